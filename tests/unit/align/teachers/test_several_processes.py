"""Several processes fill one cache, each with its share, and with a target split over them."""

from __future__ import annotations

import json
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

from forerun.align import target_cache as filling
from forerun.align.objectives import dense_probs
from forerun.align.target import ProcessShare
from forerun.align.teachers import make_teacher

WORKER = """
import json, sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, caching, objective, texts

from forerun.align.objectives import dense_probs
from forerun.align import target_cache as filling
from forerun.align.target import ProcessShare, load_sharded
from forerun.align.target_cache import TeacherSource
from forerun.align.teachers import make_teacher
from forerun.sampling.config import SamplingParams

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
filling.MAX_TOKENS = 1
dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
packing, batch = all_rows(texts(5))
reports = []
source = TeacherSource(
    target=folder / "target",
    target_hash="t0",
    sampling=SamplingParams(),
    cache_dir=folder / "caches",
    device="sharded",
    on_progress=lambda done, total: reports.append((done, total)),
    share=ProcessShare(index=rank, number=2, wait=dist.barrier),
)
out = {"reports": reports}
for kind in ("hidden", "model"):
    teacher = make_teacher(caching(kind), source, 100)
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    out[kind] = dense_probs(rows.distribution(slice(0, len(rows))), tiny.VOCAB_SIZE).tolist()
split = load_sharded(source.target, dtype="auto", device="cpu", share=source.share)
out["held"] = sum(parameter.to_local().numel() for parameter in split.body.parameters())
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


def test_two_processes_share_work_and_weights(on_disk, tmp_path):
    found = run_two(tmp_path)
    packing, batch = all_rows(texts(5))
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    for one, kind in product(found, ("hidden", "model")):
        torch.testing.assert_close(torch.tensor(one[kind]), expected, atol=2e-5, rtol=2e-4)
    assert [len(one["reports"]) for one in found] == [3, 2]
    assert sum(one["reports"][-1][1] for one in found) == packing.num_learned
    assert len(list(on_disk.source.cache_dir.glob("*/rows-*"))) == len(packing.samples)
    whole = sum(parameter.numel() for parameter in on_disk.network.model.parameters())
    assert sum(one["held"] for one in found) == whole


def test_shares_are_disjoint_complete_and_equally_long():
    for number in (1, 2, 3, 5):
        shares = [list(ProcessShare(index=i, number=number).of(range(7))) for i in range(number)]
        assert len({len(share) for share in shares}) == 1
        kept = [part for share in shares for part, is_kept in share if is_kept]
        assert sorted(kept) == list(range(7))
    assert list(ProcessShare(index=1, number=2).of([])) == []


def test_rows_written_by_another_are_found(on_disk, monkeypatch):
    """The first of two, with the second's work done while it waits."""
    monkeypatch.setattr(filling, "MAX_TOKENS", 1)
    packing, batch = all_rows(texts(4))
    waits = []

    def wait():
        waits.append(0)
        if len(waits) == 1:
            other = on_disk.with_(share=ProcessShare(index=1, number=2))
            make_teacher(caching(), other, 100).prepare(packing.samples)

    mine = replace(on_disk.source, share=ProcessShare(index=0, number=2, wait=wait))
    teacher = make_teacher(caching(), mine, 100)
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    distribution = dense_probs(rows.distribution(slice(0, len(rows))), tiny.VOCAB_SIZE)
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    torch.testing.assert_close(distribution, expected, atol=2e-5, rtol=2e-4)
