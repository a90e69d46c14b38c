"""In fp32 no controller changes a text, whatever it plans, stops or probes.

What they plan depends on what steps took, so nothing is said of it here but that it varies.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import tiny
from tests.simulated import Tables, table

from forerun.control.base import Controller
from forerun.control.config import CONTROLLER_NAMES, GoodputConfig
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.drafters.registry import SeveralDrafters
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.observing import EmittedRecords
from forerun.models.huggingface import HuggingFaceModel
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord

pytestmark = pytest.mark.usefixtures("unchecked")

K = 5
COSTS = {
    "draft_model": Tables(table(draft=0.02, overhead=0.0, batches=(1, 4))),
    "suffix": Tables(table(draft=0.001, overhead=0.0, batches=(1, 4))),
}
CURIOUS = GoodputConfig(probe_share=0.3, num_cold=1)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3),
]
REQUESTS = [(prompt, params) for params in PARAMS for prompt in tiny.PROMPTS]


def named(name: str) -> Callable[[], Controller]:
    fixed = FixedController(K, next(iter(COSTS)))
    return lambda: fixed if name == "fixed" else GoodputController(COSTS, K)


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    **{name: named(name) for name in CONTROLLER_NAMES},
    "probing": lambda: GoodputController(COSTS, K, CURIOUS),
    "without costs": lambda: GoodputController(dict.fromkeys(COSTS), K, CURIOUS),
}


@pytest.fixture(scope="module")
def target() -> HuggingFaceModel:
    return tiny.adapted(tiny.network())


def texts(engine):
    outputs = engine.generate([p for p, _ in REQUESTS], [s for _, s in REQUESTS])
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(target):
    return texts(tiny.engine_over(target))


@pytest.mark.covering
@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_texts_are_those_of_plain_decoding(target, expected, name, max_batch):
    drafter = SeveralDrafters(
        {
            "draft_model": tiny.drafting(tiny.adapted(tiny.network(jitter=0.02))),
            "suffix": SuffixDrafter(),
        }
    )
    engine = tiny.engine_over(
        target, drafter, k=K, controller=CONTROLLERS[name](), max_batch=max_batch
    )
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    assert texts(engine) == expected
    assert any(record.num_accepted for record in records)
    assert all(record.num_drafted <= record.k_budget <= K for record in records)
    if name != "fixed":
        assert len({record.k_budget for record in records}) > 1
