"""Audits of engines and streams with and without planted faults: false alarms, power, names.

    python -m benchmarks.audit.run clean --seeds 0-499     # false alarms, simulated text streams
    python -m benchmarks.audit.run engine --seeds 0-99     # the same on healthy engines
    python -m benchmarks.audit.run silent --seeds 0-19     # engines that draft nothing
    python -m benchmarks.audit.run faults --seeds 0-0      # every fault of tests/lab/audited.py
    python -m benchmarks.audit.run planted --seeds 0-0     # every fault of tests/lab/planted.py
    python -m benchmarks.audit.run power --seeds 0-17      # a fault of total variation .03
    python -m benchmarks.audit.run bound --seeds 0-3       # what more tokens rule out

Models are tables of 17 tokens, so that a run takes seconds; "clean" and "bound" draw text from the
table, the others run the engine. Every row goes to results/NAME.jsonl; seeds that are there are
skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tests.lab.audited import (
    FAULTS,
    VOCAB_SIZE,
    EngineEndpoint,
    Fault,
    Rule,
    faulty_engine,
    pair,
    reference_of,
)
from tests.lab.dice import Dice
from tests.tabular import TabularModel

from forerun.doctor.audit.config import KINDS, AuditConfig, Kind
from forerun.doctor.audit.endpoint import Endpoint
from forerun.doctor.audit.records import AuditAnswer, Question, StateFile
from forerun.doctor.audit.run import Audit
from forerun.doctor.audit.verdict import judge

RESULTS = Path(__file__).parent / "results"
PROMPTS = [(n % VOCAB_SIZE, (5 * n + 3) % VOCAB_SIZE, 7 * n % VOCAB_SIZE) for n in range(60)]
STREAM_KINDS = (replace(KINDS[0], share=0.8), replace(KINDS[3], share=0.2))
MAX_CONTEXT = 4096


class Stream:
    """Text drawn from a table whose rows differ from the reference's by rounding.

    Args:
        table: of the reference.
        noise: standard deviation of a fixed error of every logarithm; .01 is that of bf16.
        seed: of the run.
    """

    name, control, max_context = "a simulated stream", "off", MAX_CONTEXT

    def __init__(self, table: TabularModel, noise: float, seed: int) -> None:
        dice = Dice(seed, "rounding")
        size = table.log_probs.shape
        uniform = np.array([dice.uniform(-1, 1) for _ in range(size[0] * size[1])]).reshape(size)
        moved = table.log_probs.numpy() + noise * np.sqrt(3.0) * uniform
        self.rows = np.exp(moved) / np.exp(moved).sum(-1, keepdims=True)
        self.table, self.dice = table, Dice(seed, "draws")

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        return [self._one(question, kinds[question.kind]) for question in questions]

    def _one(self, question: Question, kind: Kind) -> AuditAnswer:
        ids = [*question.prompt]
        for _ in range(question.num_tokens):
            row = self.rows[self.table.state_of(ids)]
            token = (
                int(row.argmax())
                if kind.temperature == 0
                else int(np.searchsorted(row.cumsum(), self.dice.uniform(0, 1), side="right"))
            )
            ids.append(min(token, VOCAB_SIZE - 1))
        found = tuple(ids[len(question.prompt) :])
        num = len(found)
        return AuditAnswer(
            token_ids=found, finish_reason="length", num_charged=num, num_drafted=num
        )


def audited(
    endpoint: Endpoint, target: TabularModel, draft: TabularModel | None, config: AuditConfig
) -> dict[str, object]:
    """Audit an endpoint over tables and return the figures of its row."""
    reference = reference_of(target, draft)
    return row_of(Audit(config, endpoint, reference, PROMPTS, StateFile(None, {"url": ""})))


def row_of(audit: Audit) -> dict[str, object]:
    """Run an audit and return its figures."""
    audit.run(lambda what, done: None)
    verdict = judge(audit)
    return {
        "status": verdict.status,
        "family": verdict.family,
        "alarm_tokens": audit.progress.alarm_tokens,
        "log_e": round(audit.progress.peak_log_e, 2),
        "num_tokens": audit.progress.spent.num_tokens,
        "bound": verdict.bound,
        "untested": verdict.untested,
        "sentence": verdict.sentence,
        "wall_s": round(audit.progress.elapsed_s, 2),
    }


def add_rows(
    path: Path, runs: Iterable[tuple[str, int, Callable[[], dict[str, object]]]], seconds: float
) -> None:
    """Run what the file has no row of, by label and seed, until the time is over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(row["label"], row["seed"]) for row in rows}
    started_s = time.monotonic()
    with path.open("a") as file:
        for label, seed, run in runs:
            if (label, seed) in known or time.monotonic() - started_s > seconds:
                continue
            file.write(json.dumps({"label": label, "seed": seed, **run()}) + "\n")
            file.flush()
    print(f"{len(path.read_text().splitlines())} rows in {path}")


def seeds_of(text: str) -> range:
    """Return the seeds from the first to the last, as in 0-99."""
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def clean(seed: int) -> dict[str, object]:
    """A stream of the reference with rounding of bf16's size."""
    target, draft = pair(seed)
    config = AuditConfig(max_tokens=8000, kinds=STREAM_KINDS)
    return audited(Stream(target, 0.01, seed), target, draft, config)


def engine(seed: int) -> dict[str, object]:
    """A healthy engine: K from 1 to 4, drafts of several qualities."""
    target, draft = pair(seed, scale=0.3 + 0.3 * (seed % 4))
    endpoint = EngineEndpoint(faulty_engine(target, draft, None, 1 + seed % 4), seed)
    return audited(endpoint, target, draft, AuditConfig(max_tokens=6000))


def fault(planted: Fault, *, with_draft: bool) -> Callable[[int], dict[str, object]]:
    """A planted fault under the default limits."""

    def one(seed: int) -> dict[str, object]:
        target, draft = pair(seed)
        endpoint = EngineEndpoint(
            faulty_engine(target, draft, planted), seed, shares_seeds=planted.shares_seeds
        )
        return audited(endpoint, target, draft if with_draft else None, AuditConfig())

    return one


def power(seed: int, *, with_draft: bool) -> dict[str, object]:
    """Acceptance that is lenient for so many tokens that the total variation is .03."""
    target, draft = pair(seed)
    p, q = target.log_probs.exp().numpy(), draft.log_probs.exp().numpy()
    rejected = 1.0 - np.minimum(p, q).sum(-1)
    # Keeping a rejected token moves its mass from the residual to the draft's surplus: TV is the
    # share kept times the probability of a rejection.
    share = 0.03 / float(rejected.mean())

    def accepts(p_row: object, q_row: object, x: int, u: float) -> bool:
        ratio = float(p_row[x]) / float(q_row[x])  # type: ignore[index]
        return u < ratio or (u - ratio) / max(1e-12, 1.0 - ratio) < share

    planted = Fault(name="tv", family="acceptance", rule=Rule(accepts=accepts))
    endpoint = EngineEndpoint(faulty_engine(target, draft, planted), seed)
    config = AuditConfig(kinds=(replace(KINDS[0], share=1.0),))
    found = audited(endpoint, target, draft if with_draft else None, config)
    return {**found, "share_kept": round(share, 3)}


def bound(seed: int, num_tokens: int) -> dict[str, object]:
    """A clean stream of so many tokens."""
    target, draft = pair(seed)
    config = AuditConfig(max_tokens=num_tokens, kinds=STREAM_KINDS, max_requests=100_000)
    return audited(Stream(target, 0.01, seed), target, draft, config)


def silent(seed: int) -> dict[str, object]:
    """An engine that drafts nothing."""
    target, draft = pair(seed)
    endpoint = EngineEndpoint(faulty_engine(target, draft, None, 0), seed)
    return audited(endpoint, target, draft, AuditConfig(max_tokens=4000))


def runs_of(name: str) -> dict[str, Callable[[int], dict[str, object]]]:
    """Return what one subcommand runs for every seed, by label."""
    if name == "faults":
        return {f.name: fault(f, with_draft=True) for f in FAULTS}
    if name == "faults-without-draft":
        return {f.name: fault(f, with_draft=False) for f in FAULTS}
    if name == "power":
        return {
            "with draft": lambda seed: power(seed, with_draft=True),
            "without draft": lambda seed: power(seed, with_draft=False),
        }
    if name == "bound":
        sizes = (2_000, 5_000, 20_000, 100_000)
        return {f"{size} tokens": partial(bound, num_tokens=size) for size in sizes}
    return {name: {"clean": clean, "engine": engine, "silent": silent}[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--seconds", type=float, default=80.0, help="stop before the next run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = (
        (label, seed, partial(one, seed))
        for seed in seeds_of(options.seeds)
        for label, one in runs_of(options.name).items()
    )
    add_rows(options.out / f"{options.name}.jsonl", runs, options.seconds)


if __name__ == "__main__":
    main()
