"""No noise of a running engine decides twice: sampled drafts, acceptance and final draws.

Frequencies of texts show a shared key only where the bias is large; the keys themselves show all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import tiny

from forerun.drafters import draft_sequence as levels
from forerun.engine import verification
from forerun.sampling.config import SamplingParams
from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.proposal import TokenSource

pytestmark = pytest.mark.usefixtures("unchecked")

Keys = list[int]


@pytest.fixture
def keys_used(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """The keys of all draws that count: padding tests nothing, and one final draw is taken."""
    used: Keys = []
    draw_drafts, verify = levels.uniform, verification.verify_chain_batch

    def drafting(keys):
        used.extend(keys.flatten().tolist())
        return draw_drafts(keys)

    def verifying(target_probs, tokens, chains, rule):
        found = verify(target_probs, tokens, chains, rule)
        for chain, accepted in zip(chains, found.num_accepted, strict=True):
            *tests, recovered, bonus = chain.keys
            used.extend([*tests, recovered if accepted < chain.num_drafted else bonus])
        return found

    monkeypatch.setattr(levels, "uniform", drafting)
    monkeypatch.setattr(verification, "verify_chain_batch", verifying)
    return used


def num_repeated(used: Keys, rule: str) -> int:
    """Keys used again while samples, requests, ragged proposals and plain steps share passes."""
    used.clear()
    target = tiny.tabular(0, vocab_size=4)
    engine = tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 1), 4), k=3)
    params = [
        SamplingParams(seed=seed, n=2, max_tokens=20, ignore_eos=True, verification=rule)
        for seed in (0, 1)
    ]
    outputs = engine.generate([[1, 2], [3]], params)
    sources = {s for o in outputs for c in o.completions for s in c.sources}
    assert sources == set(TokenSource), "something was accepted, something rejected"
    assert len(used) > 100
    return len(used) - len(set(used))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_no_noise_decides_twice(keys_used, rule):
    assert num_repeated(keys_used, rule) == 0


def position_only(key: int, num_committed: int, node: int, purpose: Purpose) -> int:
    return step_key(key, num_committed + node, 0, purpose)


def without_node(key: int, num_committed: int, node: int, purpose: Purpose) -> int:
    return step_key(key, num_committed, 0, purpose)


def without_step(key: int, num_committed: int, node: int, purpose: Purpose) -> int:
    return step_key(key, 0, node, purpose)


def without_sample(key: int, num_committed: int, node: int, purpose: Purpose) -> int:
    return step_key(0, num_committed, node, purpose)


def of_acceptance(key: int, num_committed: int, node: int, purpose: Purpose) -> int:
    return step_key(key, num_committed, node, Purpose.ACCEPT)


@pytest.mark.parametrize(
    "wrong", [position_only, without_node, without_step, without_sample, of_acceptance]
)
def test_wrong_draft_keys_would_show(keys_used, monkeypatch, wrong):
    def step_keys(key: int, num_committed: int, nodes: range, purpose: Purpose) -> list[int]:
        return [wrong(key, num_committed, node, purpose) for node in nodes]

    monkeypatch.setattr(levels, "step_keys", step_keys)
    assert num_repeated(keys_used, "block") > 0


@pytest.mark.parametrize("wrong", ["no step", "no sample", "one test"])
def test_wrong_verification_keys_would_show(keys_used, monkeypatch, wrong):
    right: Callable[[int, int, int], list[int]] = verification.chain_keys

    def chain_keys(key: int, num_committed: int, num_nodes: int) -> list[int]:
        keys = right(
            0 if wrong == "no sample" else key,
            0 if wrong == "no step" else num_committed,
            num_nodes,
        )
        return [keys[0]] * num_nodes + keys[-2:] if wrong == "one test" else keys

    monkeypatch.setattr(verification, "chain_keys", chain_keys)
    assert num_repeated(keys_used, "block") > 0
