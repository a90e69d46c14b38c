"""A bar says how much is done of how much, and nothing where there was nothing to do."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from forerun.align.workspace import Phases


def shown(*told: tuple[int, int]) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Phases(console).bar("teacher", "the target's distributions") as on_progress:
        for done, total in told:
            on_progress(done, total)
    return console.file.getvalue()


def test_a_bar_stays_where_something_was_done():
    assert "7/7" in shown((3, 7), (7, 7))


def test_no_bar_stays_where_nothing_was():
    last_frame = shown().rpartition("\x1b[2K")[2]
    assert "the target's distributions" not in last_frame


def test_a_phase_is_timed_whether_it_shows_anything_or_not():
    phases = Phases(None)
    for _ in range(2):
        with phases.bar("teacher", "the target's distributions"):
            pass
    assert phases.seconds.keys() == {"teacher"}
    assert phases.seconds["teacher"] >= 0


@pytest.mark.parametrize(
    ("speedup", "words"),
    [(1.3, "predicted speedup 1.30x"), (0.84, "plain decoding is faster"), (None, "train")],
)
def test_training_says_where_no_k_pays(speedup: float | None, words: str):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Phases(console).training(8, 0, speedup):
        pass
    assert words in console.file.getvalue()
