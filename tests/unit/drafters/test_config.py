"""Drafters by name."""

from __future__ import annotations

import pytest
from tests import tiny

from forerun.drafters import registry
from forerun.drafters.config import METHODS, NamedDrafter, parse_drafter
from forerun.drafters.registry import (
    build_drafter,
    find_checkpoint,
    register_checkpoint,
    resolve,
)
from forerun.drafters.suffix import SuffixDrafter
from forerun.errors import InvalidRequest
from forerun.measure.bench.config import parse_arms


def test_every_function_of_a_row_is_there():
    for row in METHODS:
        for function in (row.build, row.check, row.matches, row.load):
            assert function is None or callable(resolve(function))
        assert (row.matches is None) == (row.load is None) != (row.build is None)


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [("suffix", "suffix", ""), ("suffix:9", "suffix", "9"), ("self:4", "self", "4")],
)
def test_names_and_arguments(text, name, argument):
    assert parse_drafter(text) == NamedDrafter(name=name, argument=argument)


@pytest.mark.parametrize("text", ["zoo:code-2m", "./suffix", "org/self", "suffixes", "selfish:1"])
def test_models_are_no_drafters(text):
    assert parse_drafter(text) is None


def test_arms_of_a_comparison():
    arms = parse_arms(["suffix@8,16", "self:2@3", "zoo:code-2m@3"])
    assert [(arm.name, arm.draft, arm.ks) for arm in arms] == [
        ("suffix", "suffix", (8, 16)),
        ("self:2", "self:2", (3,)),
        ("code-2m", "zoo:code-2m", (3,)),
    ]


def test_numbers_too_long_to_parse_are_refused():
    with pytest.raises(InvalidRequest, match="there is no draft self:9"):
        build_drafter(NamedDrafter(name="self", argument="9" * 5000), tiny.tabular())


def test_the_type_registered_last_is_tried_first(monkeypatch):
    monkeypatch.setattr(registry, "METHODS", [])
    first, second = (lambda folder, target: SuffixDrafter() for _ in range(2))
    register_checkpoint(lambda config: "heads" in config, first)
    assert find_checkpoint({"heads": 3}) is first
    register_checkpoint(lambda config: config.get("heads") == 3, second)
    assert find_checkpoint({"heads": 3}) is second
    assert find_checkpoint({"heads": 4}) is first
    assert find_checkpoint({"model_type": "llama"}) is None
