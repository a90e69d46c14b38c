"""Two steps of chains of attached drafters, every draft, acceptance and final token enumerated.

The drafter itself proposes: its draws are forced to every outcome in turn, and each outcome is
weighted by the row that the drafter states. A wrong row, a state left behind by a rejected draft,
or a row that depends on a later draw would change the sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests import heads, tiny
from tests.tabular import TabularModel, tabular_features
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters import draft_sequence as levels
from forerun.drafters import marginals
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.dflash.drafter import DFlashDrafter
from forerun.drafters.mtp import MTPDrafter, MTPModel, MTPModule
from forerun.sampling.chain import accept_probs, final_weights, num_accepted
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

PROMPT = (1, 0, 2, 1, 1)
LAYERS = (1, 3)
VOCAB_SIZE = 3
K = 2
HORIZON = 2 * (K + 1)


class Steps:
    """Runs the drafter along given texts with given draws.

    Args:
        target: a table.
        drafter: of an EAGLE-3 head, a module for multi-token prediction or a DFlash network.
        drafted: tokens that it can draft.
    """

    def __init__(self, target: TabularModel, drafter: Drafter, drafted: tuple[int, ...]) -> None:
        self.target = target
        self.drafter = drafter
        self.drafted = drafted
        self.forced: list[int] = []
        self.rows: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self.names = itertools.count()

    def draw(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        return torch.tensor([self.forced.pop(0) for _ in probs])

    def proposal(
        self, texts: Sequence[tuple[int, ...]], draws: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """Rows of the last of several steps, each with its committed text and its draws."""
        name = str(next(self.names))
        ids: list[int] = []
        request = DraftRequest(
            request_id=name,
            ids=ids,
            num_prompt=len(PROMPT),
            params=SamplingParams(),
            noise_key=1,
            history=None,
            coupled=False,
        )
        for text, drawn in zip(texts, draws, strict=True):
            start = max(0, len(ids) - 1)
            ids += text[len(ids) :]
            features = [
                [tabular_features(ids[: row + 1], layer) for layer in LAYERS]
                for row in range(start, len(ids) - 1)
            ]
            self.drafter.observe(
                [
                    StepOutcome(
                        request=request,
                        first_row=start,
                        num_rows=len(features),
                        features=torch.tensor(features),
                    )
                ]
            )
            self.forced = [*drawn]
            (proposal,) = self.drafter.propose([request], [Plan.chain("eagle3", K)])
            assert proposal is not None
            assert proposal.tokens.tolist() == [*drawn]
            assert proposal.draft_probs is not None
        self.drafter.forget(name)
        rows = proposal.draft_probs.double()
        for node in range(K):  # a row depends on what comes before it alone
            before = (*texts, *draws[:-1], tuple(draws[-1][:node]))
            known = self.rows.setdefault(before, rows[node])
            assert torch.equal(known, rows[node])
        return rows / rows.sum(-1, keepdim=True)

    def outcomes(
        self, texts: Sequence[tuple[int, ...]], draws: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
        """What the step behind the last text draws and emits, and how likely that is."""
        for drawn in itertools.product(self.drafted, repeat=K):
            rows = self.proposal(texts, [*draws, drawn])
            prob = float(rows[range(K), list(drawn)].prod())
            if prob == 0:
                continue
            ids = [*texts[-1]]
            target = torch.stack([self.target.probs([*ids, *drawn[:n]]) for n in range(K + 1)])
            tokens, count = torch.tensor([drawn]), torch.tensor([K])
            given = target[None], rows[None], tokens, count
            accept = accept_probs(*given, "block")
            for passes in itertools.product((False, True), repeat=K):
                tests = torch.tensor([[0.0 if p else 1.0 for p in passes]], dtype=torch.float64)
                weight = prob
                for node, is_passed in enumerate(passes):
                    chance = float(accept[0, node])
                    weight *= chance if is_passed else 1 - chance
                if weight == 0:
                    continue
                accepted = num_accepted(accept, tests, "block")
                final = final_weights(*given, accepted, "block")[0]
                for token in range(VOCAB_SIZE):
                    emitted = (*drawn[: int(accepted)], token)
                    yield drawn, emitted, weight * float(final[token] / final.sum())


@pytest.fixture(params=["eagle3", "mtp", "dflash"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Steps:
    make = {"eagle3": with_head, "mtp": with_module, "dflash": with_block}[request.param]
    steps = make(tiny.tabular(0, vocab_size=VOCAB_SIZE))
    for module in (levels, marginals):
        monkeypatch.setattr(module, "draw", steps.draw)
    return steps


def with_block(target: TabularModel) -> Steps:
    network = heads.dflash_network(
        target,
        draft_vocab_size=2,
        feature_layers=LAYERS,
        own_embedding=True,
        hidden_size=16,
        block_size=K + 1,
        mask_token_id=1,
        scale=0.6,
    )
    network.d2t = torch.tensor([0, 1])  # tokens 0 and 2
    return Steps(target, DFlashDrafter(network, target), (0, 2))


def with_module(target: TabularModel) -> Steps:
    """A module of one layer over the table's features, with the embedding of a network."""
    network, layer = (
        tiny.adapted(
            tiny.network(
                "qwen2",
                hidden_size=target.hidden_size,
                num_layers=1,
                vocab_size=VOCAB_SIZE,
                seed=seed,
            )
        )
        for seed in (0, 1)
    )
    module = MTPModule(layer.network.model, hidden_first=True)
    generator = torch.Generator().manual_seed(2)
    module.projection.weight.data.normal_(0, 0.6, generator=generator)
    module.eval().requires_grad_(False)
    drafter = MTPDrafter(MTPModel(module, layer.architecture, network), LAYERS[:1], VOCAB_SIZE)
    return Steps(target, drafter, (0, 1, 2))


def with_head(target: TabularModel) -> Steps:
    head = heads.eagle3_head(
        target,
        draft_vocab_size=2,
        feature_layers=LAYERS,
        own_embedding=True,
        hidden_size=16,
        fc_norm=True,
        scale=0.6,
    )
    head.d2t = torch.tensor([0, 1])  # tokens 0 and 2
    return Steps(target, heads.eagle3_drafter(target, head), (0, 2))


@pytest.mark.one_in(2)
def test_two_steps_keep_the_distribution(steps):
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for drawn, first, prob in steps.outcomes([PROMPT], []):
        for _, second, share in steps.outcomes([PROMPT, (*PROMPT, *first)], [drawn]):
            texts[(*first, *second)] += prob * share
    assert {len(text) for text in texts} == {2, 3, 4, 5, 6}
    assert len(steps.rows) > 30
    assert distance(steps.target, texts) <= 1e-12


def test_rows_of_rejected_drafts_are_not_reused(steps):
    """The head's rows of a second step equal those of a new state over the same text."""
    text = (*PROMPT, 0, 1)
    after_rejection = steps.proposal([PROMPT, text], [(0, 2), (2, 0)])
    steps.rows.clear()
    fresh = steps.proposal([text], [(2, 0)])
    torch.testing.assert_close(fresh, after_rejection, atol=1e-5, rtol=1e-4)  # fp32
    assert abs(float(after_rejection[0, 0]) - 0.5) > 0.01, "rows say nothing"


def distance(target: TabularModel, texts: dict[tuple[int, ...], float]) -> float:
    """Total variation to the target, both continued by it to the same length."""
    total = 0.0
    for whole in itertools.product(range(VOCAB_SIZE), repeat=HORIZON):
        rest = [float(target.probs([*PROMPT, *whole[:at]])[whole[at]]) for at in range(HORIZON)]
        tails = [1.0]
        for chance in reversed(rest):
            tails.append(tails[-1] * chance)
        found = sum(texts.get(whole[:at], 0.0) * tails[HORIZON - at] for at in range(HORIZON + 1))
        total += abs(found - tails[-1])
    return total / 2
