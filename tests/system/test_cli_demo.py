"""`forerun demo` on a tiny random pair and a clock that only counts its calls."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import pytest

from forerun.cli import demo as command
from forerun.cli.main import main
from forerun.errors import InvalidModel
from forerun.measure.bench import comparison as comparison_module
from forerun.measure.bench.config import LEAST_BLOCKS, BenchConfig, DraftArms
from forerun.measure.prompt_files import PromptEntry

ROW_KEYS = {
    "name",
    "method",
    "k",
    "tokens_per_s",
    "speedup",
    "speedup_ci",
    "acceptance_length",
    "acceptance_rate_per_position",
    "verdict",
}
ARGUMENTS = ["demo", "--model", "zoo:code-40m"]


def run_small(tiny_pair, seconds=10.0):
    """Run a small demonstration; return its comparisons and the one that showed an example."""
    ticks = count()
    bench = BenchConfig(
        target=str(tiny_pair.target),
        arms=(DraftArms(name="draft", draft=str(tiny_pair.draft), ks=(2,)),),
        controllers=("auto",),
        num_blocks=4,
        max_tokens=20,
        max_context=512,
        num_threads=1,
    )
    prompts = [PromptEntry(where="", text=f"def f{i}({'x' * i}):") for i in range(6)]
    comparisons, shown = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison_module, "shipped_prompts", lambda tokenizer, raw: prompts)
        command.run_in_turn(
            {"bf16": bench, "4 bits": replace(bench, weights="int4")},
            comparisons,
            end_s=seconds,
            clock=lambda: next(ticks) / 1000,
            notify=lambda stage: None,
            show_example=shown.append,
        )
    return comparisons, shown


@pytest.fixture(scope="module")
def finished(tiny_pair):
    """A demonstration with time for everything, run once."""
    return run_small(tiny_pair)


@pytest.fixture
def replay(finished, monkeypatch):
    """Let the command find what `finished` found, or nothing, or an interruption."""

    def prepare(interrupted=False, is_empty=False):
        found, shown = finished

        def run_in_turn(benches, comparisons, *, show_example, **settings):
            if not is_empty:
                comparisons.update(found)
                show_example(shown[0])
            if interrupted:
                raise KeyboardInterrupt

        monkeypatch.setattr(command, "run_in_turn", run_in_turn)

    return prepare


def test_both_formats_are_compared_at_both_temperatures(finished):
    comparisons, shown = finished
    assert list(comparisons) == ["bf16", "4 bits"]
    for comparison in comparisons.values():
        cells = comparison.report().cells
        assert [cell.temperature for cell in cells] == [0.0, 1.0]
        for cell in cells:
            assert [row.arm.name for row in cell.rows] == ["plain", "draft K=2", "draft auto"]
    assert shown == [comparisons["bf16"]]


def test_greedy_texts_are_compared_with_those_of_plain_decoding(finished):
    texts = command.count_equal_texts([comparison.report() for comparison in finished[0].values()])
    assert texts["num_texts"] > 2 and texts["num_tokens"] > 20
    assert texts["num_different"] == 0


def test_a_greedy_text_that_differs_is_counted(finished):
    bench = finished[0]["bf16"].report()
    cell = bench.cells[0]
    plain, fixed, adaptive = cell.blocks[0]
    ((*tokens, last),) = fixed.token_ids
    off = (plain, replace(fixed, token_ids=((*tokens, last + 1),)), adaptive)
    changed = replace(bench, cells=(replace(cell, blocks=(off, *cell.blocks[1:])),))
    assert command.count_equal_texts([changed])["num_different"] == 1


def test_a_short_time_leaves_the_fewest_blocks(tiny_pair):
    comparisons, _ = run_small(tiny_pair, seconds=0.0)
    for comparison in comparisons.values():
        assert {len(cell.blocks) for cell in comparison.report().cells} == {LEAST_BLOCKS}


def test_json_and_files(replay, tmp_path, capsys):
    replay()
    folder = tmp_path / "new" / "folder"
    assert main([*ARGUMENTS, "--json", "--out", str(folder)]) == 0
    content = json.loads(capsys.readouterr().out)
    cell = content["weights"]["bf16"]["cells"][0]
    assert all(row.keys() >= ROW_KEYS for row in cell["rows"])
    assert content["greedy_texts"]["num_different"] == 0
    written = json.loads((folder / "demo.json").read_text())
    assert written["greedy_texts"] == content["greedy_texts"]
    assert "draft&#160;auto" in (folder / "text.svg").read_text()


def test_text_and_table_for_people(replay, capsys):
    replay()
    assert main(ARGUMENTS) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("plain decoding", "draft auto", "draft K=2", "4 bits", "token for token"):
        assert words in out


def test_text_that_differs_fails_the_command(replay, monkeypatch, capsys):
    replay()
    off = {"num_texts": 5, "num_tokens": 50, "num_different": 1}
    monkeypatch.setattr(command, "count_equal_texts", lambda reports: off)
    assert main(ARGUMENTS) == 1
    assert "1 of 5 greedy texts differ" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_shows_what_was_measured(replay, capsys):
    replay(interrupted=True)
    assert main(ARGUMENTS) == 130
    captured = capsys.readouterr()
    assert "draft K=2" in captured.out
    assert captured.err.rstrip().endswith("forerun: interrupted")


def test_ctrl_c_before_anything_was_measured(replay, capsys):
    replay(interrupted=True, is_empty=True)
    assert main(ARGUMENTS) == 130
    assert "tokens/s (95%)" not in capsys.readouterr().out


def test_without_a_package_index_the_shipped_target_is_shown(monkeypatch, capsys):
    def missing(name):
        if name == "zoo:smollm2-135m":
            raise InvalidModel("it could not be downloaded")

    monkeypatch.setattr("forerun.models.catalog.zoo_path", missing)
    assert command.choose_reachable_model("zoo:smollm2-135m") == "zoo:code-40m"
    (line,) = capsys.readouterr().err.splitlines()
    assert "could not be downloaded" in line and "zoo:code-40m" in line
    assert command.choose_reachable_model("zoo:code-40m") == "zoo:code-40m"


def test_an_installed_package_without_a_package_index_says_why(monkeypatch):
    def missing(name):
        found = "could not be downloaded" if name == "zoo:smollm2-135m" else "part of a checkout"
        raise InvalidModel(found)

    monkeypatch.setattr("forerun.models.catalog.zoo_path", missing)
    with pytest.raises(InvalidModel, match="could not be downloaded"):
        command.choose_reachable_model("zoo:smollm2-135m")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_slow(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be created" in capsys.readouterr().err
