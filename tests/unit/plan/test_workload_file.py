"""Workload files: read whole, or refused with what is wrong where."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from forerun.errors import InvalidRequest
from forerun.plan.simulation.config import Phase, SimulatedServerConfig, Slo, Workload
from forerun.plan.simulation.kinds import (
    AcceptancePart,
    Constant,
    Drifting,
    Fixed,
    Lognormal,
    Mixed,
    PerPosition,
    Poisson,
)
from forerun.plan.simulation.workload_file import load_workload, workload_from

TEXT = """
requests: 100
arrivals: {kind: poisson, rate_per_s: 2}
prompt_tokens: 64
output_tokens: {kind: lognormal, median: 100, sigma: 0.5, most: 400}
phases:
  - {name: good, share: 0.25, acceptance: {kind: per-position, beta: [0.8, 0.5]}}
  - share: 0.75
    acceptance:
      kind: mixed
      parts:
        - {tag: code, weight: 1, acceptance: {kind: constant, alpha: 0.7}}
        - {tag: prose, weight: 2, acceptance: {kind: drifting, start: 0.5, end: 0.2}}
temperature: 1
server: {max_batch: 16, max_k: 5, max_prefill_rows: 128}
slo: {ttft_s: 0.5, tpot_s: 0.03}
"""
EXPECTED = Workload(
    requests=100,
    arrivals=Poisson(rate_per_s=2),
    prompt_tokens=Fixed(tokens=64),
    output_tokens=Lognormal(median=100, sigma=0.5, most=400),
    phases=(
        Phase(name="good", share=0.25, acceptance=PerPosition(beta=(0.8, 0.5))),
        Phase(
            share=0.75,
            acceptance=Mixed(
                parts=(
                    AcceptancePart(tag="code", weight=1, acceptance=Constant(alpha=0.7)),
                    AcceptancePart(tag="prose", weight=2, acceptance=Drifting(start=0.5, end=0.2)),
                )
            ),
        ),
    ),
    temperature=1,
    server=SimulatedServerConfig(max_batch=16, max_k=5, max_prefill_rows=128),
    slo=Slo(ttft_s=0.5, tpot_s=0.03),
)
SMALL = {
    "requests": 3,
    "output_tokens": 10,
    "acceptance": {"kind": "constant", "alpha": 0.5},
}


def test_every_part_is_read(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text(TEXT)
    assert load_workload(path) == EXPECTED


def test_one_acceptance_is_a_phase_of_its_own():
    assert workload_from(SMALL, "w").phases == (Phase(share=1.0, acceptance=Constant(alpha=0.5)),)


def put(place, value):
    content = copy.deepcopy(SMALL)
    inner = content
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"w is \[\]; it must be names and values"),
        ({"requests": 3}, "w lacks output_tokens"),
        (put(["request"], 3), "w has no field 'request'; did you mean requests"),
        (put(["requests"], 0), "w: requests is 0"),
        (put(["requests"], 10**9), "requests is 1000000000"),
        (put(["requests"], "many"), "requests is 'many'"),
        (put(["arrivals"], {"kind": "hourly"}), "arrivals has kind 'hourly'; use one of together"),
        (put(["arrivals"], {"kind": "poisson"}), "arrivals lacks rate_per_s"),
        (put(["arrivals"], {"kind": "poisson", "rate_per_s": 0}), "rate_per_s is 0"),
        (put(["arrivals"], {"kind": "poisson", "rate_per_s": "x"}), "rate_per_s is 'x'"),
        (put(["arrivals"], {"kind": "bursty", "rate_per_s": 1, "burst": 0.5}), "burst is 0.5"),
        (put(["arrivals"], {"kind": "recorded", "times_s": [0, 1]}), "2 arrivals are recorded"),
        (put(["arrivals"], {"kind": "recorded", "times_s": [0, 2, 1]}), "arrival 3 at 1 s is bef"),
        (put(["arrivals"], {"kind": "recorded", "times_s": [0, 1, -1]}), "arrival 3 is at -1 s"),
        (
            put(["arrivals"], {"kind": "recorded", "times_s": [0, 1, float("inf")]}),
            "arrival 3 is at inf",
        ),
        (put(["output_tokens"], 0), "output_tokens: tokens is 0"),
        (put(["output_tokens"], {"kind": "lognormal", "median": 9, "sigma": 1}), "lacks most"),
        (put(["output_tokens"], {"kind": "uniform", "least": 5, "most": 4}), "most is 4"),
        (put(["output_tokens"], {"kind": "listed", "values": []}), "a list of lengths is empty"),
        (put(["output_tokens"], 5000), "would never finish"),
        (put(["acceptance", "alpha"], 1.5), "acceptance: alpha is 1.5"),
        (put(["acceptance"], {"kind": "per-position", "beta": [0.5, 0.6]}), "position 2 is 0.6"),
        (put(["acceptance"], {"kind": "clustered", "alpha": 0.9, "spread": 0.1}), "at most 0.058"),
        (put(["acceptance"], {"kind": "mixed", "parts": []}), "a mixture has no parts"),
        (put(["acceptance"], {"kind": "mixed", "parts": 3}), "parts is 3; it must be a list"),
        (
            put(["phases"], [{"share": 0.5, "acceptance": SMALL["acceptance"]}])
            | {"acceptance": SMALL["acceptance"]},
            "give acceptance, or phases",
        ),
        (put(["server"], {"max_batch": 64, "max_step_rows": 100}), "max_step_rows is 100"),
        (put(["server"], {"max_batch": 0}), "max_batch is 0"),
        (put(["slo"], {"tpot_s": 0}), "tpot_s is 0"),
        (put(["slo"], []), "slo is "),
        (
            put(["output_tokens"], 3900) | {"requests": 1_000_000},
            "too many to simulate",
        ),
    ],
)
def test_what_is_wrong_is_named(content, message):
    with pytest.raises(InvalidRequest, match=message):
        workload_from(content, "w")


def test_shares_add_up():
    acceptance = SMALL["acceptance"]
    phases = [{"share": share, "acceptance": acceptance} for share in (0.5, 0.4)]
    content = {"requests": 3, "output_tokens": 10, "phases": phases}
    with pytest.raises(InvalidRequest, match=r"add up to 0\.9"):
        workload_from(content, "w")


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        load_workload(tmp_path / "none.yaml")
    path = tmp_path / "w.yaml"
    path.write_text("requests: [1, ")
    with pytest.raises(InvalidRequest, match="is not YAML"):
        load_workload(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="is not YAML"):
        load_workload(path)


def test_nothing_in_a_file_is_run(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text("requests: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(InvalidRequest, match="is not YAML"):
        load_workload(path)


DEEP = "phases: " + "[" * 100_000
ALIASES = "a: &a [x, x]\nb: &b [*a, *a]\nrequests: [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "aliases"),
        (DEEP, "deep|levels|more than"),
        ("requests: 2024-13-45\n", "not YAML"),
        ("? [a, b]\n: 1\n", "not YAML|names and values"),
        ("requests: " + "1" * 5000, "digits|not YAML|malformed|must be"),
    ],
)
def test_hostile_files_are_refused_with_a_sentence(tmp_path, text, message):
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        load_workload(path)


def test_a_device_is_no_workload():
    with pytest.raises(InvalidRequest, match="/dev/zero"):
        load_workload(Path("/dev/zero"))
