"""The command line's frame: help, mistakes, exit codes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

import forerun
from forerun.cli.command import Exit
from forerun.cli.main import COMMANDS, guarded, main
from forerun.errors import (
    InvalidModel,
    InvalidRequest,
    InvalidTrace,
    MaskError,
    NotEnoughMemory,
)


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
    "audit": ["x"],
    "quantise": ["x", "--out", "y"],
    "generate": ["x"],
    "info": ["x"],
    "explain": ["x"],
    "loop": ["run", "x"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_option_is_a_usage_error(name, capsys):
    assert main([name, *NEEDED.get(name, ()), "--modle"]) == 2
    assert f"forerun {name} --help" in " ".join(capsys.readouterr().err.split())


def test_help_loads_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom forerun.cli.main import COMMANDS, main\n"
        "for arguments in [['--help'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    try:\n        main(arguments)\n    except SystemExit:\n        pass\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    if heavy:\n        sys.exit(f'{arguments} loaded {heavy}')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidModel("no config.json in 'x'"), 2),
        (InvalidRequest("top_p is 2; use (0, 1]"), 2),
        (InvalidTrace("x.jsonl cannot be read"), 2),
        (NotEnoughMemory("8 GiB are needed"), 1),
        (MaskError("the mask raised"), 1),
    ],
)
def test_an_error_is_one_line_and_no_traceback(error, code, capsys):
    assert guarded(raising(error)) == code
    assert capsys.readouterr().err == f"forerun: {error}\n"


def test_brackets_in_a_message_are_not_markup(capsys):
    assert guarded(raising(InvalidModel("[bold]x[/bold] [1, 2]"))) == 2
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


def test_a_missing_file_is_bad_input(capsys):
    assert guarded(raising(FileNotFoundError(errno.ENOENT, "No such file", "gone"))) == 2
    assert capsys.readouterr().err == "forerun: gone: No such file\n"


def test_an_unforeseen_error_is_one_line_and_its_traceback_on_request(monkeypatch, capsys):
    monkeypatch.delenv("FORERUN_TRACEBACK", raising=False)
    assert guarded(raising(ZeroDivisionError("division by zero"))) == 70
    error = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in error and "Traceback" not in error
    monkeypatch.setenv("FORERUN_TRACEBACK", "1")
    assert guarded(raising(ZeroDivisionError("division by zero"))) == 70
    assert "Traceback" in capsys.readouterr().err


def test_escape_sequences_of_a_name_do_not_reach_the_terminal(capsys):
    assert guarded(raising(InvalidModel("no model \x1b]0;title\x07 here"))) == 2
    assert "\\x1b]0;title\\x07" in capsys.readouterr().err


def test_exit_codes_are_documented(capsys):
    main(["--help"])
    table = capsys.readouterr().out.split("exit codes:")[1]
    assert [int(line.split()[0]) for line in table.strip().splitlines()] == sorted(Exit)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_traceback(closed, tmp_path):
    script = f"{sys.executable} -m forerun plan --acceptance 0.8 {closed}"
    run = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


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
    assert run.wait(timeout=300) == 141
    assert error == b""


def test_two_names_of_one_flag_are_refused(capsys):
    assert main(["info", "--model", "zoo:code-11m", "--target", "zoo:code-2m"]) == Exit.BAD_INPUT
    assert "--model and --target are the same flag" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--prompts", "--profile", "--chat-template"])
def test_the_password_of_an_address_in_place_of_a_file_is_not_shown(flag, capsys):
    command = {"--prompts": "bench", "--profile": "plan"}.get(flag, "generate")
    words = ["x"] if command == "generate" else []
    assert main([command, *words, flag, "http://me:s3cr3t@host/a.json"]) == 2
    err = capsys.readouterr().err
    assert "s3cr3t" not in err and "host/a.json" in err
