"""Command lines of llama.cpp's server.

The flags are those that `llama-server --help` prints (b11669). Older builds have others in
place of some, such as --draft-max: a command that has them is written with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forerun.errors import InvalidRequest
from forerun.tune.arms import NONE, ServerCommand, Speculation
from forerun.tune.engines.base import SOME_DRAFT, EngineDialect, Flag, write_options

TYPE = "--spec-type"
K_FLAG = "--spec-draft-n-max"
OLD_K_FLAGS = ("--draft-max", "--draft-n", "--draft")
K_FLAGS = {
    f"ngram-{kind}": f"--spec-ngram-{kind}-size-m" for kind in ("simple", "map-k", "map-k4v")
} | {"ngram-mod": "--spec-ngram-mod-n-max"}
"""Flags that limit the drafts of a method; other methods have `K_FLAG`."""
DRAFT_FLAGS = frozenset(
    "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf".split()
)
KINDS = ("simple", "eagle3", "mtp", "dflash", "dspark")
FAMILIES = frozenset({"--fim-qwen-7b-spec", "--fim-qwen-14b-spec"})


class LlamaCppDialect(EngineDialect):
    """`llama-server`, in whatever folder."""

    name = "llamacpp"
    programs = (("llama-server",), ("llama-server.exe",))
    model_flags = frozenset("-m --model -hf -hfr --hf-repo -mu --model-url".split())
    address_flags = EngineDialect.address_flags | {"--api-key-file"}
    pattern = re.compile(
        r"--(no-)?spec-.*|--(draft|hf-repo-draft|.*-draft)|--draft-.*|--fim-qwen-.*-spec"
        r"|-(md|ngld|hfr?d|td|tbd|cd|devd|otd|cmoed|ncmoed|ctkd|ctvd|Cd|Crd|Cbd|Crbd)"
    )
    switches = FAMILIES | set(
        "--spec-default --spec-draft-cpu-moe --cpu-moe-draft -cmoed --spec-draft-backend-sampling "
        "--no-spec-draft-backend-sampling".split()
    )
    metrics_flag = "--metrics"
    methods: Mapping[str, str] = {
        **{word: word for word in (*K_FLAGS, "ngram-cache", *map("draft-{}".format, KINDS))},
        **{kind: f"draft-{kind}" for kind in KINDS},
        **{"ngram": "ngram-simple", SOME_DRAFT: "draft-simple"},
    }
    weightless = frozenset({*K_FLAGS, "ngram-cache", "draft-mtp"})
    # by default it looks for the last 12 tokens, which seldom occur twice
    usual = (
        Speculation(method="ngram-simple", options=(("--spec-ngram-simple-size-n", "4"),)),
        *(Speculation(method=f"ngram-{kind}") for kind in ("map-k", "mod")),
    )
    synthetic = (("--spec-synth-len", "{}"),)

    def read(self, words: Sequence[str]) -> ServerCommand | None:
        """Name the type of a draft model, without which the server loads it and does not draft.

        See https://github.com/ggml-org/llama.cpp/issues/25345.
        """
        command = super().read(words)
        if command is None or command.speculation.draft is None:
            return command
        if {TYPE, "--spec-default", *OLD_K_FLAGS} & {flag.name for flag in self._split(words)}:
            return command
        return replace(command, typed=(TYPE, command.speculation.method, *command.typed))

    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        values = {flag.name: flag.value for flag in flags}
        if family := values.keys() & FAMILIES:
            raise InvalidRequest(f"{family.pop()} names both models: write -hf and -hfd instead")
        draft = next((value for name, value in values.items() if name in DRAFT_FLAGS), None)
        implied = NONE if draft is None else "draft-simple"
        method = values.get(TYPE, "default" if "--spec-default" in values else implied)
        k_flags = {_find_k_flag(method), *OLD_K_FLAGS}
        named = {TYPE, *DRAFT_FLAGS, *k_flags}
        return Speculation(
            method=method,
            draft=draft,
            k=next((flag.count() for flag in reversed(flags) if flag.name in k_flags), None),
            options=tuple((flag.name, flag.value) for flag in flags if flag.name not in named),
        )

    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        method, draft = speculation.method, speculation.draft
        if method == NONE:
            return ()
        old = next((flag for flag in OLD_K_FLAGS if flag in command.typed), None)
        words: list[str] = []
        if method != "default" and not (old and method == "draft-simple"):
            words += [TYPE, method]
        if draft is not None:
            is_file = draft.endswith(".gguf") or Path(draft).exists()
            words += ["-md" if is_file else "-hfd", draft]
        if speculation.k is not None:
            words += [old or _find_k_flag(method), str(speculation.k)]
        return (*words, *write_options(speculation.options))

    def choose_ks(self, speculation: Speculation) -> tuple[int | None, ...]:
        method = speculation.method
        if method.endswith("mtp"):
            return (1, 3)
        if "draft" in method:
            return (2, 4, 8)
        return (8,) if method == "ngram-simple" else (None,)

    def set_k(self, speculation: Speculation, k: int) -> Speculation:
        """Drop a least length of drafts above K."""
        kept = [
            (name, value)
            for name, value in speculation.options
            if not (name.endswith("-min") and value.isdecimal() and int(value) > k)
        ]
        return replace(speculation, k=k, options=tuple(kept))


def _find_k_flag(method: str) -> str:
    """Return the flag that limits drafts, for a comma-separated list of methods."""
    kinds = method.replace("_", "-").split(",")
    return K_FLAGS[kinds[0]] if K_FLAGS.keys() >= set(kinds) else K_FLAG
