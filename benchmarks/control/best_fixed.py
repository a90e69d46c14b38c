"""`auto` without a profile beside plain decoding and every fixed K, on the engine, cell by cell.

    python benchmarks/control/best_fixed.py --out FILE [--cells TEXT ...] [--rounds 6]

A cell is a target, its drafts, a workload, a temperature and a batch. Its arms generate the same
prompts in turns, 256 tokens per prompt, prefill included; every round of `auto` is a new engine,
which knows no cost and no acceptance, and "auto kept" is one engine for all rounds, the first
included. The pair of 292M parameters is left out where `make pairs` has not made it.

One round of a quarter of the tokens with every fixed K chooses the two that are measured further.
The best in hindsight is the fastest of these and plain decoding in the rounds that are reported,
which flatters it. The order of the arms changes from round to round, so other work on the machine
disturbs all of them. A ratio is the total time of one arm over that of another, with its bootstrap
interval (95%) over rounds. Cells in FILE are not measured again, and none is begun after
`--seconds`: run the command until all are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from idle_drafter import one_layer
from rich.progress import Progress

from forerun import Engine, EngineConfig, SamplingParams
from forerun.models.catalog import held_out_prompts, prompts_of
from forerun.provenance import collect
from forerun.theory.intervals import bootstrap_ratio

KS = (1, 2, 3, 4, 5, 6, 8)
NUM_FINALISTS = 2
DRAFTS = {
    "zoo:code-40m": ("zoo:code-2m-for-40m", "suffix", "zoo:eagle3-for-40m"),
    "zoo:code-11m": ("zoo:code-2m", "suffix"),
}
PAIR = Path("build/pairs/292m")
if PAIR.exists():
    DRAFTS[f"{PAIR}/target"] = (f"{PAIR}/draft", "suffix")
USELESS = "zoo:books-1m"
SMALL = "one layer of books-1m"
EDITS = Path(__file__).parent / "edits.jsonl"
"""Prompts that begin a function of CPython again with a name changed (PSF licence)."""
KEPT = "auto kept"
AUTO = ("auto", KEPT)
WHOSE = ("best", "plain")
CONFIG = EngineConfig(num_threads=2, sharing="none", max_batch=8, max_context=768)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison; with several drafts `auto` chooses among them."""

    target: str
    drafts: tuple[str, ...]
    workload: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        names = " + ".join(name.removeprefix("zoo:") for name in self.drafts)
        target = self.target.removeprefix("zoo:")
        return f"{target}, {names}, {self.workload}, T={self.temperature:g}, batch {self.batch}"


def cells() -> list[Cell]:
    """Return the cells: single drafts and several, code and edits, T and batch; useless drafts."""
    found = []
    for target, drafts in DRAFTS.items():
        sets = [*((draft,) for draft in drafts), drafts[:2]]
        shapes = [("code", t, b) for t in (0.0, 1.0) for b in (1, 8)]
        for names in sets:
            found += [(target, names, *shape) for shape in shapes]
        found += [(target, drafts[:2], "edits then code", t, 1) for t in (0.0, 1.0)]
        if target.startswith("zoo:"):
            found += [(target, (USELESS,), "code", t, b) for t in (0.0, 1.0) for b in (1, 8)]
    three = ("zoo:code-2m-for-40m", "self:int4", "suffix")
    found += [("zoo:code-40m", three, "code", t, 1) for t in (0.0, 1.0)]
    found.append((SMALL, ("random",), "code", 0.0, 1))
    return [Cell(target=a, drafts=b, workload=c, temperature=d, batch=e) for a, b, c, d, e in found]


class Arms:
    """The engines of a cell by arm; `auto` is built anew for every round."""

    def __init__(self, cell: Cell, scratch: Path) -> None:
        self.cell = cell
        target: str | Path = cell.target
        self.drafts: list[str | Path] = [*cell.drafts]
        if cell.target == SMALL:
            target = one_layer(scratch / "target", seed=None)
            self.drafts = [one_layer(scratch / "draft", seed=1)]
        self.plain = Engine.load(target, config=CONFIG)
        self.kept = self.plain.with_draft(self.drafts)
        fixed = [] if USELESS in cell.drafts or cell.target == SMALL else self.drafts
        self.engines = {"plain": self.plain}
        for draft in fixed:
            own = self.plain.with_draft(draft)
            for k in KS:
                config = replace(CONFIG, controller="fixed", num_speculative_tokens=k)
                self.engines[f"{draft} K={k}".removeprefix("zoo:")] = Engine(
                    target=own.target,
                    tokenizer=own.tokenizer,
                    drafter=own.drafter,
                    config=config,
                    eos_token_ids=own.eos_token_ids,
                )

    def seconds(self, arm: str, number: int, num_tokens: int) -> tuple[float, Engine]:
        """Return the seconds of one round of an arm, and its engine."""
        if arm == "auto":
            engine = self.plain.with_draft(self.drafts)
        else:
            engine = self.kept if arm == KEPT else self.engines[arm]
        cell = self.cell
        params = SamplingParams(
            temperature=cell.temperature, max_tokens=num_tokens, ignore_eos=True
        )
        code, edits = held_out_prompts(), prompts_of(EDITS)
        sources = [edits, code] if cell.workload == "edits then code" else [code]
        started_s = time.perf_counter()
        for source in sources:
            first = number * cell.batch
            texts = [source[(first + at) % len(source)].text for at in range(cell.batch)]
            engine.generate(texts, params)
        return time.perf_counter() - started_s, engine


def measure(cell: Cell, num_rounds: int, num_tokens: int, progress: Progress) -> dict[str, Any]:
    """Return the seconds of every arm and round, with the ratios that are asked about."""
    with tempfile.TemporaryDirectory() as scratch:
        arms = Arms(cell, Path(scratch))
        fixed = [name for name in arms.engines if name != "plain"]
        task = progress.add_task(str(cell), total=len(fixed) + num_rounds * (3 + NUM_FINALISTS))
        arms.seconds("auto", 0, 8)
        screened = {name: arms.seconds(name, num_rounds, num_tokens // 4)[0] for name in fixed}
        names = ["auto", KEPT, "plain", *sorted(fixed, key=screened.__getitem__)[:NUM_FINALISTS]]
        progress.advance(task, len(fixed))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        choices: list[str] = []
        for number in range(num_rounds):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                took_s, engine = arms.seconds(name, number, num_tokens)
                seconds[name].append(took_s)
                if name == "auto":
                    choices = [*map(str, engine.choices())]
                progress.advance(task)
    best = min(seconds, key=lambda name: (name in AUTO, sum(seconds[name])))

    def over(name: str, arm: str) -> dict[str, Any]:
        return asdict(bootstrap_ratio(seconds[name], seconds[arm], seed=0))

    return {
        "cell": str(cell),
        "best": best,
        "auto_of_best": over(best, "auto"),
        "auto_of_plain": over("plain", "auto"),
        "kept_of_best": over(best, KEPT),
        "kept_of_plain": over("plain", KEPT),
        "choices_of_last_round": choices,
        "screened_s": screened,
        "seconds": seconds,
        "provenance": collect({}).to_dict(),
    }


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of a table, in the order of the cells."""
    names = ["`auto` of it", "`auto` of plain", "kept of the best", "kept of plain"]
    rows = [f"| cell | best in hindsight | {' | '.join(names)} |", "|---" * 6 + "|"]
    for each in found:
        ratios = [each[f"{arm}_of_{other}"] for arm in ("auto", "kept") for other in WHOSE]
        texts = ["{estimate:.2f} ({low:.2f}–{high:.2f})".format(**ratio) for ratio in ratios]
        rows.append(f"| {each['cell']} | {each['best']} | {' | '.join(texts)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--cells", nargs="*", default=[""], help="texts, one of them in a cell's name"
    )
    parser.add_argument("--seconds", type=float, default=110.0, help="no cell is begun after these")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    found = json.loads(options.out.read_text("utf-8")) if options.out.exists() else []
    started_s = time.monotonic()
    done = {each["cell"] for each in found}
    wanted = [c for c in cells() if any(text in str(c) for text in options.cells)]
    with Progress(disable=not sys.stderr.isatty()) as progress:
        for cell in wanted:
            if str(cell) in done or time.monotonic() - started_s > options.seconds:
                continue
            found.append(measure(cell, options.rounds, options.tokens, progress))
            options.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
