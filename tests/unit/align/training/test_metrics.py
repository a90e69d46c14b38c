"""The log of a run holds every step once, and the bar says what is in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.align.run import _update_means
from forerun.align.workspace import StepMetrics, append_line, read_lines

STEP = StepMetrics(
    step=1,
    loss=1.0,
    acceptance_probability=0.5,
    num_learned=100,
    num_tokens=192,
    grad_norm=2.0,
    learning_rate=1e-3,
    duration_s=0.1,
)


def test_no_log_is_an_empty_one(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl", StepMetrics) == []


def test_a_damaged_line_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in range(1, 5):
        append_line(path, replace(STEP, step=number))
    lines = path.read_bytes().split(b"\n")
    lines[1], lines[2] = b'{"step": 2, "lo', b"\xff\x00"
    path.write_bytes(b"\n".join(lines) + b'{"step": 5, "lo')  # killed while it wrote
    assert [step.step for step in read_lines(path, StepMetrics)] == [1, 4]
    assert "line 2 is damaged" in caplog.text and "line 3 is damaged" in caplog.text


def test_running_means_are_shown() -> None:
    means: dict[str, float] = {}
    assert _update_means(means, replace(STEP, loss=0.25)) == "loss 0.250  alpha 0.500"
    later = replace(STEP, loss=1.25, acceptance_probability=0.6)
    assert _update_means(means, later) == "loss 0.350  alpha 0.510"
    assert _update_means({}, replace(STEP, acceptance_probability=None)) == "loss 1.000"
