"""Flags of all commands: how many there are, that pages use them, and which --help shows."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import tyro
from tyro.extras import get_parser

from forerun.cli import command
from forerun.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
CEILING = json.loads((ROOT / "tests" / "habits.json").read_text())["flags of all commands"]
PAGES = (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md"))
MOST_SHOWN = 15


def list_flags(name: str) -> list[list[str]]:
    """Return the spellings of every flag of a command."""
    options = import_module(f"forerun.cli.{name}").COMMAND.options
    with pytest.warns(DeprecationWarning, match="get_parser"):
        parser = get_parser(
            options, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
        )
    actions = [action.option_strings for action in parser._actions]
    return [spellings for spellings in actions if spellings and "--help" not in spellings]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_that_a_mistyped_one_is_compared_with_are_all(name):
    options = import_module(f"forerun.cli.{name}").COMMAND.options
    known = {spelling for spellings in list_flags(name) for spelling in spellings}
    assert set(command.list_flags(options)) == known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["bench", "--modle", "x"],
            "bench has no option '--modle'; did you mean --model?",
        ),
        (["generate", "hi", "--drfat=x"], "no option '--drfat'; did you mean --draft?"),
        (["bench", "--qqqq"], "no option '--qqqq'; forerun bench --help-all shows all options"),
    ],
)
def test_a_mistyped_flag_is_told_what_is_like_it(words, message, capsys):
    assert main(words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def read_help(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([name, flag])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_commands_have_few_flags() -> None:
    numbers = {name: len(list_flags(name)) for name in COMMANDS}
    assert sum(numbers.values()) <= CEILING, numbers


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_used_in_a_page(name: str) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    unused = [
        spellings
        for spellings in list_flags(name)
        if not any(re.search(rf"(?<![\w-]){flag}(?![\w-])", text) for flag in spellings)
    ]
    assert not unused


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_few_flags_and_help_all_the_others(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    flags = list_flags(name)

    def count_shown(text: str) -> int:
        lines = [line for line in text.splitlines() if line[2:4] == "--"]
        words = {word.strip(",") for line in lines for word in line[2:].split("  ")[0].split()}
        return sum(not words.isdisjoint(spellings) for spellings in flags)

    num_shown = count_shown(read_help(name, "--help", capsys))
    assert num_shown <= MOST_SHOWN
    assert count_shown(read_help(name, "--help-all", capsys)) == len(flags)
    usual = import_module(f"forerun.cli.{name}").COMMAND.usual
    num_hidden = len(flags) - num_shown
    assert bool(usual) == (num_hidden > 0)
    if usual:
        assert f"--help-all shows {num_hidden} more flags" in read_help(name, "-h", capsys)


def test_help_of_shared_flags_is_the_same_after_a_short_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = read_help("generate", "--help-all", capsys)
    read_help("generate", "--help", capsys)
    assert read_help("generate", "--help-all", capsys) == before
