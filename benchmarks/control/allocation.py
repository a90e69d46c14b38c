"""A budget of verified rows shared out by survival, beside the same K for everybody.

`OMP_NUM_THREADS=1 python benchmarks/control/allocation.py --out FILE`. Only counts are compared, so
it does not matter what else the machine does.

Batches of 16 requests on the shipped pair, four of each kind: code and prose at T=0, code at T=1,
and code that has been there before. All of them run for the same number of steps, all 16 at once.
One arm drafts K tokens for every request. The other drafts 16 K in all: so many nodes of highest
survival (`theory.tree`), by what the engine's own estimates have learnt of each request since it
began. Requests carry no tags, so nobody says which is which.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.control.acceptance import AcceptanceEstimates
from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.control.config import GoodputConfig
from forerun.control.named import FixedController
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.models.catalog import held_out_prompts
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio
from forerun.theory.record import StepRecord
from forerun.theory.tree import ranked_nodes

TARGET, DRAFT = "zoo:code-11m", "zoo:code-2m"
PROSE = Path(__file__).parents[2] / "recipes" / "paradox" / "prose"
KINDS = ("code, T=0", "code, T=1", "prose, T=0", "repeated, T=0")
PER_KIND = 4
DEEPEST = 8
LOOKAHEADS = (1, 2, 4)
PROSE_CHARS, PROSE_STEP = 600, 20_000
METHOD = "draft_model"


class SharedBudget(Controller):
    """So many nodes per step for all requests together.

    Args:
        per_request: nodes, times the requests of the step.
    """

    def __init__(self, per_request: int) -> None:
        self.per_request = per_request
        self.acceptance = AcceptanceEstimates(GoodputConfig())

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """The nodes of highest survival."""
        curves = [
            self.acceptance.curve(state, METHOD, min(DEEPEST, state.max_new - 1)).survival
            for state in states
        ]
        best = ranked_nodes(curves)[: self.per_request * len(states)]
        depths = [sum(index == at for _, _, index in best) for at in range(len(states))]
        return Decision([Plan.chain(METHOD, depth) for depth in depths])

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn from the requests that drafted."""
        for record in records:
            if record.k_budget:
                self.acceptance.observe(record)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One of a batch."""

    kind: str
    text: str
    seed: int

    @property
    def params(self) -> SamplingParams:
        """No end in sight."""
        temperature = float(self.kind.partition("T=")[2])
        seed = self.seed if temperature else None
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=1000, ignore_eos=True)


def batches() -> list[list[Request]]:
    """As many as the shipped prompts are enough for; no prompt is in two of a kind."""
    code = [prompt.text for prompt in held_out_prompts()]
    half = len(code) // 2
    texts = {
        "code, T=0": code[:half],
        "code, T=1": code[half:],
        "prose, T=0": prose(half),
        "repeated, T=0": [f"{text}\n\n\n{text}\n\n\n" for text in code[:half]],
    }
    count = half // PER_KIND
    return [
        [
            Request(kind=kind, text=text, seed=number)
            for kind in KINDS
            for number, text in enumerate(texts[kind][PER_KIND * i : PER_KIND * (i + 1)])
        ]
        for i in range(count)
    ]


def prose(count: int) -> list[str]:
    """Pieces of books, the books in turns."""
    books = [path.read_text("utf-8") for path in sorted(PROSE.glob("*.txt"))]
    starts = [PROSE_STEP + PROSE_STEP // 4 * (i // len(books)) for i in range(count)]
    found = []
    for number, start in enumerate(starts):
        book = books[number % len(books)]
        begin = book.index(". ", start) + 2
        found.append(book[begin : begin + PROSE_CHARS])
    return found


def run(engine: Engine, requests: Sequence[Request], num_steps: int) -> list[StepRecord]:
    """So many decode steps of all requests at once; their records."""
    kinds = {str(number): request.kind for number, request in enumerate(requests)}
    records: list[StepRecord] = []
    for name, request in zip(kinds, requests, strict=True):
        engine.add_request(request.text, request.params, request_id=name)
    unread = set(kinds)
    while unread:  # nobody drafts before all have been read: the rows are those of 16 requests
        unread -= {chunk.request_id for chunk in engine.step()}
    engine.observers[:] = [EmittedRecords(records.append)]
    for _ in range(num_steps):
        engine.step()
    engine.observers.clear()
    for name in kinds:
        engine.abort(name)
    return records


def counted(records: Sequence[StepRecord], requests: Sequence[Request]) -> dict[str, object]:
    """Rows and accepted tokens, in all and by kind."""
    accepted, drafted = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for record in records:
        kind = requests[int(record.request_id)].kind
        accepted[kind] += record.num_accepted
        drafted[kind] += record.num_drafted
    return {
        "num_rows": len(records) + sum(drafted.values()),
        "num_accepted": sum(accepted.values()),
        "accepted": accepted,
        "drafted": drafted,
    }


def compared(num_steps: int) -> list[dict[str, object]]:
    """Every K, over all batches."""
    config = EngineConfig(
        num_speculative_tokens=DEEPEST,
        max_batch=len(KINDS) * PER_KIND,
        max_context=1024,
        sharing="none",
        num_threads=1,
    )
    loaded = Engine.load(TARGET, DRAFT, config=config)
    assert loaded.drafter is not None
    drafter = loaded.drafter
    rows = []
    for k in LOOKAHEADS:
        found: dict[str, list[dict[str, object]]] = {"equal": [], "shared": []}
        for requests in batches():
            arms: dict[str, Controller] = {
                "equal": FixedController(k),
                "shared": SharedBudget(k),
            }
            for name, controller in arms.items():
                engine = loaded.with_draft(drafter, controller=controller)
                found[name].append(counted(run(engine, requests, num_steps), requests))
        shared, equal = (
            [float(str(batch["num_accepted"])) for batch in found[name]]
            for name in ("shared", "equal")
        )
        gain = bootstrap_ratio(shared, equal, seed=1)
        print(f"K={k}: accepted x {gain.estimate:.3f} [{gain.low:.3f}, {gain.high:.3f}]")
        rows.append({"k": k, "accepted_ratio": asdict(gain), **found})
    return rows


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    content = {
        "steps": arguments.steps,
        "rows": compared(arguments.steps),
        "provenance": collect({}).to_dict(),
    }
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
