"""Command lines of `forerun serve`, and the drafts that this machine has for a target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from forerun.drafters.config import AUTO
from forerun.models.catalog import DEFAULT_TARGET, PREFIX, ZOO, ZOO_DRAFTS
from forerun.tune.arms import NONE, ServerCommand, Speculation
from forerun.tune.engines.base import SOME_DRAFT, EngineDialect, Flag, write_options

FIXED = ("--controller", "fixed")
K_FLAGS = ("--k", "--num-speculative-tokens")
WORDS = ("suffix", "recycling", "self:int4")
"""Drafts that any target has."""
MOST_CACHED = 2
"""Models of the local Hugging Face cache that are tried."""


class ForerunDialect(EngineDialect):
    """`forerun serve TARGET`: methods are the words of --draft, "draft" stands for models."""

    model_first = True
    name = "forerun"
    programs = (("forerun", "serve"), ("-m", "forerun", "serve"))
    model_flags = frozenset({"--model", "--target"})
    default_model = DEFAULT_TARGET
    address_flags = EngineDialect.address_flags - {"--api-key"} | {"--api-keys"}
    pattern = re.compile("--(draft|k|num-speculative-tokens|tree|controller|profile)")
    methods: Mapping[str, str] = {
        **{word: word for word in (*WORDS, AUTO, "self:int8", "mtp", SOME_DRAFT)},
        **{"ngram": "suffix"},
        **dict.fromkeys(("eagle", "eagle3", "dflash"), SOME_DRAFT),
    }
    weightless = frozenset((*WORDS, AUTO, "self:int8", "mtp"))

    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        drafts: list[str] = []
        k: int | None = None
        options: list[tuple[str, str]] = []
        for flag in flags:
            if flag.name == "--draft":
                drafts += flag.value.split(",")
            elif flag.name in K_FLAGS:
                k = flag.count()
            else:
                options.append((flag.name, flag.value))
        draft = ",".join(drafts) or AUTO
        if draft == NONE or k == 0:
            return Speculation()
        is_word = draft in self.weightless
        return Speculation(
            method=draft if is_word else SOME_DRAFT,
            draft=None if is_word else draft,
            k=k,
            options=tuple(options),
        )

    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        words = ["--draft", speculation.draft or speculation.method]
        if speculation.k is not None:
            words += ["--k", str(speculation.k)]
        return (*words, *write_options(speculation.options))

    def choose_ks(self, speculation: Speculation) -> tuple[int | None, ...]:
        return (None,) if speculation.draft is None else (None, 4)

    def list_usual(self, command: ServerCommand, drafts: Sequence[str]) -> Sequence[Speculation]:
        """Return "auto" and, unless drafts are named, those at hand."""
        at_hand = () if drafts else list_drafts_at_hand(command.model or DEFAULT_TARGET)
        return [Speculation(method=AUTO), *map(self.parse_draft, at_hand)]

    def set_k(self, speculation: Speculation, k: int) -> Speculation:
        names = ("--tree", FIXED[0])
        kept = [(name, value) for name, value in speculation.options if name not in names]
        return replace(speculation, k=k, options=(*kept, FIXED))


def list_drafts_at_hand(target: str) -> tuple[str, ...]:
    """Return what can be tried on a target without training or fetching anything.

    These are shipped drafts of a shipped target, or models of the local Hugging Face cache with a
    fitting tokenizer; copying from the text; token recycling; and the target's weights in 4 bits.

    Raises:
        InvalidModel: there is no such target.
    """
    if target.startswith(PREFIX):
        size = target.rpartition("-")[2]
        models = [ZOO_DRAFTS[target]] if target in ZOO_DRAFTS else []
        models += [PREFIX + name for name in ZOO if name.endswith(f"-for-{size}")]
    else:
        from forerun.engine.auto_drafts import fitting_models

        models = [str(m.folder) for m in islice(fitting_models(target, AUTO), MOST_CACHED)]
    return tuple(dict.fromkeys((*models, *WORDS)))
