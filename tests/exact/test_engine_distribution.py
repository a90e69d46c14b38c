"""The distribution of texts from the running engine, where no seed ties them to plain
decoding.

Verifiers are enumerated elsewhere; here they are wired to drafts, noise keys, batches and KV. The
noise is fixed, so a test passes always or never; the same test must reject a drafter that lies.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests import foreign, tiny
from tests.automaton import Automaton
from tests.tabular import TabularModel

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState, Tree
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.foreign import SharedTokenDraft, SharedTokenModel, TextDraft
from forerun.drafters.registry import SeveralDrafters
from forerun.drafters.suffix import SuffixDrafter
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine import drafting
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, RowHistory, TokenMask
from forerun.sampling.noise import Purpose, draw, step_key, uniform
from forerun.sampling.proposal import Choice, Proposal, TokenSource
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import finalise
from forerun.theory.tree import TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")

VOCAB_SIZE = 3
LENGTH = 4
PROMPT = [1]
BATCH = 128
BASE = SamplingParams(seed=20, max_tokens=LENGTH, ignore_eos=True, verification="block")
SMALLEST_P = 1e-3
"""A sound engine fails a test of fixed noise once in a thousand; the liars are far below."""


@pytest.fixture(scope="module")
def target() -> TabularModel:
    return tiny.tabular(0, vocab_size=VOCAB_SIZE, num_slots=BATCH)


@pytest.fixture
def draft(target: TabularModel) -> TabularModel:
    probs = tiny.tabular(7, vocab_size=VOCAB_SIZE, num_slots=BATCH)
    mixed = (0.5 * target.log_probs + 0.7 * probs.log_probs).log_softmax(-1)
    return TabularModel(log_probs=mixed, order=2, store=probs.store)


def engine_over(target: TabularModel, drafter: Drafter, k: int = 3) -> Engine:
    return tiny.engine_over(target, drafter, k=k, max_batch=BATCH, max_waiting=2000)


def penalised(probs: torch.Tensor, params: SamplingParams, output: tuple[int, ...]) -> torch.Tensor:
    """Penalties by their definitions; what they leave has yet to be normalised."""
    logits = probs.log()
    for token in {*PROMPT, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] * (factor if logits[token] < 0 else 1 / factor)
    for token, times in Counter(output).items():
        logits[token] -= times * params.frequency_penalty + params.presence_penalty
    return logits.exp()


def text_probs(
    target: TabularModel, params: SamplingParams, mask: Automaton | None = None
) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens, by the chain rule."""
    probs: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        probability = 1.0
        for end, token in enumerate(text):
            weights = penalised(target.probs([*PROMPT, *text[:end]]), params, text[:end])
            row = weights ** (1 / params.temperature)
            if mask is not None:
                row[[t for t in range(VOCAB_SIZE) if not mask.accepts((*text[:end], t))]] = 0.0
                if not row.any():
                    break
            if params.top_k:
                row = torch.where(row < row.topk(params.top_k).values[-1], 0.0, row)
            probability *= float(row[token] / row.sum())
        if probability > 0:
            probs[text] = probability
    return probs


def texts_of(engine: Engine, params: SamplingParams, num_samples: int) -> Counter[tuple[int, ...]]:
    (output,) = engine.generate([PROMPT], replace(params, n=num_samples))
    return Counter(completion.token_ids for completion in output.completions)


def masked_texts_of(
    engine: Engine, params: SamplingParams, num_samples: int, mask: TokenMask
) -> Counter[tuple[int, ...]]:
    request_id = engine.add_request(PROMPT, replace(params, n=num_samples), mask=mask)
    while engine.has_unfinished:
        engine.step()
    return Counter(c.token_ids for c in engine.take_output(request_id).completions)


def p_value(texts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square; texts expected fewer than five times are taken together."""
    if texts.keys() - probs.keys():
        return 0.0
    num_samples = texts.total()
    cells = [(texts[text], num_samples * probability) for text, probability in probs.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        common.append((sum(seen for seen, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in common)
    half_freedom = torch.tensor((len(common) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2).double()))


CASES = {
    "block": BASE,
    "token": replace(BASE, verification="token"),
    "block, shaped": replace(BASE, temperature=0.7, top_k=2, draft_temperature=1.3),
    "block, penalised": replace(BASE, frequency_penalty=0.8, repetition_penalty=1.5),
    "token, penalised": replace(BASE, presence_penalty=1.5, verification="token"),
    "greedy draft": replace(BASE, draft_temperature=0.0),
    "coupled": replace(BASE, verification="auto"),
}
# A changing controller meets every rule here, and in the full grid every shape of the rows.
RULES = ("block, shaped", "token, penalised", "coupled")
CHANGING = [
    pytest.param(params, id=name, marks=() if name in RULES else pytest.mark.full)
    for name, params in CASES.items()
]


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_texts_follow_the_targets_distribution(target, draft, params):
    engine = engine_over(target, DraftModel(draft, VOCAB_SIZE))
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P


def foreign_draft(num_shared: int, way: str) -> Drafter:
    """A draft of 300 tokens under other ids, some of the target's among them."""
    tokenizer, _ = foreign.permuted()
    found = map_vocabularies(tiny.tokenizer(), tokenizer)
    kept = {token: found.shared[token] for token in range(num_shared)}
    vocabulary = replace(found, shared=kept)
    model = tiny.tabular(7, vocab_size=300, num_slots=BATCH, order=1)
    if way == "slem":
        return TextDraft(model, vocabulary)
    return SharedTokenDraft(SharedTokenModel(model, vocabulary, VOCAB_SIZE), vocabulary, VOCAB_SIZE)


@pytest.mark.covering
@pytest.mark.parametrize("num_shared", [2, 3])
@pytest.mark.parametrize("name", ["block", "token", "block, shaped", "block, penalised", "coupled"])
def test_texts_with_a_draft_of_another_vocabulary(target, name, num_shared):
    params = CASES[name]
    engine = engine_over(target, foreign_draft(num_shared, "tli"))
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P


def test_texts_with_a_draft_of_encoded_text(target):
    engine = engine_over(target, foreign_draft(3, "slem"))
    assert p_value(texts_of(engine, BASE, 1500), text_probs(target, BASE)) > SMALLEST_P


def test_a_foreign_draft_that_is_not_renormalised_is_found_out(target, monkeypatch):
    """Its rows keep the probability of the tokens that the target does not have."""
    drafter = foreign_draft(2, "tli")
    propose = drafter.propose

    def lying(requests, plans):
        found = propose(requests, plans)
        return [
            None if p is None else replace(p, draft_probs=p.draft_probs * 0.6, assurance=None)
            for p in found
        ]

    monkeypatch.setattr(drafter, "propose", lying)
    monkeypatch.setattr(drafting, "_check_probs", lambda proposals: None)
    engine = engine_over(target, drafter)
    assert p_value(texts_of(engine, BASE, 1500), text_probs(target, BASE)) < SMALLEST_P


NO_TWO_ALIKE = Automaton([{0: 1, 1: 2, 2: 3}, {1: 2, 2: 3}, {0: 1, 2: 3}, {0: 1, 1: 2}], VOCAB_SIZE)


@pytest.mark.parametrize("verification", ["block", "token", "auto"])
def test_masked_texts_follow_the_masked_distribution(target, draft, verification):
    engine = engine_over(target, DraftModel(draft, VOCAB_SIZE))
    params = replace(BASE, verification=verification)
    probs = text_probs(target, params, NO_TWO_ALIKE)
    assert len(probs) == 3 * 2**3
    assert p_value(masked_texts_of(engine, params, 1500, NO_TWO_ALIKE), probs) > SMALLEST_P


def at_the_root(history: History, path: Sequence[int] = ()) -> RowHistory:
    """Forgets the path: what a history not extended along it would say."""
    return RowHistory(base=history)


def along_the_root(history: History, tree: TokenTree, tokens: Sequence[int]) -> list[RowHistory]:
    return [RowHistory(base=history)] * (len(tokens) + 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verification", ["block", "token"])
def test_counts_that_end_at_the_root_are_caught(target, draft, verification, monkeypatch):
    monkeypatch.setattr(History, "at", at_the_root)
    monkeypatch.setattr(History, "along", along_the_root)
    params = replace(BASE, verification=verification, frequency_penalty=0.8, repetition_penalty=1.5)
    engine = engine_over(target, DraftModel(draft, VOCAB_SIZE))
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) < 1e-6


def test_texts_without_a_seed_follow_it_too(target, draft, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    params = replace(BASE, seed=None, verification="auto")
    engine = engine_over(target, DraftModel(draft, VOCAB_SIZE), k=2)
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P


class Sapling(Drafter):
    """Two guesses and one that follows the first of them, all drawn from the draft."""

    method = "sapling"
    required_features: tuple[int, ...] = ()
    TREE = TokenTree((-1, -1, 0))

    def __init__(self, draft: TabularModel) -> None:
        self.draft = draft

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        return [
            self.grown(request) if plan.num_speculative_tokens >= 3 else None
            for request, plan in zip(requests, plans, strict=True)
        ]

    def grown(self, request: DraftRequest) -> Proposal:
        committed = len(request.ids)
        keys = [step_key(request.noise_key, committed, node, Purpose.DRAFT) for node in range(3)]
        noise = uniform(torch.tensor(keys))
        root = self.draft.probs(request.ids)[None]
        first, second = draw(root.expand(2, -1), noise[:2]).tolist()
        after = self.draft.probs([*request.ids, first])[None]
        return Proposal(
            tokens=torch.tensor([first, second, int(draw(after, noise[2:]))]),
            tree=self.TREE,
            choice=Choice.SAMPLED,
            draft_probs=torch.cat([root, after]).float(),
        )

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Nothing is kept."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("seed", [None, 5])
def test_sampled_trees_are_walked(target, draft, seed, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    params = replace(BASE, seed=seed, verification="auto")
    engine = engine_over(target, Sapling(draft))
    sources: Counter[TokenSource] = Counter()
    engine.observers[:] = [EmittedRecords(lambda r: sources.update([r.last_token_source]))]
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P
    assert {TokenSource.BONUS, TokenSource.RECOVERED} <= {*sources}, (
        "branches were accepted to their ends, and rejected"
    )


class Shrub(Sapling):
    """The same tree, its siblings drawn without replacement."""

    method = "shrub"
    keeps_drawn = False

    def grown(self, request: DraftRequest) -> Proposal:
        keys = [
            step_key(request.noise_key, len(request.ids), node, Purpose.DRAFT) for node in range(3)
        ]
        noise = uniform(torch.tensor(keys))
        root = self.draft.probs(request.ids)[None]
        first = int(draw(root, noise[:1]))
        left = root.clone()
        left[0, first] = root[0, first] if self.keeps_drawn else 0.0
        second = int(draw(left, noise[1:2]))
        if second == first:
            second = (first + 1) % VOCAB_SIZE
        after = self.draft.probs([*request.ids, first])[None]
        return Proposal(
            tokens=torch.tensor([first, second, int(draw(after, noise[2:]))]),
            tree=self.TREE,
            choice=Choice.WITHOUT_REPLACEMENT,
            draft_probs=torch.cat([root, after]).float(),
        )


class WrongShrub(Shrub):
    """Puts another sibling in the place of one that was drawn twice."""

    keeps_drawn = True


SHAPED = replace(BASE, seed=None, verification="auto", temperature=0.8, repetition_penalty=1.3)


@pytest.mark.covering
@pytest.mark.parametrize("params", [replace(SHAPED, temperature=1.0, repetition_penalty=1), SHAPED])
def test_drawn_trees_follow_the_targets_distribution(target, draft, params, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    engine = engine_over(target, Shrub(draft))
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P
    drafted = [record for record in records if record.num_drafted == 3]
    assert {record.num_accepted for record in drafted} >= {1, 2}
    differences = torch.tensor([r.num_accepted - r.expected_accepted for r in drafted])
    error = float(differences.std()) / len(drafted) ** 0.5
    assert abs(float(differences.mean())) < 3.5 * error


def test_siblings_that_were_not_drawn_without_replacement_are_caught(target, draft, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    engine = engine_over(target, WrongShrub(draft))
    params = replace(BASE, seed=None, verification="auto")
    assert p_value(texts_of(engine, params, 2000), text_probs(target, params)) < 1e-4


@pytest.mark.parametrize("changes", [{"verification": "auto"}, {"temperature": 0}], ids=str)
def test_with_a_seed_or_greedily_drawn_trees_leave_the_text_as_it_is(target, draft, changes):
    params = replace(BASE, **changes)
    plain = texts_of(tiny.engine_over(target, max_batch=BATCH), params, 100)
    assert texts_of(engine_over(target, Shrub(draft)), params, 100) == plain


class Restless(Controller):
    """Another drafter and K at every step, by all it was ever told."""

    def __init__(self, methods: Sequence[str]) -> None:
        self.methods = methods
        self.told = 0

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        choices = [finalise(self.told + at) for at in range(len(states))]
        return Decision(
            [
                Plan.chain(self.methods[choice % len(self.methods)], choice // 7 % 4)
                for choice in choices
            ]
        )

    def observe(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.told = finalise(self.told + record.num_accepted)


@pytest.mark.parametrize("params", CHANGING)
def test_no_controller_or_change_of_drafter_biases_the_text(target, draft, params):
    stranger = tiny.tabular(9, vocab_size=VOCAB_SIZE, num_slots=BATCH)
    drafters = {
        "draft_model": DraftModel(draft, VOCAB_SIZE),
        "suffix": SuffixDrafter(),
        "stranger": DraftModel(stranger, VOCAB_SIZE),
    }
    engine = tiny.engine_over(
        target,
        SeveralDrafters(drafters),
        k=3,
        controller=Restless(tuple(drafters)),
        max_batch=BATCH,
        max_waiting=2000,
    )
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P
    assert {record.method for record in records if record.num_drafted} == set(drafters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verification", ["block", "token"])
def test_a_draft_that_fails_after_some_tokens_does_not_bias_the_text(target, draft, verification):
    """Failing after token 0 says that 0 was drawn: such chains must end there, not be dropped."""
    probs = draft.log_probs.clone()
    probs[:: VOCAB_SIZE + 1] = torch.nan
    sick = TabularModel(log_probs=probs, order=2, store=draft.store)
    params = replace(BASE, verification=verification)
    engine = engine_over(target, DraftModel(sick, VOCAB_SIZE))
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) > SMALLEST_P


def test_as_much_is_accepted_as_is_expected(target, draft):
    """The trace's expectation is unbiased: over many steps the differences cancel."""
    for verification in ("block", "token", "auto"):
        records: list[StepRecord] = []
        engine = engine_over(target, DraftModel(draft, VOCAB_SIZE))
        engine.observers[:] = [EmittedRecords(records.append)]
        texts_of(engine, replace(BASE, verification=verification), 400)
        drafted = [record for record in records if record.num_drafted]
        differences = torch.tensor([r.num_accepted - r.expected_accepted for r in drafted])
        assert len(drafted) > 400
        error = float(differences.std()) / len(drafted) ** 0.5
        assert abs(float(differences.mean())) < 3.5 * error


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tree", [Tree(num_nodes=7, depth=3, width=2), None])
def test_as_much_of_a_coupled_draft_is_accepted_as_is_expected(tree, monkeypatch):
    """Vocabularies beyond one group of the race; the target's own probabilities would not do."""
    target = tiny.tabular(0, vocab_size=19, num_slots=BATCH)
    draft = tiny.cousin(tiny.tabular(0, vocab_size=19, num_slots=BATCH), 7)
    records: dict[bool, list[StepRecord]] = {True: [], False: []}
    for has_rows, of_kind in records.items():
        drafter = DraftModel(draft, 19)
        if not has_rows:
            propose = drafter.propose
            monkeypatch.setattr(
                drafter,
                "propose",
                lambda *args, ask=propose: [p and replace(p, draft_probs=None) for p in ask(*args)],
            )
        engine = tiny.engine_over(target, drafter, max_batch=BATCH, max_waiting=2000, tree=tree)
        engine.observers[:] = [EmittedRecords(of_kind.append)]
        texts_of(engine, replace(BASE, verification="auto"), 1200)
    drafted = [record for record in records[True] if record.num_drafted > 1]
    differences = torch.tensor([r.num_accepted - r.expected_accepted for r in drafted])
    assert len(drafted) > 900
    error = float(differences.std()) / len(drafted) ** 0.5
    assert 0 < abs(float(differences.mean())) < 3.5 * error
    assert 3.5 * error < 0.1
    assert all(r.num_accepted == r.expected_accepted for r in records[False])


class Lying(DraftModel):
    """Says its tokens were drawn from rows flatter than the real ones."""

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        honest = super().propose(requests, plans)
        return [p and replace(p, draft_probs=self.flatter(p.draft_probs)) for p in honest]

    def flatter(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        return None if rows is None else (rows + 1 / VOCAB_SIZE) / 2


class Pruning(DraftModel):
    """Looks at what it drew, and keeps it only if that was likely."""

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        return [p and self.pruned(p) for p in super().propose(requests, plans)]

    def pruned(self, proposal: Proposal) -> Proposal | None:
        if proposal.draft_probs is None:
            return proposal
        drawn = proposal.draft_probs.gather(-1, proposal.tokens[:, None])[:, 0]
        kept = int((drawn > 0.4).cumprod(-1).sum())
        return replace(
            proposal,
            tokens=proposal.tokens[:kept],
            tree=TokenTree.chain(kept),
            draft_probs=proposal.draft_probs[:kept],
        )


@pytest.mark.covering
@pytest.mark.parametrize("kind", [Lying, Pruning])
@pytest.mark.parametrize("verification", ["block", "token"])
def test_the_same_test_catches_a_drafter_that_breaks_the_rules(target, draft, kind, verification):
    params = replace(BASE, verification=verification)
    engine = engine_over(target, kind(draft, VOCAB_SIZE))
    assert p_value(texts_of(engine, params, 1500), text_probs(target, params)) < 1e-6


@pytest.mark.parametrize("kind", [Lying, Pruning])
def test_no_drafter_can_bias_the_coupled_walk(target, draft, kind):
    params = replace(BASE, verification="auto")
    engine = engine_over(target, kind(draft, VOCAB_SIZE))
    plain = tiny.engine_over(target, max_batch=BATCH)
    assert texts_of(engine, params, 200) == texts_of(plain, params, 200)
