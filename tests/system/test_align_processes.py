"""Trainings of several processes, and killed ones: the same curve as one that ran through."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests import training
from tests.conftest import ROOT
from tests.train_worker import METRICS, train

from forerun.align.trainer import CHECKPOINT
from forerun.align.workspace import StepMetrics, read_lines

NUM_STEPS = 8
HALF_WAY = 4
LIMIT_S = 600
BF16_STEP = 2**-8
"""Between neighbouring numbers, relative: what gradients are rounded to."""
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT}
# On machines without GPUs `--multi_gpu` is what makes Accelerate start several processes at all;
# the worker asks for the CPU, and they talk over gloo.
LAUNCH = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port 0"
).split()


def environment(**more: str) -> dict[str, str]:
    shown = {"PYTHONFAULTHANDLER": "1"}  # a crash says in its log where it happened
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | shown | more


def worker(*trainings: Sequence[object]) -> list[str]:
    """Arguments of a worker: folder, steps and options of each training."""
    joined = " + ".join(" ".join(map(str, training)) for training in trainings)
    return ["-m", "tests.train_worker", *joined.split(" ")]


def start(arguments: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment(**variables),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def ended(*processes: subprocess.Popen[bytes]) -> list[int]:
    """How each of them ended, once all have."""
    try:
        return [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(*processes: subprocess.Popen[bytes], logs: Sequence[Path]) -> None:
    codes = ended(*processes)
    assert not any(codes), said(codes, logs)


def said(codes: Sequence[int], logs: Sequence[Path]) -> str:
    return "\n".join(f"{codes}\n{log.read_text()[-3000:]}" for log in logs)


def metrics_of(folder: Path) -> list[StepMetrics]:
    return read_lines(folder / METRICS, StepMetrics)


def alone(folder: Path, steps: int, **changes: Any) -> list[StepMetrics]:
    """In this process, up to a step."""
    train(folder, steps, **changes)
    return metrics_of(folder)


def sharded(root: Path, *trainings: Sequence[object]) -> None:
    """In two processes with weights and optimiser state cut in two.

    Gloo's threads let go of tensors on their own, which has been seen to end a process by a signal,
    once in some hundred runs (pytorch/pytorch#179291 is of the kind). Then both are started again,
    from the same state, once; whatever else goes wrong is a failure at once.
    """
    before = shutil.copytree(root, root.with_name("before"))
    logs = [root.with_name(f"log.{rank}") for rank in range(2)]
    codes = ended(*start_shards(trainings, logs))
    if any(code in CRASHES for code in codes):
        print(f"started again: {said(codes, logs)}")
        shutil.rmtree(root)
        shutil.copytree(before, root)
        codes = ended(*start_shards(trainings, logs))
    assert not any(codes), said(codes, logs)


def start_shards(
    trainings: Sequence[Sequence[object]], logs: Sequence[Path]
) -> list[subprocess.Popen[bytes]]:
    """Both processes of `sharded`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        start(
            worker(*((*training, "--sharded") for training in trainings)),
            logs[rank],
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]


@pytest.fixture(autouse=True, scope="module")
def no_settings_left() -> Iterator[None]:
    """Whatever else this process tests may train otherwise."""
    yield
    training.forget_accelerators()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that ran through, and its checkpoint half way."""
    folder = tmp_path_factory.mktemp("reference")

    def keep(metrics: StepMetrics) -> None:
        if metrics.step == HALF_WAY + 1:
            shutil.copy(folder / CHECKPOINT, folder / "half-way.safetensors")

    train(folder, NUM_STEPS, on_step=keep)
    return folder


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft and a head, trained one after the other by `accelerate launch`."""
    root = tmp_path_factory.mktemp("two")
    for name in ("draft", "head"):
        training.pair(root / name)
    log = root / "log"
    trainings = (root / "draft", NUM_STEPS), (root / "head", 4, "--head")
    finish(start([*LAUNCH, *worker(*trainings)], log), logs=[log])
    return root


@pytest.fixture(scope="module")
def in_shards(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft from half way on, and another in bf16, by two processes of half the weights each."""
    root = tmp_path_factory.mktemp("shards") / "runs"
    for name in ("draft", "bf16"):
        training.pair(root / name)
    shutil.copy(reference / "half-way.safetensors", root / "draft" / CHECKPOINT)
    sharded(root, (root / "draft", NUM_STEPS), (root / "bf16", 4, "--precision", "bf16"))
    return root


def assert_same_curve(
    found: list[StepMetrics], expected: list[StepMetrics], sums: float = 2e-5, norms: float = 2e-5
) -> None:
    """Within relative errors: of loss and alpha, and of the norm of the gradient."""
    assert [step.step for step in found] == [step.step for step in expected]
    assert [s.learning_rate for s in found] == [s.learning_rate for s in expected]
    for name, within in (("loss", sums), ("acceptance_probability", sums), ("grad_norm", norms)):
        ours = [getattr(step, name) for step in found]
        assert ours == pytest.approx([getattr(step, name) for step in expected], rel=within), name


def assert_same_state(found: Path, expected: Path) -> None:
    """Weights and optimiser state, whole whatever wrote them."""
    ours, theirs = (load_file(folder / CHECKPOINT) for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        scale = float(tensor.abs().max())
        assert float((ours[name] - tensor).abs().max()) <= 1e-3 * scale, name


@pytest.mark.full
def test_two_processes_are_one(reference: Path, in_two_processes: Path) -> None:
    assert_same_curve(metrics_of(in_two_processes / "draft"), metrics_of(reference))
    assert_same_state(in_two_processes / "draft", reference)


@pytest.mark.full
def test_two_processes_train_one_head(in_two_processes: Path, tmp_path: Path) -> None:
    assert_same_curve(metrics_of(in_two_processes / "head"), alone(tmp_path, 4, head=True))
    assert_same_state(in_two_processes / "head", tmp_path)


@pytest.mark.full
def test_shards_go_on_where_one_process_was(reference: Path, in_shards: Path) -> None:
    found = in_shards / "draft"
    assert_same_curve(metrics_of(found), metrics_of(reference)[HALF_WAY:])
    assert_same_state(found, reference)
    ours, theirs = (load_file(f / "trained" / "model.safetensors") for f in (found, reference))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


@pytest.mark.full
def test_shards_in_bf16(in_shards: Path, tmp_path: Path) -> None:
    """Passes round to bf16, differently where weights were rounded first; sums do not."""
    expected = alone(tmp_path, 4, precision="bf16")
    assert_same_curve(metrics_of(in_shards / "bf16"), expected, 1e-3, BF16_STEP)


def test_killed_it_goes_on_with_the_same_curve(reference: Path, tmp_path: Path) -> None:
    training.pair(tmp_path)
    log = tmp_path / "log"
    process = start(worker((tmp_path, NUM_STEPS, "--hang-at", HALF_WAY)), log)
    try:
        give_up_s = time.monotonic() + LIMIT_S
        while len(metrics_of(tmp_path)) < HALF_WAY:
            assert process.poll() is None and time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(metrics_of(tmp_path)) == HALF_WAY
    found = alone(tmp_path, NUM_STEPS)

    def timeless(steps: list[StepMetrics]) -> list[StepMetrics]:
        return [replace(step, duration_s=0.0) for step in steps]

    assert timeless(found) == timeless(metrics_of(reference))
    ours, theirs = (f / "trained" / "model.safetensors" for f in (tmp_path, reference))
    assert ours.read_bytes() == theirs.read_bytes()
