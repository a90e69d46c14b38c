"""Workload files: read whole, or refused with what is wrong where."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest

from forerun.errors import InvalidRequest
from forerun.plan.workload import (
    Constant,
    Lognormal,
    Phase,
    Poisson,
    SimulatedServerConfig,
    Slo,
    Uniform,
    Workload,
    load_workload,
    workload_from,
)

TEXT = """
requests = 100
arrivals = {kind = "poisson", rate_per_s = 2}
prompt_tokens = 64
output_tokens = {kind = "lognormal", median = 100, sigma = 0.5, most = 400}
temperature = 1
server = {max_batch = 16, max_k = 5}
slo = {ttft_s = 0.5, tpot_s = 0.03}

[[phases]]
name = "good"
share = 0.25
acceptance = [0.8, 0.5]

[[phases]]
share = 0.75
acceptance = {kind = "constant", alpha = 0.7}
"""
EXPECTED = Workload(
    requests=100,
    arrivals=Poisson(rate_per_s=2),
    prompt_tokens=64,
    output_tokens=Lognormal(median=100, sigma=0.5, most=400),
    phases=(
        Phase(name="good", share=0.25, acceptance=(0.8, 0.5)),
        Phase(share=0.75, acceptance=Constant(alpha=0.7)),
    ),
    temperature=1,
    server=SimulatedServerConfig(max_batch=16, max_k=5),
    slo=Slo(ttft_s=0.5, tpot_s=0.03),
)
SMALL = {
    "requests": 3,
    "output_tokens": 10,
    "acceptance": {"kind": "constant", "alpha": 0.5},
}


def test_every_part_is_read(tmp_path):
    path = tmp_path / "w.toml"
    path.write_text(TEXT)
    assert load_workload(path) == EXPECTED


def test_one_acceptance_is_a_phase_of_its_own():
    assert workload_from(SMALL).phases == (Phase(share=1.0, acceptance=Constant(alpha=0.5)),)


def put(place, value):
    content = copy.deepcopy(SMALL)
    inner = content
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = value
    return content


PHASE = {"share": 1.0, "acceptance": [0.5]}
PHASED = {"requests": 3, "output_tokens": 10}
POISSON = {"kind": "poisson", "rate_per_s": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"requests": 3}, "missing required field `output_tokens`"),
        (put(["request"], 3), "unknown field `request`"),
        (put(["requests"], 0), r"Expected `int` >= 1 - at `\$.requests`"),
        (put(["requests"], 10**9), r"Expected `int` <= 10000000 - at `\$.requests`"),
        (put(["requests"], "many"), r"Expected `int`, got `str` - at `\$.requests`"),
        (put(["requests"], [3]), r"Expected `int`, got `array` - at `\$.requests`"),
        (put(["requests"], {"a": 3}), r"Expected `int`, got `object` - at `\$.requests`"),
        (put(["arrivals"], POISSON | {"kind": "hourly"}), "Invalid value 'hourly'"),
        (put(["arrivals"], POISSON | {"kind": 3}), r"Expected `str`.* at `\$.arrivals.kind`"),
        (put(["arrivals"], POISSON | {"kind": ["poisson"]}), r"at `\$.arrivals.kind`"),
        (put(["arrivals"], POISSON | {"kind": {"poisson": 1}}), r"at `\$.arrivals.kind`"),
        (put(["arrivals"], {"kind": "poisson"}), "missing required field `rate_per_s`"),
        (put(["arrivals"], POISSON | {"rate_per_s": 0}), r"> 0.0 - at `\$.arrivals.rate_per_s`"),
        (put(["arrivals"], POISSON | {"rate_per_s": "x"}), r"at `\$.arrivals.rate_per_s`"),
        (put(["arrivals"], [0, 1]), "2 arrivals are given for 3 requests"),
        (put(["arrivals"], [0, 2, 1]), "arrival 3 is at 1 s, after one at 2 s"),
        (put(["arrivals"], [-1, 0, 1]), "arrival 1 is at -1 s"),
        (put(["arrivals"], [0, 1, float("inf")]), "arrival 3 is at inf"),
        (put(["output_tokens"], 0), r"Expected `int` >= 1 - at `\$.output_tokens`"),
        (put(["output_tokens"], {"kind": "lognormal", "median": 9, "sigma": 1}), "`most`"),
        (put(["output_tokens"], {"kind": "uniform", "least": 5, "most": 4}), "most is 4"),
        (put(["output_tokens"], []), r"length >= 1 - at `\$.output_tokens`"),
        (put(["output_tokens"], [3, 0]), r"Expected `int` >= 1 - at `\$.output_tokens\[1\]`"),
        (put(["output_tokens"], 5000), "would never finish"),
        (put(["acceptance", "alpha"], 1.5), r"<= 1.0 - at `\$.phases\[0\].acceptance.alpha`"),
        (put(["acceptance"], [0.5, 0.6]), "position 2 is 0.6"),
        (put(["acceptance"], []), r"length >= 1 - at `\$.phases\[0\].acceptance`"),
        (
            put(["phases"], [{"share": 0.5, "acceptance": SMALL["acceptance"]}]),
            "unknown field `acceptance`",
        ),
        (PHASED | {"phases": [PHASE | {"name": 3}]}, r"Expected `str`.*phases\[0\].name"),
        (PHASED | {"phases": [PHASE | {"name": ["a"]}]}, r"Expected `str`.*phases\[0\].name"),
        (PHASED | {"phases": [PHASE | {"name": {"a": 1}}]}, r"Expected `str`.*phases\[0\].name"),
        (PHASED | {"phases": PHASE}, r"Expected `array`, got `object` - at `\$.phases`"),
        (put(["server"], {"max_batch": 64, "max_step_rows": 100}), "max_step_rows is 100"),
        (put(["server"], {"max_batch": 0}), r"Expected `int` >= 1 - at `\$.server.max_batch`"),
        (put(["slo"], {"tpot_s": 0}), r"> 0.0 - at `\$.slo.tpot_s`"),
        (put(["slo"], []), "Expected `object`, got `array`"),
        (
            put(["output_tokens"], 3900) | {"requests": 1_000_000},
            "too many to simulate",
        ),
    ],
)
def test_what_is_wrong_is_named(content, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        workload_from(content)


def test_shares_add_up():
    acceptance = SMALL["acceptance"]
    phases = [{"share": share, "acceptance": acceptance} for share in (0.5, 0.4)]
    content = {"requests": 3, "output_tokens": 10, "phases": phases}
    with pytest.raises(msgspec.ValidationError, match=r"add up to 0\.9"):
        workload_from(content)


def test_a_uniform_length_is_read():
    lengths = {"kind": "uniform", "least": 5, "most": 9}
    assert workload_from(SMALL | {"output_tokens": lengths}).output_tokens == Uniform(
        least=5, most=9
    )


ONE_OF = "output_tokens.kind is 'unifrom'; it is one of uniform, lognormal"
AT_MOST = r"phases\[0\].acceptance.alpha is 1.7; it must be a number at most 1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"requests = [1, ", "is not TOML"),
        (b"\xff\xfe\x00", "is not TOML"),
        (b"phases = " + b"[" * 100_000, "is not TOML"),
        (b"requests = " + b"1" * 5000, "is not TOML"),
        (b"requests = 2024-13-45", "is not TOML"),
        (b"requests = 3", r"w.toml cannot be used: .* missing required field `output_tokens`"),
        (b"[[requests]]\na = 1", r"w.toml cannot be used: requests is \[.*a whole number"),
        (b"requests = 3\noutput_tokens = {kind = 'unifrom'}", ONE_OF),
        (b"acceptance = {kind = 'constant', alpha = 1.7}", AT_MOST),
    ],
)
def test_files_that_describe_no_workload_are_refused_with_a_sentence(tmp_path, content, message):
    path = tmp_path / "w.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        load_workload(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/nowhere/w.toml"])
def test_what_is_no_file_is_no_workload(path):
    with pytest.raises(InvalidRequest, match=path):
        load_workload(Path(path))
