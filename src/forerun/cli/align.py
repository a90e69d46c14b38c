"""`forerun align`: distil a draft to its target and measure the change in acceptance."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Column
from tyro.conf import Suppress, UseAppendAction, arg

from forerun.align.config import (
    AlignConfig,
    AttachedConfig,
    DataConfig,
    EvaluationConfig,
    Export,
    TeacherConfig,
    TrainingConfig,
)
from forerun.bounded_read import read_bytes
from forerun.cli.command import Command
from forerun.cli.flags import LookAhead, Model, use_threads
from forerun.cli.tables import SafeConsole, rates, table_of, with_ends
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest, Range
from forerun.models.catalog import DEFAULT_TARGET
from forerun.sampling.config import SamplingParams
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
    from forerun.align.plan import TextSizes
    from forerun.align.results import AlignReport
    from forerun.engine.engine import Engine
    from forerun.measure.judge import (
        AcceptanceFigures,
        DraftFigures,
        FigureChange,
    )

logger = logging.getLogger("forerun.align")

NO_PROMPTS = Path()
"""This very object: the folder one is in, as "." names it, may well hold prompts."""
SELF = Path("self")
"""In place of a file: the target writes the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlags(DataConfig):
    """Texts for training and for evaluation."""

    # Help comes from DataConfig; the prompts may come from an earlier run.
    prompts: Annotated[Path, arg(help_behavior_hint="(required without --refresh)")] = NO_PROMPTS
    """A .jsonl, .json, .parquet or .txt file of prompts or conversations, a folder of them, or
    "self": the target writes them (a file of that name is given by its whole path)."""
    num_self_prompts: int | None = None
    """Prompts that the target writes with --prompts self. Default: 5,000, on a GPU 20,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFlags:
    """Sampling parameters of the deployment, under which responses are drawn."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the fewest most likely tokens whose probabilities sum to top_p."""
    top_k: int = 0
    """The k most likely tokens; 0 is off."""
    max_tokens: int | None = None
    """Most tokens of a response. Default: 128 on a CPU; on a GPU 256, from 1B parameters 512."""
    draft_temperature: float | None = None
    """Temperature of the draft alone. Default: that of the target."""
    others: Suppress[SamplingParams] = field(default_factory=SamplingParams)
    """Parameters that have no flag, of the run that is refreshed."""

    @property
    def params(self) -> SamplingParams:
        return replace(self.others, **{name: getattr(self, name) for name in RESPONSES})


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFlags(TeacherConfig):
    """Source of the target's probabilities during training."""

    max_cache_bytes: Suppress[int | None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedFlags(AttachedConfig):
    """Shape and training of a head on the target (methods eagle3, dflash and medusa)."""

    pass_decay: Suppress[float] = 0.8
    norm_before_residual: Suppress[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags(TrainingConfig):
    """The training loop and its optimiser."""

    # Help comes from TrainingConfig; None where a flag is left out.
    num_steps: int | None = None  # type: ignore[assignment]
    """Optimiser steps. Default: texts are read 1.5 to 12 times, less often the more there are."""
    tokens_per_step: int | None = None  # type: ignore[assignment]
    """Tokens per optimiser step, over all processes and accumulated passes. This and the next two:
    by default what suits the size of the target (docs/align.md)."""
    window: int | None = None  # type: ignore[assignment]
    learning_rate: float | None = None  # type: ignore[assignment]
    warmup_share: Suppress[float] = 0.05
    checkpoint_every_s: Suppress[float] = 300.0
    training_seed: Suppress[int] = 0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        self.fill_defaults()

    def fill_defaults(self) -> TrainingConfig:
        """Return the settings, with those of `TrainingConfig` for flags that are left out."""
        values = values_of(self, TrainingConfig)
        return TrainingConfig(**{name: v for name, v in values.items() if v is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFlags(EvaluationConfig):
    """How drafts are evaluated, by the engine's own verifier."""

    num_speculative_tokens: LookAhead = 5
    """K: tokens drafted per step during evaluation; smaller K are predicted from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignOptions(AlignConfig):
    """Options of `forerun align`."""

    # Help comes from AlignConfig; these differ, since defaults may come from an earlier run.
    target: Model = DEFAULT_TARGET
    """Target: folder, hub name or zoo: name."""
    dtype: Suppress[str] = "auto"
    refresh: Path | None = None
    """Folder of an earlier alignment, or its draft: go on from that, its settings as defaults."""
    export: UseAppendAction[tuple[Export, ...]] = ()
    data: DataFlags = field(default_factory=DataFlags)
    sampling: ResponseFlags = field(default_factory=ResponseFlags)  # type: ignore[assignment]
    teacher: TeacherFlags = field(default_factory=TeacherFlags)
    attached: AttachedFlags = field(default_factory=AttachedFlags)
    training: TrainingFlags = field(default_factory=TrainingFlags)
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    engine: Suppress[EngineConfig] = field(default_factory=lambda: EngineConfig(controller="fixed"))
    threads: int | None = None
    """Threads. Default: as many as torch takes."""
    profile: Path | None = None
    """Costs from `forerun profile` to predict speedups with. Default: they are measured."""
    no_prediction: bool = False
    """Measure no costs: keep the draft of the highest tau, not of the best predicted speedup."""
    plan_only: bool = False
    """Print what would be done and how long it would take, and end."""
    json: bool = False
    """Print the report, or the plan, as one JSON object."""

    def __post_init__(self) -> None:
        """Leave the checks of `AlignConfig` out: `config` makes them once all flags are known."""

    @classmethod
    def of(cls, config: AlignConfig, draft: Path, refresh: Path) -> AlignOptions:
        """Return the options of an earlier alignment, to be continued from its aligned draft."""
        changed = {
            "draft": str(draft),
            "init": None,
            "out": Path("aligned"),
            "data": DataFlags(**values_of(config.data, DataConfig)),
            "sampling": ResponseFlags(
                others=config.sampling,
                **{name: getattr(config.sampling, name) for name in RESPONSES},
            ),
            "teacher": TeacherFlags(**values_of(config.teacher, TeacherConfig)),
            "attached": AttachedFlags(**values_of(config.attached, AttachedConfig)),
            "training": TrainingFlags(**values_of(config.training, TrainingConfig)),
            "evaluation": EvaluationFlags(**values_of(config.evaluation, EvaluationConfig)),
        }
        return cls(**{**values_of(config, AlignConfig), **changed, "refresh": refresh})

    @property
    def config(self) -> AlignConfig:
        """The settings; where flags are left out those of small targets."""
        data, number = DataConfig(**values_of(self.data, DataConfig)), self.data.num_self_prompts
        Range("--num-self-prompts", 1, integer=True, optional=True).check(number)
        if number is not None and self.data.prompts != SELF:
            raise InvalidRequest("--num-self-prompts is for --prompts self; leave it out")
        if self.data.prompts is NO_PROMPTS:
            raise InvalidRequest(
                "no prompts: give --prompts FILE or DIR, or --prompts self to have the target "
                "write them"
            )
        if self.data.prompts == SELF:
            if data.held_out_share != DataConfig(prompts=data.prompts).held_out_share:
                raise InvalidRequest(
                    "with --prompts self the draft is judged on shipped prompts, or on those of "
                    "--held-out FILE; leave --held-out-share out"
                )
            held_out = data.held_out or self.out / HELD_OUT
            data = replace(data, prompts=self.out / WRITTEN, held_out=held_out)
        if self.method == "draft_model" and (self.draft is None) == (self.init is None):
            raise InvalidRequest("give either --draft, to start from one, or --init, to make one")
        changed = {
            "data": data,
            "sampling": self.sampling.params,
            "teacher": TeacherConfig(**values_of(self.teacher, TeacherConfig)),
            "attached": AttachedConfig(**values_of(self.attached, AttachedConfig)),
            "training": self.training.fill_defaults(),
            "evaluation": EvaluationConfig(**values_of(self.evaluation, EvaluationConfig)),
        }
        return AlignConfig(**{**values_of(self, AlignConfig), **changed})


RESPONSES = ("temperature", "top_p", "top_k", "max_tokens", "draft_temperature")
"""Sampling parameters that have flags."""
WRITTEN, HELD_OUT = "prompts.jsonl", "held-out.jsonl"
"""Files of --prompts self in the folder of the alignment, unless --held-out names another."""
TEXTS = "prompts"
"""Folder there of all texts that the target wrote to find prompts."""


class Preparation:
    """What comes before an alignment: its settings by the target's size, its plan, its prompts."""

    def __init__(self, options: AlignOptions) -> None:
        from forerun.align.plan import defaults_for, fill_in, read_sizes
        from forerun.models.checkpoint import ModelFiles

        config = options.config
        self.options = options
        self.target = ModelFiles.open(config.target)
        self.sizes = read_sizes(config, self.target)
        chosen = defaults_for(self.sizes, config.method)
        if config.sampling.max_tokens is None and options.refresh is None:
            sampling = replace(config.sampling, max_tokens=chosen.max_tokens)
            config = replace(config, sampling=sampling)
        self.tokenizer = self.target.tokenizer
        self.num_written = 0
        if options.data.prompts == SELF:
            self.num_written = options.data.num_self_prompts or chosen.num_prompts
        self.is_chat = self.tokenizer.has_chat_template and not config.data.raw
        window = options.training.window or chosen.window
        self.texts = self._measure_texts(config, window)
        given = values_of(options.training, TrainingConfig)
        self.config = fill_in(config, chosen, self.texts, given)

    def _measure_texts(self, config: AlignConfig, window: int) -> TextSizes:
        from forerun.align.plan import TEXTS_PER_PROMPT, TURN_TOKENS, TextSizes, measure_prompts
        from forerun.align.samples import read_prompts
        from forerun.align.self_prompts import find_opening
        from forerun.align.texts import read_prompt_split

        data = config.data
        if not self.num_written:
            split = read_prompt_split(data, self.tokenizer)
            most = window - (config.sampling.max_tokens or 0)
            mean, cut, long = measure_prompts(split.training, data.max_prompt_tokens, most)
            return TextSizes(
                num_training=len(split.training),
                num_held_out=len(split.held_out),
                judged_on=f"{len(split.held_out):,} held-out prompts",
                prompt_tokens=mean,
                cut_prompts_share=cut,
                cut_texts_share=long,
            )
        opening = find_opening(self.tokenizer, raw=data.raw)
        around = len(self.tokenizer.encode(opening.text, add_special_tokens=False))
        given = self.options.data.held_out
        if given is None:
            num_held_out = len(self._read_shipped())
            judged_on = f"{num_held_out} {SHIPPED[self.is_chat]}, {NOT_BY_TARGET}"
        else:
            judged = read_prompts(given, self.tokenizer, data.max_prompt_tokens, raw=data.raw)
            num_held_out = len(judged)
            judged_on = f"{num_held_out:,} prompts of {given}"
        return TextSizes(
            num_training=self.num_written,
            num_held_out=num_held_out,
            judged_on=judged_on,
            prompt_tokens=TURN_TOKENS + around,
            num_texts=round(TEXTS_PER_PROMPT * self.num_written),
        )

    def _read_shipped(self) -> list[dict[str, str]]:
        """Return the shipped prompts as records of a prompt file."""
        from forerun.models.catalog import chat_prompts, held_out_prompts

        prompts = chat_prompts() if self.is_chat else held_out_prompts()
        return [{"prompt": prompt.text, "tag": SHIPPED[self.is_chat]} for prompt in prompts]

    def prepare(self) -> None:
        """Print the plan of a run that has not begun, and have the target write the prompts."""
        from forerun.align.run import METHODS, configure_method
        from forerun.align.workspace import Workspace

        files = [self.config.data.prompts, self.config.data.held_out] if self.num_written else []
        begun = Workspace(root=self.config.out).manifest.exists()
        has_written = bool(files) and self.config.data.prompts.exists()
        if begun and has_written and not all(path.exists() for path in files if path):
            raise InvalidRequest(
                f"{self.config.out} began with --held-out FILE: name the file again, or give "
                "another --out"
            )
        if begun and all(path.exists() for path in files if path) and not self.options.plan_only:
            self._check_number()
            return
        method = METHODS[self.config.method](configure_method(self.config, self.target))
        method.load()  # refuses a wrong draft
        with self._engine() as engine:
            self._print_plan(engine)
            if self.num_written and not self.options.plan_only:
                self._write_prompts(engine)

    def _check_number(self) -> None:
        """Refuse another number of prompts than that with which the alignment began."""
        path, wanted = self.config.data.prompts, self.options.data.num_self_prompts
        if wanted is not None and (number := read_bytes(path).count(b"\n")) != wanted:
            raise InvalidRequest(
                f"{path} has {number:,} prompts, with which this alignment began; give another "
                f"--out to have {wanted:,} written"
            )

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        """Load the target for measuring and for writing prompts, and release it afterwards."""
        import torch

        from forerun.align.self_prompts import MAX_TURN_TOKENS
        from forerun.engine.engine import Engine

        config, num_threads = self.config, torch.get_num_threads()
        sized = config.sized_engine
        room = max(sized.max_context, int(self.texts.prompt_tokens) + 2 * MAX_TURN_TOKENS)
        own = replace(sized, num_speculative_tokens=0, max_context=room)
        try:
            yield Engine.load(
                self.target, draft="none", dtype=config.dtype, device=config.device, config=own
            )
        finally:
            torch.set_num_threads(num_threads)  # a native target takes the cores for itself

    def _print_plan(self, engine: Engine) -> None:
        from forerun.align.plan import make_plan, measure_rates

        plan = make_plan(self.config, self.sizes, self.texts, measure_rates(engine))
        if self.options.plan_only and self.options.json:
            print(json.dumps(asdict(plan)))
            return
        console = SafeConsole(stderr=not self.options.plan_only)
        for line in plan.lines():
            console.print(line, markup=False, soft_wrap=True)

    def _write_prompts(self, engine: Engine) -> None:
        from forerun.align.self_prompts import PromptWriter, find_opening
        from forerun.align.workspace import Phases
        from forerun.atomic_write import atomic_write

        config, phases = self.config, Phases(SafeConsole(stderr=True))
        writer = PromptWriter(
            engine=engine,
            opening=find_opening(self.tokenizer, raw=config.data.raw),
            target_hash=self.target.content_hash,
            tokenizer_hash=self.target.tokenizer_hash,
            folder=config.out / TEXTS,
        )
        with phases.bar("prompts", "texts of the target") as on_progress:
            selection = writer.write(config.data.prompts, self.num_written, on_progress)
        phases.console.print(str(selection), markup=False, soft_wrap=True)
        if self.options.data.held_out is None:
            lines = [json.dumps(record) + "\n" for record in self._read_shipped()]
            with atomic_write(config.out / HELD_OUT) as scratch:
                scratch.write_text("".join(lines), encoding="utf-8")


SHIPPED = {
    True: "chats that ship with forerun",
    False: "beginnings of Python modules that ship with forerun",
}
"""What is judged on without --held-out where the target writes the prompts, by whether it chats."""
NOT_BY_TARGET = "not written by the target (--held-out FILE: your own)"


def run(options: AlignOptions) -> int:
    """Align in all processes, and print the report in the main one; returns the exit code."""
    config = options.config  # refuses contradictions before anything is read
    if options.profile is not None and options.no_prediction:
        raise InvalidRequest("--profile is for predictions; leave --no-prediction out")
    use_threads(options.threads)

    from forerun.align.run import align
    from forerun.align.trainer import connect_processes
    from forerun.cli.pair_costs import PairCosts
    from forerun.measure.profile import load_profile

    profile = None if options.profile is None else load_profile(options.profile)
    preparation = Preparation(options)
    config = preparation.config
    predicted = not options.no_prediction and config.method not in ("dflash", "medusa")
    costs = None if not predicted else PairCosts(config, options.threads, profile)
    state = connect_processes(config.device)
    try:
        with state.main_process_first():  # the others wait for the prompts
            if state.is_main_process:
                preparation.prepare()
        report = None if options.plan_only else align(config, costs=costs)
    except (KeyboardInterrupt, OSError):
        if not options.plan_only:
            logger.warning(
                "the finished work is kept in %s: the same command continues", config.out
            )
        raise
    if report is None:  # there is a plan alone, or another process of the same run reports
        return 0
    if options.json:
        print(json.dumps(report.to_dict()))
        return 0
    print_report(report, config.target)
    if config.data.held_out == config.out / HELD_OUT:
        judged_on = f"judged on {preparation.texts.judged_on}"
        SafeConsole().print(judged_on, markup=False, soft_wrap=True)
    return 0


def values_of(config: Any, kind: type[Any]) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(kind)}


def defaults(arguments: Sequence[str]) -> AlignOptions | None:
    """Return the settings of the run named by --refresh as the defaults of all flags."""
    given = [*arguments, ""]
    for flag, value in pairwise(given):
        name, _, inline = flag.partition("=")
        if name == "--refresh":
            from forerun.align.workspace import read_settings

            folder = Path(inline or value)
            return AlignOptions.of(*read_settings(folder), folder)
    return None


COMMAND = Command(
    options=AlignOptions,
    run=run,
    lists={"--export": ","},
    usual="target method draft init prompts num_self_prompts held_out temperature max_tokens out "
    "refresh export num_steps plan_only json",
    defaults=defaults,
    description="Distil a draft to its target on your prompts: the target answers them, the draft\n"
    "learns the target's distributions, the engine's own verifier evaluates it on held-out\n"
    "prompts, and the draft of the best predicted speedup is kept. After an interruption the\n"
    "same command continues.",
    examples=(
        "forerun align --model DIR --method eagle3 --prompts self    # the target writes them",
        "forerun align --model DIR --draft DIR --prompts prompts.jsonl --out aligned",
        "forerun align --model DIR --init config.json --prompts chats.parquet --temperature 0.7",
        "forerun align --model DIR --draft DIR --prompts p.jsonl --temperature 0 "
        "--response-temperature 1",
        "forerun align --method eagle3 --model DIR --prompts prompts.jsonl --out aligned",
        "forerun align --refresh aligned --out aligned-2    # after the target was updated",
        "accelerate launch -m forerun align --model DIR --draft DIR --prompts prompts.jsonl",
    ),
)


COLUMNS = {
    "tau\n(95%)": "tau: tokens per step",
    "alpha\n(95%)": "alpha: acceptance probability on the target's own text",
    "accepted by\nposition": "",
    "predicted\n(95%)": "predicted: speedup of decoding by the cost table, at this K",
    "at the\nbest K": "at the best K: the same; plain: faster without the draft at every K",
    "4-\ngrams": "4-grams: share that is distinct",
}
"""Legends of the columns after the draft's name; narrow enough for 80 characters."""
WORDS = {
    "acceptance_length": "tau",
    "acceptance_probability": "alpha",
    "speedup": "predicted speedup at this K",
}


def print_drafts(drafts: Mapping[str, DraftFigures]) -> None:
    """Print a table per temperature and K: drafts over all prompts, and by tag."""
    console, shown = SafeConsole(), dict[str, None]()
    settings = {(d.temperature, d.num_speculative_tokens): None for d in drafts.values()}
    for temperature, k in settings:
        chosen = {
            name: figures
            for name, figures in drafts.items()
            if (figures.temperature, figures.num_speculative_tokens) == (temperature, k)
        }
        title = f"T={temperature:g}, K={k}, held-out prompts"
        shown |= dict.fromkeys(_print_setting(console, title, chosen))
    legend = [words for heading, words in COLUMNS.items() if heading in shown and words]
    console.print("[dim]" + ";\n".join(legend) + "[/]")


def _print_setting(
    console: SafeConsole, title: str, drafts: Mapping[str, DraftFigures]
) -> list[str]:
    """Print the columns that are not empty, and return their headings."""
    rows = [[(escape(name), *cells(figures.overall)) for name, figures in drafts.items()]]
    tags = sorted({tag for figures in drafts.values() for tag in figures.by_tag})
    for tag in tags if len(tags) > 1 else ():
        label = f"\n[dim]{escape(tag or 'no tag')}[/]"
        found = [(name, figures.by_tag.get(tag)) for name, figures in drafts.items()]
        rows.append([(escape(name) + label, *cells(one)) for name, one in found if one])
    filled = [any(column) for column in zip(*chain.from_iterable(rows), strict=True)]
    headings = list(compress(COLUMNS, filled[1:]))
    table = table_of(Column("draft", overflow="fold"), *headings, title=title)
    for section in rows:
        table.add_section()
        for row in section:
            table.add_row(*compress(row, filled))
    console.print(table, "")
    return headings


def cells(figures: AcceptanceFigures) -> tuple[str, ...]:
    speedup = figures.speedup
    betas = [beta.estimate for beta in figures.acceptance_rate_per_position]
    best = ""
    if speedup is not None:
        k = speedup.num_speculative_tokens
        best = f"{speedup.best.estimate:.2f}\n{f'K={k}' if k else 'plain'}"
    return (
        with_ends(figures.acceptance_length, ".2f"),
        with_ends(figures.acceptance_probability, ".2f"),
        rates(betas[:3]) + ("\n" + rates(betas[3:], most=3) if betas[3:] else ""),
        with_ends(speedup, ".2f"),
        best,
        f"{figures.distinct_4gram_share:.2f}",
    )


def print_changes(changes: Sequence[FigureChange]) -> None:
    """Print per figure whether its intervals before and after alignment show a difference."""
    console = SafeConsole()
    for change in changes:
        over = "" if change.tag is None else f", {change.tag or 'no tag'}"
        ends = [change.before.show(), change.after.show()]
        name = f"[bold]{WORDS[change.figure]}{escape(over)}:[/]"
        console.print(f"{name} {' -> '.join(ends)}: {change.finding}")


LEAST_ACCEPTED = 0.1
"""Fewest draft tokens accepted per step with which any draft could pay for its own time."""


def print_report(report: AlignReport, target: str) -> None:
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
    after = report.judged[0].after
    tau = after.overall.acceptance_length
    if tau is not None and tau.high - 1.0 < LEAST_ACCEPTED:
        console.print(
            f"[yellow]It is of no use yet: it accepts {tau.estimate - 1.0:.2f} tokens a step. "
            "Train it longer (--num-steps), or on more prompts.[/]"
        )
    console.print(f"[dim]{escape(report.provenance.line)}[/]")
    arm = f"{report.draft}@{report.best_k or after.num_speculative_tokens}"
    command = shell_command("forerun bench --model {target} --arms {arm}", target=target, arm=arm)
    console.print(f"measure it: {command}", markup=False, soft_wrap=True)
