"""Log-probabilities are those of plain decoding, whatever was drafted beside them.

Bit for bit where a row's logits are the same bits in any pass, as the native runner's are. The
matrix products of torch round differently for other numbers of rows: there plain decoding and
speculation are equally far from transformers' own pass over the whole text.
"""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.natives import native_model

from forerun.engine.engine import Engine
from forerun.engine.results import TokenLogprobs
from forerun.models.base import LanguageModel
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams, TokenSource

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_TOKENS = 18
PARAMS = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "shaped": {"temperature": 0.7, "top_p": 0.9, "logit_bias": {5: 4.0}},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 9},
}
REQUESTS = [
    SamplingParams(
        **({"seed": 11, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 4} | changes)
    )
    for changes in PARAMS.values()
]
DRAFTS = {"stranger": {"seed": 50, "num_layers": 1}, "cousin": {"jitter": 0.02}, "itself": {}}

Found = list[tuple[TokenLogprobs, ...]]
ROUNDING = 1e-4
"""Between passes of unequal shape, of logits of size 10 in fp32; 2e-5 was the most seen."""


@pytest.fixture(scope="module", params=["native", "eager"])
def target(request: pytest.FixtureRequest) -> LanguageModel:
    network = tiny.network()
    return native_model(network) if request.param == "native" else tiny.adapted(network)


@pytest.fixture(scope="module")
def expected(target: LanguageModel) -> Found:
    """One request after the other, one token after the other."""
    plain = tiny.engine_over(target)
    return [
        entry
        for prompt, params in zip(tiny.PROMPTS, REQUESTS, strict=True)
        for entry in logprobs_of(plain, [prompt], [params])
    ]


def logprobs_of(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> Found:
    return [output.completions[0].logprobs or () for output in engine.generate(prompts, params)]


def assert_same(target: LanguageModel, found: Found, expected: Found) -> None:
    if isinstance(target, NativeModel):
        assert found == expected
        return
    assert [ids_of(entries) for entries in found] == [ids_of(entries) for entries in expected]
    for entries, others in zip(found, expected, strict=True):
        for entry, other in zip(entries, others, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=ROUNDING)
            best, other_best = ([value for _, value in e.top] for e in (entry, other))
            assert best == pytest.approx(other_best, abs=ROUNDING)


def ids_of(entries: tuple[TokenLogprobs, ...]) -> list[tuple[int, list[int]]]:
    return [(entry.token_id, [token for token, _ in entry.top]) for entry in entries]


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.covering
def test_any_k_any_draft_any_neighbours(
    target: LanguageModel, expected: Found, name: str, k: int
) -> None:
    draft = tiny.adapted(tiny.network(**DRAFTS[name]))
    engine = tiny.engine_over(target, tiny.drafting(draft), k=k)
    assert_same(target, logprobs_of(engine, [*tiny.PROMPTS], REQUESTS), expected)


def test_accepted_recovered_and_bonus_tokens_have_them(target: LanguageModel) -> None:
    """Otherwise the equality above would show less than it seems to."""
    draft = tiny.adapted(tiny.network(**DRAFTS["cousin"]))
    engine = tiny.engine_over(target, tiny.drafting(draft), k=3)
    outputs = engine.generate([*tiny.PROMPTS], REQUESTS)
    sources = {source for output in outputs for source in output.completions[0].sources}
    assert sources == set(TokenSource)


def test_they_are_the_log_softmax_of_the_networks_own_logits(expected: Found) -> None:
    network = tiny.network()
    for prompt, entries in zip(tiny.PROMPTS, expected, strict=True):
        ids = tiny.tokenizer().encode(prompt)
        full = [*ids, *(entry.token_id for entry in entries)]
        rows = network(torch.tensor([full])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        for entry, row in zip(entries, rows, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=ROUNDING)
            best = row.topk(4)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            values = [value for _, value in entry.top]
            assert values == pytest.approx(best.values.tolist(), abs=ROUNDING)


def test_a_stop_inside_a_block_leaves_as_many_as_tokens(target: LanguageModel) -> None:
    draft = tiny.adapted(tiny.network())
    engine = tiny.engine_over(target, tiny.drafting(draft), k=7)
    plain = tiny.engine_over(target)
    (free,) = plain.generate([tiny.PROMPTS[0]], REQUESTS[0])
    for place in range(2, 12):
        params = SamplingParams(
            temperature=0,
            max_tokens=NUM_TOKENS,
            logprobs=2,
            stop_token_ids=(free.token_ids[place],),
        )
        found, wanted = (logprobs_of(e, [tiny.PROMPTS[0]], [params]) for e in (engine, plain))
        assert_same(target, found, wanted)
        assert len(found[0]) == free.token_ids.index(free.token_ids[place]) + 1


@pytest.mark.parametrize("k", [1, 4, 7])
def test_equal_logits_give_equal_bits_at_any_k(k: int) -> None:
    """A written-down law has no rounding of its own: what is left is ours."""
    target = tiny.tabular(0, vocab_size=tiny.VOCAB_SIZE, order=1, scale=3.0)
    draft = tiny.cousin(target, 5, scale=1.0)
    prompts = [*tiny.PROMPTS]
    plain = logprobs_of(tiny.engine_over(target), prompts, REQUESTS)
    engine = tiny.engine_over(target, tiny.drafting(draft), k=k)
    assert logprobs_of(engine, prompts, REQUESTS) == plain
