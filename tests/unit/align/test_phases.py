"""A bar says how much is done of how much, and nothing where there was nothing to do."""

from __future__ import annotations

import io

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


def test_where_there_is_no_terminal_a_line_now_and_then_says_rate_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    times = iter((0.0, 1.0, 40.0, 50.0, 80.0))  # begun, then one per call
    with Phases(console, clock=lambda: next(times)).bar("responses", "responses") as on_progress:
        for num_done in (100, 140, 150, 180):
            on_progress(num_done, 260)
    lines = [line for line in console.file.getvalue().splitlines() if "a minute" in line]
    assert lines == [
        "responses 140/260, 60 a minute, 2 min left",
        "responses 180/260, 60 a minute, 1 min left",
    ]


def test_a_phase_of_unknown_length_is_named_in_a_log():
    written = io.StringIO()
    phases = Phases(Console(file=written))
    with phases.waiting("judging", "judging step 4"):
        pass
    assert written.getvalue() == "judging step 4 ...\n"
