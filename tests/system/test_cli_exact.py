"""`forerun exact`: what it asks for and shows. tests/exact checks the enumeration itself."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.doctor.exact import run as enumeration
from forerun.doctor.exact.run import ExactReport, PlantedResult, VerifierResult


def test_json_is_the_report_of_the_enumeration_that_was_asked_for(monkeypatch, capsys):
    report = ExactReport(
        seed=5,
        verifiers=(VerifierResult(name="v", num_pairs=1, num_histories=1, worst_tv=1e-15),),
        planted=(PlantedResult(name="p", num_pairs=1, worst_tv=0.1),),
    )
    asked = []
    monkeypatch.setattr(
        enumeration, "run_enumeration", lambda *given: asked.append(given) or report
    )
    assert main(["exact", "--distributions", "2", "--seed", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.to_dict()
    assert asked[0][:2] == (2, 5)


@pytest.mark.full
def test_json_reports_every_verifier_and_planted_bug(capsys):
    assert main(["exact", "--distributions", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert all(row["worst_tv"] <= content["tolerance"] for row in content["verifiers"])
    assert len(content["planted"]) >= 5
    assert all(row["caught"] for row in content["planted"])


@pytest.mark.parametrize(
    ("worst_tv", "planted_tv", "word"), [(1e-9, 0.1, "NOT EXACT"), (0.0, 0.0, "MISSED")]
)
def test_a_biased_verifier_or_a_missed_bug_fails(worst_tv, planted_tv, word, monkeypatch, capsys):
    report = ExactReport(
        seed=0,
        verifiers=(VerifierResult(name="v", num_pairs=1, num_histories=1, worst_tv=worst_tv),),
        planted=(PlantedResult(name="p", num_pairs=1, worst_tv=planted_tv),),
    )
    monkeypatch.setattr(enumeration, "run_enumeration", lambda *_: report)
    assert main(["exact"]) == 1
    assert word in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "-3"])
def test_too_few_distributions_are_a_usage_error(number, capsys):
    assert main(["exact", "--distributions", number]) == 2
    assert f"--distributions is {number}" in capsys.readouterr().err
