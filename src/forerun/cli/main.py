"""The `forerun` command: find the subcommand, parse, run, turn errors into an exit code.

Only the subcommand named is imported, and command modules import models inside `run`, so that help
and mistakes answer at once.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import forerun
from forerun.cli.command import Command
from forerun.cli.notices import notices_on_stderr
from forerun.errors import ForerunError, InvalidRequest

__all__ = ["main"]

COMMANDS = {
    "demo": "compare plain and speculative decoding on the shipped pair",
    "bench": "compare drafts and K with plain decoding, on your prompts",
    "generate": "continue a prompt, streaming",
    "info": "say what a model is, what it needs and whether a draft fits it",
    "profile": "measure what drafting and verifying cost on this machine",
    "plan": "say which drafter, K and batch to use, and what it should be worth",
    "align": "distil a draft to its target on your prompts, and prove what it gained",
    "probe": "measure with the models at hand what tells causes apart, for diagnose",
    "diagnose": "say why speculation is slow or wrong, and what to change",
    "simulate": "serve a workload in simulated time under several controllers",
    "trace": "say what a trace holds: tokens and cost per step, acceptance by position",
    "exact": "prove by enumeration that every verifier keeps the target's law",
}
OVERVIEW = """\
usage: forerun COMMAND [OPTIONS]

Speculative decoding for Hugging Face models: exact, fast, measured.

commands:
{commands}

options:
  -h, --help   this help; `forerun COMMAND --help` for a command's options
  --version    print the version

examples:
  forerun demo
  forerun generate "def quicksort(items):" --temperature 0 --color
  forerun generate - --target path/to/model --draft path/to/draft --k 4 < prompt.txt
  forerun info path/to/model --draft path/to/draft
  forerun profile --target zoo:code-11m --draft zoo:code-2m --out profile.json
"""
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A full or a failing disk may turn up at any write; every other OSError is a mistake of ours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `forerun` with `argv` (default: the process's arguments).

    Returns:
        0 on success, 1 for a failure, 2 for a request that cannot be honoured, 130 after Ctrl-C.

    Raises:
        SystemExit: from a subcommand's parser, with 0 after `--help` and 2 after a usage error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), end="")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"forerun {forerun.__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        say_error(unknown(arguments[0]))
        return EXIT_USAGE
    return guarded(partial(run_command, *arguments))


def run_command(name: str, *arguments: str) -> int:
    """Import, parse and run one subcommand."""
    command: Command[Any] = import_module(f"forerun.cli.{name}").COMMAND
    return command.run(parse(command, name, arguments))


def parse(command: Command[Any], name: str, arguments: Sequence[str]) -> object:
    """Options of a subcommand; exits after printing help or what is wrong."""
    import tyro

    return tyro.cli(
        command.options,
        prog=f"forerun {name}",
        description=command.help,
        args=list(arguments),
        default=command.defaults(arguments),
        config=(
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.OmitArgPrefixes,
        ),
    )


def guarded(action: Callable[[], int]) -> int:
    """Do it; every foreseen failure becomes one line on stderr and an exit code."""
    try:
        with notices_on_stderr():
            code = action()
        sys.stdout.flush()
        return code
    except ForerunError as error:
        say_error(str(error))
        return EXIT_USAGE if isinstance(error, InvalidRequest) else EXIT_ERROR
    except KeyboardInterrupt:
        say_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Nothing is wrong, and the exit flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK_FAILURES:
            raise
        say_error(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
        return EXIT_ERROR


def overview() -> str:
    """The text of `forerun --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}   {summary}" for name, summary in COMMANDS.items()]
    return OVERVIEW.format(commands="\n".join(lines))


def unknown(word: str) -> str:
    """What to say to a first argument that is no command."""
    known = [*COMMANDS, "--help", "--version"]
    kind = "option" if word.startswith("-") else "command"
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"no {kind} {word!r}; {hint}"


def say_error(message: str) -> None:
    """One line on stderr."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("forerun: ", "bold red"), message)
    Console(stderr=True, soft_wrap=True).print(line)


if __name__ == "__main__":
    sys.exit(main())
