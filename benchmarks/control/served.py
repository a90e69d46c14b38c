"""Requests of several kinds through the real engine, and what each of them took.

Edits are scripted (benchmarks/speed/suffix): the passes are the target's own, the text that of a
model that does the edit. Everything else is the target's own text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

import torch
from texts import Text, code_texts, edit_texts, prose_texts

sys.path.insert(0, str(Path(__file__).parents[1] / "speed" / "suffix"))

from scripted import ScriptedModel

from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.measure.bench.compare import MIN_TOKENS
from forerun.models.base import LanguageModel, ModelOutput, RowBatch
from forerun.models.catalog import ZOO_DRAFTS
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import first_repeat
from forerun.theory.record import StepRecord

KINDS = ("code, T=0", "code, T=1", "prose, T=1", "edits, T=0")
MAX_TOKENS = 128
MAX_PROMPT = 700
LOOKAHEADS = (1, 2, 3, 5, 8, 12)
NUM_BEYOND = max(LOOKAHEADS) + 2
"""Tokens that every request goes on behind those that count, so that no draft is cut to its end."""
TARGET = "zoo:code-11m"
RESULTS = Path(__file__).parent / "results"
NO_SCRIPT = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is measured, and where figures of it lie.

    Attributes:
        target: shipped, or a folder.
        results: a folder of their own for every target.
    """

    target: str
    results: Path

    @property
    def drafts(self) -> dict[str, str]:
        """Drafts of the target by the names that figures have."""
        domain = ZOO_DRAFTS.get(self.target, "zoo:code-2m")
        return {"domain": domain, "shelf": "zoo:books-1m", "suffix": "suffix"}

    @classmethod
    def of(cls, options: argparse.Namespace) -> Place:
        """As the command line says."""
        if (options.target == TARGET) != (options.results == RESULTS):
            raise SystemExit(
                "--target and --results belong together: figures of targets must not mix"
            )
        options.results.mkdir(parents=True, exist_ok=True)
        return cls(target=options.target, results=options.results)

    def load(self, num_threads: int) -> Engine:
        """Plain decoding of the target, scripted where a request wants it."""
        config = EngineConfig(
            controller="fixed",
            num_threads=num_threads,
            num_speculative_tokens=max(LOOKAHEADS),
            max_batch=8,
            max_context=1024,
            sharing="none",  # every arm reads its prompts
        )
        torch.set_num_threads(num_threads)
        loaded = Engine.load(self.target, config=config)
        return Engine(
            target=MaybeScripted(loaded.target),
            tokenizer=loaded.tokenizer,
            config=loaded.config,
            eos_token_ids=loaded.eos_token_ids,
        )

    def provenance(self) -> dict[str, object]:
        """Of what is reported now; the number of threads is said beside the figures."""
        models = [self.target, *(draft for draft in self.drafts.values() if draft != "suffix")]
        return collect({model: content_hash(model) for model in models}).to_dict()


def add_place(flags: argparse.ArgumentParser) -> None:
    """Flags of a place."""
    flags.add_argument("--target", default=TARGET, help="it has the tokens of the drafts")
    flags.add_argument("--results", type=Path, default=RESULTS, help="folder for its figures")


class MaybeScripted(ScriptedModel):
    """The target; while it has a script it writes that."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.script = NO_SCRIPT

    def forward(self, batch: RowBatch) -> ModelOutput:
        return super().forward(batch) if len(self.script) else self.model.forward(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request: its prompt, and what decides its text.

    Attributes:
        kind: one of KINDS.
        origin: of its text.
        prompt: ids.
        num_tokens: that count; NUM_BEYOND more are emitted.
        temperature: of the request.
        script: what is written; None where the target writes its own.
    """

    kind: str
    origin: str
    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    script: tuple[int, ...] | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.num_tokens + NUM_BEYOND,
            ignore_eos=True,
        )


def texts_of(kind: str) -> list[Text]:
    """All there are of a kind."""
    sources = {"code": code_texts, "prose": prose_texts, "edits": edit_texts}
    return sources[kind.partition(",")[0]]()


def items_of(kind: str, target: Engine, texts: Iterable[Text]) -> Iterator[Item]:
    """Requests of a kind; greedy texts end before they loop."""
    temperature = kind.partition(", T=")[2]
    encode = target.tokenizer.encode
    for text in texts:
        prompt = tuple(encode(text.prompt))
        script = None if text.result is None else tuple(encode(text.result))
        item = Item(
            kind=kind,
            origin=text.origin,
            prompt=prompt,
            num_tokens=MAX_TOKENS if script is None else min(MAX_TOKENS, len(script) - NUM_BEYOND),
            temperature=float(temperature),
            script=script,
        )
        if len(prompt) > MAX_PROMPT:
            continue
        if script is None and item.temperature == 0:
            (output,) = target.generate([item.prompt], item.params)
            item = replace(item, num_tokens=min(MAX_TOKENS, first_repeat(output.token_ids)))
        if item.num_tokens >= MIN_TOKENS:
            yield item


def endless(kind: str, target: Engine, texts: Sequence[Text], num_done: int) -> Iterator[Item]:
    """Requests of a kind from where the last run stopped, again from the first text at the end."""
    return items_of(kind, target, islice(cycle(texts), num_done % len(texts), None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to serve requests."""

    name: str
    engine: Engine


def serve(arm: Arm, item: Item) -> dict[str, Any]:
    """One request: seconds in all and after the first token, tokens, and its steps.

    Counted are the cycles behind the first token up to that in which it has all that count.
    """
    target = arm.engine.target
    assert isinstance(target, MaybeScripted)
    script = item.script
    target.script = NO_SCRIPT if script is None else torch.tensor([*item.prompt, *script])
    records: list[StepRecord] = []
    arm.engine.observers[:] = [EmittedRecords(records.append)]
    start_s = time.monotonic()
    arm.engine.generate(
        [item.prompt], item.params, RequestTerms(tags=(item.kind.partition(",")[0],))
    )
    target.script = NO_SCRIPT
    decoding = [record for record in records if not record.num_prefill_rows]
    num_first = sum(record.num_emitted for record in records if record.num_prefill_rows)
    emitted = accumulate((record.num_emitted for record in decoding), initial=num_first)
    num_cycles = next(i for i, num_tokens in enumerate(emitted) if num_tokens >= item.num_tokens)
    decoded, end_s = decoding[:num_cycles], decoding[num_cycles].t_s
    return {
        "total_s": end_s - start_s,
        "decode_s": end_s - decoded[0].t_s,
        "num_tokens": 1 + sum(record.num_emitted for record in decoded),
        "num_steps": len(decoded),
        "num_prompt": len(item.prompt),
        "draft_s": sum(record.draft_s for record in decoded),
        "drafted": depths(decoded),
        "records": decoded,
    }


def depths(records: Iterable[StepRecord]) -> list[list[int]]:
    """Steps by K that was planned, depth that was drafted and nodes that were accepted."""
    found: dict[tuple[int, int, int], int] = {}
    for record in records:
        key = record.k_budget, record.depth_drafted, record.num_accepted
        found[key] = found.get(key, 0) + 1
    return [[*key, count] for key, count in sorted(found.items())]


def block_of(arms: Sequence[Arm], item: Item, number: int, *, warm: bool = False) -> dict[str, Any]:
    """All arms on one request, in an order that rotates.

    Args:
        arms: ways to serve it.
        item: the request.
        number: of the block.
        warm: whether each serves a little of it before: who serves alone finds its caches warm, and
            who follows another does not.
    """
    shift = number % len(arms)
    served = {}
    for arm in [*arms[shift:], *arms[:shift]]:
        if warm:
            warm_up([arm], item)
        served[arm.name] = serve(arm, item)
    return {"kind": item.kind, "origin": item.origin, "number": number, "arms": served}


def warm_up(arms: Sequence[Arm], item: Item) -> None:
    """No measurement pays for a first time."""
    short = replace(item, num_tokens=MIN_TOKENS)
    for _ in range(2):
        for arm in arms:
            serve(arm, short)


def fixed_arms(
    place: Place, target: Engine, name: str, ks: Sequence[int] = LOOKAHEADS
) -> list[Arm]:
    """One drafter at every K, over one loaded draft."""
    loaded = target.with_draft(place.drafts[name], max(ks))
    assert loaded.drafter is not None
    drafter = loaded.drafter
    return [Arm(name=f"{name} K={k}", engine=target.with_draft(drafter, k)) for k in ks]


def read_blocks(path: Path) -> list[dict[str, Any]]:
    """Blocks that were written so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rounded(value: Any) -> Any:
    """Microseconds are enough."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return value
