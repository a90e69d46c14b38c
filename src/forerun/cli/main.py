"""The forerun command: find the subcommand, parse, run, turn errors into an exit code.

Only the subcommand named is imported, and command modules import models inside `run`, so that help
and usage errors take no time.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import forerun
from forerun.cli.command import Command, Exit
from forerun.client.urls import hide_credentials
from forerun.errors import (
    CacheTooLarge,
    DrafterError,
    EngineStopped,
    ForerunError,
    NotEnoughMemory,
    NumericalError,
    QueueFull,
    ServerUnavailable,
    TrainingDiverged,
)
from forerun.terminal_text import printable

PREPARATION = "forerun.preparation"
"""Logger of what is prepared once, or once per start."""
COMMANDS = {
    "demo": "compare plain and speculative decoding on the shipped models",
    "bench": "compare drafts and K with plain decoding, on your prompts",
    "generate": "continue a prompt, streaming",
    "serve": "serve a target over HTTP, as the OpenAI API does",
    "tune": "find the fastest exact setting of speculation for the server you run",
    "info": "describe a model, its memory and whether a draft fits it",
    "quantise": "write a model with weights of 8 or 4 bits, and measure the loss",
    "profile": "measure what drafting and verifying cost on this machine",
    "plan": "choose drafter, K and batch, predict the speedup, and simulate a workload",
    "align": "distil a draft to its target on your prompts, and measure the gain",
    "loop": "serve, and train, try and replace the draft as the requests change",
    "diagnose": "explain why speculation is slow or wrong, what to change, and when it changes",
    "audit": "test whether speculation changes the text of a server, and name the fault",
    "explain": "summarise a trace, or explain the steps of a request, token by token",
    "exact": "prove by enumeration that every verifier keeps the target's distribution",
}
FORMER = {
    ("recommend",): ("tune", "--target"),
    ("simulate",): ("plan",),
    ("probe",): ("diagnose", "--probe"),
    ("watch",): ("diagnose", "--watch"),
    ("trace", "summarize"): ("explain",),
    ("trace",): ("explain",),
}
"""Commands that are part of another one now; this release still knows their names."""
OVERVIEW = """\
usage: forerun COMMAND [OPTIONS]

Speculative decoding for Hugging Face models: exact, fast, measured.

commands:
{commands}

options:
  -h, --help   this help; `forerun COMMAND --help` for a command's options
  --version    print the version

lists: --rows 1,2,4 and --rows 1 2 4 and --rows 1 --rows 2 --rows 4 mean the same

examples:
  forerun demo
  forerun generate "def quicksort(items):" --temperature 0 --color
  forerun generate - --model path/to/model --draft path/to/draft < prompt.txt
  forerun info path/to/model --draft path/to/draft
  forerun profile --model zoo:code-40m --draft zoo:code-2m-for-40m --out profile.json

exit codes:
  0    the work is done; diagnose: healthy; audit: no deviation
  1    a check did not pass, or the work could not be finished (memory, disk, a broken model)
  2    a flag, a value, a file or a model cannot be used
  3    diagnose, audit: a problem was found
  4    diagnose, audit: inconclusive
  70   an error that forerun did not foresee; FORERUN_TRACEBACK=1 shows where
  130  interrupted
  141  the reader of the output ended early
"""
UNFINISHED = (
    CacheTooLarge,
    DrafterError,
    EngineStopped,
    NotEnoughMemory,
    NumericalError,
    QueueFull,
    ServerUnavailable,
    TrainingDiverged,
)
"""Errors of the work; every other ForerunError is one of the input."""
DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A full or failing disk; every other OSError is about a path that was given."""


class Notices(logging.Handler):
    """Prints log records to the stderr of the moment, which a spinner may have replaced.

    Attributes:
        held: records to print later; None while each is printed at once.
    """

    held: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line that begins with the program's name."""
        if self.held is not None:
            self.held.append(record)
            return
        try:
            print(f"forerun: {printable(self.format(record))}", file=sys.stderr, flush=True)
        except (BrokenPipeError, ValueError):  # stderr is closed
            return


@contextmanager
def notices_on_stderr() -> Iterator[None]:
    """Print warnings and progress messages of the package on stderr while the block runs."""
    package, preparation = logging.getLogger("forerun"), logging.getLogger(PREPARATION)
    handler, level = Notices(), preparation.level
    package.addHandler(handler)
    preparation.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        preparation.setLevel(level)


def list_notice_handlers() -> list[Notices]:
    """Return the handlers that print notices at present."""
    handlers = logging.getLogger("forerun").handlers
    return [handler for handler in handlers if isinstance(handler, Notices)]


@contextmanager
def notices_held() -> Iterator[None]:
    """Hold warnings back until the block ends, so that they do not interrupt streamed text."""
    shown = list_notice_handlers()
    for handler in shown:
        handler.held = []
    try:
        yield
    finally:
        for handler in shown:
            held, handler.held = handler.held or [], None
            for record in held:
                handler.handle(record)


@contextmanager
def hide_notices() -> Iterator[None]:
    """Print no warnings and no progress messages while the block runs, only errors."""
    shown = list_notice_handlers()
    for handler in shown:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler in shown:
            handler.setLevel(logging.NOTSET)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `forerun` with `argv` (default: the process's arguments)."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(partial(answered, arguments))


def _open_standard_streams() -> None:
    """Connect closed standard streams to the null device.

    Otherwise the next file that is opened would get their number, and output would go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def answered(arguments: Sequence[str]) -> int:
    """Print help or the version, or run the subcommand."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_format_overview(), end="")
        return Exit.GOOD if arguments else Exit.BAD_INPUT
    if arguments[0] == "--version":
        print(f"forerun {forerun.__version__}")
        return Exit.GOOD
    for former, words in FORMER.items():
        if tuple(arguments[: len(former)]) == former:
            rest = arguments[len(former) :]
            if former == ("recommend",):
                words = words[: 1 if not rest or rest[0].startswith("-") else 2]
                rest = ["--draft" if word == "--drafts" else word for word in rest]
            arguments = [*words, *rest]
            print(f"forerun {former[0]} is forerun {' '.join(words)} now", file=sys.stderr)
    if arguments[0] not in COMMANDS:
        _print_error(unknown(arguments[0]))
        return Exit.BAD_INPUT
    name, *rest = arguments
    command: Command[Any] = import_module(f"forerun.cli.{name}").COMMAND
    return command.run(command.parse(name, rest))


EXTRAS = {
    **dict.fromkeys(
        "fastapi llguidance prometheus_client pydantic starlette uvicorn".split(), "serve"
    ),
    **dict.fromkeys(["accelerate", "filelock"], "align"),
    "scipy": "measure",
    "pyarrow": "parquet",
}
"""The extra of `pip install 'forerun[EXTRA]'` that has an optional module."""


def guarded(action: Callable[[], int]) -> int:
    """Run the action and report each failure as one line on stderr and an exit code."""
    try:
        with notices_on_stderr():
            code = action()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 (an unforeseen error is reported as a defect)
        return report_failure(error)


def report_failure(error: Exception) -> int:
    if isinstance(error, ForerunError):
        _print_error(str(error))
        return Exit.FAILED if isinstance(error, UNFINISHED) else Exit.BAD_INPUT
    if isinstance(error, BrokenPipeError):
        # The reader (head, less) has gone. Nothing is wrong, and the exit flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN_PIPE
    if isinstance(error, OSError):
        return _report_os_failure(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in EXTRAS:
        extra = EXTRAS[(error.name or "").split(".")[0]]
        _print_error(f"{error.name} is not installed: pip install 'forerun[{extra}]'")
        return Exit.BAD_INPUT
    if isinstance(error, MemoryError):
        _print_error("the memory of this machine does not suffice")
        return Exit.FAILED
    _print_error(
        f"unexpected {type(error).__name__}: {error}; this is a defect of forerun, please report "
        "it with the output of FORERUN_TRACEBACK=1"
    )
    if os.environ.get("FORERUN_TRACEBACK"):
        traceback.print_exception(error)
    return Exit.DEFECT


def _report_os_failure(error: OSError) -> int:
    """Report a file that cannot be read or written, and return the exit code."""
    name = error.filename or "the output"
    if error.errno in DISK_FAILURES:
        _print_error(f"{name} cannot be written: {error.strerror}")
        return Exit.FAILED
    _print_error(f"{name}: {error.strerror or error}")
    return Exit.BAD_INPUT


def _format_overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}   {summary}" for name, summary in COMMANDS.items()]
    return OVERVIEW.format(commands="\n".join(lines))


def unknown(word: str) -> str:
    """Report a first argument that is not a command, and return the exit code."""
    known = [*COMMANDS, "--help", "--version"]
    kind = "option" if word.startswith("-") else "command"
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"no {kind} {word!r}; {hint}"


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    shown = printable(hide_credentials(message), keep="\n", max_length=4000)
    line = Text.assemble(("forerun: ", "bold red"), shown)
    Console(stderr=True, soft_wrap=True).print(line)


if __name__ == "__main__":
    sys.exit(main())
