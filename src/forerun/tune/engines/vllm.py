"""Command lines of vLLM.

The flags are those of https://docs.vllm.ai/en/latest/cli/serve/ and, for those that are gone, of
https://docs.vllm.ai/en/v0.6.6/serving/engine_args.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.errors import InvalidRequest
from forerun.models.catalog import LOOKUP_NAMES
from forerun.tune.arms import NONE, ServerCommand, Speculation
from forerun.tune.engines.base import SOME_DRAFT, EngineDialect, Flag, write_options

CONFIG = ("--speculative-config", "-sc")
OLD_KEYS = {
    "--speculative-model": "model",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
}
"""Keys of --speculative-config that were flags up to version 0.8."""
KEYS = OLD_KEYS | {
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
K = "num_speculative_tokens"
LOOKUPS = ("ngram", "ngram_gpu", "suffix")


class VllmDialect(EngineDialect):
    """`vllm serve MODEL`, and the module that it runs."""

    model_first = True
    name = "vllm"
    programs = (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"))
    address_flags = EngineDialect.address_flags | {"--uds"}
    lists = frozenset({"--api-key"})
    pattern = re.compile(
        r"-sc(\..*)?|--speculative-.*|--spec-.*|--num-speculative-tokens|--ngram-prompt-lookup-m.."
    )
    methods: Mapping[str, str] = {
        word: word
        for word in (
            *(SOME_DRAFT, "draft_model", "mtp", *LOOKUPS, "eagle", "eagle3"),
            *("medusa", "mlp_speculator", "dflash", "dspark"),
        )
    }
    weightless = frozenset({*LOOKUPS, "mtp"})
    usual = (
        Speculation(
            method="ngram", options=(("prompt_lookup_max", "4"), ("prompt_lookup_min", "2"))
        ),
        Speculation(method="suffix"),
    )
    synthetic = (
        ("rejection_sample_method", '"synthetic"'),
        ("synthetic_acceptance_length", "{}"),
    )

    def read(self, words: Sequence[str]) -> ServerCommand | None:
        command = super().read(words)
        if command is None or not {flag.name for flag in self._split(command.typed)} & {*OLD_KEYS}:
            return command
        return replace(command, typed=self.write_flags(command.speculation, command))

    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        config: dict[str, Any] = {}
        unknown: list[tuple[str, str]] = []
        for flag in flags:
            name, _, key = flag.name.partition(".")
            key = (key or KEYS.get(name, "")).replace("-", "_")
            if key:
                config[key] = _read_value(flag.value)
            elif name in CONFIG:
                config |= _read_config(flag)
            else:
                unknown.append((flag.name, flag.value))
        k, model, method = (config.pop(key, None) for key in (K, "model", "method"))
        if k is not None and (type(k) is not int or k < 1):
            raise InvalidRequest(f"{K} is {k!r:.80}; it must be a whole number above 0")
        if method is None and str(model) in LOOKUP_NAMES:
            method, model = "ngram", None
        elif method is None:
            method = NONE if model is k is None else SOME_DRAFT
        elif method in LOOKUPS and model is not None:
            config["model"], model = model, None
        return Speculation(
            method=str(method),
            draft=None if model is None else str(model),
            k=k,
            options=(*((key, json.dumps(value)) for key, value in config.items()), *unknown),
        )

    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        if speculation.method == NONE:
            return ()
        named = speculation.method if speculation.method != SOME_DRAFT else None
        config: dict[str, Any] = {"method": named, "model": speculation.draft, K: speculation.k}
        config = {key: value for key, value in config.items() if value is not None}
        flags = [option for option in speculation.options if option[0].startswith("-")]
        config |= {
            key: json.loads(value)
            for key, value in speculation.options
            if (key, value) not in flags
        }
        return (CONFIG[0], json.dumps(config), *write_options(flags))

    def choose_ks(self, speculation: Speculation) -> tuple[int | None, ...]:
        method = speculation.method
        if method in LOOKUPS:
            return (None,) if method == "suffix" else (2, 4)
        return (1, 3) if method.endswith("mtp") else (2, 4, 7)


def _read_config(flag: Flag) -> dict[str, Any]:
    """Read the value of --speculative-config (InvalidRequest)."""
    try:
        config = json.loads(flag.value)
    except ValueError as error:
        raise InvalidRequest(
            f"{flag.name} is {flag.value!r:.80}, which is not JSON ({error}): put single quotes "
            "around the JSON"
        ) from error
    if not isinstance(config, dict | None):
        raise InvalidRequest(f"{flag.name} is {flag.value!r:.80}; it must be a JSON object")
    return {key.replace("-", "_"): value for key, value in (config or {}).items()}


def _read_value(text: str) -> Any:
    """Return a value as JSON where it is some, and as text otherwise."""
    try:
        return json.loads(text)
    except ValueError:
        return text
