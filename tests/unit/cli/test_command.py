"""Lists and names of flags: every way to write them means the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.cli.align import COMMAND as ALIGN
from forerun.cli.bench import COMMAND as BENCH
from forerun.cli.generate import COMMAND as GENERATE
from forerun.cli.info import COMMAND as INFO
from forerun.cli.plan import COMMAND as PLAN
from forerun.cli.profile import COMMAND as PROFILE
from forerun.errors import InvalidRequest


@pytest.mark.parametrize(
    "words",
    [
        ["--rows", "1,2,4"],
        ["--rows", "1", "2", "4"],
        ["--rows", "1", "--rows", "2,4"],
        ["--rows=1", "--rows=2,4"],
    ],
)
def test_a_list_is_written_in_three_ways(words):
    assert PROFILE.parse("profile", words).rows == (1, 2, 4)


def test_separators_within_a_value_stay_where_they_mean_something_else():
    options = BENCH.parse("bench", ["--arms", "a@1,2", "b@3", "--temperature", "0,1", "0.5"])
    assert options.arms == ("a@1,2", "b@3")
    assert options.temperatures == (0.0, 1.0, 0.5)
    options = PLAN.parse("plan", ["--acceptance", "a=.5,.4", "b=.3", "--batch", "1,8"])
    assert options.acceptance == ("a=.5,.4", "b=.3") and options.batch == (1, 8)


def test_a_list_does_not_swallow_the_prompt():
    options = GENERATE.parse("generate", ["--draft", "a,b", "--draft", "c", "-"])
    assert options.pair.draft == ("a", "b", "c") and options.prompt == "-"


def test_a_file_whose_name_has_a_comma_stays_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a,b").mkdir()
    assert GENERATE.parse("generate", ["x", "--draft", "a,b"]).pair.draft == ("a,b",)


def test_nothing_after_two_hyphens_is_a_list():
    assert GENERATE.parse("generate", ["--", "--draft=a,b"]).prompt == "--draft=a,b"


def test_negative_numbers_are_values():
    assert BENCH.parse("bench", ["--temperature", "0", "-1"]).temperatures == (0.0, -1.0)


@pytest.mark.parametrize("flag", ["--rows", "--batch"])
def test_a_list_without_a_value_is_a_usage_error(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        PROFILE.parse("profile", [flag])
    assert stop.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "old", "new", "value"),
    [
        (BENCH, "--target", "--model", "m"),
        (BENCH, "--temperatures", "--temperature", "0.5"),
        (BENCH, "--batches", "--batch", "3"),
        (BENCH, "--controllers", "--controller", "auto"),
        (PROFILE, "--target", "--model", "m"),
        (PROFILE, "--batches", "--batch", "3"),
        (PROFILE, "--contexts", "--context", "30"),
        (PLAN, "--max-k", "--num-speculative-tokens", "3"),
        (PLAN, "--controllers", "--controller", "auto"),
        (GENERATE, "--k", "--num-speculative-tokens", "3"),
        (GENERATE, "--target", "--model", "m"),
        (INFO, "--max-batch", "--batch", "3"),
        (ALIGN, "--k", "--num-speculative-tokens", "3"),
        (ALIGN, "--target", "--model", "m"),
    ],
)
def test_old_names_are_aliases(command, old, new, value):
    needed = ["x"] if command.has_positional else []
    found = [command.parse("name", [*needed, flag, value]) for flag in (old, new)]
    assert found[0] == found[1] != command.parse("name", needed)


@pytest.mark.parametrize("words", [["a b", "c d"], ["a b", "--k", "3", "c d"]])
def test_a_second_prompt_is_refused_by_its_words(words):
    with pytest.raises(InvalidRequest, match="'c d' is one word too many for forerun generate"):
        GENERATE.parse("generate", words)
