"""`forerun exact`: what it asks for and shows. tests/exact checks the enumeration itself."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.doctor.exact import run as enumeration
from forerun.doctor.exact.run import ExactReport, VerifierResult


def test_json_is_the_report_of_the_enumeration_that_was_asked_for(monkeypatch, capsys):
    report = ExactReport(
        seed=5,
        verifiers=(VerifierResult(name="v", num_pairs=1, num_histories=1, worst_tv=1e-15),),
    )
    asked = []
    monkeypatch.setattr(
        enumeration, "run_enumeration", lambda *given: asked.append(given) or report
    )
    assert main(["exact", "--distributions", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.to_dict()
    assert asked[0][:2] == (2, 0)


@pytest.mark.full
def test_json_reports_every_verifier(capsys):
    assert main(["exact", "--distributions", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert all(row["worst_tv"] <= content["tolerance"] for row in content["verifiers"])


def test_a_biased_verifier_fails(monkeypatch, capsys):
    report = ExactReport(
        seed=0,
        verifiers=(VerifierResult(name="v", num_pairs=1, num_histories=1, worst_tv=1e-9),),
    )
    monkeypatch.setattr(enumeration, "run_enumeration", lambda *_: report)
    assert main(["exact"]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "-3"])
def test_too_few_distributions_are_a_usage_error(number, capsys):
    assert main(["exact", "--distributions", number]) == 2
    assert f"--distributions is {number}" in capsys.readouterr().err
