"""The loop: it learns, a step is a mean over its rows however they are passed, and it goes on."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch
from tests import training

from forerun.align.samples import Packing
from forerun.align.trainer import Trainer
from forerun.align.workspace import StepMetrics
from forerun.errors import InvalidCheckpoint, TrainingDiverged


def curve(trainer: Trainer, until_step: int) -> list[StepMetrics]:
    steps: list[StepMetrics] = []
    trainer.run(training.packing(), until_step, steps.append)
    return steps


def losses(steps: list[StepMetrics]) -> list[float]:
    return [step.loss for step in steps]


def test_a_draft_learns_the_table(tmp_path: Path) -> None:
    settings = training.config(num_steps=60)
    steps = curve(training.trainer_of(training.tiny_draft(tmp_path), tmp_path, settings), 60)
    first, last = steps[0], steps[-1]
    assert last.loss < 0.6 * first.loss
    assert first.acceptance_probability is not None and last.acceptance_probability is not None
    assert last.acceptance_probability > first.acceptance_probability + 0.15
    assert [step.step for step in steps] == list(range(1, 61))


def test_passes_do_not_change_a_step(tmp_path: Path) -> None:
    curves = []
    for rows_per_pass in (8, 3, 1):
        trainer = training.trainer_of(
            training.tiny_draft(tmp_path),
            tmp_path / str(rows_per_pass),
            training.config(rows_per_pass=rows_per_pass),
        )
        curves.append(losses(curve(trainer, 6)))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = losses(curve(training.trainer_of(training.tiny_draft(tmp_path), tmp_path / "a"), 8))
    first = training.trainer_of(training.tiny_draft(tmp_path), tmp_path / "b")
    begun = losses(curve(first, 5))
    second = training.trainer_of(training.tiny_draft(tmp_path), tmp_path / "b")
    assert second.resume() == 5
    assert begun + losses(curve(second, 8)) == whole


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    curve(training.trainer_of(training.tiny_draft(tmp_path), tmp_path), 2)
    changed = training.config(learning_rate=1e-3)
    other = training.trainer_of(training.tiny_draft(tmp_path), tmp_path, changed)
    with pytest.raises(InvalidCheckpoint, match=r"learning_rate was 0\.02, is 0\.001"):
        other.resume()
    free = training.config(rows_per_pass=1, checkpoint_every_s=1.0)
    assert training.trainer_of(training.tiny_draft(tmp_path), tmp_path, free).resume() == 2


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path)
    curve(trainer, 1)
    trainer.path.write_bytes(trainer.path.read_bytes()[:1000])
    again = training.trainer_of(training.tiny_draft(tmp_path), tmp_path)
    with pytest.raises(InvalidCheckpoint, match="delete it to start again"):
        again.resume()


def test_nan_stops_and_keeps_the_last_good(tmp_path: Path) -> None:
    teacher = training.NaNTeacher(good_batches=2 * 3 + 1)
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path, teacher=teacher)
    curve(trainer, 2)
    kept = trainer.path.read_bytes()
    with pytest.raises(TrainingDiverged, match="step 4: the loss is nan"):
        curve(trainer, 12)
    assert trainer.path.read_bytes() == kept
    assert trainer.step == 3
    assert all(bool(torch.isfinite(p).all()) for p in trainer.module.parameters())


def test_a_full_disk_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path)
    curve(trainer, 2)
    kept = trainer.path.read_bytes()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forerun.align.trainer.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        curve(trainer, 3)
    assert trainer.path.read_bytes() == kept
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [trainer.path.name]


def test_a_signal_is_heard_between_steps(tmp_path: Path) -> None:
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path)
    steps: list[int] = []

    def on_step(metrics: StepMetrics) -> None:
        steps.append(metrics.step)
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(training.packing(), 12, on_step)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert steps == [1, 2, 3]  # the wish is asked for before a step
    assert training.trainer_of(training.tiny_draft(tmp_path), tmp_path).resume() == 3


def test_checkpoints_come_in_time(tmp_path: Path) -> None:
    settings = training.config(checkpoint_every_s=0.0)
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path, settings)
    seen = []

    def on_step(metrics: StepMetrics) -> None:
        seen.append(trainer.path.exists())

    trainer.run(training.packing(), 3, on_step)
    assert seen == [False, True, True]


def test_a_step_without_anything_to_learn_is_harmless(tmp_path: Path) -> None:
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path)
    batch = training.packing().batch(0, 4)

    class Nothing(Packing):
        def __init__(self) -> None:
            pass

        def batch(self, first_row: int, num_rows: int) -> training.PackedBatch:
            return training.PackedBatch(
                ids=batch.ids,
                positions=batch.positions,
                samples=batch.samples,
                predicts=torch.zeros_like(batch.predicts),
            )

    steps: list[StepMetrics] = []
    trainer.run(Nothing(), 1, steps.append)
    assert steps[0].loss == 0 and steps[0].num_learned == 0
    assert math.isfinite(steps[0].grad_norm)


def test_training_has_its_threads_though_a_native_target_took_them(tmp_path: Path) -> None:
    trainer = training.trainer_of(training.tiny_draft(tmp_path), tmp_path)
    trainer.num_threads = 2
    seen: list[int] = []
    trainer.run(training.packing(), 2, lambda step: seen.append(torch.get_num_threads()))
    assert seen == [2, 2]
    assert torch.get_num_threads() == 1
