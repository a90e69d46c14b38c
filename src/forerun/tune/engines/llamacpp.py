"""Command lines of llama.cpp's server.

The flags are those that `llama-server --help` prints; --draft-max and its like are of builds before
May 2026, and a command that has them is written with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forerun.errors import InvalidRequest
from forerun.tune.arms import NONE, ServerCommand, Speculation
from forerun.tune.engines.base import SOME_DRAFT, EngineDialect, Flag

TYPE = "--spec-type"
K_FLAG = "--spec-draft-n-max"
OLD_K_FLAGS = ("--draft-max", "--draft-n", "--draft")
K_FLAGS = {
    f"ngram-{kind}": f"--spec-ngram-{kind}-size-m" for kind in ("simple", "map-k", "map-k4v")
} | {"ngram-mod": "--spec-ngram-mod-n-max"}
"""Flags that limit the drafts of a method; other methods have `K_FLAG`."""
MODEL_FLAGS = {"-md", "--model-draft", "--spec-draft-model"}
HUB_FLAGS = {"-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"}
FAMILY = "--fim-qwen-7b-spec", "--fim-qwen-14b-spec"


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
    switches = frozenset(
        (
            *("--spec-default", "--spec-draft-cpu-moe", "--cpu-moe-draft", "-cmoed"),
            *("--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling", *FAMILY),
        )
    )
    metrics_flag = "--metrics"
    methods: Mapping[str, str] = {
        **{word: word for word in (*K_FLAGS, "ngram-cache")},
        **{f"draft-{kind}": f"draft-{kind}" for kind in ("simple", "mtp", "dspark")},
        **{kind: f"draft-{kind}" for kind in ("mtp", "eagle3", "dflash")},
        **{f"draft-{kind}": f"draft-{kind}" for kind in ("eagle3", "dflash")},
        **{SOME_DRAFT: "draft-simple", "ngram": "ngram-simple"},
    }
    weightless = frozenset({*K_FLAGS, "ngram-cache", "draft-mtp"})
    usual = tuple(Speculation(method=f"ngram-{kind}") for kind in ("simple", "map-k", "mod"))
    usual_ks: Mapping[str, tuple[int | None, ...]] = {
        "ngram-simple": (None, 8),
        "ngram-map-k": (None,),
        "ngram-mod": (None,),
        "ngram-cache": (None,),
        "draft-mtp": (1, 3),
        "draft-simple": (2, 4, 8),
    }
    takes_model_first = False

    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        method, draft, options = "", None, list[tuple[str, str]]()
        counts: dict[str, int] = {}
        for flag in flags:
            if flag.name in FAMILY:
                raise InvalidRequest(f"{flag.name} names both models; write -hf and -hfd instead")
            if flag.name == TYPE:
                method = flag.value or ""
            elif flag.name in MODEL_FLAGS | HUB_FLAGS:
                draft = flag.value
            elif flag.name in (K_FLAG, *OLD_K_FLAGS, *K_FLAGS.values()):
                counts[K_FLAG if flag.name in OLD_K_FLAGS else flag.name] = flag.count()
            else:
                options.append((flag.name, flag.value or ""))
        if not method and draft is not None:
            method = "draft-simple"
        elif not method:
            method = "default" if ("--spec-default", "") in options else NONE
        k_flag = _find_k_flag(method)
        k = counts.pop(k_flag, None)
        if k is None and K_FLAG in counts and not {K_FLAG} & {flag.name for flag in flags}:
            k = counts.pop(K_FLAG)  # old builds have one flag for all methods
        options += [(name, str(count)) for name, count in counts.items()]
        return Speculation(method=method, draft=draft, k=k, options=tuple(options))

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
        for name, value in speculation.options:
            words += [name, value] if value else [name]
        return tuple(words)

    def find_kind(self, speculation: Speculation) -> str:
        """Take a list of n-gram methods as one without K."""
        method = speculation.method.replace("_", "-")
        is_list = "," in method and "draft" not in method
        return "ngram-mod" if is_list else "draft-mtp" if method == "mtp" else method

    def set_k(self, speculation: Speculation, k: int | None) -> Speculation:
        """Drop least lengths of drafts above K."""
        if k is None:
            return speculation
        kept = [
            (name, value)
            for name, value in speculation.options
            if not (name.endswith("-min") and value.isdigit() and int(value) > k)
        ]
        return replace(speculation, k=k, options=tuple(kept))


def _find_k_flag(method: str) -> str:
    """Return the flag that limits drafts, for a comma-separated list of methods."""
    kinds = method.replace("_", "-").split(",")
    return K_FLAGS[kinds[0]] if K_FLAGS.keys() >= set(kinds) else K_FLAG
