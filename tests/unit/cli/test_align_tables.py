from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.measure.judge.judgements import figures, judged

from forerun.cli.align import _at_best_k, print_changes, print_drafts
from forerun.measure.judge import PredictedSpeedup, changes
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.intervals import Interval

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
    assert "K=0" in shown  # which does not pay
    assert "K=2" in shown  # which the other does best at
    assert "1.00 1.00 .67" in shown  # beta of the strong one


def test_changes_are_sentences(capsys):
    print_changes(changes(WEAK, STRONG))
    lines = capsys.readouterr().out.replace("\n", " ")
    assert "tau: 1.33 (1.33–1.33) -> 3.67 (3.67–3.67): higher" in lines
    assert "predicted speedup at this K, [prose]: " in lines


def test_a_best_k_that_loses_says_that_plain_decoding_is_faster():
    slow = PredictedSpeedup(
        num_speculative_tokens=1, best=Interval(estimate=0.84, low=0.8, high=0.9), per_k=()
    )
    assert _at_best_k(slow) == "0.84\nK=1\nplain is\nfaster"
    assert _at_best_k(replace(slow, best=Interval(estimate=1.2, low=1.1, high=1.3))) == "1.20\nK=1"
