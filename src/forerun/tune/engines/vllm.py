"""Command lines of vLLM.

The flags are those of https://docs.vllm.ai/en/latest/cli/serve/ and, for those that are gone, of
https://docs.vllm.ai/en/v0.6.6/serving/engine_args.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import InvalidRequest
from forerun.models.catalog import LOOKUP_NAMES
from forerun.tune.arms import NONE, ServerCommand, Speculation
from forerun.tune.engines.base import SOME_DRAFT, EngineDialect, Flag

CONFIG = ("--speculative-config", "-sc")
OLD_KEYS = {
    "--speculative-model": "model",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
}
"""Keys of --speculative-config that were flags until 2025."""


class VllmDialect(EngineDialect):
    """`vllm serve MODEL`, and the module that it runs."""

    name = "vllm"
    programs = (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"))
    address_flags = EngineDialect.address_flags | {"--uds"}
    pattern = re.compile(
        r"-sc(\..*)?|--speculative-.*|--spec-.*|--num-speculative-tokens|--ngram-prompt-lookup-m.."
    )
    methods: Mapping[str, str] = {
        word: word
        for word in "ngram suffix mtp eagle eagle3 medusa mlp_speculator draft_model dflash".split()
    } | {SOME_DRAFT: SOME_DRAFT}
    weightless = frozenset({"ngram", "suffix", "mtp"})
    usual = (
        Speculation(
            method="ngram", options=(("prompt_lookup_max", "4"), ("prompt_lookup_min", "2"))
        ),
        Speculation(method="suffix"),
    )
    usual_ks: Mapping[str, tuple[int | None, ...]] = {
        "ngram": (2, 4),
        "suffix": (None,),
        "mtp": (1, 3),
    }

    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        config: dict[str, Any] = {}
        unknown: list[tuple[str, str]] = []
        for flag in flags:
            name, _, key = flag.name.partition(".")
            if name in CONFIG:
                config = {**config, key: _read_value(flag)} if key else _read_config(flag)
            elif name in OLD_KEYS:
                config[OLD_KEYS[name]] = _read_value(flag)
            else:
                unknown.append((flag.name, flag.value or ""))
        k, model = config.pop("num_speculative_tokens", None), config.pop("model", None)
        method = config.pop("method", None)
        if k is not None and (type(k) is not int or k < 1):
            raise InvalidRequest(f"num_speculative_tokens is {k!r}; it must be a whole number")
        if method is None and model in LOOKUP_NAMES:
            method = "ngram"
        elif method is None:
            method = NONE if model is k is None else SOME_DRAFT
        elif method in ("ngram", "suffix") and model is not None:
            config["model"] = model
        options = [(key, json.dumps(value)) for key, value in config.items()]
        return Speculation(
            method=str(method),
            draft=None if model is None or method in ("ngram", "suffix") else str(model),
            k=k,
            options=(*options, *unknown),
        )

    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        if speculation.method == NONE:
            return ()
        config: dict[str, Any] = {}
        if speculation.method != SOME_DRAFT:
            config["method"] = speculation.method
        if speculation.draft is not None:
            config["model"] = speculation.draft
        if speculation.k is not None:
            config["num_speculative_tokens"] = speculation.k
        flags: list[str] = []
        for key, value in speculation.options:
            if key.startswith("-"):
                flags += [key, value] if value else [key]
            else:
                config[key] = json.loads(value)
        return (CONFIG[0], json.dumps(config), *flags)

    def modernise(self, command: ServerCommand) -> tuple[str, ...]:
        """Write flags that vLLM has dropped as --speculative-config."""
        names = {word.partition("=")[0].replace("_", "-") for word in command.typed}
        if names & OLD_KEYS.keys():
            return self.write_flags(command.speculation, command)
        return command.typed

    def find_default_model(self, arguments: Sequence[str]) -> str | None:
        if any(word.partition("=")[0] == "--config" for word in arguments):
            return None
        raise InvalidRequest(
            "the vLLM command names no model: write `vllm serve MODEL`, model first"
        )


def _read_config(flag: Flag) -> dict[str, Any]:
    """Read the value of --speculative-config (InvalidRequest)."""
    try:
        config = json.loads(flag.value or "")
    except ValueError as error:
        raise InvalidRequest(
            f"{flag.name} is {flag.value or ''!r:.80}, which is not JSON ({error}); put it in "
            "single quotes"
        ) from error
    if not isinstance(config, dict | None):
        raise InvalidRequest(f"{flag.name} is {flag.value!r:.80}; it must be a JSON object")
    return config or {}


def _read_value(flag: Flag) -> Any:
    """Return a value as JSON where it is some, and as text otherwise."""
    try:
        return json.loads(flag.value or "")
    except ValueError:
        return flag.value
