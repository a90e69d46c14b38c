"""Tokens per verification of draft trees and chains of equal size, by verification rule.

    python benchmarks/trees/tau.py            # measures the cells that results/tau.jsonl lacks
    python benchmarks/trees/tau.py --table    # prints the tables of README.md

Only counts are used, no times. A cell decodes the same prompts with one draft, temperature, rule
and number of nodes, and averages E[tokens per verification | draft tokens] over all full steps.
Every rule is exact, so all cells of a temperature see texts of the same distribution. A "coupled"
draft shares the target's noise, which is what requests with a seed get; there the tokens are
counted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from forerun.control.base import Capacity, Chain, Controller, Decision, Plan, RequestState, Tree
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
from forerun.models.catalog import held_out_prompts
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord

TARGET = "zoo:code-11m"
DRAFTS = ("zoo:code-2m", "zoo:books-1m", "self:2")
TEMPERATURES = (0.0, 0.7, 1.0)
DEPTHS = {7: 6, 15: 8, 3: 3, 31: 10}
"""The most levels of a tree, by its nodes."""
WIDTH = 8
RULES = ("chain", "walk", "traversal", "coupled_chain", "coupled")
VERIFICATIONS = {"chain": "block", "coupled_chain": "coupled"}
NUM_PROMPTS = 10
MAX_TOKENS = 40
RESULTS = Path(__file__).parent / "results" / "tau.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one run measures."""

    draft: str
    temperature: float
    num_nodes: int
    rule: str

    @property
    def params(self) -> SamplingParams:
        """Of every request; a chain is verified by block verification, or walked at 0."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            seed=1,
            verification=VERIFICATIONS.get(self.rule, self.rule),
        )

    @property
    def plan(self) -> Plan:
        """Of every step."""
        if self.rule.endswith("chain"):
            return Plan(method="draft", shape=Chain(num_tokens=self.num_nodes))
        depth = DEPTHS[self.num_nodes]
        return Plan(method="draft", shape=Tree(num_nodes=self.num_nodes, depth=depth, width=WIDTH))


class Same(Controller):
    """Plans the same for every request."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """Return the plan for every request."""
        return Decision([self.plan] * len(states))

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn nothing."""


class Expectations:
    """Adds up expected and actual tokens per verification, by request.

    Steps near the end of a text, which draft less than planned, are left out.
    """

    is_required = True
    wants_logits = True

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.totals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def observe(self, step: ObservedStep) -> None:
        """Note a step."""
        for entry in step.emitting:
            full = entry.proposal is not None and entry.plan.shape == self.cell.plan.shape
            if not full or entry.verdict is None:
                continue
            figures = self.totals[entry.sequence.key]
            accepted = entry.verdict.expected_accepted
            if self.cell.rule.startswith("coupled"):  # the draft shares the noise: count instead
                accepted = entry.verdict.num_accepted
            figures[self.cell.rule].append(1 + accepted)
            figures["actual"].append(1 + entry.verdict.num_accepted)
            figures["drafted"].append(entry.num_drafted)
            figures["levels"].append(entry.depth)


def cells() -> Iterator[Cell]:
    """All cells; at temperature 0 every rule for trees is the walk."""
    for num_nodes, draft, temperature, rule in product(DEPTHS, DRAFTS, TEMPERATURES, RULES):
        if temperature or rule in ("chain", "walk"):
            yield Cell(draft=draft, temperature=temperature, num_nodes=num_nodes, rule=rule)


def measure(engine: Engine, cell: Cell) -> list[dict[str, object]]:
    """Decode the prompts, and return a record per rule with means over prompts."""
    engine.stepper.controller = Same(cell.plan)
    seen = Expectations(cell)
    engine.observers[:] = [seen]
    prompts = [prompt.text for prompt in held_out_prompts()][:NUM_PROMPTS]
    engine.generate(prompts, cell.params)
    records = []
    for rule in (cell.rule,):
        means = [sum(f[rule]) / len(f[rule]) for f in seen.totals.values() if f[rule]]
        steps = [value for f in seen.totals.values() for value in f[rule]]
        mean = sum(means) / len(means)
        variance = sum((value - mean) ** 2 for value in means) / (len(means) - 1)
        every = {
            name: [value for f in seen.totals.values() for value in f[name]]
            for name in ("actual", "drafted", "levels")
        }
        records.append(
            {
                "draft": cell.draft,
                "temperature": cell.temperature,
                "num_nodes": cell.num_nodes,
                "rule": rule,
                "tau": mean,
                "standard_error": math.sqrt(variance / len(means)),
                "num_steps": len(steps),
                "num_prompts": len(means),
                **{name: sum(values) / len(values) for name, values in every.items()},
            }
        )
    return records


def read() -> list[dict[str, object]]:
    """Return the records measured so far."""
    if not RESULTS.is_file():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def run(limit_s: float) -> None:
    """Measure what is missing until the time is up."""
    started_s = time.monotonic()
    RESULTS.parent.mkdir(exist_ok=True)
    done = {(r["draft"], r["temperature"], r["num_nodes"], r["rule"]) for r in read()}
    engine: Engine | None = None
    loaded = ""
    for cell in cells():
        if (cell.draft, cell.temperature, cell.num_nodes, cell.rule) in done:
            continue
        if time.monotonic() - started_s > limit_s:
            return
        if engine is None or loaded != cell.draft:
            config = EngineConfig(
                num_speculative_tokens=max(DEPTHS),
                controller="fixed",
                max_batch=4,
                max_context=1024,
            )
            engine = Engine.load(TARGET, draft=cell.draft, config=config)
            loaded = cell.draft
        records = measure(engine, cell)
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        print(records[-1], flush=True)


def table() -> None:
    """Print a table per draft and temperature, the largest of each row marked."""
    found = {(r["draft"], r["temperature"], r["num_nodes"], r["rule"]): r for r in read()}
    names = (
        "chain",
        "traversal",
        "walk",
        "coupled_chain",
        "coupled",
    )
    print("| draft | T | nodes | " + " | ".join(names).replace("_", " ") + " |")
    print("|---|---|---|" + "---|" * len(names))
    for draft, temperature, num_nodes in product(DRAFTS, TEMPERATURES, sorted(DEPTHS)):
        row = [found.get((draft, temperature, num_nodes, name)) for name in names]
        best = max((r["tau"] for r in row if r), default=None)
        shown = [
            ""
            if r is None
            else f"{'**' * (r['tau'] == best)}{r['tau']:.2f}{'**' * (r['tau'] == best)}"
            f" ± {1.96 * r['standard_error']:.2f}"
            for r in row
        ]
        print(f"| {draft} | {temperature:g} | {num_nodes} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--limit-s", type=float, default=math.inf)
    arguments = parser.parse_args()
    if arguments.table:
        table()
    else:
        torch.set_num_threads(1)
        run(arguments.limit_s)
