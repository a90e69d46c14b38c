"""The engine's identity on the CPU kernels, and what is left of it in bf16.

In fp32 their texts are those of transformers. In bf16 a row of theirs computes the same bits
whatever else is in its pass, so speculation still changes nothing. Of transformers' modules that is
not so: there texts part where two tokens are as good as equal, and only there.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests import tiny
from tests.natives import native_model
from tests.system.test_engine_identity import (
    DRAFTS,
    NUM_TOKENS,
    REQUESTS,
    answers,
)
from transformers import PreTrainedModel

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.models.base import Context, pack
from forerun.models.catalog import held_out_prompts
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

UNSEEDED = [(text, SamplingParams(temperature=0, max_tokens=NUM_TOKENS)) for text in tiny.PROMPTS]
SMALL = {"max_context": 512}
BATCHES = [
    {"max_batch": 1},
    {"max_batch": 3, "prefill_chunk": 1},
    {"prefill_chunk": 5, "max_step_rows": 17},
]


def natively(network: PreTrainedModel, dtype: torch.dtype = torch.float32) -> NativeModel:
    return native_model(network, dtype=dtype, max_context=tiny.MAX_CONTEXT)


def draft_of(family: str, name: str) -> PreTrainedModel:
    return tiny.network("llama" if name == "stranger" else family, **DRAFTS.get(name, {}))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", tiny.LEAN + tiny.NATIVE)
def test_in_fp32_texts_are_those_of_the_eager_runner(family):
    network = tiny.network(family)
    expected = answers(tiny.engine_over(tiny.adapted(network)))
    assert len({ids for _, ids, _ in expected}) == len(expected) == len(REQUESTS)
    target = natively(network)
    assert answers(tiny.engine_over(target)) == expected
    for name in (*DRAFTS, "itself"):
        drafter = tiny.drafting(natively(draft_of(family, name)))
        assert answers(tiny.engine_over(target, drafter, k=4)) == expected
    assert target.store.num_free == 4


def greedy_by_transformers(network: PreTrainedModel, ids: list[int]) -> list[int]:
    tokens = torch.tensor([ids])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": tiny.EOS}
    generated = network.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return generated[0, len(ids) :].tolist()


def test_in_fp32_greedy_text_is_that_of_transformers():
    network = tiny.network()
    prompts = [tiny.tokenizer().encode(text) for text in tiny.PROMPTS]
    expected = [greedy_by_transformers(network, ids) for ids in prompts]
    drafter = tiny.drafting(natively(draft_of("llama", "cousin")))
    engine = tiny.engine_over(natively(network), drafter, prefill_chunk=7)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    assert [list(o.token_ids) for o in engine.generate(prompts, params)] == expected


def test_runners_may_be_mixed():
    network, cousin = tiny.network(), draft_of("llama", "cousin")
    expected = answers(tiny.engine_over(natively(network)))
    for target, draft in (
        (natively(network), tiny.adapted(cousin)),
        (tiny.adapted(network), natively(cousin)),
    ):
        assert answers(tiny.engine_over(target, tiny.drafting(draft), k=3)) == expected


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2-mixed", "gemma3", "qwen3-moe"])
def bf16(request) -> tuple[str, NativeModel]:
    return request.param, natively(tiny.network(request.param), torch.bfloat16)


@pytest.mark.one_in(2)
def test_in_bf16_no_batch_changes_a_text(bf16):
    _, target = bf16
    requests = REQUESTS + UNSEEDED
    expected = answers(tiny.engine_over(target), requests)
    alone = tiny.engine_over(target)
    assert [answer for request in requests for answer in answers(alone, [request])] == expected
    for changes in BATCHES:
        assert answers(tiny.engine_over(target, **changes), requests) == expected


@pytest.mark.one_in(2)
@pytest.mark.covering
@pytest.mark.parametrize("k", [1, 4, 7])
def test_in_bf16_no_draft_changes_a_text(bf16, k):
    """Token for token, where others promise it in fp32 alone."""
    family, target = bf16
    requests = REQUESTS + UNSEEDED
    expected = answers(tiny.engine_over(target), requests)
    assert len({ids for _, ids, _ in expected}) >= len(REQUESTS)
    for name in (*DRAFTS, "itself"):
        drafter = tiny.drafting(natively(draft_of(family, name), torch.bfloat16))
        assert answers(tiny.engine_over(target, drafter, k=k), requests) == expected


def test_in_bf16_the_shipped_pair_says_the_same_with_and_without_its_draft():
    """Trained weights, long texts, two threads, several requests at a time."""
    config = EngineConfig(max_batch=3, num_threads=2, runner="native", controller="fixed", **SMALL)
    plain = Engine.load("zoo:code-11m", config=config)
    assert plain.target.dtype == torch.bfloat16
    speculative = plain.with_draft("zoo:code-2m")
    prompts = [prompt.text for prompt in held_out_prompts()[::16]]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True)
        for seed, temperature in enumerate([0.0, 0.0, 1.0, 0.7] * len(prompts))
    ][: len(prompts)]
    outputs = [engine.generate(prompts, params) for engine in (plain, speculative)]
    plain_ids, ids = ([output.token_ids for output in each] for each in outputs)
    assert ids == plain_ids
    assert sum(output.completions[0].acceptance.num_accepted for output in outputs[1]) > 60


# ---------------------------------------------------------------- the margin test of other runners


@pytest.fixture(scope="module")
def eager() -> Engine:
    """The shipped target in bf16 by transformers' modules, plainly."""
    return Engine.load("zoo:code-11m", config=EngineConfig(max_batch=1, runner="eager", **SMALL))


def greedy(engine: Engine) -> list[RequestOutput]:
    prompts = [engine.tokenizer.encode(p.text)[-60:] for p in held_out_prompts()[5:60:11]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return engine.generate(prompts, params)


@pytest.fixture(scope="module")
def plain_outputs(eager) -> list[RequestOutput]:
    return greedy(eager)


def margins(
    plain: Engine, expected: Sequence[RequestOutput], others: Sequence[RequestOutput]
) -> list[float]:
    """Where a text first differs from the plain one: how far apart the logits of the two tokens
    are, in steps of bf16 at the size of the largest."""
    found = []
    for one, other in zip(expected, others, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if where is not None:
            logits = logits_after(plain, [*one.prompt_token_ids, *one.token_ids[:where]])
            distance = logits[one.token_ids[where]] - logits[other.token_ids[where]]
            step = logits.abs().max() * torch.finfo(torch.bfloat16).eps
            found.append(float(distance.abs() / step))
    return found


def logits_after(engine: Engine, ids: list[int]) -> torch.Tensor:
    model = engine.target
    context = Context(model.store, ids)
    batch = pack([context.span(len(ids))], torch.tensor(ids), [len(ids) - 1], model.device)
    logits = model.forward(batch).logits[0]
    context.close()
    return logits


@pytest.mark.full
def test_in_bf16_the_eager_runner_parts_only_at_near_ties(eager, plain_outputs):
    """There the noise of the pass decided, not the verifier."""
    found = margins(eager, plain_outputs, greedy(eager.with_draft("zoo:code-2m")))
    assert all(margin <= 4 for margin in found), found


@pytest.mark.full
def test_a_text_of_another_model_parts_elsewhere(eager, plain_outputs):
    """What the margin test would say of an engine that accepts whatever is drafted."""
    config = EngineConfig(max_batch=1, runner="eager", **SMALL)
    found = margins(eager, plain_outputs, greedy(Engine.load("zoo:books-1m", config=config)))
    assert found
    assert min(found) > 4, found
