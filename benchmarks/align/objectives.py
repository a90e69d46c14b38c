"""Every objective at T=0 and T=1, and raw text, from one draft and data.

    python benchmarks/align/objectives.py --alignment DIR --out FILE.json

DIR is a finished alignment: its responses and caches are used, its draft to begin with is the one
every arm starts from. Arms differ in what they minimise, at which temperature the target's
distribution is taken (and the draft judged), and which text they read. Steps are equal, except in
the arms of `--group raw`, which train for equal seconds on the target's responses and on library
source.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "paradox"))

from finetune import pieces
from openings import modules

from forerun.align.config import AlignConfig, TrainingConfig, suited_objective
from forerun.align.methods.base import MethodConfig
from forerun.align.methods.draft_model import DraftModelMethod
from forerun.align.objectives import OBJECTIVES, Objective, forward_kl, overlap
from forerun.align.samples import Packing, Sample
from forerun.align.target import TeacherSource
from forerun.align.teachers import make_teacher
from forerun.align.texts import PromptSplit, TrainingTexts, read_prompt_split
from forerun.align.trainer import Trainer, make_accelerator
from forerun.align.workspace import StepMetrics, Workspace, read_settings
from forerun.engine.engine import Engine
from forerun.measure.judge import DraftFigures, Judge
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash

BETA, ETA = 0.5, 3.0  # the target's share of the JSD's mixture; how fast LK turns from FKL to TV


def reverse_kl(log_draft: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    log_target = target_probs.clamp(min=1e-8).log()
    return (log_draft.exp() * (log_draft - log_target)).sum(-1)


def jensen_shannon(log_draft: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    draft_probs, tiny = log_draft.exp(), torch.finfo(log_draft.dtype).tiny
    log_mixture = (BETA * target_probs + (1 - BETA) * draft_probs).clamp(min=tiny).log()
    log_target = target_probs.clamp(min=tiny).log()
    to_target = (target_probs * (log_target - log_mixture)).sum(-1)
    return BETA * to_target + (1 - BETA) * (draft_probs * (log_draft - log_mixture)).sum(-1)


def total_variation(log_draft: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    return 1 - overlap(log_draft, target_probs)


def hybrid(log_draft: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """LK losses, arXiv 2602.23881."""
    alpha = overlap(log_draft, target_probs)
    weight = torch.exp(-ETA * alpha.detach())
    return weight * forward_kl(log_draft, target_probs) + (1 - weight) * (1 - alpha)


COMPARED = {
    **OBJECTIVES,
    "rkl": Objective(name="rkl", divergence=reverse_kl),
    "jsd": Objective(name="jsd", divergence=jensen_shannon),
    "tv": Objective(name="tv", divergence=total_variation),
    "lk": Objective(name="lk", divergence=hybrid),
}
TEMPERATURES = (1.0, 0.0)
JUDGED_TOKENS = 128
RATE_STEPS = 20  # trained and thrown away, to know how many fit into the seconds

Group = Literal["objectives", "raw"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare."""

    alignment: Path
    """A finished alignment."""
    out: Path
    """JSON; arms that are in it are not run again."""
    work: Path = Path("build/objectives")
    """For checkpoints and drafts."""
    groups: tuple[Group, ...] = ("objectives", "raw")
    """Which arms."""
    temperatures: tuple[float, ...] = TEMPERATURES
    """At which the distribution is taken and the draft judged."""
    num_steps: int = 400
    """Optimiser steps of an arm."""
    seconds: float = 100.0
    """Of training, for the arms of equal time."""
    learning_rate: float | None = None
    """Peak of every arm; None: the alignment's."""
    tokens_per_step: int | None = None
    """Of every arm; None: the alignment's."""
    threads: int | None = None
    """Of torch and of the engine."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training.

    Attributes:
        objective: what is minimised.
        temperature: of the target's distribution and of the judge.
        text: the target's responses, or library source as it is.
        seconds: train for so long; None: the common number of steps.
    """

    objective: str
    temperature: float
    text: Literal["responses", "library"] = "responses"
    seconds: float | None = None

    @property
    def name(self) -> str:
        parts = [self.objective, f"T{self.temperature:g}"]
        if self.seconds is not None:
            parts.append(f"{self.text}-{self.seconds:g}s")
        return "-".join(parts)


def arms(options: Options) -> Iterator[Arm]:
    for temperature in options.temperatures:
        if "objectives" in options.groups:
            for objective in COMPARED:
                yield Arm(objective=objective, temperature=temperature)
        best = suited_objective(temperature)
        if "raw" in options.groups:
            yield Arm(objective=best, temperature=temperature, seconds=options.seconds)
            yield Arm(
                objective="ce", temperature=temperature, text="library", seconds=options.seconds
            )


class Comparison:
    """All arms over one alignment."""

    def __init__(self, options: Options) -> None:
        self.options = options
        config, _ = read_settings(options.alignment)
        training = replace(
            config.training,
            learning_rate=options.learning_rate or config.training.learning_rate,
            tokens_per_step=options.tokens_per_step or config.training.tokens_per_step,
        )
        self.config = replace(config, training=training)
        engine = replace(
            self.config.engine,
            num_speculative_tokens=self.config.evaluation.num_speculative_tokens,
        )
        self.engine = Engine.load(self.config.target, config=engine)
        self.target_hash = content_hash(self.config.target)
        self.prompts: PromptSplit = read_prompt_split(self.config.data, self.engine.tokenizer)
        self.judge = Judge(
            engine=self.engine,
            prompts=self.prompts.to_judge,
            params=replace(self.config.sampling, max_tokens=JUDGED_TOKENS),
            num_speculative_tokens=self.config.evaluation.num_speculative_tokens,
        )
        self.judges = {1.0: self.judge.at(1.0), 0.0: self.judge.at(0.0)}
        self.accelerator = make_accelerator("cpu" if not torch.cuda.is_available() else "auto")

    def run(self) -> None:
        done = json.loads(self.options.out.read_text()) if self.options.out.exists() else {}
        if "provenance" not in done:
            done = {"config": self.described(), "provenance": self.provenance(), "arms": {}}
            for temperature, judge in self.judges.items():
                before = judge.judge(self.start, name="before")
                done["arms"][f"before-T{temperature:g}"] = {"figures": before.to_dict()}
        for arm in arms(self.options):
            if arm.name in done["arms"]:
                continue
            figures, spent = self.result(arm)
            done["arms"][arm.name] = {
                "arm": asdict(arm),
                "figures": figures.to_dict(),
                **spent,
            }
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(done, indent=1) + "\n")
            tau, alpha = figures.overall.acceptance_length, figures.overall.acceptance_probability
            Console().print(arm.name, spent, "tau", tau, "alpha", alpha)
        self.options.out.with_suffix(".md").write_text(table(done["arms"]), "utf-8")

    @property
    def start(self) -> Path:
        """The draft every arm begins with, as the alignment began."""
        return Workspace(root=self.options.alignment).snapshot(0)

    def result(self, arm: Arm) -> tuple[DraftFigures, dict[str, float]]:
        """Train one arm and judge what came of it."""
        folder = self.options.work / arm.name
        num_steps = self.options.num_steps
        if arm.seconds is not None:
            metrics = self.train(arm, replace_steps(self.config, RATE_STEPS), folder / "rate")
            per_step = sorted(m.duration_s for m in metrics[1:])[len(metrics[1:]) // 2]
            num_steps = max(1, round(arm.seconds / per_step))
        metrics = self.train(arm, replace_steps(self.config, num_steps), folder / "run")
        figures = self.judges[arm.temperature].judge(folder / "run" / "draft", name=arm.name)
        return figures, {
            "num_steps": len(metrics),
            "training_s": sum(m.duration_s for m in metrics),
            "num_learned_tokens": sum(m.num_learned for m in metrics),
        }

    def train(self, arm: Arm, training: TrainingConfig, folder: Path) -> list[StepMetrics]:
        """One training from the common start; the draft is left in `folder`."""
        objective = COMPARED[arm.objective]
        draft = DraftModelMethod(
            MethodConfig(
                target=self.config.target, draft=str(self.start), temperature=arm.temperature
            )
        )
        draft.load()
        trainer = Trainer(
            config=training,
            module=draft.loss(objective),
            teacher=None,
            accelerator=self.accelerator,
            folder=folder,
            identity={"arm": arm.name, "start": content_hash(str(self.start))},
        )
        metrics: list[StepMetrics] = []
        packing = Packing(self.samples(arm), window=training.window, seed=0)
        if objective.needs_teacher:
            source = TeacherSource(
                target=ModelFiles.open(self.config.target),
                sampling=replace(self.config.sampling, temperature=arm.temperature),
                cache_dir=Workspace(
                    root=self.options.alignment, cache_root=self.config.teacher.cache_dir
                ).cache,
            )
            trainer.teacher = make_teacher(self.config.teacher, source, packing.num_learned)
            trainer.teacher.prepare(packing.samples)
        trainer.run(packing, training.num_steps, metrics.append)
        draft.save(folder / "draft", trainer.weights())
        return metrics

    def samples(self, arm: Arm) -> list[Sample]:
        """The texts an arm learns."""
        if arm.text == "library":
            return list(self.library())
        texts = TrainingTexts(
            data=self.config.data,
            sampling=self.config.sampling,
            prompts=self.prompts,
            target=ModelFiles.open(self.config.target),
            engine=self.engine,
            folder=Workspace(root=self.options.alignment).responses,
        )
        return texts.mixed(texts.read(lambda done, of: None))

    def library(self) -> Iterator[Sample]:
        """Source of the modules that are not held out, in windows, every token learned."""
        width = self.config.training.window
        for _, source in modules():
            yield from pieces(self.engine.tokenizer.encode(source), width)

    def described(self) -> dict[str, object]:
        options = {k: str(v) for k, v in asdict(self.options).items()}
        return {"options": options, "training": asdict(self.config.training)}

    def provenance(self) -> dict[str, object]:
        models = {
            "target": self.target_hash,
            "start": content_hash(str(self.start)),
        }
        return collect(models).to_dict()


def table(found: dict[str, Any]) -> str:
    """All arms in Markdown, the draft to begin with first."""
    lines = [
        "| arm | T | steps | learned tokens | alpha | tau at K=5 |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        figures = result["figures"]
        overall = figures["overall"]
        cells = [shown(overall[f"acceptance_{figure}"]) for figure in ("probability", "length")]
        trained = [f"{result.get(figure, 0):,}" for figure in ("num_steps", "num_learned_tokens")]
        lines.append(
            f"| {name} | {figures['temperature']:g} | {' | '.join(trained)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def shown(interval: dict[str, float]) -> str:
    return f"{interval['estimate']:.3f} ({interval['low']:.3f}–{interval['high']:.3f})"


def replace_steps(config: AlignConfig, num_steps: int) -> TrainingConfig:
    """The alignment's training, shorter."""
    return replace(config.training, num_steps=num_steps, checkpoint_every_s=1e9)


def main(options: Options) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    started_s = time.monotonic()
    Comparison(options).run()
    Console().print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
