"""Runs an alignment: from prompts to a trained draft with its report.

Every phase continues where an interrupted run stopped: the target answers the prompts; its
distributions are cached; the draft learns them; at intervals the engine's own verifier judges the
draft on held-out prompts, and the draft of the highest predicted speedup is kept.

Under `accelerate launch` every process trains; the main one alone generates, judges and writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console

from forerun.align.attached import check_start, load_attached
from forerun.align.config import AlignConfig
from forerun.align.draft import DraftConfig, TrainedDraft, load_draft
from forerun.align.objectives import objective_of
from forerun.align.report import (
    AlignReport,
    DataSummary,
    JudgedPair,
    export,
    finished,
    hand_over,
)
from forerun.align.rounds import DraftSelector, RoundData
from forerun.align.samples import Packing
from forerun.align.serving import check_repo
from forerun.align.texts import PromptSplit, TrainingTexts, read_prompt_split, warn_of_few_prompts
from forerun.align.trainer import Trainer, from_main, make_accelerator
from forerun.align.workspace import (
    MetricsLog,
    Phases,
    StepMetrics,
    Workspace,
    check_folder,
    check_hashes,
    claim_folder,
    exclusive_access,
    identity_of,
    lock_for,
    of_training,
)
from forerun.engine.engine import Engine
from forerun.measure.judge import Judge
from forerun.models.checkpoint import ModelFiles
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import collect, content_hash
from forerun.theory.cost import CostTable

logger = logging.getLogger("forerun.align")

CostsOf = Callable[[Path, float, str], CostTable | None]
"""Returns the cost table of a draft folder at a temperature, or None if it is not known. The last
argument is the hash of the target's weights, which takes long to compute."""


def align(
    config: AlignConfig, *, costs: CostsOf | None = None, console: Console | None = None
) -> AlignReport | None:
    """Distil a draft to its target; returns the report in the main process, None in the others.

    Without `costs` to predict speedups from, the draft of the highest tau is kept.

    Raises:
        CacheTooLarge: the teacher's cache does not fit; nothing was written.
        TrainingDiverged: the loss is no number; the best draft so far is kept.
    """
    accelerator = make_accelerator(config.device)
    run = Alignment(config, accelerator, costs, console or Console(stderr=True))
    return run.run()


class Alignment:
    """One run of an alignment."""

    def __init__(
        self, config: AlignConfig, accelerator: Accelerator, costs: CostsOf | None, console: Console
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.num_threads = torch.get_num_threads()  # before a native target takes the cores
        self.costs = costs
        self.workspace = Workspace(root=config.out, cache_root=config.teacher.cache_dir)
        self.objective = objective_of(config)
        self.phases = Phases(console if self.is_main else None)

    def run(self) -> AlignReport | None:
        config, workspace = self.config, self.workspace
        if config.push_to_hub is not None:
            check_repo(config.push_to_hub)
        tokenizer = ModelFiles.open(config.target).tokenizer
        prompts = read_prompt_split(config.data, tokenizer)
        if self.is_main:
            warn_of_few_prompts(prompts)
        identity = identity_of(config, prompts, from_main(self.accelerator, self._target_hash))
        check_folder(workspace, identity)
        report = finished(workspace, identity, predicted=self.costs is not None)
        if report is not None:
            return self._told_again(report) if self.is_main else None
        lock = exclusive_access(lock_for(workspace.root / "alignment"), workspace.root)
        with lock if self.is_main else nullcontext():
            return self._aligned(tokenizer, prompts, identity)

    def _aligned(
        self, tokenizer: Tokenizer, prompts: PromptSplit, identity: Mapping[str, str]
    ) -> AlignReport | None:
        """Run all phases under the lock of the folder."""
        config = self.config
        check_start(config)
        draft: TrainedDraft | None = None
        if not config.is_attached:
            draft = load_draft(
                DraftConfig(
                    target=ModelFiles.find(config.target).folder,
                    draft=None if config.draft is None else ModelFiles.find(config.draft).folder,
                    init=config.init,
                    seed=config.training.training_seed,
                )
            )
        engine: Engine | None = None
        if self.is_main:
            engine = Engine.load(
                config.target,
                dtype=config.dtype,
                device=config.device,
                config=config.sized_engine,
            )
        texts = TrainingTexts(
            config=config,
            prompts=prompts,
            target=engine,
            target_hash=identity["target"],
            tokenizer=tokenizer,
            folder=self.workspace.responses,
        )
        if self.is_main:
            claim_folder(config, self.workspace, identity)
        data = RoundData(config, self.accelerator, self.workspace, self.phases, texts)
        if draft is None:
            draft = head = load_attached(config, data.steady)
            data.feature_layers = head.feature_layers
        trainer = self._trainer(draft, identity)
        self._snapshot(draft, trainer, 0)
        selector = self._selector(engine, prompts, identity) if engine is not None else None
        packing = self._train(trainer, draft, data, selector)
        if selector is None:
            return None
        return self._conclude(selector, prompts, packing, identity, texts.num_cut)

    def _target_hash(self) -> str:
        with self.phases.waiting("hashing", "hashing the weights of the target"):
            return content_hash(self.config.target)

    def _told_again(self, report: AlignReport) -> AlignReport:
        export(self.config, self.workspace, report)
        path = self.workspace.report
        self.phases.console.print(
            f"finished before; to judge again remove {path}, to align again give another --out",
            style="dim",
            highlight=False,
            markup=False,
        )
        return report

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def schedule(self) -> list[int]:
        """Steps at which the draft is judged, from 0 to the last step."""
        num_steps = self.config.training.num_steps
        num_rounds = max(1, min(self.config.evaluation.num_evaluations, num_steps))
        return [num_steps * i // num_rounds for i in range(num_rounds + 1)]

    def _trainer(self, draft: TrainedDraft, identity: Mapping[str, str]) -> Trainer:
        config = self.config
        trainer = Trainer(
            config=config.training,
            module=draft.loss(self.objective, config),
            teacher=None,
            accelerator=self.accelerator,
            folder=self.workspace.training,
            identity=of_training(identity),
        )
        trainer.num_threads = self.num_threads
        trainer.resume()
        return trainer

    def _selector(
        self, engine: Engine, prompts: PromptSplit, identity: Mapping[str, str]
    ) -> DraftSelector:
        config = self.config
        judge = Judge(
            engine=engine,
            prompts=prompts.to_judge,
            params=config.sampling,
            num_speculative_tokens=config.evaluation.num_speculative_tokens,
            costs=self._costs_at(config.sampling.temperature, identity["target"]),
            seed=config.training.training_seed,
        )
        selector = DraftSelector(self.workspace, judge, config.evaluation.max_prompts)
        for step in self.schedule:  # more than the first where judgements were lost
            if self.workspace.snapshot(step).exists():
                with self.phases.waiting("judging", f"judging step {step}"):
                    selector.consider(step)
        return selector

    def _costs_at(self, temperature: float, target_hash: str) -> CostTable | None:
        if self.costs is None:
            return None
        return self.costs(self.workspace.snapshot(0), temperature, target_hash)

    def _train(
        self, trainer: Trainer, draft: TrainedDraft, data: RoundData, selector: DraftSelector | None
    ) -> Packing:
        """Train all rounds that are not complete; returns the data of the last round."""
        packing: Packing | None = None
        rounds = list(enumerate(pairwise(self.schedule)))
        log = MetricsLog(self.workspace.metrics, self.workspace.root / "tensorboard")
        with log.open_at(trainer.step) if self.is_main else nullcontext():
            for number, (start, until) in rounds:
                if trainer.step > until:
                    continue
                if packing is None or data.changes:
                    packing = data.packing(start, number, len(rounds))
                    trainer.teacher = data.teacher(packing)
                self._round(trainer, packing, until, selector, log)
                self._snapshot(draft, trainer, until)
                if selector is not None:
                    with self.phases.waiting("judging", f"judging step {until}"):
                        selector.consider(until)
                self.accelerator.wait_for_everyone()
        assert packing is not None  # the last round is never skipped
        return packing

    def _round(
        self,
        trainer: Trainer,
        packing: Packing,
        until: int,
        selector: DraftSelector | None,
        log: MetricsLog,
    ) -> None:
        """Train until the step `until`; with a selector, log and show the metrics of every step."""
        if selector is None:
            trainer.run(packing, until, lambda metrics: None)
            return
        speedup = selector.latest.predicted_speedup
        with self.phases.training(self.schedule[-1], trainer.step, speedup) as show:

            def on_step(metrics: StepMetrics) -> None:
                log.append(metrics)
                show(metrics)

            trainer.run(packing, until, on_step)

    def _snapshot(self, draft: TrainedDraft, trainer: Trainer, step: int) -> None:
        if self.workspace.snapshot(step).exists() or trainer.step != step:
            return
        weights = trainer.weights()
        if self.is_main:
            draft.save(self.workspace.snapshot(step), weights)

    def _conclude(
        self,
        selector: DraftSelector,
        prompts: PromptSplit,
        packing: Packing,
        identity: Mapping[str, str],
        num_cut: int,
    ) -> AlignReport:
        """Judge the first and the kept draft on all held-out prompts, and write the report."""
        config, workspace = self.config, self.workspace
        first = workspace.snapshot(0)
        temperatures = {*config.evaluation.temperatures} - {config.sampling.temperature}
        judges = [selector.judge]
        judges += [
            selector.judge.at(temperature, self._costs_at(temperature, identity["target"]))
            for temperature in sorted(temperatures)
        ]
        with self.phases.waiting("judging", "judging on all held-out prompts"):
            check_hashes(first)
            judged = tuple(
                JudgedPair(
                    before=judge.judge(first, name="before"),
                    after=judge.judge(workspace.draft, name="after"),
                )
                for judge in judges
            )
        hashes = {"target": identity["target"], "draft": content_hash(str(workspace.draft))}
        report = AlignReport(
            draft=workspace.draft,
            objective=config.objective_name,
            data=DataSummary(
                num_training_prompts=len(prompts.training),
                num_held_out_prompts=len(prompts.held_out),
                num_samples=len(packing.samples),
                num_learned_tokens=packing.num_learned,
                num_rows=packing.rows_per_epoch,
                num_cut_responses=num_cut,
            ),
            judged=judged,
            judgements=tuple(selector.judgements[step] for step in sorted(selector.judgements)),
            best_step=selector.best.step,
            seconds=dict(self.phases.seconds),
            provenance=collect(hashes),
            identity=identity,
        )
        hand_over(config, workspace, report, packing)
        return report
