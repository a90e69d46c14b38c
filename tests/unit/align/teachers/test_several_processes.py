"""Several processes fill one cache, each with its share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import product

import torch
from tests import tiny
from tests.unit.align.teachers.conftest import (
    all_rows,
    caching,
    expected_logits,
    texts,
)

from forerun.align import teachers as filling
from forerun.align.objectives import dense_probs
from forerun.align.teachers import make_teacher

WORKER = """
import json, sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, caching, objective, texts

from forerun.align.objectives import dense_probs
from forerun.align import teachers as filling
from forerun.align.teachers import TeacherSource
from forerun.align.teachers import make_teacher
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
filling.MAX_TOKENS = 1
dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
packing, batch = all_rows(texts(5))
reports = []
source = TeacherSource(
    target=ModelFiles.open(folder / "target"),
    sampling=SamplingParams(),
    cache_dir=folder / "caches",
    device="cpu",
    on_progress=lambda done, total: reports.append((done, total)),
    process=(rank, 2),
    wait=dist.barrier,
)
out = {"reports": reports}
for kind in ("hidden", "model"):
    teacher = make_teacher(caching(kind), source, 100)
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    out[kind] = dense_probs(rows.distribution(slice(None)), tiny.VOCAB_SIZE).tolist()
(folder / f"{rank}.json").write_text(json.dumps(out))
dist.barrier()
dist.destroy_process_group()
"""


def run_two(folder) -> list[dict]:
    """Two processes over gloo; what each of them found."""
    command = [sys.executable, "-c", WORKER, str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_share_work(on_disk, tmp_path):
    found = run_two(tmp_path)
    packing, batch = all_rows(texts(5))
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    for one, kind in product(found, ("hidden", "model")):
        torch.testing.assert_close(torch.tensor(one[kind]), expected, atol=2e-5, rtol=2e-4)
    assert [len(one["reports"]) for one in found] == [3, 2]
    assert sum(one["reports"][-1][1] for one in found) == packing.num_learned
    assert len(list(on_disk.source.cache_dir.glob("*/rows-*"))) == len(packing.samples)


def test_rows_written_by_another_are_found(on_disk, monkeypatch):
    """The first of two, with the second's work done while it waits."""
    monkeypatch.setattr(filling, "MAX_TOKENS", 1)
    packing, batch = all_rows(texts(4))
    waits = []

    def wait():
        waits.append(0)
        if len(waits) == 1:
            other = on_disk.with_(process=(1, 2))
            make_teacher(caching(), other, 100).prepare(packing.samples)

    mine = replace(on_disk.source, process=(0, 2), wait=wait)
    teacher = make_teacher(caching(), mine, 100)
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    distribution = dense_probs(rows.distribution(slice(None)), tiny.VOCAB_SIZE)
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    torch.testing.assert_close(distribution, expected, atol=2e-5, rtol=2e-4)


TYPES = """
import sys

import torch.distributed as dist
from forerun.align import trainer

rank = int(sys.argv[2])
trainer.choose_precision = lambda device: ("bf16", "no")[rank]
accelerator = trainer.make_accelerator("cpu")
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    file.write(f"{accelerator.num_processes} {accelerator.mixed_precision}")
dist.barrier()
dist.destroy_process_group()
"""


def test_all_processes_train_in_the_type_that_the_first_one_chose(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, "-c", TYPES, str(tmp_path), rank]
        variables = os.environ | address | ranks
        processes.append(
            subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["2 bf16", "2 bf16"]
