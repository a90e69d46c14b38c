"""A draft on trial: what it would reach in service, and that no text notices it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from tests import heads, tiny

from forerun.drafters.draft_model import DraftModel
from forerun.engine import shadow as shadow_module
from forerun.engine.shadow import OpenChain, RequestTally, ShadowDraft, score_token
from forerun.sampling.config import SamplingParams

K = 3
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 7}
SAMPLED = {"temperature": 1.0, "seed": 7, "verification": "block"}
KINDS = pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, SAMPLED], ids=["greedy", "seeded", "sampled"]
)
OFTEN = 1e9


def models(scale=2.0):
    """A table of the target, a draft close to it, and one far from it."""
    target = tiny.tabular(0, scale=scale)
    return target, tiny.cousin(target, 1, scale=0.25 * scale), tiny.cousin(target, 2, scale=3.0)


def seed_of(params, number):
    return {"seed": params["seed"] + number} if "seed" in params else {}


def run(engine, params, number=24, max_tokens=24):
    generator = torch.Generator().manual_seed(11)
    prompts = torch.empty(number, 4).random_(1, 8, generator=generator).long().tolist()
    given = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{**params, **seed_of(params, n)})
        for n in range(number)
    ]
    return [output.token_ids for output in engine.generate(prompts, given)]


def trial(engine, drafter, share=OFTEN):
    shadow = ShadowDraft(drafter, engine.target.vocab_size, K, share)
    engine.observers.append(shadow)
    return shadow


class Starts:
    """Notes the last tokens of every sequence after each step, and how many may follow."""

    is_required = True
    wants_logits = False

    def __init__(self):
        self.seen = []

    def observe(self, step):
        for entry in step.emitting:
            sequence = entry.sequence
            if sequence.stop is None and sequence.max_new > 1:
                self.seen.append((tuple(sequence.ids[-2:]), min(K, sequence.max_new - 1)))


def expected_sums(target, draft, starts):
    """Sums over all starts of the chance to reach each position, and to be accepted there."""
    reached, accepted = [0.0] * K, [0.0] * K
    for context, depth in starts:
        states = {context: 1.0}
        for position in range(depth):
            following = {}
            reached[position] += sum(states.values())
            for (_, last), chance in states.items():
                state = target.state_of((_, last))
                least = torch.minimum(target.log_probs[state].exp(), draft.log_probs[state].exp())
                for token, share in enumerate(least.tolist()):
                    key = (last, token)
                    following[key] = following.get(key, 0.0) + chance * share
            accepted[position] += sum(following.values())
            states = following
    return reached, accepted


def tables(seed, vocab_size=3):
    """The distributions of three tokens, each by the tokens before it."""
    generator = torch.Generator().manual_seed(seed)
    paths = [path for depth in range(K) for path in product(range(vocab_size), repeat=depth)]
    drawn = torch.empty(len(paths), vocab_size).normal_(generator=generator)
    return dict(zip(paths, (1.5 * drawn).softmax(-1), strict=True))


def chance_of(path, table):
    return math.prod(float(table[path[:place]][token]) for place, token in enumerate(path))


def test_scores_of_drawn_chains_are_unbiased_by_enumeration():
    """Over all chains and all texts, which are independent: positions 2 and 3 as the first."""
    target, draft, tally = tables(1), tables(2), RequestTally()
    for drawn in product(range(3), repeat=K):
        probs = torch.stack([draft[drawn[:place]] for place in range(K)])
        for text in product(range(3), repeat=K):
            weight = chance_of(drawn, draft) * chance_of(text, target)
            chain = OpenChain(tokens=[*drawn], start=0, probs=probs, weight=weight)
            place = 0
            while score_token(chain, tally, text, target[text[:place]]):
                place += 1
    survival, states = [1.0], {(): 1.0}
    for _ in range(K):
        states = {
            (*path, token): chance * float(torch.minimum(target[path], draft[path])[token])
            for path, chance in states.items()
            for token in range(3)
        }
        survival.append(sum(states.values()))
    assert tally.weights == pytest.approx(survival[:-1], rel=1e-5)
    assert tally.accepted == pytest.approx(survival[1:], rel=1e-5)


@pytest.mark.parametrize("has_draft", [False, True])
def test_drawn_chains_are_scored_on_the_passes_of_the_target(has_draft):
    target, near, far = models(4.0)  # sharp, so that few chains are weighed much
    engine = tiny.engine_over(target, tiny.drafting(far, 8) if has_draft else None, k=K)
    starts = Starts()
    engine.observers.append(starts)
    shadow = trial(engine, tiny.drafting(near, 8))
    run(engine, SAMPLED, number=80)
    tallies = [tally for tally in shadow.tallies.values() if tally.weights]
    assert shadow.num_ended == len(tallies) == 80
    found = [
        [sum(t.weights[i] for t in tallies if len(t.weights) > i) for i in range(K)],
        [sum(t.accepted[i] for t in tallies if len(t.accepted) > i) for i in range(K)],
    ]
    for sums, expected in zip(found, expected_sums(target, near, starts.seen), strict=True):
        assert sums == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_that_is_in_service_too_is_scored_as_it_is_accepted(params):
    """Chains that equal the text as far as they are accepted: the very counts."""
    target, near, _ = models()
    engine = tiny.engine_over(target, tiny.drafting(near, 8), k=K)
    _, again, _ = models()
    shadow = trial(engine, tiny.drafting(again, 8))
    run(engine, params)
    stats, tallies = engine.stats(), [*shadow.tallies.values()]
    # Both draft after every step; a stop may cut the last chain of the text.
    accepted = sum(sum(tally.accepted) for tally in tallies)
    assert 0 <= stats.num_accepted - accepted < len(tallies)
    assert sum(tally.weights[0] for tally in tallies) > stats.num_drafted / K - len(tallies)


class Twins:
    """Compares what is verified with what the trial proposed after the step before."""

    is_required = True
    wants_logits = False

    def __init__(self, shadow):
        self.shadow = shadow
        self.num_compared = 0

    def observe(self, step):
        for entry in step.emitting:
            if entry.proposal is not None:
                _, tokens, _ = self.shadow._shadowed[entry.sequence.key].latest
                assert tokens == entry.proposal.tokens.tolist()
                self.num_compared += 1


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_twin_of_the_draft_in_service_proposes_the_same(kind, params):
    """It reads the same rows and features, although nothing of it is verified."""
    target = tiny.adapted(tiny.network(num_layers=4))
    if kind == "head":
        head = heads.eagle3_head(target, draft_vocab_size=tiny.VOCAB_SIZE)
        served, twin = (heads.eagle3_drafter(target, head) for _ in range(2))
    else:
        served, twin = (
            tiny.drafting(tiny.adapted(tiny.network(jitter=0.02, num_layers=4))) for _ in range(2)
        )
    engine = tiny.engine_over(target, served, k=K)
    twins = Twins(None)
    engine.observers.append(twins)
    twins.shadow = trial(engine, twin)
    run(engine, params, number=6)
    assert twins.shadow.failure is None
    assert twins.num_compared >= engine.stats().num_drafted / K > 20


@KINDS
@pytest.mark.parametrize("method", ["model", "broken"])
def test_texts_do_not_depend_on_a_trial(params, method):
    target, near, far = models()
    without = run(tiny.engine_over(target, tiny.drafting(near, 8), k=K), params)
    target, near, far = models()
    engine = tiny.engine_over(target, tiny.drafting(near, 8), k=K)
    drafter = tiny.drafting(far, 8) if method == "model" else Broken(far, 8)
    shadow = trial(engine, drafter)
    assert run(engine, params) == without
    assert (shadow.failure is None) == (method == "model")
    assert engine.observers == [shadow]


class Broken(DraftModel):
    """Raises after a few drafts."""

    num_left = 3

    def propose(self, requests, plans):
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("broken")
        return super().propose(requests, plans)


def test_a_trial_takes_its_share_of_the_time_of_steps(monkeypatch):
    """With a clock that only drafting moves: a step takes 1.3 ms, a draft on trial 2 ms."""
    now = [0.0]
    monkeypatch.setattr(shadow_module.time, "monotonic", lambda: now[0])
    target, near, far = models()
    engine = tiny.engine_over(target, tiny.drafting(far, 8), k=K)
    slow = Slow(near, 8)
    slow.now = now
    shadow = trial(engine, slow, share=0.1)
    run(engine, GREEDY, number=60)
    num_steps = engine.stats().num_steps
    assert shadow.failure is None
    # One burst of two drafts may be paid afterwards.
    assert 0.05 * 0.0013 * num_steps < shadow.spent.seconds <= 0.1 * 0.0013 * num_steps + 0.004
    without = tiny.engine_over(target, tiny.drafting(far, 8), k=K)
    assert without.observers == []


class Slow(DraftModel):
    def propose(self, requests, plans):
        self.now[0] += 0.002
        return super().propose(requests, plans)
