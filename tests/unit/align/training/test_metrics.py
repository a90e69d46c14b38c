"""The log of a run holds every step once; the bar and the picture say what is in it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forerun.align.report import plot_training
from forerun.align.workspace import MetricsLog, Phases, StepMetrics, read_metrics


def step(number: int, **changes: object) -> StepMetrics:
    values = {
        "step": number,
        "loss": 1 / number,
        "acceptance_probability": 0.5,
        "num_learned": 100,
        "num_tokens": 192,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "duration_s": 0.1,
    }
    return StepMetrics(**(values | changes))


def write(path: Path, numbers: range, first: int, events: Path | None = None) -> None:
    with MetricsLog(path, events).open_at(first) as log:
        for number in numbers:
            log.append(step(number))


def test_steps_after_the_checkpoint_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8), 0)
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # killed while it wrote
    assert [s.step for s in read_metrics(path)] == list(range(1, 8))
    write(path, range(5, 10), 4)
    assert read_metrics(path) == [step(number) for number in range(1, 10)]


def test_no_log_is_an_empty_one(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_tensorboard_sees_the_same_steps(tmp_path: Path) -> None:
    path, events = tmp_path / "metrics.jsonl", tmp_path / "events"
    write(path, range(1, 4), 0, events)
    write(path, range(3, 6), 2, events)
    found = EventAccumulator(str(events))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert [number for number, _ in losses] == [1, 2, 3, 4, 5]
    assert [value for _, value in losses] == pytest.approx([1 / n for n in range(1, 6)])
    assert "train/acceptance_probability" in found.Tags()["scalars"]


def test_what_is_not_known_is_not_drawn_by_tensorboard(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl", tmp_path / "e").open_at(0) as log:
        log.append(step(1, acceptance_probability=None))
    found = EventAccumulator(str(tmp_path / "e"))
    found.Reload()
    assert "train/acceptance_probability" not in found.Tags()["scalars"]
    assert json.loads((tmp_path / "m.jsonl").read_text())["acceptance_probability"] is None


def test_the_bar_says_where_the_run_is() -> None:
    out = io.StringIO()
    phases = Phases(Console(file=out, force_terminal=True, width=120))
    with phases.training(num_steps=10, first_step=3, speedup=1.337) as show:
        show(step(4))
        show(step(5, loss=1.25, acceptance_probability=0.6))
    assert "5/10" in out.getvalue()
    assert "loss 0.350  alpha 0.510  predicted speedup 1.34x" in out.getvalue()
    assert phases.seconds.keys() == {"training"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[float], list[float]]]:
    """What curves are drawn of."""
    curves: list[tuple[list[float], list[float]]] = []
    original: Callable[..., object] = Axes.plot

    def noted(axes: Axes, xs: list[float], ys: list[float], *rest: object, **style: object):
        curves.append((xs, ys))
        return original(axes, xs, ys, *rest, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    return curves


def test_the_picture_shows_training_and_judgements(
    tmp_path: Path, drawn: list[tuple[list[float], list[float]]]
) -> None:
    steps = [step(1), step(2, acceptance_probability=None), step(3, acceptance_probability=0.7)]
    paths = [tmp_path / "a.svg", tmp_path / "a.png"]
    plot_training(steps, {0: 0.2, 3: 0.6}, {0: 1.0, 3: 1.4}, paths)
    assert drawn == [([1, 3], [0.5, 0.7]), ([0, 3], [0.2, 0.6]), ([0, 3], [1.0, 1.4])]
    assert paths[0].read_text().startswith("<?xml")
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_costs_says_so(tmp_path: Path) -> None:
    plot_training([step(1)], {0: 0.2}, {}, [tmp_path / "a.svg"])
    assert "<!-- no cost table -->" in (tmp_path / "a.svg").read_text()


def test_lines_are_plain(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(1, 2), 0)
    assert StepMetrics(**json.loads((tmp_path / "m.jsonl").read_text())) == replace(step(1))


def test_a_damaged_line_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 5), 0)
    lines = path.read_bytes().split(b"\n")
    lines[1], lines[2] = b'{"step": 2, "lo', b"\xff\x00"
    path.write_bytes(b"\n".join(lines))
    assert [s.step for s in read_metrics(path)] == [1, 4]
    assert "line 2 is damaged" in caplog.text and "line 3 is damaged" in caplog.text
    write(path, range(5, 6), 4)
    assert [s.step for s in read_metrics(path)] == [1, 4, 5]
