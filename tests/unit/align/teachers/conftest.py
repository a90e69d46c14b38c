"""Tiny targets on disk, texts for them, and teachers over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests import tiny

from forerun.align.config import TeacherConfig
from forerun.align.objectives import OBJECTIVES, Objective
from forerun.align.samples import PackedBatch, Packing, Sample
from forerun.align.target import TeacherSource
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams

WINDOW = 40


def texts(number: int = 9, seed: int = 0, vocab_size: int = tiny.VOCAB_SIZE) -> list[Sample]:
    """Texts of 5 to 30 tokens, one of them learned in two spans."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        length = int(torch.empty(1).random_(5, 31, generator=generator))
        ids = torch.empty(length).random_(0, vocab_size, generator=generator).long().tolist()
        spans = ((1, 2), (4, length)) if index == 2 else ((3, length),)
        found.append(Sample(prompt_hash=f"{index:016x}", token_ids=tuple(ids), spans=spans))
    return found


def all_rows(samples: Sequence[Sample]) -> tuple[Packing, PackedBatch]:
    """Every row of an epoch as one batch."""
    packing = Packing(samples, window=WINDOW, seed=0)
    return packing, packing.batch(0, packing.rows_per_epoch)


def expected_logits(network, packing: Packing, batch: PackedBatch) -> torch.Tensor:
    """Logits at the learned rows of a batch, every sample read alone by the whole network."""
    alone = [network(torch.tensor([sample.token_ids])).logits[0] for sample in packing.samples]
    owners, positions = batch.samples[batch.predicts], batch.positions[batch.predicts]
    pairs = zip(owners.tolist(), positions.tolist(), strict=True)
    return torch.stack([alone[owner][position] for owner, position in pairs]).detach()


def objective(name: str = "fkl") -> Objective:
    return OBJECTIVES[name]


def caching(kind: str = "hidden", **changes) -> TeacherConfig:
    return TeacherConfig(teacher=kind, **changes)


@dataclass
class OnDisk:
    """A tiny target in a folder, and where its caches go."""

    network: object
    source: TeacherSource

    def with_(self, **changes) -> TeacherSource:
        """The target as it is in the folder now."""
        now = ModelFiles.open(self.source.target.folder)
        return replace(self.source, target=now, **changes)


@pytest.fixture
def on_disk(tmp_path):
    network = tiny.network(num_layers=1)
    folder = tmp_path / "target"
    network.save_pretrained(folder)
    tiny.backend().save_pretrained(folder)
    source = TeacherSource(
        target=ModelFiles.open(folder),
        sampling=SamplingParams(),
        cache_dir=tmp_path / "caches",
        device="cpu",
    )
    return OnDisk(network=network, source=source)
