from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from forerun.errors import InvalidRequest
from forerun.sampling import config
from forerun.sampling.config import Choice, SamplingParams, draft_params, resolve_verification


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("temperature", 1e9),
        ("draft_temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2**31),  # counts are 32-bit integers in the kernels
        ("max_tokens", 2**63),
        ("logprobs", 2**63),
        ("n", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-20),
        ("repetition_penalty", 1e20),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("n", 0),
        ("stop", ("",)),
        ("stop", tuple(map(str, range(65)))),
        ("stop", ("x" * 1025,)),
        ("stop_token_ids", (-1,)),
        ("allowed_token_ids", ()),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: -1000.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value})


def test_the_message_names_value_and_range() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p is 1\.5; it must be .*above 0 and at most 1"):
        SamplingParams(top_p=1.5)


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids is \(1, 2\), all of them in bad_"):
        SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(2, 1, 7))


@pytest.mark.parametrize(
    ("fields", "value", "advice"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5", "raise max_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty", "leave it None"),
        (
            {"allowed_token_ids": tuple(range(20)), "bad_token_ids": tuple(range(20))},
            r"6, 7, \.\.\. 20 in all",
            "take one out of bad_token_ids",
        ),
        ({"stop": ("x",) * 65}, "stop holds 65 strings; it may hold 64", "use stop_token_ids"),
        ({"stop": ("y" * 2000,)}, "a string of 2000 characters; 1024", "stops the text just as"),
        ({"logit_bias": {3: 200}}, r"logit_bias\[3\] is 200", "in bad_token_ids"),
    ],
)
def test_a_refusal_names_the_value_and_what_to_do(
    fields: dict[str, object], value: str, advice: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){value}.*{advice}"):
        SamplingParams(**fields)


@pytest.fixture(scope="module")
def unchecked() -> Iterator[ModuleType]:
    """The module as users run it: under another name, the type checks of the tests pass it by."""
    spec = spec_from_file_location("unchecked_config", config.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", 2.5),
        ("seed", 1.5),
        ("stop", (3,)),
        ("bad_token_ids", ("7",)),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("stop_token_ids", "37"),
        ("bad_token_ids", {3: 1}),
        ("allowed_token_ids", 5),
        ("logit_bias", {"word": 1.0}),
        ("logit_bias", {2.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {3: "much"}),
        ("logit_bias", {3: None}),
        ("logit_bias", {"3": 1.0, 3: 2.0}),
        ("logit_bias", [1.0, 2.0]),
        ("ignore_eos", "yes"),
        ("include_stop_str_in_output", 1),
        ("verification", "fast"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(
    unchecked: ModuleType, field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        unchecked.SamplingParams(**{field: value})


def test_what_json_brings_becomes_what_is_declared(unchecked: ModuleType) -> None:
    params = unchecked.SamplingParams(
        stop="end",
        stop_token_ids=[1],
        bad_token_ids=[2],
        allowed_token_ids=[2, 3],
        logit_bias={"3": 1},
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1,)
    assert params.bad_token_ids == (2,)
    assert params.allowed_token_ids == (2, 3)
    assert params.logit_bias == {3: 1.0}
    nothing = unchecked.SamplingParams(stop=None, stop_token_ids=None, bad_token_ids=None)
    assert nothing == unchecked.SamplingParams()


def test_extremes_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(10**30), n=1)
    SamplingParams(seed=10**400, logit_bias={0: -100, 1: 100}, temperature=1e5)
    SamplingParams(stop=("x" * 1024,) * 64, repetition_penalty=1e-5)
    SamplingParams(repetition_penalty=1e5, stop_token_ids=tuple(range(100_000)))


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"bad_token_ids": (1,)},
        {"min_tokens": 1},
    ],
)
def test_what_needs_a_history(field: dict[str, object]) -> None:
    assert SamplingParams(**field).needs_history
    assert SamplingParams(**field).has_processors


def test_what_needs_none() -> None:
    assert not SamplingParams(top_k=5, top_p=0.5, min_p=0.1, temperature=0.3).needs_history
    assert SamplingParams(top_k=5).has_processors
    assert not SamplingParams(temperature=0.3, top_k=-1).has_processors
    assert SamplingParams(temperature=0).greedy


def test_the_draft_has_its_own_temperature_unless_greedy() -> None:
    params = SamplingParams(temperature=1.0, top_k=7, draft_temperature=0.5)
    assert draft_params(params) == SamplingParams(temperature=0.5, top_k=7, draft_temperature=0.5)
    assert draft_params(SamplingParams(temperature=0.7)).temperature == 0.7
    assert draft_params(SamplingParams(temperature=0, draft_temperature=0.5)).greedy


SAMPLED, COUPLED, FIXED = Choice.SAMPLED, Choice.COUPLED, Choice.DETERMINISTIC


@pytest.mark.parametrize(
    ("fields", "choice", "is_chain", "method"),
    [
        ({}, SAMPLED, True, "block"),
        ({}, SAMPLED, False, "walk"),
        ({}, COUPLED, True, "coupled"),
        ({}, FIXED, True, "walk"),
        ({"seed": 1}, SAMPLED, True, "coupled"),
        ({"seed": 1}, FIXED, False, "walk"),
        ({"temperature": 0, "verification": "block"}, SAMPLED, True, "walk"),
        ({"verification": "block"}, FIXED, False, "walk"),
        ({"verification": "token"}, SAMPLED, True, "token"),
        ({"verification": "block", "seed": 1}, SAMPLED, True, "block"),
        ({"verification": "walk"}, SAMPLED, True, "walk"),
        ({"verification": "coupled"}, SAMPLED, True, "coupled"),
    ],
)
def test_the_verifier_follows_from_parameters_and_proposal(
    fields: dict[str, object], choice: Choice, is_chain: bool, method: str
) -> None:
    assert resolve_verification(SamplingParams(**fields), choice, is_chain=is_chain) == method


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_rule_that_would_not_be_exact_is_refused(rule: str) -> None:
    params = SamplingParams(verification=rule)
    with pytest.raises(InvalidRequest, match=f'"{rule}", which is not exact for a tree'):
        resolve_verification(params, SAMPLED, is_chain=False)
    with pytest.raises(InvalidRequest, match="shares the target's noise"):
        resolve_verification(params, COUPLED)


def test_parameters_load_no_torch() -> None:
    code = "import sys, forerun.sampling.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bias_of_no_token_needs_no_history():
    assert not SamplingParams(logit_bias={}).needs_history
