"""Two steps of trees that the draft model itself draws, every draw enumerated, verified in fp64."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel, TokenStore
from torch import Tensor

from forerun.control.base import Chain, Plan, Tree
from forerun.doctor.exact.trees import reach_probs
from forerun.drafters import tree_growth
from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.draft_model import DraftModel
from forerun.sampling.config import Choice, SamplingParams, TokenSource, resolve_verification
from forerun.sampling.proposal import Proposal, Verdict
from forerun.sampling.tree_rules import tree_weights

VOCAB_SIZE = 3
PROMPT = [1, 0, 2]
FIRST, SECOND = Tree(num_nodes=3, depth=2, width=2), Tree(num_nodes=2, depth=1, width=2)
HORIZON = 5
Result = TypeVar("Result")
Text = tuple[int, ...]

pytestmark = pytest.mark.usefixtures("unchecked")


class Script:
    """Draws in a given order of outcomes; those behind the end take the first possible one."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.taken: list[tuple[int, int]] = []
        self.prob = 1.0
        self.keys: list[int] = []

    def draw(self, weights: Tensor, keys: Tensor) -> Tensor:
        """Stands for `noise.draw`; `keys` come from the identity in place of `noise.uniform`."""
        drawn = []
        for row, key in zip(weights.tolist(), keys.tolist(), strict=True):
            possible = [token for token, weight in enumerate(row) if weight > 0]
            if key == 0 or not possible:  # padding, or nothing is left to draw
                drawn.append(0)
                continue
            self.keys.append(key)
            at = len(self.taken)
            index = self.choices[at] if at < len(self.choices) else 0
            self.taken.append((index, len(possible)))
            self.prob *= row[possible[index]] / sum(row)
            drawn.append(possible[index])
        return torch.tensor(drawn)


def outcomes(
    run: Callable[[], Result], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Script, Result]]:
    """Run a function once per outcome of its draws."""
    choices: list[int] = []
    while True:
        script = Script(choices)
        monkeypatch.setattr(tree_growth, "draw", script.draw)
        yield script, run()
        taken = script.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        choices = [index for index, _ in taken[:-1]] + [taken[-1][0] + 1]


def models() -> tuple[TabularModel, TabularModel]:
    """Target and draft in fp64."""
    target = tiny.tabular(0, vocab_size=VOCAB_SIZE)
    draft = tiny.cousin(target, 3)
    return (
        TabularModel(
            log_probs=model.log_probs,
            order=2,
            store=TokenStore(2, tiny.MAX_CONTEXT, max_staged_rows=16),
            dtype=torch.float64,
        )
        for model in (target, draft)
    )


class Sequence:
    """One request of the draft model, which is driven without an engine."""

    def __init__(self, draft: TabularModel, params: SamplingParams) -> None:
        self.drafter = DraftModel(draft, VOCAB_SIZE)
        self.request = DraftRequest(
            request_id="r",
            ids=[*PROMPT],
            num_prompt=len(PROMPT),
            params=params,
            noise_key=77,
            history=None,
            coupled=False,
        )

    def propose(self, shape: Tree | Chain) -> Proposal:
        plan = Plan(method="draft_model", shape=shape)
        (proposal,) = self.drafter.propose([self.request], [plan])
        assert proposal is not None
        return proposal

    def commit(self, proposal: Proposal, path: tuple[int, ...], text: Text) -> None:
        """Let the step end with this verdict."""
        before = len(self.request.ids)
        self.request.ids.extend(text)
        sources = (TokenSource.ACCEPTED,) * len(path) + (TokenSource.RECOVERED,)
        verdict = Verdict(path=path, tokens=text, sources=sources, expected_accepted=0.0)
        outcome = StepOutcome(
            request=self.request,
            first_row=before - 1,
            num_rows=1 + len(path),
            verdict=verdict,
            proposal=proposal,
        )
        self.drafter.observe([outcome])


def emitted(
    target: TabularModel, ids: list[int], proposal: Proposal, params: SamplingParams
) -> Iterator[tuple[tuple[int, ...], Text, float]]:
    """Every accepted path and emitted text with its probability, given what was drafted."""
    tree, tokens = proposal.tree, proposal.tokens.tolist()
    rule = resolve_verification(params, proposal.choice, is_chain=tree.is_chain)
    assert rule == "traversal"
    paths = {node: tree.path(node) for node in range(-1, len(tokens))}
    rows = [target.probs(ids + [tokens[n] for n in paths[node]]) for node in paths]
    drafted = proposal.tokens[None]
    weights = tree_weights(tree, torch.stack(rows)[None], proposal.draft_probs[None], drafted)
    final = weights.final / weights.final.sum(-1, keepdim=True)
    for node, prob in reach_probs(tree, weights.accept).items():
        row = final[0, node + 1].tolist()
        accepted = tuple(tokens[n] for n in paths[node])
        for token, share in enumerate(row):
            if share > 0:
                yield paths[node], (*accepted, token), float(prob) * share


def distance(target: TabularModel, texts: dict[Text, float]) -> float:
    """Total variation to the target, both continued by it to the same length."""
    total = 0.0
    for whole in itertools.product(range(VOCAB_SIZE), repeat=HORIZON):
        rest = [float(target.probs([*PROMPT, *whole[:at]])[whole[at]]) for at in range(HORIZON)]
        found = sum(texts.get(whole[:at], 0.0) * math.prod(rest[at:]) for at in range(HORIZON + 1))
        total += abs(found - math.prod(rest))
    return total / 2


@pytest.fixture(autouse=True)
def _keys_for_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_growth, "uniform", lambda keys: keys)


PARAMS = {
    "traversal": SamplingParams(),
    "tempered": SamplingParams(temperature=0.6, verification="traversal"),
}


def two_steps(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> dict[Text, float]:
    """Probability of every text of two steps.

    First steps with the same text and path leave the drafter in the same state; the second step is
    enumerated behind one of them.
    """
    target, draft = models()
    target = tempered(target, params)

    def first_step() -> tuple[Sequence, Proposal]:
        draft.store = TokenStore(2, tiny.MAX_CONTEXT, max_staged_rows=16)
        sequence = Sequence(draft, params)
        return sequence, sequence.propose(FIRST)

    states: dict[tuple[tuple[int, ...], Text], tuple[float, list[int]]] = {}
    for script, (_, proposal) in outcomes(first_step, monkeypatch):
        for path, text, prob in emitted(target, PROMPT, proposal, params):
            taken = [index for index, _ in script.taken]
            mass, kept = states.get((path, text), (0.0, taken))
            states[path, text] = mass + prob * script.prob, kept
    assert len(states) > 2 * VOCAB_SIZE
    texts: dict[Text, float] = defaultdict(float)
    for (path, text), (mass, taken) in states.items():

        def second_step(
            path: tuple[int, ...] = path, text: Text = text, taken: list[int] = taken
        ) -> Proposal:
            following = tree_growth.draw
            before = Script(taken)
            monkeypatch.setattr(tree_growth, "draw", before.draw)
            sequence, proposal = first_step()
            sequence.commit(proposal, path, text)
            monkeypatch.setattr(tree_growth, "draw", following)
            drafted = sequence.propose(SECOND)
            assert not set(before.keys) & set(following.__self__.keys), "a key decides twice"
            return drafted

        for script, proposal in outcomes(second_step, monkeypatch):
            ids = [*PROMPT, *text]
            for _, more, prob in emitted(target, ids, proposal, params):
                texts[*text, *more] += mass * script.prob * prob
    return texts


def tempered(target: TabularModel, params: SamplingParams) -> TabularModel:
    """The target at the request's temperature."""
    log_probs = (target.log_probs / params.temperature).log_softmax(-1)
    return TabularModel(log_probs=log_probs, order=2, store=target.store, dtype=torch.float64)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_two_steps_keep_the_distribution(params, monkeypatch):
    texts = two_steps(params, monkeypatch)
    assert sum(texts.values()) == pytest.approx(1, abs=1e-12)
    target, _ = models()
    assert distance(tempered(target, params), texts) <= 1e-12
    lengths = {len(text) for text in texts}
    assert lengths <= {2, 3, 4, 5}
    assert len(lengths) > 1


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_most_likely_tokens_that_are_called_drawn_are_caught(params, monkeypatch):
    """The rows that come with them are those of the draft, but nothing was drawn."""
    target, draft = models()
    target = tempered(target, params)
    monkeypatch.setattr(tree_growth, "draw", lambda weights, keys: weights.argmax(-1))
    proposal = Sequence(draft, params).propose(FIRST)
    texts: dict[Text, float] = defaultdict(float)
    for _, text, prob in emitted(target, PROMPT, proposal, params):
        texts[text] += prob
    assert distance(target, texts) > 1e-3


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(verification="walk")]
)
def test_deterministic_trees_draw_nothing(params, monkeypatch):
    def draw(weights: Tensor, keys: Tensor) -> Tensor:
        raise AssertionError("a deterministic tree was drawn")

    monkeypatch.setattr(tree_growth, "draw", draw)
    _, draft = models()
    proposal = Sequence(draft, params).propose(FIRST)
    assert proposal.choice is Choice.DETERMINISTIC
    assert proposal.draft_probs is None
    assert not proposal.tree.is_chain
