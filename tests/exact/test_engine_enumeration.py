"""Two steps of the running engine, enumerated, with a drafter that reads features and draws trees.

Every outcome of the draws is put in place of the noise, under the keys that the engine really asks
for, and weighted with the probabilities that the engine's own rows give it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel, TokenStore, tabular_features
from torch import Tensor

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState, Tree
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.engine import verification
from forerun.engine.engine import Engine
from forerun.sampling import tree_rules
from forerun.sampling.config import SamplingParams
from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.proposal import Choice, Proposal
from forerun.sampling.walk import target_keys, walk
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree, expanded

pytestmark = pytest.mark.usefixtures("unchecked")

PROMPT = [1, 0, 2, 1] * 5  # long enough to be found in the cache
LAYERS = (1, 3)
BATCH = 64
VOCAB_SIZE = 3
NUM_TABLES = 13
FIRST, SECOND = TokenTree((-1, -1, 0)), TokenTree((-1, -1))
HORIZON = 5
CHOICES = (Choice.WITHOUT_REPLACEMENT, Choice.DETERMINISTIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is drawn in one step.

    Attributes:
        drafted: token of every node; of most likely tokens only the drafter decides.
        passed: whether the test of each node passes.
        drawn: the token drawn behind each row; by depth where siblings share their noise.
    """

    drafted: tuple[int, ...] = ()
    passed: tuple[bool, ...] = ()
    drawn: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Run:
    """One sequence with the outcomes that its steps take in turn.

    Attributes:
        outcomes: of the first step, then of the second.
        prob: of all of them together, as far as they have happened.
        text: tokens emitted.
        states: length of the text and accepted path behind every step.
    """

    outcomes: tuple[Outcome, ...]
    prob: float = 1.0
    text: list[int] = field(default_factory=list)
    states: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Noise:
    """The outcomes in place of the noise.

    Attributes:
        by_key: what every key gives, by the engine's own keys; none may be given twice.
        owners: the run that a step's first key belongs to, and the step's tree and tokens.
    """

    by_key: dict[int, float] = field(default_factory=dict)
    owners: dict[int, tuple[Run, TokenTree, list[int]]] = field(default_factory=dict)

    def give(self, key: int, value: float) -> None:
        assert key not in self.by_key, "a noise key decides twice"
        self.by_key[key] = value


class FeatureTrees(Drafter):
    """Draws trees from tables that it chooses by the features of the last row it has seen."""

    method = "feature_trees"
    required_features = LAYERS

    def __init__(self, choice: Choice, noise: Noise) -> None:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(NUM_TABLES, VOCAB_SIZE, generator=generator, dtype=torch.float64)
        self.tables = logits.softmax(-1)
        self.choice = choice
        self.noise = noise
        self.features: dict[str, list[tuple[float, ...]]] = {}
        self.runs: dict[str, Run] = {}
        self.wrong: list[object] = []

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        return [self.proposed(request) for request in requests]

    def proposed(self, request: DraftRequest) -> Proposal | None:
        run = self.runs.get(request.request_id)
        seen = self.features.get(request.request_id, [])
        if seen != [
            row for end in range(1, len(request.ids)) for row in rows_of(request.ids[:end])
        ]:
            self.wrong.append((request.ids, seen))
        if run is None or len(run.states) == len(run.outcomes):
            return None
        step = len(run.states)
        tree, outcome = (FIRST, SECOND)[step], run.outcomes[step]
        mark = int(seen[-1][-1]) + request.ids[-1]
        tokens, rows = self.grown(tree, outcome, mark, run)
        if run.prob == 0:
            return None
        self.arrange(request, run, tree, tokens, outcome)
        return Proposal(
            tokens=torch.tensor(tokens),
            tree=tree,
            choice=self.choice,
            draft_probs=self.stated(torch.stack(rows)) if self.choice.is_drawn else None,
        )

    def stated(self, rows: Tensor) -> Tensor:
        """The rows that the proposal carries."""
        return rows

    def grown(
        self, tree: TokenTree, outcome: Outcome, mark: int, run: Run
    ) -> tuple[list[int], list[Tensor]]:
        """Tokens of all nodes and rows they were drawn from; the run's probability is updated."""
        tokens, rows = [0] * len(tree.parents), []
        for parent in expanded(tree):
            above = [tokens[node] + 1 for node in tree.path(parent)]
            row = self.tables[(mark + 3 * sum(above)) % NUM_TABLES].clone()
            children = tree.children(parent)
            top = row.argsort(descending=True).tolist()
            is_top = self.choice is not Choice.WITHOUT_REPLACEMENT
            for rank, child in enumerate(children):
                if self.choice is Choice.DETERMINISTIC or (is_top and child != children[-1]):
                    tokens[child] = top[rank]
                    row[top[rank]] = 0.0
            if is_top:
                row /= row.sum()
            rows.append(row)
            left = row
            for child in children if not is_top else children[-1:] if self.choice.is_drawn else ():
                tokens[child] = outcome.drafted[child]
                run.prob *= float(left[tokens[child]])
                left = left.clone()
                left[tokens[child]] = 0.0
                left = left / left.sum() if left.any() else left
        return tokens, rows

    def arrange(
        self, request: DraftRequest, run: Run, tree: TokenTree, tokens: list[int], outcome: Outcome
    ) -> None:
        """Put the outcome under the keys that this step must use."""
        key, start, noise = request.noise_key, len(request.ids), self.noise
        if self.choice is Choice.DETERMINISTIC:
            keys = target_keys(key, start, tree)
            noise.owners[keys[0]] = run, tree, tokens
            noise.by_key.update(zip(keys, outcome.drawn, strict=True))
            return
        for node in range(len(tree.parents)):
            noise.give(step_key(key, start, node, Purpose.DRAFT), math.nan)
        tests, finals = tree_rules.tree_keys(key, start, len(tree.parents))
        noise.owners[tests[0]] = run, tree, tokens
        for test, passes in zip(tests, outcome.passed, strict=True):
            noise.give(test, 0.0 if passes else 1.0)
        for final, token in zip(finals, outcome.drawn, strict=True):
            noise.give(final, token)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        for outcome in outcomes:
            seen = self.features.setdefault(outcome.request_id, [])
            if len(seen) != len(LAYERS) * outcome.first_row:
                self.wrong.append((outcome.first_row, len(seen)))
            assert outcome.features is not None
            seen += [tuple(layer) for row in outcome.features.tolist() for layer in row]
            run = self.runs.get(outcome.request_id)
            if run is not None and outcome.verdict is not None:
                run.text += outcome.verdict.tokens
                run.states.append((len(run.text), outcome.verdict.path))

    def forget(self, request_id: str) -> None:
        self.features.pop(request_id, None)


def rows_of(ids: Sequence[int]) -> list[tuple[float, ...]]:
    return [tabular_features(ids, layer) for layer in LAYERS]


class Lying(FeatureTrees):
    """Hands in rows that are flatter than those it draws from."""

    def stated(self, rows: Tensor) -> Tensor:
        flat = rows.sqrt()
        return flat / flat.sum(-1, keepdim=True)


class AlwaysTrees(Controller):
    """Plans the largest tree of this module at every step."""

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        return Decision(
            [Plan(method="feature_trees", shape=Tree(num_nodes=3, depth=2, width=2))] * len(states)
        )

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Nothing changes."""


def tree_prob(
    tree: TokenTree,
    weights: tree_rules.TreeWeights,
    tests: Sequence[float],
    finals: Sequence[float],
    path: tuple[int, ...],
) -> float:
    """Probability of the outcome of the tests and of the final draws that are read."""
    prob, passed = 1.0, [noise == 0.0 for noise in tests]
    for node in tree_rules.post_order(tree):
        accept = float(weights.accept[0, node])
        prob *= accept if passed[node] else 1 - accept
        if passed[node]:
            break  # the other tests decide nothing
    last = (-1, *path)[-1]
    final = weights.final[0, last + 1]
    return prob * float(final[int(finals[last + 1])] / final.sum())


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Noise:
    """Outcomes instead of noise, in the very places where the engine draws."""
    noise = Noise()
    verify = verification.verify_trees

    def uniform(keys: Tensor) -> Tensor:
        return torch.tensor([noise.by_key[key] for key in keys.tolist()], dtype=torch.float64)

    def verifying(trees, target_probs, draft_probs, tokens, keys):
        found = verify(trees, target_probs, draft_probs, tokens, keys)
        row = 0
        for tree, drafted, own_keys, outcome in zip(trees, draft_probs, keys, found, strict=True):
            own = slice(row, row := row + len(tree.parents) + 1)
            weights = tree_rules.tree_weights(
                tree,
                target_probs[own][None],
                drafted[None],
                tokens[own][None, 1:],
            )
            run, _, _ = noise.owners[own_keys[0][0]]
            tests, finals = ([noise.by_key[key] for key in part] for part in own_keys)
            run.prob *= tree_prob(tree, weights, tests, finals, outcome.path)
        return found

    def target_tokens(probs, keys):
        drawn = [int(noise.by_key.get(key, 0)) for key in keys.tolist()]
        for row, key in enumerate(keys.tolist()):
            if key in noise.owners:
                run, tree, tokens = noise.owners[key]
                path, _ = walk(tree, tokens, drawn[row : row + 1 + len(tokens)])
                reached = [row, *(row + 1 + node for node in path)]
                run.prob *= math.prod(float(probs[at, drawn[at]]) for at in reached)
                run.prob /= VOCAB_SIZE ** (max(tree.depths) + 1 - len(reached))
        return torch.tensor(drawn)

    monkeypatch.setattr(tree_rules, "uniform", uniform)
    monkeypatch.setattr(tree_rules, "draw", lambda rows, drawn: drawn.long())
    monkeypatch.setattr(verification, "verify_trees", verifying)
    monkeypatch.setattr(verification, "target_tokens", target_tokens)
    count = itertools.count(1)
    monkeypatch.setattr(os, "urandom", lambda size: next(count).to_bytes(size, "little"))
    return noise


def outcomes_of(choice: Choice, tree: TokenTree) -> Iterator[Outcome]:
    """All outcomes of a step. Of the rows at one depth only one is read, so they share a token."""
    ids, num_nodes = range(VOCAB_SIZE), len(tree.parents)
    is_traversal = choice is Choice.WITHOUT_REPLACEMENT
    drawn_nodes = [is_traversal] * num_nodes
    tests = [
        *itertools.product(*((False, True) if is_drawn else (False,) for is_drawn in drawn_nodes))
    ]
    if is_traversal:  # it ends at the first test that passes
        tests = [passed for passed in tests if sum(passed) <= 1]
    num_drawn = 1 if is_traversal else max(tree.depths) + 1
    rows = [0] * (num_nodes + 1) if is_traversal else (0, *tree.depths)
    for drafted in itertools.product(*(ids if is_drawn else (0,) for is_drawn in drawn_nodes)):
        if is_traversal and len(set(zip(tree.parents, drafted, strict=True))) < num_nodes:
            continue  # a token is drawn once
        for passed, drawn in itertools.product(tests, itertools.product(ids, repeat=num_drawn)):
            yield Outcome(
                drafted=drafted, passed=passed, drawn=tuple(drawn[depth] for depth in rows)
            )


def play(engine: Engine, drafter: FeatureTrees, runs: Sequence[Run]) -> None:
    """Let every run take its steps, in full batches that begin with a prefix from the cache."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for start in range(0, len(runs), BATCH):
        batch = runs[start : start + BATCH]
        names = [engine.add_request(PROMPT, params) for _ in batch]
        drafter.runs = dict(zip(names, batch, strict=True))
        for _ in batch[0].outcomes:
            engine.step()
        for name in names:
            engine.abort(name)
        assert all(len(run.states) == len(run.outcomes) for run in batch)


def engine_with(drafter: FeatureTrees) -> Engine:
    """An engine in fp64 whose cache holds all of the prompt but its last token."""
    target = tiny.tabular(0, vocab_size=VOCAB_SIZE)
    store = TokenStore(2 * BATCH, tiny.MAX_CONTEXT, max_staged_rows=64)
    exact = TabularModel(log_probs=target.log_probs, order=2, store=store, dtype=torch.float64)
    engine = tiny.engine_over(
        exact, drafter, controller=AlwaysTrees(), max_batch=BATCH, max_waiting=BATCH
    )
    engine.generate([PROMPT], SamplingParams(max_tokens=1))
    return engine


def two_steps(engine: Engine, drafter: FeatureTrees) -> dict[tuple[int, ...], float]:
    """Probability of every text of two steps.

    First steps with the same text and accepted path leave the engine in the same state; the second
    step is enumerated behind the most likely of them.
    """
    firsts = [Run(outcomes=(outcome,)) for outcome in outcomes_of(drafter.choice, FIRST)]
    play(engine, drafter, firsts)
    states: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in firsts:
        if run.prob > 0:
            states[(*run.text, *run.states)].append(run)
    seconds = list(outcomes_of(drafter.choice, SECOND))
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for runs in states.values():
        likely = max(runs, key=lambda run: run.prob)
        share = sum(run.prob for run in runs) / likely.prob
        both = [Run(outcomes=(*likely.outcomes, outcome)) for outcome in seconds]
        play(engine, drafter, both)
        for run in both:
            texts[tuple(run.text)] += share * run.prob
    return texts


def distance(engine: Engine, texts: dict[tuple[int, ...], float]) -> float:
    """Total variation to the target, both continued by it to the same length."""
    total = 0.0
    target = engine.target
    assert isinstance(target, TabularModel)
    for whole in itertools.product(range(VOCAB_SIZE), repeat=HORIZON):
        rest = [float(target.probs([*PROMPT, *whole[:at]])[whole[at]]) for at in range(HORIZON)]
        found = sum(texts.get(whole[:at], 0.0) * math.prod(rest[at:]) for at in range(HORIZON + 1))
        total += abs(found - math.prod(rest))
    return total / 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("choice", CHOICES)
def test_two_steps_with_features_and_trees_keep_the_distribution(choice, noise):
    drafter = FeatureTrees(choice, noise)
    engine = engine_with(drafter)
    texts = two_steps(engine, drafter)
    assert drafter.wrong == []
    assert {len(text) for text in texts} == {2, 3, 4, 5}
    assert distance(engine, texts) <= 1e-12


@pytest.mark.parametrize("choice", CHOICES[:1])
def test_rows_that_tokens_were_not_drawn_from_are_caught(choice, noise):
    drafter = Lying(choice, noise)
    engine = engine_with(drafter)
    runs = [Run(outcomes=(outcome,)) for outcome in outcomes_of(choice, FIRST)]
    play(engine, drafter, runs)
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for run in runs:
        texts[tuple(run.text)] += run.prob
    assert distance(engine, texts) > 1e-3
