"""What reaches stderr while a command runs, and that nothing else changes."""

from __future__ import annotations

import logging
import re
import sys

from rich.console import Console

from forerun.cli.main import PREPARATION, notices_held, notices_on_stderr


def say_everything() -> None:
    logging.getLogger(PREPARATION).info("compiling %d kernels", 3)
    logging.getLogger(PREPARATION).debug("not this")
    logging.getLogger("forerun.engine").warning("careful")
    logging.getLogger("forerun.engine").info("not this")
    logging.getLogger("somebody.else").info("not this")


def test_warnings_and_preparation_are_shown_as_ours(capsys):
    with notices_on_stderr():
        say_everything()
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["forerun: compiling 3 kernels", "forerun: careful"]
    assert captured.out == ""


def test_afterwards_all_is_as_before(capsys):
    package, preparation = logging.getLogger("forerun"), logging.getLogger(PREPARATION)
    before = list(package.handlers), preparation.level
    with notices_on_stderr():
        assert len(package.handlers) == len(before[0]) + 1
    assert (package.handlers, preparation.level) == before


def test_no_notice_cuts_text_that_is_being_streamed(capsys):
    package = logging.getLogger("forerun")
    with notices_on_stderr():
        before = list(package.handlers)
        with notices_held():
            print("one ", end="", file=sys.stderr)
            logging.getLogger("forerun.engine").warning("careful")
            print("line", file=sys.stderr)
        assert package.handlers == before
    assert capsys.readouterr().err.splitlines() == ["one line", "forerun: careful"]


def test_a_spinner_steps_aside(capsys):
    """Lines go to stderr as it is when they are said, which a spinner puts itself before."""
    console = Console(stderr=True, force_terminal=True, width=60)
    with notices_on_stderr(), console.status("loading"):
        assert sys.stderr is not console.file
        logging.getLogger(PREPARATION).info("compiling")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line.rpartition("\r")[2].strip() for line in shown.split("\n")]
    assert "forerun: compiling" in lines


def test_a_reader_that_went_away_is_no_error(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with notices_on_stderr():
        logging.getLogger(PREPARATION).info("compiling")
