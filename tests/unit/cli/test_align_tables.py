from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.align.test_json_files import made
from tests.unit.measure.judge.judgements import figures, judged

from forerun.align.results import JudgedPair
from forerun.cli.align import print_changes, print_drafts, print_report
from forerun.measure.judge import changes
from forerun.theory.cost import CostLine, CostTable

COSTS = CostTable(lines=(CostLine(rows=(1, 4), verify_s=(1.0, 1.2), plain_s=1.0, draft_s=0.4),))
TAGS = ["code", "code", "[prose]", "[prose]"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def draft(accepted, alphas, **changes):
    prompts = [judged(accepted, tag=tag, alphas=alphas) for tag in TAGS]
    return figures(prompts, **({"costs": COSTS} | changes))


WEAK = draft([0, 1, 0], (0.1, 0.3, 0.2, 0.1, 0.2))
STRONG = draft([3, 2, 3], (0.8, 0.9, 0.9, 0.8, 0.7))
GREEDY = draft([1, 0, 1], (1.0, 0.0, 1.0, 1.0, 1.0), temperature=0.0, costs=None)


def test_drafts_are_shown_by_temperature_and_tag(capsys):
    print_drafts({"before": WEAK, "[after]": STRONG, "greedy": GREEDY})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.index("T=1, K=3") < shown.index("before") < shown.index("[after]")
    assert shown.index("[after]") < shown.index("T=0, K=3") < shown.index("greedy")
    assert shown.count("[prose]") == 3  # once per draft
    assert "1.33" in shown  # tau of the weak one
    assert "plain" in shown  # which is faster than this draft at every K
    assert "K=2" in shown  # which the other does best at
    assert "1.00 1.00 .67" in shown  # beta of the strong one


def test_changes_are_sentences(capsys):
    print_changes(changes(WEAK, STRONG))
    lines = capsys.readouterr().out.replace("\n", " ")
    assert "tau: 1.33 -> 3.67: higher" in lines
    assert "predicted speedup at this K, [prose]: " in lines


def test_columns_that_are_empty_everywhere_are_left_out_with_their_legend(capsys):
    prompts = [judged([0, 1, 0]) for _ in TAGS]
    print_drafts({"before": figures(prompts), "after": figures(prompts)})
    shown = capsys.readouterr().out
    assert "tau: tokens per step;\n4-grams: share that is distinct" in shown
    for word in ("alpha", "predicted", "best K"):
        assert word not in shown


@pytest.mark.parametrize(("accepted", "is_useless"), [([0] * 30, True), ([1, 0, 1], False)])
def test_a_report_ends_with_the_next_command_and_says_what_is_of_no_use(
    accepted, is_useless, capsys
):
    found = figures([judged(accepted) for _ in TAGS])
    pair = JudgedPair(before=found, after=found)
    print_report(replace(made(), judged=(pair,)), "the/target")
    shown = capsys.readouterr().out
    assert ("of no use yet: it accepts 0.00 tokens a step" in shown) == is_useless
    assert shown.endswith("forerun bench --model the/target --arms draft@3\n")
