"""Prompts that begin alike are read once, by target and draft, and nobody's text changes."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.natives import native_model
from tests.tabular import TabularModel

from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.models.base import LanguageModel
from forerun.sampling.config import SamplingParams

SHARED = [1, 2, 3, 4, 5, 6, 7, 0] * 5
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)


class Counting(TabularModel):
    """Counts the rows it is fed."""

    num_rows = 0

    def forward(self, batch):
        self.num_rows += len(batch.tokens)
        return super().forward(batch)


def counting(model: TabularModel) -> Counting:
    return Counting(log_probs=model.log_probs, order=model.order, store=model.store)


@pytest.fixture
def target() -> Counting:
    return counting(tiny.tabular(0))


@pytest.fixture
def draft(target: TabularModel) -> Counting:
    return counting(tiny.cousin(target, 5))


@pytest.fixture
def engine(target: Counting, draft: Counting) -> Engine:
    return tiny.engine_over(target, tiny.drafting(draft, 8))


def rows_of(engine: Engine, *models: Counting, prompt: list[int], **terms: str) -> list[int]:
    before = [model.num_rows for model in models]
    engine.generate([prompt], SEEDED, RequestTerms(**terms))
    return [m.num_rows - b for m, b in zip(models, before, strict=True)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_longer_conversation_is_read_from_where_it_was(engine, target, draft, params):
    (first,) = engine.generate([SHARED], params)
    longer = [*SHARED, *first.token_ids, 3, 4]
    before = target.num_rows, draft.num_rows
    (second,) = engine.generate([longer], params)
    fresh = tiny.tabular(0)
    alone = tiny.engine_over(fresh, sharing="none")
    (expected,) = alone.generate([longer], params)
    assert second.token_ids == expected.token_ids
    assert expected.completions[0].num_cached_tokens == 0
    cached = second.completions[0].num_cached_tokens
    assert len(SHARED) <= cached < len(longer)
    assert target.num_rows - before[0] < len(SHARED)
    assert draft.num_rows - before[1] < len(SHARED)


def test_a_prompt_read_to_its_end_by_a_request_of_one_token_is_there(engine):
    engine.generate([SHARED], SamplingParams(temperature=0, max_tokens=1))
    (again,) = engine.generate([SHARED], GREEDY)
    assert again.completions[0].num_cached_tokens == len(SHARED) - 1


def test_tenants_share_nothing_unless_told(engine, target, draft):
    cold = rows_of(engine, target, draft, prompt=SHARED, tenant="a")
    assert rows_of(engine, target, draft, prompt=SHARED, tenant="b") == cold
    assert rows_of(engine, target, draft, prompt=SHARED) == cold
    warm = rows_of(engine, target, draft, prompt=SHARED, tenant="a")
    assert all(w < c - len(SHARED) // 2 for w, c in zip(warm, cold, strict=True))

    told = tiny.engine_over(target, tiny.drafting(draft, 8), sharing="all")
    assert all(
        w < c - len(SHARED) // 2
        for w, c in zip(rows_of(told, target, draft, prompt=SHARED, tenant="c"), cold, strict=True)
    )


def test_sharing_can_be_turned_off(target, draft):
    engine = tiny.engine_over(target, tiny.drafting(draft, 8), sharing="none")
    cold = rows_of(engine, target, draft, prompt=SHARED)
    assert rows_of(engine, target, draft, prompt=SHARED) == cold


def test_samples_of_a_request_read_their_prompt_once(engine, target):
    params = SamplingParams(seed=3, max_tokens=1, n=4)
    (output,) = engine.generate([SHARED], params)
    assert target.num_rows == len(SHARED) + 3
    assert [c.num_cached_tokens for c in output.completions] == [0, *[len(SHARED) - 1] * 3]


def test_a_prompt_is_waited_for_while_another_reads_its_beginning(target):
    engine = tiny.engine_over(target, prefill_chunk=8)
    names = [engine.add_request([*SHARED, n], SEEDED) for n in range(3)]
    engine.step()
    assert len(engine.scheduler.running) == 1
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.take_output(name) for name in names]
    cached = [output.completions[0].num_cached_tokens for output in outputs]
    assert cached[0] == 0
    assert all(n > len(SHARED) - 16 for n in cached[1:])
    alone = tiny.engine_over(tiny.tabular(0), sharing="none")
    for n, output in enumerate(outputs):
        assert output.token_ids == alone.generate([[*SHARED, n]], SEEDED)[0].token_ids


def test_engines_over_one_target_take_kept_slots_from_each_other(target):
    first, second = tiny.engine_over(target), tiny.engine_over(target)
    prompts = [[n, *SHARED] for n in range(4)]
    texts = [output.token_ids for output in first.generate(prompts, SEEDED)]
    others = [[n, n, *SHARED] for n in range(4)]
    second.generate(others, SEEDED)
    assert [output.token_ids for output in first.generate(prompts, SEEDED)] == texts
    assert target.store.num_free == 4


def test_what_a_nan_left_in_the_kv_serves_nobody(target):
    """The prompt's first chunk may hold NaN that only its last logits show."""
    engine = tiny.engine_over(target, prefill_chunk=32)
    target.log_probs = target.log_probs.clone()
    sound = target.log_probs.clone()
    engine.add_request(SHARED, SEEDED, "sick")
    engine.step()
    target.log_probs[:] = torch.nan
    with pytest.raises(Exception, match="request sick"):
        engine.step()
    engine.abort("sick")
    target.log_probs[:] = sound
    (output,) = engine.generate([SHARED], SEEDED)
    assert output.completions[0].num_cached_tokens == 0


def test_a_draft_that_failed_leaves_nothing_behind(target, draft):
    engine = tiny.engine_over(target, tiny.drafting(draft, 8))
    sound = draft.log_probs.clone()
    draft.log_probs = torch.full_like(sound, torch.nan)
    engine.generate([SHARED], SEEDED)
    draft.log_probs = sound
    before = draft.num_rows
    engine.generate([SHARED], SEEDED)
    assert draft.num_rows - before > len(SHARED)


def hugging_face(jitter: float = 0.0) -> LanguageModel:
    return tiny.adapted(tiny.network(jitter=jitter))


def native(jitter: float = 0.0) -> LanguageModel:
    return native_model(tiny.network(jitter=jitter), dtype=torch.bfloat16)


@pytest.mark.parametrize("model", [hugging_face, native])
@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_networks_keep_their_text(model, jitter):
    """The native runner even in bf16: a row computes the same bits whatever else is in the pass."""
    engine = tiny.engine_over(model(), tiny.drafting(model(jitter)))
    plain = tiny.engine_over(model(), sharing="none")
    prompt = tiny.tokenizer().encode(tiny.PROMPTS[2])
    turns = [prompt, [*prompt, 5, 6, 7], [*prompt[:20], 9], prompt, [*prompt, 5, 6, 7]]
    for params in (GREEDY, SEEDED):
        for turn in turns:
            (found,), (expected,) = engine.generate([turn], params), plain.generate([turn], params)
            assert found.token_ids == expected.token_ids
    assert found.completions[0].num_cached_tokens >= len(prompt)
