"""Runs an alignment: from prompts to a trained draft with its report.

Every phase is stored, and a run continues where an interrupted one stopped: the target answers the
prompts; its distributions are cached; the draft learns them; at intervals the engine's own verifier
judges the draft on held-out prompts, and the draft of the highest predicted speedup is kept.

Under `accelerate launch` every process trains; the main one alone generates, judges and writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from accelerate import Accelerator
from rich.console import Console

from forerun.align.config import AlignConfig
from forerun.align.manifest import (
    DTYPES,
    check_folder,
    claim_folder,
    data_hash,
    identity_of,
    of_training,
    settings_of,
)
from forerun.align.methods.base import Method, MethodConfig
from forerun.align.methods.draft_model import DraftModelMethod
from forerun.align.methods.eagle3 import Eagle3Method
from forerun.align.methods.medusa import MedusaMethod
from forerun.align.objectives import OBJECTIVES, Objective
from forerun.align.report import (
    AlignReport,
    DataSummary,
    JudgedPair,
    card_of,
    draw,
    find_finished,
)
from forerun.align.samples import Packing, Sample
from forerun.align.selection import DraftSelector
from forerun.align.serving import describe_pair, export_draft
from forerun.align.target import ProcessShare, choose_faster_dtype
from forerun.align.target_cache import TeacherSource
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
    MetricsLog,
    Phases,
    StepMetrics,
    Workspace,
    check_hashes,
    exclusive_access,
    lock_for,
)
from forerun.engine.engine import Engine
from forerun.measure.judge import Judge
from forerun.models.checkpoint import ModelFiles, read_object
from forerun.models.draft_card import write_card
from forerun.models.load import choose_device, choose_dtype
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import collect, content_hash
from forerun.theory.cost import CostTable

logger = logging.getLogger("forerun.align")

METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {"draft_model": DraftModelMethod, "eagle3": Eagle3Method, "medusa": MedusaMethod}
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
    tokenizer = ModelFiles.find(config.target).tokenizer
    prompts = read_prompt_split(config.data, tokenizer)
    if run.is_main:
        warn_of_few_prompts(prompts)
    identity = run.identify(prompts)
    check_folder(run.workspace, identity)
    finished = find_finished(run.workspace, identity, predicted=costs is not None)
    if finished is not None:
        return run.repeat(finished) if run.is_main else None
    with run.lock():
        return _run_phases(run, prompts, tokenizer, identity, costs)


def _run_phases(
    run: Run,
    prompts: PromptSplit,
    tokenizer: Tokenizer,
    identity: Mapping[str, str],
    costs: CostsOf | None,
) -> AlignReport | None:
    method = METHODS[run.config.method](configure_method(run.config))
    method.load()
    engine = run.load_engine() if run.is_main else None
    texts = TrainingTexts(
        data=run.config.data,
        sampling=run.config.sampling,
        prompts=prompts,
        target=engine,
        target_name=run.config.target,
        target_hash=identity["target"],
        tokenizer=tokenizer,
        folder=run.workspace.responses,
    )
    run.claim(identity)
    samples = run.write_texts(texts)
    method.start(samples)
    trainer = run.make_trainer(method, identity)
    run.snapshot(method, trainer, 0)
    selector = None
    if engine is not None:
        selector = run.make_selector(engine, prompts, identity["target"], costs)
    packing = run.pack(texts, samples)
    trainer.teacher = run.make_teacher(packing, engine, method.layers, identity["target"])
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
    run.hand_over(report, data_hash(packing.samples))
    return report


def configure_method(config: AlignConfig) -> MethodConfig:
    """Return what a method needs of the settings of an alignment."""
    return MethodConfig(
        target=config.target,
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
        state = connect_processes(config.device)
        dtypes = from_main(state, lambda: _stored_dtypes(workspace) or _measure_dtypes(config))
        return cls(
            config=config,
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
                return content_hash(self.config.target)

        target_hash = from_main(self.accelerator, hash_target)
        identity = identity_of(self.config, prompts, target_hash)
        if self.objective is not OBJECTIVES[self.config.objective_name]:
            identity["objective.objective"] = self.objective.name
        return identity

    def lock(self) -> AbstractContextManager[None]:
        root = self.workspace.root
        if not self.is_main:
            return nullcontext()
        return exclusive_access(lock_for(root / "alignment"), root)

    def claim(self, identity: Mapping[str, str]) -> None:
        if self.is_main:
            claim_folder(settings_of(self.config), self.workspace, identity, self.dtypes)

    def load_engine(self) -> Engine:
        config = self.config
        return Engine.load(
            config.target, dtype=config.dtype, device=config.device, config=config.sized_engine
        )

    def write_texts(self, texts: TrainingTexts) -> list[Sample]:
        def make() -> list[Sample]:
            with self.phases.bar("responses", "responses") as on_progress:
                return texts.steady(on_progress)

        return from_main(self.accelerator, make)

    def pack(self, texts: TrainingTexts, samples: list[Sample]) -> Packing:
        training = self.config.training
        mixed = texts.mixed(samples)
        return Packing(mixed, window=training.window, seed=training.training_seed)

    def make_teacher(
        self,
        packing: Packing,
        engine: Engine | None,
        layers: tuple[int, ...] | None,
        target_hash: str,
    ) -> Teacher | None:
        """Return the teacher, whose cache is filled by all processes together."""
        config = self.config
        if not self.objective.needs_teacher:
            return None
        num_rows = packing.num_learned
        if layers is not None:
            num_rows = sum(len(sample.token_ids) for sample in packing.samples)
        with self.phases.bar("teacher", "the target's distributions") as on_progress:
            source = TeacherSource(
                target=config.target,
                target_hash=target_hash,
                sampling=config.sampling,
                cache_dir=self.workspace.cache,
                device=config.device,
                dtype=config.dtype,
                computed=getattr(torch, self.dtypes["target"]),
                runs=None if engine is None else engine.target,
                on_progress=on_progress,
                share=ProcessShare(
                    index=self.accelerator.process_index,
                    number=self.accelerator.num_processes,
                    wait=self.accelerator.wait_for_everyone,
                ),
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
        )
        trainer.num_threads = self.num_threads
        trainer.resume()
        return trainer

    def make_selector(
        self, engine: Engine, prompts: PromptSplit, target_hash: str, costs: CostsOf | None
    ) -> DraftSelector:
        """Return what judges drafts, after it has judged those that were left without."""
        config, first = self.config, self.workspace.snapshot(0)

        def costs_at(temperature: float) -> CostTable | None:
            return None if costs is None else costs(first, temperature, target_hash)

        temperature = config.sampling.temperature
        judge = Judge(
            engine=engine,
            prompts=prompts.to_judge,
            params=config.sampling,
            num_speculative_tokens=config.evaluation.num_speculative_tokens,
            costs=costs_at(temperature),
            seed=config.training.training_seed,
        )
        selector = DraftSelector(self.workspace, judge, config.evaluation.max_prompts)
        for step in self.schedule:  # more than the first where judgements were lost
            if self.workspace.snapshot(step).exists():
                self._judge(selector, step)
        return selector

    def _judge(self, selector: DraftSelector, step: int) -> None:
        with self.phases.waiting("judging", f"judging step {step}"):
            selector.consider(step)

    def train(
        self, trainer: Trainer, method: Method, packing: Packing, selector: DraftSelector | None
    ) -> None:
        """Train from judgement to judgement, logging the metrics of every step."""
        log = MetricsLog(self.workspace.metrics, self.workspace.root / "tensorboard")
        with log.open_at(trainer.step) if self.is_main else nullcontext():
            for until in self.schedule[1:]:
                if trainer.step > until:
                    continue
                speedup = None if selector is None else selector.latest.predicted_speedup
                with self.phases.training(self.schedule[-1], trainer.step, speedup) as show:

                    def on_step(
                        metrics: StepMetrics, show: Callable[[StepMetrics], None] = show
                    ) -> None:
                        if self.is_main:
                            log.append(metrics)
                        show(metrics)

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
        first, target_hash = workspace.snapshot(0), identity["target"]
        temperatures = {*self.config.evaluation.temperatures} - {self.config.sampling.temperature}
        judges = [selector.judge]
        for temperature in sorted(temperatures):
            known = None if costs is None else costs(first, temperature, target_hash)
            judges.append(selector.judge.at(temperature, known))
        with self.phases.waiting("judging", "judging on all held-out prompts"):
            check_hashes(first)
            judged = tuple(
                JudgedPair(
                    before=judge.judge(first, name="before"),
                    after=judge.judge(workspace.draft, name="after"),
                )
                for judge in judges
            )
        hashes = {"target": target_hash, "draft": content_hash(str(workspace.draft))}
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

    def hand_over(self, report: AlignReport, data: str) -> None:
        """Write the model card, the serving files, the plots, and the report last."""
        card = card_of(
            report, target=self.config.target, settings=settings_of(self.config), data=data
        )
        write_card(card, self.workspace.draft)
        self.export(report)
        draw(self.workspace, report)
        report.write(self.workspace.report)

    def export(self, report: AlignReport) -> None:
        """Write the settings that serve the draft."""
        config, most = self.config, self.config.evaluation.num_speculative_tokens
        k = most if report.best_k is None else report.best_k
        draft = self.workspace.draft
        serving = describe_pair(config.target, draft, k, config.sampling, config.method)
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


def _stored_dtypes(workspace: Workspace) -> dict[str, str] | None:
    """Return the types of an interrupted run; None for a new one, or if they cannot be read."""
    if not workspace.manifest.exists():
        return None
    stored = read_object(workspace.manifest).get(DTYPES)
    known = {"training": ("no", "bf16"), "target": ("float32", "bfloat16", "float16")}
    if not isinstance(stored, dict) or stored.keys() != known.keys():
        return None
    return stored if all(stored[name] in known[name] for name in known) else None


def _measure_dtypes(config: AlignConfig) -> dict[str, str]:
    stored = choose_dtype(config.dtype, ModelFiles.open(config.target))
    computed = choose_faster_dtype(stored, choose_device(config.device).type)
    return {
        "training": choose_precision(config.device),
        "target": str(computed).removeprefix("torch."),
    }
