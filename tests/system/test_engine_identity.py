"""In fp32 speculation changes nothing: greedy and seeded texts are those of plain decoding.

Drafts that never, sometimes and always agree, every setting that may change how rows are batched.
What every family owes, with transformers as the oracle, is in tests/contract/test_families.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests import tiny

from forerun.engine.engine import Engine
from forerun.models.huggingface import HuggingFaceModel
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_TOKENS = 18
PARAMS = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "warped": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "biased": {
        "logit_bias": {5: 4.0, 9: -3.0},
        "bad_token_ids": (6, 7),
        "stop_token_ids": tuple(range(40, 80)),
        "min_tokens": 9,
        "ignore_eos": False,
    },
    "greedy and penalised": {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 5},
    "allowed": {"allowed_token_ids": tuple(range(100, 150)), "temperature": 1.5},
    "walk": {"verification": "walk", "top_p": 0.7},
}
REQUESTS = [
    (
        prompt,
        SamplingParams(**({"seed": 11, "max_tokens": NUM_TOKENS, "ignore_eos": True} | changes)),
    )
    for prompt, changes in zip(tiny.PROMPTS * 2, PARAMS.values(), strict=True)
]
DRAFTS = {"stranger": {"seed": 50, "num_layers": 1}, "cousin": {"jitter": 0.02}}

Texts = list[tuple[str, tuple[int, ...], str]]


def answers(engine: Engine, requests: Sequence[tuple[str, SamplingParams]] = REQUESTS) -> Texts:
    """All requests at once; more than fit into the batch, so they come and go raggedly."""
    outputs = engine.generate([text for text, _ in requests], [params for _, params in requests])
    return [(o.text, o.token_ids, o.completions[0].finish_reason) for o in outputs]


def acceptance_length(engine: Engine, params: SamplingParams) -> float:
    (output,) = engine.generate([tiny.PROMPTS[0]], params)
    return output.completions[0].acceptance.acceptance_length or 0.0


@pytest.fixture(scope="module")
def target() -> HuggingFaceModel:
    return tiny.adapted(tiny.network())


@pytest.fixture(scope="module")
def expected(target: HuggingFaceModel) -> Texts:
    return answers(tiny.engine_over(target))


def draft(name: str, family: str = "llama") -> HuggingFaceModel:
    return tiny.adapted(tiny.network(family, **DRAFTS.get(name, {})))


def test_the_requests_are_worth_comparing(expected):
    assert len({ids for _, ids, _ in expected}) == len(expected)
    assert min(len(set(ids)) for _, ids, _ in expected) > 4
    assert {reason for _, _, reason in expected} == {"length", "stop"}


def test_one_by_one_is_what_the_batch_says(target, expected):
    plain = tiny.engine_over(target)
    assert [answer for request in REQUESTS for answer in answers(plain, [request])] == expected


@pytest.mark.covering
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("name", ["stranger", "cousin", "itself"])
def test_no_draft_and_no_k_changes_a_text(target, expected, name, k):
    engine = tiny.engine_over(target, tiny.drafting(draft(name)), k=k)
    assert answers(engine) == expected
    greedy, seeded = (params for _, params in REQUESTS[:2])
    lengths = [acceptance_length(engine, params) for params in (greedy, seeded)]
    if name == "itself":
        assert min(lengths) > {1: 1.7, 3: 2.9, 7: 4}[k]
    assert max(lengths) <= k + 1
    assert target.store.num_free == 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch": 1},
        {"max_batch": 3, "prefill_chunk": 1},
        {"prefill_chunk": 5},
        {"max_step_rows": 16},
        {"max_step_rows": 17, "prefill_chunk": 4},
        {"max_context": 64},
    ],
    ids=str,
)
def test_no_batch_and_no_chunk_changes_a_text(target, expected, changes):
    """Requests fit into 64 tokens, whose end is the end of the draft's store as well."""
    assert max(len(ids) for _, ids, _ in expected) < 64
    engine = tiny.engine_over(target, tiny.drafting(draft("cousin")), **changes)
    assert answers(engine) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_no_draft_temperature_changes_a_text(target, temperature):
    params = [SamplingParams(seed=seed, max_tokens=NUM_TOKENS) for seed in range(4)]
    other = [
        SamplingParams(seed=seed, max_tokens=NUM_TOKENS, draft_temperature=temperature)
        for seed in range(4)
    ]
    plain = tiny.engine_over(target)
    engine = tiny.engine_over(target, tiny.drafting(draft("cousin")), k=4)
    assert answers(engine, list(zip(tiny.PROMPTS, other, strict=True))) == answers(
        plain, list(zip(tiny.PROMPTS, params, strict=True))
    )


def test_a_draft_of_another_family():
    target = draft("itself", "qwen3")
    engine = tiny.engine_over(target, tiny.drafting(draft("itself", "llama")))
    assert answers(engine) == answers(tiny.engine_over(target))
