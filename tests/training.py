"""A training in miniature: tiny models on disk, texts, and a teacher that is a table of bigrams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests import tiny
from torch import Tensor

from forerun.align.config import (
    AlignConfig,
    AttachedConfig,
    DataConfig,
    TrainingConfig,
)
from forerun.align.methods.base import Method, MethodConfig
from forerun.align.methods.draft_model import DraftLoss, DraftModelMethod
from forerun.align.objectives import (
    OBJECTIVES,
    DenseDistribution,
    TargetDistribution,
)
from forerun.align.run import METHODS, configure_method
from forerun.align.samples import PackedBatch, Packing, Sample
from forerun.align.target import load_target
from forerun.align.teachers import ModelTeacher
from forerun.align.trainer import Trainer, make_accelerator
from forerun.models.checkpoint import ModelFiles

WINDOW = 24


def target_folder(folder: Path, **changes: int) -> Path:
    """A random target with the tests' tokenizer."""
    tiny.network(seed=5, **changes).save_pretrained(folder)
    tiny.backend().save_pretrained(folder)
    return folder


def draft_folder(folder: Path, family: str = "llama", **changes: int) -> Path:
    """A random draft with the tests' tokenizer."""
    network = tiny.network(family, seed=9, scale=0.1, hidden_size=16, **changes)
    network.save_pretrained(folder)
    tiny.backend().save_pretrained(folder)
    return folder


def samples(number: int = 40) -> list[Sample]:
    """Texts of 6 to 20 tokens; all but the first few are learned."""
    generator = torch.Generator().manual_seed(3)

    def some(low: int, high: int, count: int = 1) -> list[int]:
        return torch.empty(count).random_(low, high, generator=generator).long().tolist()

    made = []
    for index in range(number):
        length, start = some(6, 21)[0], some(1, 4)[0]
        made.append(
            Sample(
                prompt_hash=f"{index:016x}",
                token_ids=tuple(some(0, 20, length)),
                spans=((start, length),),
            )
        )
    return made


class TableRows:
    def __init__(self, probs: Tensor) -> None:
        self.probs = probs

    def distribution(self, rows: slice) -> TargetDistribution:
        return DenseDistribution(target_probs=self.probs[rows])


class TableTeacher:
    """A distribution for every last token, which a draft can learn completely."""

    exact = True

    def __init__(self, sharpness: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(1)
        logits = torch.empty(tiny.VOCAB_SIZE, tiny.VOCAB_SIZE).normal_(generator=generator)
        self.table = (sharpness * logits).softmax(-1)

    def prepare(self, samples: Sequence[Sample]) -> None: ...

    def rows(self, batch: PackedBatch) -> TableRows:
        return TableRows(self.table[batch.ids[batch.predicts]])


class NaNTeacher(TableTeacher):
    """Knows nothing from a certain batch on."""

    def __init__(self, good_batches: int) -> None:
        super().__init__()
        self.left = good_batches

    def rows(self, batch: PackedBatch) -> TableRows:
        self.left -= 1
        rows = super().rows(batch)
        return rows if self.left >= 0 else TableRows(rows.probs * torch.nan)


def config(**changes: object) -> TrainingConfig:
    defaults = {
        "num_steps": 12,
        "tokens_per_step": 8 * WINDOW,
        "window": WINDOW,
        "rows_per_pass": 4,
        "learning_rate": 2e-2,
        "warmup_share": 0.1,
    }
    return TrainingConfig(**(defaults | changes))


def packing(number: int = 40) -> Packing:
    return Packing(samples(number), window=WINDOW, seed=0)


def forget_accelerators() -> None:
    """Accelerate allows one set of settings per process, and tests want several."""
    AcceleratorState._reset_state(reset_partial_state=True)


def fresh_accelerator(precision: Literal["no", "bf16"] = "no") -> Accelerator:
    """On the CPU, whatever this process trained with before."""
    forget_accelerators()
    return make_accelerator("cpu", precision)


def trainer_of(
    draft: DraftModelMethod,
    folder: Path,
    settings: TrainingConfig | None = None,
    *,
    teacher: TableTeacher | None = None,
    objective: str = "fkl",
    accelerator: Accelerator | None = None,
) -> Trainer:
    """In fp32, on the CPU, by the table unless another teacher is given."""
    chosen = OBJECTIVES[objective]
    return Trainer(
        config=settings or config(),
        module=DraftLoss(draft.model, chosen, 1.0),
        teacher=teacher or TableTeacher(),
        accelerator=accelerator or fresh_accelerator(),
        folder=folder,
        identity={"data": "samples", "objective": objective},
    )


def tiny_head(
    folder: Path, settings: TrainingConfig, accelerator: Accelerator
) -> tuple[Method, Trainer]:
    """An EAGLE-3 head for a target made under a folder, trained on features of every step."""
    target, _ = pair(folder)
    chosen = AlignConfig(
        target=str(target),
        method="eagle3",
        data=DataConfig(prompts=folder / "prompts.jsonl"),
        attached=AttachedConfig(num_passes=3, feature_layers=(0, 1, 2), draft_vocab_size=24),
        training=settings,
    )
    draft = start_method(chosen, samples())
    model = load_target(target, device="cpu")
    trainer = Trainer(
        config=settings,
        module=draft.loss(OBJECTIVES[chosen.objective_name]),
        teacher=ModelTeacher(model, chosen.sampling, draft.layers),
        accelerator=accelerator,
        folder=folder,
        identity={"data": "samples"},
        muon=draft.muon_matrices(),
    )
    return draft, trainer


def pair(folder: Path) -> tuple[Path, Path]:
    """Target and draft under a folder, made if they are not there."""
    target, draft = folder / "target", folder / "draft"
    if not target.exists():
        target_folder(target)
        draft_folder(draft)
    return target, draft


def start_method(settings: AlignConfig, texts: Sequence[Sample]) -> Method:
    """The method of an alignment, ready to be trained."""
    method = METHODS[settings.method](configure_method(settings, ModelFiles.open(settings.target)))
    method.load()
    method.start(texts)
    return method


def load_draft(target: Path, draft: Path | None = None, **changes: Any) -> DraftModelMethod:
    """A draft model, ready to be trained."""
    begun = None if draft is None else str(draft)
    method = DraftModelMethod(MethodConfig(target=str(target), draft=begun, **changes))
    method.load()
    return method


def tiny_draft(folder: Path, **changes: Any) -> DraftModelMethod:
    """Target and draft made under a folder, and loaded."""
    target, draft = pair(folder)
    return load_draft(target, draft, **changes)
