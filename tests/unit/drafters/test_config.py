"""Drafters by name."""

from __future__ import annotations

import pytest

from forerun.bench.config import BenchConfig, parse_arms
from forerun.drafters.config import DRAFTER_NAMES, NamedDrafter, parse_drafter
from forerun.drafters.named import DRAFTERS


def test_every_name_has_a_drafter():
    assert tuple(DRAFTERS) == DRAFTER_NAMES


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
        ("draft-domain", "zoo:code-2m", (3,)),
    ]
    assert BenchConfig(arms=arms).models == ("zoo:code-11m", "zoo:code-2m")
