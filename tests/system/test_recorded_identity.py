"""The engine's identity on the torch runner: its texts are those of transformers' own forward."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.recorders import Again, Traced, torch_model
from tests.system.test_engine_identity import REQUESTS, answers

pytestmark = pytest.mark.usefixtures("unchecked")

RECORDERS = {"torch": None, "rectangles": Again(), "traced": Traced()}
CASES = [(tiny.LEAN[0], "torch"), (tiny.LEAN[1], "rectangles")]
MORE_CASES = [
    ("llama", "traced"),
    *(
        (family, runner)
        for family in tiny.LEAN
        for runner in ("torch", "rectangles")
        if (family, runner) not in CASES
    ),
]


@pytest.mark.parametrize(
    ("family", "runner"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_CASES)],
)
def test_no_draft_changes_a_text(family, runner):
    network = tiny.network(family)
    requests = REQUESTS[:3] if runner == "traced" else REQUESTS  # every shape is traced for itself
    expected = answers(tiny.engine_over(tiny.adapted(network)), requests)
    assert len({ids for _, ids, _ in expected}) == len(expected) == len(requests)
    target = torch_model(network, RECORDERS[runner])
    assert answers(tiny.engine_over(target), requests) == expected
    drafts = (tiny.network(family, jitter=0.02), network)
    for draft in drafts[:1] if runner == "traced" else drafts:
        drafter = tiny.drafting(torch_model(draft, RECORDERS[runner]))
        assert answers(tiny.engine_over(target, drafter, k=4), requests) == expected
    assert target.store.num_free == 4


def test_recorded_passes_are_what_runs():
    target, draft = (torch_model(tiny.network(), Again()) for _ in range(2))
    answers(tiny.engine_over(target, tiny.drafting(draft), k=4))
    for model in (target, draft):
        assert model.programs is not None
        assert len(model.programs._programs) > 3
