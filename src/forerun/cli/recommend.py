"""`forerun recommend`: try the drafts at hand on a target, and name the fastest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from tyro.conf import Positional, Suppress, UseAppendAction, arg

from forerun.cli.command import Command
from forerun.cli.flags import check_threads
from forerun.cli.tables import SafeConsole, progress_bar, table_of, with_ends
from forerun.errors import Range
from forerun.measure.bench.config import RecommendConfig
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
    from forerun.measure.recommend import DraftTrial, Recommendation

NUM_PROMPTS = 16
"""Prompts that are tried at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendOptions(RecommendConfig):
    """Options of `forerun recommend`."""

    # Help comes from RecommendConfig.
    target: Annotated[Positional[str], arg(metavar="TARGET")]
    drafts: Annotated[
        UseAppendAction[tuple[str, ...]], arg(name="drafts", aliases=("--draft",))
    ] = ()
    num_threads: Annotated[int | None, arg(name="threads")] = None
    max_tokens: Suppress[int] = 128
    prompts: Path | None = None
    """As for `forerun bench`. Default: shipped chats for a chat model, else Python code."""
    raw: bool = False
    """Continue texts as they are, even if the model has a chat template."""
    json: bool = False
    """Print one JSON object."""


def run(options: RecommendOptions) -> int:
    """Try the drafts; returns 0 also where plain decoding is recommended."""
    check_threads(options.num_threads)
    Range("--budget-s", 0, above_low=True).check(options.budget_s)
    from forerun.measure.prompt_files import read_prompts
    from forerun.measure.recommend import recommend

    prompts = None if options.prompts is None else read_prompts(options.prompts)[:NUM_PROMPTS]
    with progress_bar("starting", 1.0) as report:
        found = recommend(options, prompts, raw=options.raw, notify=report)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        show(found, options)
    return 0


def show(found: Recommendation, options: RecommendOptions) -> None:
    """Print the table of drafts, and what to do."""
    from forerun.measure.bench.report import outcome

    console = SafeConsole()
    table = table_of(
        Column("draft", overflow="fold"),
        "parameters",
        "K",
        "tokens\nper step",
        "ms per\nstep",
        "speedup\n(95%)",
        title=f"{found.target}, T={found.temperature:g}, batch 1; K chosen on "
        f"{(found.num_prompts + 1) // 2} prompts, measured on {found.num_prompts // 2} others; "
        f"a plain step takes {1e3 * found.plain_step_s:.2f} ms",
    )
    for trial in found.trials:
        table.add_row(*_cells(trial))
    console.print(table, "")
    for trial in found.trials:
        if trial.failure is not None:
            console.print(f"{trial.draft} cannot be used: {trial.failure}", markup=False)
        elif trial.measured is not None and trial.measured.disturbance is not None:
            console.print(f"{trial.draft}: {outcome(trial.measured)}", markup=False)
    console.print(_advice(found, options), markup=False)


def _cells(trial: DraftTrial) -> tuple[str, ...]:
    size = "" if trial.num_parameters is None else f"{trial.num_parameters / 1e6:,.1f}M"
    best = trial.measured
    if best is None:
        return trial.draft, size, "", "", "", "" if trial.failure is None else "cannot be used"
    return (
        trial.draft,
        size,
        str(best.arm.num_speculative_tokens),
        f"{best.decode_tokens_per_s.estimate * best.step_s:.2f}",
        f"{1e3 * best.step_s:.2f}",
        with_ends(best.speedup, ".2f"),
    )


def _advice(found: Recommendation, options: RecommendOptions) -> str:
    chosen = found.chosen
    if chosen is not None and chosen.measured is not None:
        best, words = chosen.measured, {"target": found.target, "draft": chosen.draft}
        k = best.arm.num_speculative_tokens
        arms = f"{{draft}}@{k} --temperature {found.temperature:g}"
        return (
            f"recommended: {chosen.draft}, which is {best.speedup.estimate:.2f} times as fast with "
            f"K={k} on prompts that did not choose it. K follows the text by itself in\n"
            f"  {shell_command('forerun serve {target} --draft {draft}', **words)}\n"
            "prove it on more prompts with\n"
            f"  {shell_command('forerun bench --model {target} --arms ' + arms, **words)}"
        )
    command = shell_command(
        "forerun align --target {target} --prompts {prompts} --out draft",
        target=found.target,
        prompts="PROMPTS.jsonl" if options.prompts is None else options.prompts,
    )
    return (
        "recommended: plain decoding; no draft that was tried is faster.\n"
        f"A draft can be distilled on your prompts:\n  {command}"
    )


COMMAND = Command(
    options=RecommendOptions,
    run=run,
    lists={"--drafts": ",", "--draft": ","},
    has_positional=True,
    description="Try the drafts at hand on a target: choose K on half of the prompts, measure the\n"
    "speedup on the others, and name the fastest; or what to train if none is faster.",
    examples=(
        "forerun recommend zoo:code-40m",
        "forerun recommend path/to/model --prompts prompts.jsonl --temperature 1",
        "forerun recommend path/to/model --drafts path/to/draft suffix self:int4",
        "forerun recommend zoo:code-40m --json",
    ),
)
