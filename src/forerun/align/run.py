"""Runs an alignment: from prompts to a trained draft with its report.

Every phase is stored, and a run continues where an interrupted one stopped: the target answers the
prompts; its distributions are cached; the draft learns them; at intervals the engine's own verifier
judges the draft on held-out prompts, and the draft of the highest predicted speedup is kept.

Under `accelerate launch` every process trains; the main one alone generates, judges and writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

import forerun
from forerun.align.config import AlignConfig
from forerun.align.methods.base import Method, MethodConfig
from forerun.align.methods.dflash import DFlashMethod
from forerun.align.methods.draft_model import DraftModelMethod
from forerun.align.methods.eagle3 import Eagle3Method
from forerun.align.methods.medusa import MedusaMethod
from forerun.align.objectives import OBJECTIVES, Objective
from forerun.align.results import (
    AlignReport,
    DataSummary,
    DraftSelector,
    JudgedPair,
    describe_pair,
    export_draft,
    find_finished,
)
from forerun.align.samples import Packing, Sample, data_hash
from forerun.align.target import TeacherSource, choose_faster_dtype
from forerun.align.teachers import Teacher, make_teacher
from forerun.align.texts import PromptSplit, TrainingTexts, read_prompt_split, warn_of_few_prompts
from forerun.align.trainer import (
    Trainer,
    choose_precision,
    connect_processes,
    from_main,
    make_accelerator,
)
from forerun.align.workspace import (
    DTYPES,
    Phases,
    StepMetrics,
    Workspace,
    append_line,
    check_folder,
    claim_folder,
    exclusive_access,
    identity_of,
    lock_for,
    of_training,
    read_lines,
    settings_of,
    write_lines,
)
from forerun.engine.engine import Engine
from forerun.measure.judge import DraftFigures, Judge
from forerun.models.checkpoint import ModelFiles, read_object
from forerun.models.draft_card import CardFigures, DraftCard, identify, write_card
from forerun.models.load import choose_device, choose_dtype
from forerun.provenance import collect, content_hash, version_of
from forerun.theory.cost import CostTable

logger = logging.getLogger("forerun.align")

METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {
        "draft_model": DraftModelMethod,
        "eagle3": Eagle3Method,
        "dflash": DFlashMethod,
        "medusa": MedusaMethod,
    }
)
CostsOf = Callable[[Path, float, str], CostTable | None]
"""Returns the cost table of a draft folder at a temperature, or None if it is not known. The last
argument is the hash of the target's weights, which takes long to compute."""


def align(
    config: AlignConfig,
    *,
    costs: CostsOf | None = None,
    console: Console | None = None,
    objective: Objective | None = None,
) -> AlignReport | None:
    """Distil a draft to its target; returns the report in the main process, None in the others.

    Without `costs` to predict speedups from, the draft of the highest tau is kept.

    Args:
        objective: takes the place of the one that the settings name.

    Raises:
        CacheTooLarge: the teacher's cache does not fit; nothing was written.
        TrainingDiverged: the loss is no number; the best draft so far is kept.
    """
    objective = objective or OBJECTIVES[config.objective_name]
    run = Run.open(config, objective, console or Console(stderr=True))
    prompts = read_prompt_split(config.data, run.target.tokenizer)
    if run.is_main:
        warn_of_few_prompts(prompts)
    identity = run.identify(prompts)
    check_folder(run.workspace, identity)
    finished = find_finished(run.workspace, identity, predicted=costs is not None)
    if finished is not None:
        return run.repeat(finished) if run.is_main else None
    root = run.workspace.root
    lock = exclusive_access(lock_for(root / "alignment"), root) if run.is_main else nullcontext()
    with lock:
        return _run_phases(run, prompts, identity, costs)


def _run_phases(
    run: Run, prompts: PromptSplit, identity: Mapping[str, str], costs: CostsOf | None
) -> AlignReport | None:
    config, target = run.config, run.target
    method = METHODS[config.method](configure_method(config, target))
    method.load()
    engine = None
    if run.is_main:
        engine = Engine.load(
            target, dtype=config.dtype, device=config.device, config=config.sized_engine
        )
        claim_folder(settings_of(config), run.workspace, identity, run.dtypes)
    texts = TrainingTexts(
        data=config.data,
        sampling=config.sampling,
        prompts=prompts,
        target=target,
        engine=engine,
        folder=run.workspace.responses,
    )
    samples = run.write_texts(texts)
    method.start(samples)
    trainer = run.make_trainer(method, identity)
    run.snapshot(method, trainer, 0)
    selector = None if engine is None else run.make_selector(engine, prompts, costs)
    training = config.training
    packing = Packing(texts.mixed(samples), window=training.window, seed=training.training_seed)
    trainer.teacher = run.make_teacher(packing, engine, method.layers)
    run.train(trainer, method, packing, selector)
    if selector is None:
        return None
    summary = DataSummary(
        num_training_prompts=len(prompts.training),
        num_held_out_prompts=len(prompts.held_out),
        num_samples=len(packing.samples),
        num_learned_tokens=packing.num_learned,
        num_rows=packing.rows_per_epoch,
        num_cut_responses=texts.num_cut,
    )
    report = run.report(selector, summary, identity, costs)
    card = card_of(
        report,
        target=target,
        settings=settings_of(config),
        data=data_hash(packing.samples),
    )
    write_card(card, run.workspace.draft)
    report.write(run.workspace.report)
    run.export(report)
    return report


def configure_method(config: AlignConfig, target: ModelFiles) -> MethodConfig:
    """Return what a method needs of the settings of an alignment."""
    return MethodConfig(
        target=target,
        draft=config.draft,
        init=config.init,
        seed=config.training.training_seed,
        temperature=config.draft_temperature,
        num_speculative_tokens=config.evaluation.num_speculative_tokens,
        attached=config.attached,
    )


@dataclass(kw_only=True, eq=False)
class Run:
    """One alignment in one folder: its processes, and what every phase needs.

    Attributes:
        dtypes: of matrix products in "training" and of the "target" while it is scored, the same in
            all processes and after an interruption.
        num_threads: of torch before a native target takes the cores.
    """

    config: AlignConfig
    target: ModelFiles
    objective: Objective
    accelerator: Accelerator
    dtypes: Mapping[str, str]
    workspace: Workspace
    phases: Phases
    num_threads: int

    @classmethod
    def open(cls, config: AlignConfig, objective: Objective, console: Console) -> Run:
        """Connect the processes of a run."""
        workspace = Workspace(root=config.out, cache_root=config.teacher.cache_dir)
        state, target = connect_processes(config.device), ModelFiles.open(config.target)
        dtypes = from_main(
            state, lambda: _read_dtypes(workspace) or _measure_dtypes(config, target)
        )
        return cls(
            config=config,
            target=target,
            objective=objective,
            accelerator=make_accelerator(config.device, dtypes["training"]),
            dtypes=dtypes,
            workspace=workspace,
            phases=Phases(console if state.is_main_process else None),
            num_threads=torch.get_num_threads(),
        )

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def schedule(self) -> list[int]:
        """Steps at which the draft is judged, from 0 to the last step."""
        num_steps = self.config.training.num_steps
        num_rounds = max(1, min(self.config.evaluation.num_evaluations, num_steps))
        return [num_steps * i // num_rounds for i in range(num_rounds + 1)]

    def identify(self, prompts: PromptSplit) -> dict[str, str]:
        def hash_target() -> str:
            with self.phases.waiting("hashing", "hashing the weights of the target"):
                return self.target.content_hash

        target_hash = from_main(self.accelerator, hash_target)
        identity = identity_of(self.config, prompts.hashes, target_hash)
        if self.objective is not OBJECTIVES[self.config.objective_name]:
            identity["objective.objective"] = self.objective.name
        return identity

    def write_texts(self, texts: TrainingTexts) -> list[Sample]:
        def make() -> list[Sample]:
            with self.phases.bar("responses", "responses") as on_progress:
                return texts.read(on_progress)

        return from_main(self.accelerator, make)

    def make_teacher(
        self, packing: Packing, engine: Engine | None, layers: tuple[int, ...] | None
    ) -> Teacher | None:
        """Return the teacher, whose cache is filled by all processes together."""
        config, accelerator = self.config, self.accelerator
        if not self.objective.needs_teacher:
            return None
        num_rows = packing.num_learned
        if layers is not None:
            num_rows = sum(len(sample.token_ids) for sample in packing.samples)
        with self.phases.bar("teacher", "the target's distributions") as on_progress:
            source = TeacherSource(
                target=self.target,
                sampling=config.sampling,
                cache_dir=self.workspace.cache,
                device=config.device,
                dtype=config.dtype,
                computed=getattr(torch, self.dtypes["target"]),
                runs=None if engine is None else engine.target,
                on_progress=on_progress,
                process=(accelerator.process_index, accelerator.num_processes),
                wait=accelerator.wait_for_everyone,
            )
            teacher = make_teacher(config.teacher, source, num_rows, layers)
            teacher.prepare(packing.samples)
        return teacher

    def make_trainer(self, method: Method, identity: Mapping[str, str]) -> Trainer:
        trainer = Trainer(
            config=self.config.training,
            module=method.loss(self.objective),
            teacher=None,
            accelerator=self.accelerator,
            folder=self.workspace.training,
            identity=of_training(identity),
            muon=method.muon_matrices(),
        )
        trainer.num_threads = self.num_threads
        trainer.resume()
        return trainer

    def make_selector(
        self, engine: Engine, prompts: PromptSplit, costs: CostsOf | None
    ) -> DraftSelector:
        """Return what judges drafts, after it has judged those that were left without."""
        config = self.config
        judge = Judge(
            engine=engine,
            prompts=prompts.to_judge,
            params=config.sampling,
            num_speculative_tokens=config.evaluation.num_speculative_tokens,
            costs=self._find_costs(config.sampling.temperature, costs),
            seed=config.training.training_seed,
        )
        selector = DraftSelector(self.workspace, judge, config.evaluation.max_prompts)
        for step in self.schedule:  # more than the first where judgements were lost
            if self.workspace.snapshot(step).exists():
                self._judge(selector, step)
        return selector

    def _find_costs(self, temperature: float, costs: CostsOf | None) -> CostTable | None:
        first = self.workspace.snapshot(0)
        return None if costs is None else costs(first, temperature, self.target.content_hash)

    def _judge(self, selector: DraftSelector, step: int) -> None:
        with self.phases.waiting("judging", f"judging step {step}"):
            selector.consider(step)

    def train(
        self, trainer: Trainer, method: Method, packing: Packing, selector: DraftSelector | None
    ) -> None:
        """Train from judgement to judgement, logging the metrics of every step."""
        path, means = self.workspace.metrics, dict[str, float]()
        if self.is_main:  # a resumed run trains some steps again
            rows = read_lines(path, StepMetrics)
            write_lines(path, (row for row in rows if row.step <= trainer.step))
        for until in self.schedule[1:]:
            if trainer.step > until:
                continue
            with self.phases.bar("training", "training step") as show:

                def on_step(metrics: StepMetrics, show: Callable[..., None] = show) -> None:
                    if self.is_main:
                        append_line(path, metrics)
                    figures = _update_means(means, metrics)
                    show(metrics.step, self.schedule[-1], figures + _describe_speedup(selector))

                show(trainer.step, self.schedule[-1])
                trainer.run(packing, until, on_step)
            self.snapshot(method, trainer, until)
            if selector is not None:
                self._judge(selector, until)
            self.accelerator.wait_for_everyone()

    def snapshot(self, method: Method, trainer: Trainer, step: int) -> None:
        """Save the draft after a step; all processes must call this."""
        if self.workspace.snapshot(step).exists() or trainer.step != step:
            return
        weights = trainer.weights()
        if self.is_main:
            method.save(self.workspace.snapshot(step), weights)

    def report(
        self,
        selector: DraftSelector,
        data: DataSummary,
        identity: Mapping[str, str],
        costs: CostsOf | None,
    ) -> AlignReport:
        """Judge the first and the kept draft on all held-out prompts."""
        workspace = self.workspace
        first = workspace.snapshot(0)
        temperatures = {*self.config.evaluation.temperatures} - {self.config.sampling.temperature}
        judges = [selector.judge]
        for temperature in sorted(temperatures):
            judges.append(selector.judge.at(temperature, self._find_costs(temperature, costs)))
        with self.phases.waiting("judging", "judging on all held-out prompts"):
            judged = tuple(
                JudgedPair(
                    before=judge.judge(first, name="before"),
                    after=judge.judge(workspace.draft, name="after"),
                )
                for judge in judges
            )
        hashes = {"target": self.target.content_hash, "draft": content_hash(str(workspace.draft))}
        return AlignReport(
            draft=workspace.draft,
            objective=self.objective.name,
            data=data,
            judged=judged,
            judgements=tuple(selector.judgements[step] for step in sorted(selector.judgements)),
            best_step=selector.best.step,
            seconds=dict(self.phases.seconds),
            provenance=collect(hashes),
            identity=identity,
        )

    def export(self, report: AlignReport) -> None:
        """Write the settings that serve the draft."""
        config, most = self.config, self.config.evaluation.num_speculative_tokens
        k = most if report.best_k is None else report.best_k
        draft = self.workspace.draft
        serving = describe_pair(self.target, draft, k, config.sampling, config.method)
        export_draft(config.export, serving)
        if not serving.speculates:
            logger.warning(
                "no number of speculative tokens up to %d is predicted to be faster than decoding "
                "without the draft: the serving files do not use it",
                most,
            )

    def repeat(self, report: AlignReport) -> AlignReport:
        """Export a finished alignment again, and say how to have it judged or run anew."""
        self.export(report)
        path = self.workspace.report
        self.phases.console.print(
            f"finished before; to judge again remove {path}, to align again give another --out",
            style="dim",
            highlight=False,
            markup=False,
        )
        return report


def _read_dtypes(workspace: Workspace) -> dict[str, str] | None:
    """Return the types of an interrupted run; None for a new one, or if they cannot be read."""
    if not workspace.manifest.exists():
        return None
    stored = read_object(workspace.manifest).get(DTYPES)
    known = {"training": ("no", "bf16"), "target": ("float32", "bfloat16", "float16")}
    if not isinstance(stored, dict) or stored.keys() != known.keys():
        return None
    return stored if all(stored[name] in known[name] for name in known) else None


def _measure_dtypes(config: AlignConfig, target: ModelFiles) -> dict[str, str]:
    stored = choose_dtype(config.dtype, target)
    computed = choose_faster_dtype(stored, choose_device(config.device).type)
    return {
        "training": choose_precision(config.device),
        "target": str(computed).removeprefix("torch."),
    }


SMOOTHING = 0.9
"""Weight of earlier steps in the running means that are shown."""


def _update_means(means: dict[str, float], metrics: StepMetrics) -> str:
    """Update the running means of loss and alpha, and return them as text."""
    for name, value in (("loss", metrics.loss), ("alpha", metrics.acceptance_probability)):
        if value is not None:
            means[name] = SMOOTHING * means.get(name, value) + (1 - SMOOTHING) * value
    return "  ".join(f"{name} {mean:.3f}" for name, mean in means.items())


def _describe_speedup(selector: DraftSelector | None) -> str:
    speedup = None if selector is None else selector.latest.predicted_speedup
    if speedup is None:
        return ""
    if speedup < 1.0:
        return f"  plain decoding is faster (speedup {speedup:.2f}x)"
    return f"  predicted speedup {speedup:.2f}x"


PACKAGES = ("torch", "transformers", "accelerate")


def card_of(
    report: AlignReport, *, target: ModelFiles, settings: Mapping[str, Any], data: str
) -> DraftCard:
    """Return the card of the kept draft; `data` is the hash of its training texts."""
    return DraftCard(
        target=target.name,
        target_hash=report.identity["target"],
        made_for=identify(target),
        data_hash=data,
        objective=report.objective,
        temperature=report.judged[0].after.temperature,
        before=tuple(_make_card_figures(pair.before) for pair in report.judged),
        after=tuple(_make_card_figures(pair.after) for pair in report.judged),
        versions={"forerun": forerun.__version__, **{name: version_of(name) for name in PACKAGES}},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=settings,
    )


def _make_card_figures(judged: DraftFigures) -> CardFigures:
    overall = judged.overall
    return CardFigures(
        temperature=judged.temperature,
        num_speculative_tokens=judged.num_speculative_tokens,
        acceptance_length=overall.acceptance_length,
        acceptance_probability=overall.acceptance_probability,
        speedup=None if overall.speedup is None else overall.speedup.best,
    )
