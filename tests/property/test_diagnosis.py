"""More true evidence does not move the answer away from the cause that is there.

`lab-facts.jsonl` holds what the readers and the probe found in runs of the fault laboratory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from forerun.doctor.diagnosis import CAUSES, diagnose, score_causes
from forerun.doctor.evidence import Evidence, merge
from forerun.doctor.readers.sources import read_facts

FACTS = Path(__file__).parents[1] / "unit/doctor/data/lab-facts.jsonl"
UNSEEN = {"head reads other layers", "head with a wrong flag"}
"""Faults too small for the probe: they leave no mark in any fact (benchmarks/faults)."""
NUM_SUBSETS = 12
MOST_WORSE = 0.02


def evidence_of(facts: Mapping[str, object]) -> Evidence:
    return read_facts({"forerun_facts": 1, "facts": facts}, "test")


def rank(evidence: Evidence, label: str) -> int:
    """Return how many causes come before the true one."""
    evidence = diagnose(evidence).evidence
    return [item.cause.label for item in score_causes(evidence, CAUSES.values())].index(label)


def test_the_rest_of_the_evidence_seldom_makes_the_true_cause_come_later():
    chance = random.Random(0)
    num_pairs = num_worse = 0
    for line in FACTS.read_text().splitlines():
        run = json.loads(line)
        if run["run"].replace("-", " ") in UNSEEN:
            continue
        found = merge(evidence_of(run["trace"]), evidence_of(run["probe"]))
        every = {fact.name: fact for fact in found}
        order = rank(found, run["label"])
        for _ in range(NUM_SUBSETS):
            share = chance.uniform(0.1, 0.95)
            some = {name: fact for name, fact in every.items() if chance.random() < share}
            num_pairs += 1
            num_worse += order > rank(Evidence(facts=some), run["label"])
    assert num_pairs > 300
    assert num_worse <= MOST_WORSE * num_pairs, f"{num_worse} of {num_pairs}"


LOG_FACTS = {
    "num_drafts": 1200,
    "num_drafted": 6000,
    "num_accepted": 480,
    "acceptance_length": 1.4,
    "tokens_per_s": 240,
    "batch": 1,
}


@pytest.mark.parametrize("more", [{}, {"tokens_per_s_plain": 310}, {"tokens_per_s_plain": 200}])
def test_a_plain_rate_beside_low_acceptance_keeps_the_cause(more: Mapping[str, object]):
    found = diagnose(evidence_of({**LOG_FACTS, **more}))
    assert found.verdict == "problem"
    assert found.causes[0].scored.cause.label == "low_alignment"
