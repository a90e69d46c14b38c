"""Every objective at T=0 and T=1, shares of on-policy text, and raw text, from one draft and data.

    python benchmarks/align/objectives.py --alignment DIR --out FILE.json

DIR is a finished alignment: its responses and caches are used, its draft to begin with is the one
every arm starts from. Arms differ in what they minimise, at which temperature the target's
distribution is taken (and the draft judged), and who wrote the text. Steps are equal, except in
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

from forerun.align.config import AlignConfig, ObjectiveConfig, ObjectiveName, TrainingConfig
from forerun.align.draft import DraftConfig, DraftLoss, load_draft
from forerun.align.objectives import make_objective, suited_objective
from forerun.align.samples import Packing, Sample
from forerun.align.target_cache import TeacherSource
from forerun.align.teachers import make_teacher
from forerun.align.texts import PromptSplit, TrainingTexts, read_prompt_split
from forerun.align.trainer import Trainer, make_accelerator
from forerun.align.workspace import StepMetrics, Workspace, read_settings
from forerun.engine.engine import Engine
from forerun.measure.judge import DraftFigures, Judge
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash

OBJECTIVES: tuple[ObjectiveName, ...] = ("ce", "fkl", "rkl", "jsd", "tv", "nla", "lk")
TEMPERATURES = (1.0, 0.0)
SHARES = (0.5, 1.0)
ROUNDS = 4  # in which a draft that learns from its own text writes anew
JUDGED_TOKENS = 128
RATE_STEPS = 20  # trained and thrown away, to know how many fit into the seconds

Group = Literal["objectives", "on-policy", "raw"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare."""

    alignment: Path
    """A finished alignment."""
    out: Path
    """JSON; arms that are in it are not run again."""
    work: Path = Path("build/objectives")
    """For checkpoints and drafts."""
    groups: tuple[Group, ...] = ("objectives", "on-policy", "raw")
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
        on_policy_share: of the learned tokens, by the draft itself.
        text: the target's responses, or library source as it is.
        seconds: train for so long; None: the common number of steps.
    """

    objective: ObjectiveName
    temperature: float
    on_policy_share: float = 0.0
    text: Literal["responses", "library"] = "responses"
    seconds: float | None = None

    @property
    def name(self) -> str:
        parts = [self.objective, f"T{self.temperature:g}"]
        if self.on_policy_share:
            parts.append(f"own{self.on_policy_share:g}")
        if self.seconds is not None:
            parts.append(f"{self.text}-{self.seconds:g}s")
        return "-".join(parts)


def arms(options: Options) -> Iterator[Arm]:
    for temperature in options.temperatures:
        if "objectives" in options.groups:
            for objective in OBJECTIVES:
                yield Arm(objective=objective, temperature=temperature)
        best = suited_objective(temperature)
        if "on-policy" in options.groups:
            for share in SHARES:
                yield Arm(objective=best, temperature=temperature, on_policy_share=share)
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
        objective = make_objective(ObjectiveConfig(objective=arm.objective), arm.temperature)
        draft = load_draft(
            DraftConfig(target=ModelFiles.find(self.config.target).folder, draft=self.start)
        )
        trainer = Trainer(
            config=training,
            module=DraftLoss(draft.model, objective, arm.temperature),
            teacher=None,
            accelerator=self.accelerator,
            folder=folder,
            identity={"arm": arm.name, "start": content_hash(str(self.start))},
        )
        metrics: list[StepMetrics] = []
        rounds = ROUNDS if arm.on_policy_share else 1
        for number in range(rounds):
            snapshot = folder / "draft"
            draft.save(snapshot, trainer.weights())
            packing = Packing(
                self.samples(arm, snapshot, number), window=training.window, seed=number
            )
            if objective.needs_teacher:
                source = TeacherSource(
                    target=self.config.target,
                    target_hash=self.target_hash,
                    sampling=replace(self.config.sampling, temperature=arm.temperature),
                    cache_dir=Workspace(
                        root=self.options.alignment, cache_root=self.config.teacher.cache_dir
                    ).cache,
                )
                trainer.teacher = make_teacher(self.config.teacher, source, packing.num_learned)
                trainer.teacher.prepare(packing.samples)
            trainer.run(packing, training.num_steps * (number + 1) // rounds, metrics.append)
        draft.save(folder / "draft", trainer.weights())
        return metrics

    def samples(self, arm: Arm, snapshot: Path, number: int) -> list[Sample]:
        """The texts an arm learns."""
        if arm.text == "library":
            return list(self.library())
        data = replace(self.config.data, on_policy_share=arm.on_policy_share)
        texts = TrainingTexts(
            config=replace(self.config, data=data),
            prompts=self.prompts,
            target=self.engine,
            target_hash=self.target_hash,
            tokenizer=self.engine.tokenizer,
            folder=Workspace(root=self.options.alignment).responses,
        )
        found = texts.steady(lambda done, of: None)
        if arm.on_policy_share:
            found += texts.of_draft(snapshot, number, ROUNDS * 4, lambda done, of: None)
        return texts.mixed(found, seed=number)

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
