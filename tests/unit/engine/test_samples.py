"""n > 1: the prompt is read once and forked, and every text is that of a request of its own."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.tabular import TabularModel

from forerun.drafters.base import Drafter
from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.kv_store import MIN_SHARED_TOKENS
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

VOCAB = 8
PROMPT = [1, 2, 3, 4, 5, 6, 7, 0] * 4
PARAMS = {
    "seeded": {},
    "shaped": {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.7},
    "repeating": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_tokens": 5},
    "walk": {"verification": "walk"},
}


class Counting(TabularModel):
    """Counts the rows it is fed."""

    num_rows = 0

    def forward(self, batch: RowBatch) -> ModelOutput:
        self.num_rows += len(batch.tokens)
        return super().forward(batch)


def counting(num_slots: int) -> Counting:
    model = tiny.tabular(0, vocab_size=VOCAB, num_slots=num_slots)
    return Counting(log_probs=model.log_probs, order=model.order, store=model.store)


def sampling(n: int, **changes: object) -> SamplingParams:
    return SamplingParams(**({"seed": 6, "n": n, "max_tokens": 14, "ignore_eos": True} | changes))


def one_by_one(engine: Engine, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """Every sample as a request that is alone in the engine."""
    texts = []
    for index in range(params.n):
        name = f"sample-{index}"
        samples = engine.intake.sequences(name, prompt, params, RequestTerms())
        engine.enlist([samples[index]])
        while engine.has_unfinished:
            engine.step()
        (completion,) = engine.take_output(name).completions
        assert completion.num_cached_tokens == 0
        texts.append(completion.token_ids)
    return texts


def texts_of(engine: Engine, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    (output,) = engine.generate([prompt], params)
    assert [completion.index for completion in output.completions] == list(range(params.n))
    return [completion.token_ids for completion in output.completions]


@pytest.mark.parametrize("changes", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("k", [0, 1, 4])
def test_samples_say_what_separate_requests_say(k: int, changes: dict[str, object]) -> None:
    target = counting(4)
    params = sampling(4, **changes)
    expected = one_by_one(tiny.engine_over(counting(4), sharing="none"), PROMPT, params)
    drafter = tiny.drafting(tiny.cousin(target, 5), VOCAB) if k else None
    assert texts_of(tiny.engine_over(target, drafter, k=k), PROMPT, params) == expected
    assert len(set(expected)) > 1


@pytest.fixture(scope="module")
def network() -> HuggingFaceModel:
    return tiny.adapted(tiny.network())


@pytest.mark.parametrize("k", [0, 3])
def test_forked_keys_and_values_are_the_prompts(network: HuggingFaceModel, k: int) -> None:
    prompt = tiny.tokenizer().encode("".join(tiny.PROMPTS))
    assert len(prompt) > 40
    expected = one_by_one(tiny.engine_over(network, sharing="none"), prompt, sampling(4))
    draft: Drafter | None = None
    if k:
        draft = tiny.drafting(tiny.adapted(tiny.network(jitter=0.02)))
    assert texts_of(tiny.engine_over(network, draft, k=k), prompt, sampling(4)) == expected


@pytest.mark.parametrize("sharing", ["tenant", "none"])
def test_the_prompt_is_read_once(sharing: str) -> None:
    target = counting(4)
    engine = tiny.engine_over(target, sharing=sharing)
    engine.generate([PROMPT], sampling(4, max_tokens=1))
    assert target.num_rows == len(PROMPT) + 3  # the last token of the prompt once per sample


def test_a_prompt_in_chunks_is_read_once_but_for_its_end() -> None:
    """A sample that would save fewer than MIN_SHARED_TOKENS does not wait for them."""
    target = counting(4)
    engine = tiny.engine_over(target, prefill_chunk=5)
    engine.generate([PROMPT], sampling(4, max_tokens=1))
    assert target.num_rows < len(PROMPT) + 3 * MIN_SHARED_TOKENS


def test_nothing_else_is_shared_where_nothing_may_be() -> None:
    target = counting(4)
    engine = tiny.engine_over(target, sharing="none")
    for _ in range(2):
        before = target.num_rows
        engine.generate([PROMPT], sampling(3, max_tokens=1), RequestTerms(tenant="a"))
        assert target.num_rows - before == len(PROMPT) + 2


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_more_samples_than_places_wait_for_one(num_slots: int) -> None:
    target = counting(num_slots)
    params = sampling(7)
    expected = one_by_one(tiny.engine_over(counting(1), sharing="none"), PROMPT, params)
    engine = tiny.engine_over(target, max_batch=num_slots)
    assert texts_of(engine, PROMPT, params) == expected
    # Read once: what a sample leaves behind serves the next one.
    assert target.num_rows == len(PROMPT) - 1 + 7 * 14
    assert target.store.num_free == num_slots


@pytest.mark.parametrize("num_steps", range(6))
def test_an_aborted_request_gives_all_its_places_back(num_steps: int) -> None:
    target = counting(3)
    engine = tiny.engine_over(target, prefill_chunk=9)
    (alone,) = engine.generate([PROMPT], sampling(1))
    request_id = engine.add_request(PROMPT[:20], sampling(5))
    for _ in range(num_steps):
        engine.step()
    engine.abort(request_id)
    assert not engine.has_unfinished
    assert target.store.num_free == 3
    assert engine.generate([PROMPT], sampling(1))[0].token_ids == alone.token_ids
