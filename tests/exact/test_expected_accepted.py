"""What a step is expected to accept equals the mean over everything that verification may draw.

For rules whose draws are independent of the proposal the mean is enumerated: every outcome of the
tests and of the target's draws, through the engine's own draw stage. A coupled draft shares the
target's noise, which is continuous; there the difference is averaged over many requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from tests import tiny

from forerun.control.base import Tree
from forerun.drafters.draft_model import DraftModel
from forerun.engine import verification
from forerun.engine.observing import EmittedRecords
from forerun.engine.scheduler import ScheduledSequence
from forerun.sampling import chain, tree_rules
from forerun.sampling.config import Choice, SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.sampling.walk import walk
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree, expanded

pytestmark = pytest.mark.usefixtures("unchecked")

VOCAB_SIZE = 5
TREES = [TokenTree.chain(1), TokenTree.chain(3), TokenTree((-1, -1, 0)), TokenTree((-1, 0, 0, 1))]
SHAPED = [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.3}]


def entry_of(
    tree: TokenTree,
    choice: Choice,
    draft: torch.Tensor | None,
    tokens: Sequence[int],
    **params: object,
) -> ScheduledSequence:
    sequence = tiny.sequence()
    sequence.params = SamplingParams(**params)  # type: ignore[arg-type]
    entry = tiny.scheduled(sequence)
    entry.draft(Proposal(tokens=torch.tensor(tokens), tree=tree, choice=choice, draft_probs=draft))
    entry.num_logit_rows = len(tree.parents) + 1
    return entry


def verify(entry: ScheduledSequence, logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    """What the engine expects, and the target's probabilities that it uses."""
    assert entry.proposal is not None
    fed = torch.cat([torch.tensor([0]), entry.proposal.tokens])
    (verdict,) = verification.verify([entry], logits, fed)
    batch = verification.VerifyBatch(entries=[entry], logits=logits, tokens=fed)
    return verdict.expected_accepted, verification.probabilities(batch).double()


def mean_over_tests(probs: Sequence[float], count: Callable[[Sequence[bool]], int]) -> float:
    """Mean number of accepted nodes over every outcome of independent tests."""
    total = 0.0
    for passed in itertools.product((False, True), repeat=len(probs)):
        weights = (p if is_in else 1 - p for p, is_in in zip(probs, passed, strict=True))
        total += math.prod(weights) * count(passed)
    return total


def rows_of(seed: int, num_rows: int) -> torch.Tensor:
    return 1.5 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("params", SHAPED, ids=str)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_chains(rule: chain.Rule, params: dict[str, object]):
    for seed, length in itertools.product(range(5), (1, 2, 4)):
        logits, draft = rows_of(seed, length + 1), rows_of(90 + seed, length).softmax(-1)
        tokens = draft.multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0].tolist()
        entry = entry_of(
            TokenTree.chain(length), Choice.SAMPLED, draft, tokens, verification=rule, **params
        )
        assert entry.rule == rule
        expected, target = verify(entry, logits)
        pair = (target[None], draft[None].double(), torch.tensor([tokens]), torch.tensor([length]))
        probs = chain.accept_probs(*pair, rule)[0].tolist()

        def accepted(passed: Sequence[bool]) -> int:
            noise = torch.tensor([[0.0 if is_in else 1.0 for is_in in passed]]).double()
            return int(chain.num_accepted(torch.full_like(noise, 0.5), noise, rule))

        assert expected == pytest.approx(mean_over_tests(probs, accepted), abs=1e-5)


@pytest.mark.parametrize("params", SHAPED, ids=str)
@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.is_chain], ids=str)
def test_drawn_trees(tree: TokenTree, params: dict[str, object]):
    for seed in range(5):
        logits = rows_of(seed, len(tree.parents) + 1)
        parents = expanded(tree)
        draft = rows_of(70 + seed, len(parents)).softmax(-1)
        tokens = [0] * len(tree.parents)
        for row, parent in enumerate(parents):  # siblings are drawn without replacement
            children = tree.children(parent)
            drawn = draft[row].multinomial(
                len(children), generator=torch.Generator().manual_seed(seed + row)
            )
            for child, token in zip(children, drawn.tolist(), strict=True):
                tokens[child] = token
        entry = entry_of(tree, Choice.WITHOUT_REPLACEMENT, draft, tokens, **params)
        assert entry.rule == "traversal"
        expected, target = verify(entry, logits)
        found = tree_rules.tree_weights(
            tree, target[None], draft[None].double(), torch.tensor([tokens])
        )

        def accepted(passed: Sequence[bool]) -> int:
            return len(tree.path(tree_rules.accepted_node(tree, passed)))

        mean = mean_over_tests(found.accept[0].tolist(), accepted)
        assert expected == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("params", SHAPED, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_walks(tree: TokenTree, params: dict[str, object]):
    """Every row's own draw is enumerated; siblings share theirs, which the walk sees once."""
    for seed in range(3):
        logits = rows_of(seed, len(tree.parents) + 1)
        tokens = [(seed + 2 * node) % VOCAB_SIZE for node in range(len(tree.parents))]
        entry = entry_of(tree, Choice.DETERMINISTIC, None, tokens, **params)
        assert entry.rule == "walk"
        expected, target = verify(entry, logits)
        mean = 0.0
        for drawn in itertools.product(range(VOCAB_SIZE), repeat=len(target)):
            weight = math.prod(float(row[t]) for row, t in zip(target, drawn, strict=True))
            mean += weight * len(walk(tree, tokens, drawn)[0])
        assert expected == pytest.approx(mean, abs=1e-5)


def test_greedy_is_certain():
    for seed, tree in itertools.product(range(5), TREES):
        logits = rows_of(seed, len(tree.parents) + 1)
        tokens = [int(logits[parent + 1].argmax()) for parent in tree.parents]
        entry = entry_of(tree, Choice.DETERMINISTIC, None, tokens, temperature=0.0)
        fed = torch.tensor([0, *tokens])
        (verdict,) = verification.verify([entry], logits, fed)
        assert verdict.expected_accepted == verdict.num_accepted > 0


@pytest.mark.parametrize("params", SHAPED, ids=str)
@pytest.mark.parametrize("tree", [None, Tree(num_nodes=5, depth=2, width=3)], ids=str)
def test_coupled_drafts(tree: Tree | None, params: dict[str, object]):
    target = tiny.tabular(0, vocab_size=11, num_slots=64)
    draft = DraftModel(tiny.cousin(tiny.tabular(0, vocab_size=11, num_slots=64), 7), 11)
    engine = tiny.engine_over(target, draft, max_batch=64, max_waiting=2000, tree=tree)
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    asked = SamplingParams(seed=3, max_tokens=4, ignore_eos=True, n=500, **params)  # type: ignore[arg-type]
    engine.generate([[1]], asked)
    drafted = [record for record in records if record.num_drafted > 1]
    differences = torch.tensor([r.num_accepted - r.expected_accepted for r in drafted])
    error = float(differences.std()) / len(drafted) ** 0.5
    assert len(drafted) > 400 and error < 0.05
    assert abs(float(differences.mean())) < 3.5 * error


def test_an_expectation_that_ignores_the_shared_noise_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The probabilities of uncoupled drafts are far too low for coupled ones."""
    monkeypatch.setattr(
        verification,
        "_coupled_matches",
        lambda proposal, probs, tokens: verification.edge_probs(proposal.tree, tokens, probs),
    )
    with pytest.raises(AssertionError, match=r"3\.5"):
        test_coupled_drafts(Tree(num_nodes=5, depth=2, width=3), {})
