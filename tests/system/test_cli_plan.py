"""`forerun plan` from written profiles and traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.profiles import SETUP, profile_of
from tests.records import HEADER, REQUEST, steps

from forerun.cli.main import main
from forerun.measure.profile import write_profile
from forerun.theory.cost import CostLine, CostTable
from forerun.trace.files import open_trace

LINES = tuple(
    CostLine(
        batch=batch,
        context=context,
        rows=(1, 2, 4, 8),
        verify_s=tuple((0.010 + 1e-5 * context) * (1 + 0.02 * batch * n) for n in range(4)),
        plain_s=0.010 + 1e-5 * context,
        draft_s=0.0005,
        overhead_s=(0.0002,),
        plain_error_s=0.0001,
    )
    for batch in (1, 4)
    for context in (64, 512)
)
TABLE = CostTable(lines=LINES)
SLOWER = CostTable(lines=tuple(replace(line, draft_s=0.001) for line in LINES))
PROFILE = profile_of(greedy=TABLE, sampled=SLOWER)


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    return str(path)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    with open_trace(path) as writer:
        writer.add(HEADER)
        for request, accepted in (("a", 4), ("b", 2), ("c", 1)):
            for record in steps(30, num_accepted=accepted, num_emitted=1):
                writer.add(changed(record, request_id=request))
            writer.add(changed(REQUEST, request_id=request, parameters={"temperature": 0.0}))
    return str(path)


def plan(capsys, *arguments):
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, " ".join(captured.err.split())


def planned(capsys, *arguments):
    code, out, err = plan(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_tables_for_people(profile, capsys):
    code, out, _ = plan(capsys, "--profile", profile, "--acceptance", "0.8")
    assert code == 0
    text = " ".join(out.split())
    for words in ("draft with draft, K=", "even at", "accepted / drafted"):
        assert words in text
    assert max(map(len, out[out.index("batch  K") :].split("acceptance is")[0].splitlines())) <= 80


def test_temperature_takes_the_table_of_sampled_drafts(profile, capsys):
    arguments = ("--profile", profile, "--acceptance", "0.8", "--batch", "1", "--max-k", "3")
    greedy = planned(capsys, *arguments, "--temperature", "0")["best"]["cycle_cost"]["estimate"]
    sampled = planned(capsys, *arguments, "--temperature", "0.7")["best"]["cycle_cost"]["estimate"]
    assert sampled - greedy == pytest.approx(3 * 0.0005 / (0.010 + 64e-5))


def test_acceptance_from_a_trace_has_an_error(profile, trace, capsys):
    found = planned(capsys, "--profile", profile, "--trace", trace)
    assert found["acceptance"]["draft"] == pytest.approx([1.0, 2 / 3, 1 / 3, 1 / 3])
    tau = found["best"]["acceptance_length"]
    assert tau["low"] < tau["estimate"] < tau["high"]


def test_drafters_are_compared(profile, tmp_path, capsys):
    other = tmp_path / "other.json"
    setup = replace(SETUP, draft_hash="d9")
    write_profile(replace(PROFILE, draft="big", setup=setup, greedy=SLOWER), other)
    found = planned(
        capsys,
        *("--profile", profile, "--profile", str(other)),
        *("--draft", "draft", "--draft", "big", "--draft", "suffix"),
        *("--acceptance", "draft=0.6", "--acceptance", "big=0.9", "--acceptance", "suffix=.3,.2"),
    )
    assert list(found["curves"]) == ["draft", "big", "suffix"]
    assert found["best"]["draft"] == "big"
    assert len(found["curves"]["suffix"]) == 3
    code, out, _ = plan(
        capsys,
        *("--profile", profile, "--draft", "draft", "--draft", "suffix"),
        *("--acceptance", "draft=0.6", "--acceptance", "suffix=.9"),
    )
    assert code == 0
    assert "draft with suffix" in out


def test_a_drafter_without_a_model_costs_what_the_trace_says(profile, tmp_path, capsys):
    path = tmp_path / "suffix.jsonl"
    with open_trace(path) as writer:
        writer.add(changed(HEADER, draft="suffix", draft_hash=None))
        for record in steps(30, method="suffix", draft_s=0.004, other_s=0.0025):
            writer.add(record)
    arguments = ("--profile", profile, "--draft", "suffix", "--batch", "1")
    traced = planned(capsys, *arguments, "--trace", str(path))["curves"]["suffix"][1]
    free = planned(capsys, *arguments, "--acceptance", "0.9")["curves"]["suffix"][1]
    difference = traced["cycle_cost"]["estimate"] - free["cycle_cost"]["estimate"]
    # 4 tokens are copied in 4 ms; a cycle of the profile has 0.2 ms beside drafting and the pass.
    assert difference == pytest.approx((0.001 + 0.0025 - 0.0002) / (0.010 + 64e-5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a plan needs costs"),
        (
            ("--profile", "PROFILE"),
            "the acceptance of draft is not known: give",
        ),
        (("--profile", "PROFILE", "--acceptance", "1.5"), "1.5 is no probability"),
        (("--profile", "PROFILE", "--acceptance", "0.5,0.7"), "which is impossible"),
        (("--profile", "PROFILE", "--acceptance", "0.5,x"), "'x' is no number"),
        (("--profile", "PROFILE", "--acceptance", "other=0.5"), "the drafters are draft"),
        (("--profile", "PROFILE", "--acceptance", "0.5", "--acceptance", "0.6"), "given twice"),
        (
            ("--profile", "PROFILE", "--draft", "x", "--acceptance", "0.5"),
            "the cost of drafting with x is not known",
        ),
        (("--profile", "PROFILE", "--draft", "self:2", "--acceptance", ".5"), "a trace of it"),
        (("--profile", "PROFILE", "--profile", "PROFILE"), "a second profile with draft draft"),
        (
            ("--profile", "PROFILE", "--draft", "draft", "--draft", "suffix", "--acceptance", ".5"),
            "could be of draft, suffix; give DRAFT=.5",
        ),
        (("--profile", "PROFILE", "--acceptance", ".8", "--slo-tpot", ".0001"), "cannot be kept"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message, profile, capsys):
    code, _, err = plan(capsys, *(profile if word == "PROFILE" else word for word in arguments))
    assert code == 2
    assert message in err


def test_profiles_of_different_machines_are_not_compared(profile, tmp_path, capsys):
    other = tmp_path / "other.json"
    setup = replace(SETUP, cpu="Real 100", draft_hash="d9")
    write_profile(replace(PROFILE, draft="big", setup=setup), other)
    code, _, err = plan(capsys, "--profile", profile, "--profile", str(other))
    assert code == 2
    assert "cpu 'Real 100' instead of 'Imaginary 9000'" in err


@pytest.mark.parametrize(("field", "of"), [("target_hash", "target"), ("draft_hash", "draft")])
def test_acceptance_of_another_pair_is_refused(field, of, tmp_path, trace, capsys):
    path = tmp_path / "p.json"
    write_profile(replace(PROFILE, setup=replace(SETUP, **{field: "zz"})), path)
    code, _, err = plan(capsys, "--profile", str(path), "--trace", trace)
    assert code == 2
    assert f"the trace was made with {field} {getattr(HEADER, field)} ({of})" in err
    assert "acceptance holds for its own pair" in err


def test_an_empty_trace_is_refused(profile, tmp_path, capsys):
    path = tmp_path / "empty.jsonl"
    with open_trace(path) as writer:
        writer.add(HEADER)
    code, _, err = plan(capsys, "--profile", profile, "--trace", str(path))
    assert code == 2
    assert "drafted in none of them" in err


def test_what_could_not_be_read_of_a_trace_is_said(profile, trace, capsys):
    with open(trace, "a") as file:
        file.write("no record\n")
    code, _, err = plan(capsys, "--profile", profile, "--trace", trace)
    assert code == 0
    assert "1 place(s) of the trace" in err


def test_what_is_given_is_not_said_to_be_traced(profile, trace, capsys):
    code, out, _ = plan(
        capsys, "--profile", profile, "--trace", trace, "--acceptance", "0.7", "--json"
    )
    assert code == 0
    assert json.loads(out)["origin"][1:] == ["acceptance of draft: given"]


def test_where_only_small_batches_profit_the_plan_says_so(tmp_path, capsys):
    lines = [line for line in LINES if line.batch == 1]
    crowd = [
        replace(line, batch=4, verify_s=tuple(0.012 * (1 + n) for n in range(4)), plain_s=0.012)
        for line in lines
    ]
    path = tmp_path / "crowd.json"
    write_profile(profile_of(greedy=CostTable(lines=(*lines, *crowd)), sampled=TABLE), path)
    code, out, _ = plan(capsys, "--profile", str(path), "--acceptance", "0.6", "--temperature", "0")
    assert code == 0
    assert "decode plainly at batch 4" in out
    assert "no draft pays there, but" in out
