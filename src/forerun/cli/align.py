"""`forerun align`: distil a draft to its target and measure the change in acceptance."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Column
from tyro.conf import UseAppendAction, arg

from forerun.align.config import (
    LEFT_OUT,
    AlignConfig,
    AttachedConfig,
    DataConfig,
    EvaluationConfig,
    Export,
    Method,
    ObjectiveConfig,
    TeacherConfig,
    TrainingConfig,
)
from forerun.cli.command import Command
from forerun.cli.flags import LookAhead, Model, SamplingFlags, use_threads
from forerun.cli.tables import SafeConsole, rates, table_of, with_ends
from forerun.errors import InvalidRequest
from forerun.models.catalog import DEFAULT_TARGET
from forerun.sampling.config import SamplingParams

if TYPE_CHECKING:
    from forerun.align.report import AlignReport
    from forerun.measure.judge import (
        AcceptanceFigures,
        DraftFigures,
        FigureChange,
    )
    from forerun.theory.intervals import Interval

logger = logging.getLogger("forerun.align")

EXPORTS: tuple[Export, ...] = ("hf",)
NO_PROMPTS = Path()
"""This very object: the folder one is in, as "." names it, may well hold prompts."""
REPEATED = tuple(item.name for item in fields(AlignConfig) if item.name not in LEFT_OUT)
"""Settings that an alignment from an earlier one repeats, unless a flag changes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlags(DataConfig):
    """Texts for training and for evaluation."""

    # Help comes from DataConfig; the prompts may come from an earlier run.
    prompts: Annotated[Path, arg(help_behavior_hint="(required without --refresh)")] = NO_PROMPTS
    """A .jsonl, .json, .csv, .tsv, .parquet or .txt file of prompts or conversations, a folder of
    them, or the name of a dataset on the Hugging Face hub."""
    replay: UseAppendAction[tuple[Path, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFlags(EvaluationConfig):
    """How drafts are evaluated, by the engine's own verifier."""

    num_speculative_tokens: LookAhead = 5
    """K: tokens drafted per step during evaluation; smaller K are predicted from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignOptions:
    """Options of `forerun align`."""

    target: Model = DEFAULT_TARGET
    """Target: folder, hub name or zoo: name."""
    method: Method = "draft_model"
    """draft_model: a model of its own; eagle3, medusa: a head on the target's hidden states."""
    draft: str | None = None
    """The draft to start from; or give --init. For eagle3 a head; by default a fresh one."""
    init: Path | None = None
    """config.json of a draft to make from nothing, in the target's vocabulary."""
    out: Path = Path("aligned")
    """Folder for the draft (OUT/draft), data, caches, checkpoints, metrics and report."""
    refresh: Path | None = None
    """Folder of an earlier alignment, or its draft: go on from that, its settings as defaults."""
    export: UseAppendAction[tuple[Export, ...]] = ()
    """Serving configuration to write beside the draft: hf, vllm or sglang; hf if none is named."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face hub, such as me/my-draft, to upload the draft to."""
    data: DataFlags = field(default_factory=DataFlags)
    sampling: SamplingFlags = field(default_factory=lambda: SamplingFlags(max_tokens=128))
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    attached: AttachedConfig = field(default_factory=AttachedConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    dtype: str = "auto"
    """Of the target: auto (as stored), bfloat16, float16 or float32."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int | None = None
    """Threads. Default: as many as torch takes."""
    profile: Path | None = None
    """Costs from `forerun profile` to predict speedups with. Default: they are measured."""
    no_prediction: bool = False
    """Measure no costs: keep the draft of the highest tau, not of the best predicted speedup."""
    json: bool = False
    """Print the report as one JSON object instead of tables."""

    @classmethod
    def of(cls, config: AlignConfig, draft: Path, refresh: Path) -> AlignOptions:
        """Return the options of an earlier alignment, to be continued from its aligned draft."""
        changed = {
            "draft": str(draft),
            "init": None,
            "data": DataFlags(**values_of(config.data, DataConfig)),
            "sampling": SamplingFlags(**values_of(config.sampling, SamplingParams)),
            "evaluation": EvaluationFlags(**values_of(config.evaluation, EvaluationConfig)),
        }
        known = {name: getattr(config, name) for name in REPEATED}
        return cls(**{**known, **changed, "refresh": refresh})

    @property
    def config(self) -> AlignConfig:
        if self.data.prompts is NO_PROMPTS:
            raise InvalidRequest("no prompts: give --prompts FILE or DIR")
        if self.method == "draft_model" and (self.draft is None) == (self.init is None):
            raise InvalidRequest("give either --draft, to start from one, or --init, to make one")
        known = {name: getattr(self, name) for name in (*REPEATED, "out", "push_to_hub")}
        changed = {"sampling": self.sampling.params, "export": self.export or EXPORTS}
        return AlignConfig(**{**known, **changed})


def run(options: AlignOptions) -> int:
    """Align in all processes, and print the report in the main one; returns the exit code."""
    config = options.config
    if options.profile is not None and options.no_prediction:
        raise InvalidRequest("--profile is for predictions; leave --no-prediction out")
    use_threads(options.threads)

    from forerun.align.run import align
    from forerun.cli.pair_costs import PairCosts
    from forerun.measure.profile import load_profile

    profile = None if options.profile is None else load_profile(options.profile)
    predicted = not options.no_prediction and config.method != "medusa"
    costs = None if not predicted else PairCosts(config, options.threads, profile)
    try:
        report = align(config, costs=costs)
    except (KeyboardInterrupt, OSError):
        logger.warning("the finished work is kept in %s: the same command continues", config.out)
        raise
    if report is None:  # another process of the same run reports
        return 0
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        print_report(report)
    return 0


def values_of(config: Any, kind: type[Any]) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(kind)}


def defaults(arguments: Sequence[str]) -> AlignOptions | None:
    """Return the settings of the run named by --refresh as the defaults of all flags."""
    given = [*arguments, ""]
    for flag, value in pairwise(given):
        name, _, inline = flag.partition("=")
        if name == "--refresh":
            from forerun.align.manifest import read_settings

            folder = Path(inline or value)
            return AlignOptions.of(*read_settings(folder), folder)
    return None


COMMAND = Command(
    options=AlignOptions,
    run=run,
    lists={"--replay": ",", "--export": ","},
    defaults=defaults,
    description="Distil a draft to its target on your prompts: the target answers them, the draft\n"
    "learns the target's distributions, the engine's own verifier evaluates it on held-out\n"
    "prompts, and the draft of the best predicted speedup is kept. After an interruption the\n"
    "same command continues.",
    examples=(
        "forerun align --model DIR --draft DIR --prompts prompts.jsonl --out aligned",
        "forerun align --model DIR --init config.json --prompts chats.parquet --temperature 0.7",
        "forerun align --model DIR --draft DIR --prompts p.jsonl --temperature 0 "
        "--response-temperature 1",
        "forerun align --method eagle3 --model DIR --prompts prompts.jsonl --out aligned",
        "forerun align --refresh aligned --out aligned-2    # after the target was updated",
        "accelerate launch -m forerun align --model DIR --draft DIR --prompts prompts.jsonl",
    ),
)


HEADINGS = (
    "tau\n(95%)",
    "alpha\n(95%)",
    "accepted by\nposition",
    "predicted\n(95%)",
    "at the\nbest K",
    "4-\ngrams",
)
"""Of the columns after the draft's name; narrow enough for 80 characters."""
LEGEND = (
    "tau: tokens per step; alpha: acceptance probability on the target's own text;\n"
    "predicted: speedup of decoding by the cost table, at this K and at the best K;\n"
    "plain: decoding without the draft is predicted to be faster at every K;\n"
    "4-grams: share that is distinct"
)
WORDS = {
    "acceptance_length": "tau",
    "acceptance_probability": "alpha",
    "speedup": "predicted speedup at this K",
}


def print_drafts(drafts: Mapping[str, DraftFigures]) -> None:
    """Print a table per temperature and K: drafts over all prompts, and by tag."""
    console = SafeConsole()
    settings = {(d.temperature, d.num_speculative_tokens): None for d in drafts.values()}
    for temperature, k in settings:
        chosen = {
            name: figures
            for name, figures in drafts.items()
            if (figures.temperature, figures.num_speculative_tokens) == (temperature, k)
        }
        _print_setting(console, f"T={temperature:g}, K={k}, held-out prompts", chosen)
    console.print(f"[dim]{LEGEND}[/]")


def _print_setting(console: SafeConsole, title: str, drafts: Mapping[str, DraftFigures]) -> None:
    table = table_of(Column("draft", overflow="fold"), *HEADINGS, title=title)
    tags = sorted({tag for figures in drafts.values() for tag in figures.by_tag})
    for name, figures in drafts.items():
        table.add_row(escape(name), *cells(figures.overall))
    for tag in tags if len(tags) > 1 else ():
        table.add_section()
        for name, figures in drafts.items():
            if tag in figures.by_tag:
                label = f"{escape(name)}\n[dim]{escape(tag or 'no tag')}[/]"
                table.add_row(label, *cells(figures.by_tag[tag]))
    console.print(table, "")


def cells(figures: AcceptanceFigures) -> tuple[str, ...]:
    speedup = figures.speedup
    betas = [beta.estimate for beta in figures.acceptance_rate_per_position]
    best = ""
    if speedup is not None:
        k = speedup.num_speculative_tokens
        best = f"{speedup.best.estimate:.2f}\n{f'K={k}' if k else 'plain'}"
    return (
        ends(figures.acceptance_length),
        ends(figures.acceptance_probability),
        rates(betas[:3]) + ("\n" + rates(betas[3:], most=3) if betas[3:] else ""),
        ends(speedup.at_max_k) if speedup else "",
        best,
        f"{figures.distinct_4gram_share:.2f}",
    )


def ends(interval: Interval | None) -> str:
    return "" if interval is None else with_ends(interval, ".2f")


def print_changes(changes: Sequence[FigureChange]) -> None:
    """Print per figure whether its intervals before and after alignment show a difference."""
    console = SafeConsole()
    for change in changes:
        over = "" if change.tag is None else f", {change.tag or 'no tag'}"
        console.print(
            f"[bold]{WORDS[change.figure]}{escape(over)}:[/] {_in_line(change.before)} -> "
            f"{_in_line(change.after)}: {change.finding}"
        )


def _in_line(interval: Interval) -> str:
    return with_ends(interval, ".2f").replace("\n", " ")


def print_report(report: AlignReport) -> None:
    console = SafeConsole()
    for pair in report.judged:
        print_drafts({"before": pair.before, "after": pair.after})
        print_changes(pair.changes)
        console.print()
    step, num_steps = report.best_step, report.judgements[-1].step
    if step == 0:
        console.print(
            "[yellow]No training step is predicted to be faster than the draft before.[/]"
        )
    console.print(
        f"kept step {step} of {num_steps}: {report.data.num_learned_tokens:,} tokens of "
        f"{report.data.num_samples:,} texts, objective {report.objective}"
    )
    if num_cut := report.data.num_cut_responses:
        console.print(
            f"{num_cut:,} responses of {report.data.num_training_prompts:,} were cut at "
            "--max-tokens; a draft learns how answers end from whole ones"
        )
    console.print(f"draft: {escape(str(report.draft))}")
    console.print(f"[dim]{escape(report.provenance.line)}[/]")
