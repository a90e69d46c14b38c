"""A drafter that reads features has those of every committed row, whatever happened before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from tests import tiny
from tests.tabular import tabular_features

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.registry import SeveralDrafters
from forerun.errors import UnsupportedFeatures
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.tree import TokenTree

LAYERS = (0, 2)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Reading(Drafter):
    """Proposes trees of three nodes, and compares the features of all rows with the true ones."""

    method = "reading"

    def __init__(self, layers: tuple[int, ...] = LAYERS, fails_at: int = -1) -> None:
        self.required_features = layers
        self.fails_at = fails_at
        self.num_calls = 0
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.starts: list[int] = []

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        for request in requests:
            assert self.seen[request.request_id] == len(request.ids) - 1
        tree = TokenTree((-1, -1, 0))
        return [
            Proposal(tokens=torch.tensor([1, 2, 3]), tree=tree, choice=Choice.DETERMINISTIC)
            if plan.num_speculative_tokens >= 3
            else None
            for plan in plans
        ]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise RuntimeError("planted")
        for outcome in outcomes:
            start, stop = outcome.first_row, outcome.first_row + outcome.num_rows
            assert self.seen[outcome.request_id] == start
            self.seen[outcome.request_id] = stop
            self.starts.append(outcome.num_rows)
            ids = outcome.request.ids
            expected = [
                [tabular_features(ids[: row + 1], layer) for layer in self.required_features]
                for row in range(start, stop)
            ]
            assert outcome.features is not None
            assert torch.equal(outcome.features, torch.tensor(expected))

    def forget(self, request_id: str) -> None:
        self.seen.pop(request_id, None)


PROMPTS = [[1, 2, 3, 4] * 8, [1, 2, 3, 4] * 8 + [5, 6], [7, 1], [2] * 30]


@pytest.mark.parametrize("fails_at", [-1, 3])
@pytest.mark.parametrize("changes", [{}, {"max_kv_tokens": 105}], ids=["roomy", "preempted"])
def test_no_row_is_missed(
    changes: dict[str, int], fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.tabular(3, num_slots=4)
    plain = tiny.engine_over(target).generate(PROMPTS, PARAMS)
    drafter = Reading(fails_at=fails_at)
    engine = tiny.engine_over(target, drafter, k=3, prefill_chunk=16, **changes)
    for _ in range(2):  # the second time most rows are found in the cache
        found = engine.generate(PROMPTS, PARAMS)
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert max(drafter.starts) > 16, "no prefix was found in the cache"
    assert "decodes plainly" not in caplog.text  # a row that is missing is an error of the drafter
    assert target.store.num_free == 4
    tiny.engine_over(target).generate(PROMPTS, PARAMS)
    assert target.store.feature_layers == ()


def test_each_of_several_drafters_gets_its_own_layers() -> None:
    target = tiny.tabular(3, num_slots=4)
    first, second = Reading((2,)), Reading((0, 1))
    both = SeveralDrafters({"reading": first, "other": second})
    tiny.engine_over(target, both, k=3).generate(PROMPTS[:2], PARAMS)
    assert first.starts
    assert second.starts


def test_a_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedFeatures, match="layer 99; the target has layers 0 to"):
        tiny.engine_over(tiny.tabular(3), Reading((99,)), k=3)
