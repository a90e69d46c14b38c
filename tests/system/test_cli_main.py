"""The command line's frame: help, mistakes, exit codes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

import forerun
from forerun.cli.main import COMMANDS, guarded, main
from forerun.errors import InvalidModel, InvalidRequest


def raising(error):
    def action():
        raise error

    return action


def test_help_lists_every_command_with_examples(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "examples:" in text


def test_no_command_shows_the_help_and_is_a_usage_error(capsys):
    assert main([]) == 2
    assert "usage: forerun" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forerun {forerun.__version__}\n"


@pytest.mark.parametrize(
    ("word", "nearest"), [("genrate", "generate"), ("exat", "exact"), ("--verson", "--version")]
)
def test_an_unknown_command_names_the_nearest(word, nearest, capsys):
    assert main([word]) == 2
    captured = capsys.readouterr()
    assert f"did you mean {nearest}?" in captured.err
    assert captured.out == ""


def test_a_command_unlike_any_lists_them_all(capsys):
    assert main(["zzzzzz"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: forerun {name}" in text
    assert f"  forerun {name}" in text.split("examples:")[1]


NEEDED = {
    "generate": ["x"],
    "info": ["x"],
    "simulate": ["--workload", "x", "--profile", "x"],
    "trace": ["summarize", "x"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_option_is_a_usage_error(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, *NEEDED.get(name, ()), "--jsom"])
    assert stop.value.code == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_neither_torch_nor_transformers(arguments):
    code = (
        "import sys\nfrom forerun.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidModel("no config.json in 'x'"), 1), (InvalidRequest("top_p is 2; use (0, 1]"), 2)],
)
def test_an_error_is_one_line_and_no_traceback(error, code, capsys):
    assert guarded(raising(error)) == code
    assert capsys.readouterr().err == f"forerun: {error}\n"


def test_brackets_in_a_message_are_not_markup(capsys):
    assert guarded(raising(InvalidModel("[bold]x[/bold] [1, 2]"))) == 1
    assert capsys.readouterr().err == "forerun: [bold]x[/bold] [1, 2]\n"


def test_ctrl_c_says_interrupted(capsys):
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_full_disk_is_one_line_that_names_the_file(capsys):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")
    assert guarded(raising(full)) == 1
    assert capsys.readouterr().err == (
        "forerun: report.html cannot be written: No space left on device\n"
    )


def test_other_errors_of_the_system_are_defects():
    with pytest.raises(FileNotFoundError):
        guarded(raising(FileNotFoundError(errno.ENOENT, "No such file", "gone")))


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()))


def test_a_reader_that_goes_away_is_no_error():
    code = (
        "import sys\nfrom forerun.cli.main import guarded\n"
        "def action():\n"
        "    for _ in range(100000):\n        print('x' * 100)\n    return 0\n"
        "sys.exit(guarded(action))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    error = run.stderr.read()
    run.stderr.close()
    assert run.wait(timeout=60) == 141
    assert error == b""
