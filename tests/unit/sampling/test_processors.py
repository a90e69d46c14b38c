"""Processors against transformers' where it has them, against the definitions otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun.sampling import processors
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.processors import failed_rows, pack_params, target_probs

VOCAB = 60


def logits(num_rows: int, seed: int = 0, decimals: int | None = None) -> Tensor:
    """Random logits; rounding makes ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(num_rows, VOCAB).normal_(0, 3, generator=generator)
    return values if decimals is None else values.round(decimals=decimals)


def probs_of(scores: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:
    rows = [0] * len(scores)
    histories = () if history is None else [history.at()] * len(scores)
    return target_probs(scores, pack_params([params], rows=rows), histories)


def oracle(scores: Tensor, *chain: LogitsProcessor, ids: tuple[int, ...] = (0,)) -> Tensor:
    context = torch.tensor([ids] * len(scores))
    return LogitsProcessorList(chain)(context, scores.clone()).softmax(-1)


def assert_same_probs(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def assert_same_up_to_ties(found: Tensor, expected: Tensor) -> None:
    """Which of equal logits top_p drops is up to the sort; how many is not."""
    assert_same_probs(found.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("decimals", [None, 0], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingParams(top_k=1), [TopKLogitsWarper(1)]),
        (SamplingParams(top_k=7), [TopKLogitsWarper(7)]),
        (SamplingParams(top_k=1000), [TopKLogitsWarper(1000)]),
        (SamplingParams(top_p=0.9), [TopPLogitsWarper(0.9)]),
        (SamplingParams(top_p=1e-6), [TopPLogitsWarper(1e-6)]),
        (SamplingParams(min_p=0.05), [MinPLogitsWarper(0.05)]),
        (SamplingParams(min_p=1.0), [MinPLogitsWarper(1.0)]),
        (
            SamplingParams(temperature=1.7, min_p=0.02, top_k=20, top_p=0.8),
            [
                TemperatureLogitsWarper(1.7),
                MinPLogitsWarper(0.02),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
)
def test_warpers_agree_with_transformers(
    params: SamplingParams, warpers: list[LogitsProcessor], decimals: int | None
) -> None:
    scores = logits(50, decimals=decimals)
    same = assert_same_probs if decimals is None else assert_same_up_to_ties
    same(probs_of(scores, params), oracle(scores, *warpers))


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(top_k=7), TopKLogitsWarper(7)),
        (SamplingParams(min_p=0.05), MinPLogitsWarper(0.05)),
    ],
    ids=["top_k", "min_p"],
)
def test_ties_at_a_threshold_are_kept_by_transformers_and_here(
    params: SamplingParams, warper: LogitsProcessor
) -> None:
    scores = logits(50, decimals=0)
    assert_same_probs(probs_of(scores, params), oracle(scores, warper))


def test_top_p_keeps_the_same_of_equal_logits_in_any_batch() -> None:
    scores = logits(50, decimals=0)
    params = SamplingParams(top_p=0.8)
    alone = [probs_of(scores[row : row + 1], params) for row in range(50)]
    assert torch.equal(probs_of(scores, params), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
def test_a_distribution_does_not_depend_on_what_neighbours_ask_for(temperature, dtype) -> None:
    scores = logits(3).to(dtype)
    own = SamplingParams(temperature=temperature)
    alone = probs_of(scores[:1], own)
    penalised = SamplingParams(presence_penalty=0.5)
    history = History.of(penalised, [3], vocab_size=VOCAB)
    for other in (
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9, temperature=0.0),
        SamplingParams(min_p=0.1, temperature=0.7),
        penalised,
    ):
        rows = [None, history.at() if other is penalised else None, None]
        found = target_probs(scores, pack_params([own, other, other]), rows)
        assert torch.equal(found[:1], alone)


def test_a_greedy_row_is_the_lowest_of_equals_whatever_top_p_would_keep() -> None:
    scores = torch.zeros(1, 10)
    found = probs_of(scores, SamplingParams(temperature=0.0, top_p=0.5))
    assert found.argmax() == 0
    assert found.sum() == 1


def test_a_uniform_distribution_is_cut_to_as_many_tokens_as_by_transformers() -> None:
    for vocab_size in (10, 8):  # of eight, some have half of the mass exactly
        scores = torch.zeros(1, vocab_size)
        for top_p in (0.55, 0.5, 0.05):
            found = probs_of(scores, SamplingParams(top_p=top_p))
            assert_same_up_to_ties(found, oracle(scores, TopPLogitsWarper(top_p)))


def test_repetition_penalty_agrees_with_transformers_over_prompt_and_output() -> None:
    params = SamplingParams(repetition_penalty=1.3)
    history = History.of(params, [3, 3, 17], vocab_size=VOCAB)
    for token in (5, 17, 40):
        history.append(token)
    scores = logits(20)
    expected = oracle(scores, RepetitionPenaltyLogitsProcessor(1.3), ids=(3, 3, 17, 5, 17, 40))
    assert_same_probs(probs_of(scores, params, history), expected)


def test_frequency_and_presence_penalties_count_output_only() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.25)
    history = History.of(params, [3, 9], vocab_size=VOCAB)
    for token in (5, 5, 9):
        history.append(token)
    scores = logits(4)
    expected = scores.clone()
    expected[:, 5] -= 2 * 0.5 + 1.25
    expected[:, 9] -= 0.5 + 1.25
    assert_same_probs(probs_of(scores, params, history), expected.softmax(-1))


def test_masks_and_bias() -> None:
    params = SamplingParams(
        allowed_token_ids=(1, 2, 3), logit_bias={2: 1.5, 9: 50.0}, bad_token_ids=(3,)
    )
    scores = logits(3)
    expected = torch.full_like(scores, -torch.inf)
    expected[:, 1] = scores[:, 1]
    expected[:, 2] = scores[:, 2] + 1.5
    history = History.of(params, [0], vocab_size=VOCAB)
    assert_same_probs(probs_of(scores, params, history), expected.softmax(-1))


def test_order_bias_then_penalty_then_temperature_then_warpers() -> None:
    params = SamplingParams(
        temperature=0.5,
        logit_bias={0: 4.0},
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        top_k=2,
    )
    history = History.of(params, [0], vocab_size=3)
    history.append(1)
    scores = torch.tensor([[-1.0, 1.0, 0.2]])
    # token 0: (-1 + 4) / 2 = 1.5; token 1: 1 / 2 - 1 = -0.5; token 2 untouched; all over 0.5
    expected = torch.tensor([[3.0, -torch.inf, 0.4]]).softmax(-1)
    assert_same_probs(probs_of(scores, params, history), expected)


def test_every_row_has_the_history_of_its_own_path() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5, min_tokens=3)
    history = History.of(params, [8], vocab_size=VOCAB, eos_token_ids=(2,))
    history.append(4)
    paths = [(), (4,), (4, 6), (7,), (4, 4, 6)]
    scores = logits(len(paths))
    rows = pack_params([params], rows=[0] * len(paths))
    found = target_probs(scores, rows, [history.at(path) for path in paths])
    for row, path in enumerate(paths):
        alone = History.of(params, [8], vocab_size=VOCAB, eos_token_ids=(2,))
        for token in (4, *path):
            alone.append(token)
        assert_same_probs(found[row : row + 1], probs_of(scores[row : row + 1], params, alone))
        assert (found[row, 2] == 0) == (1 + len(path) < 3)


def test_rows_of_many_requests_do_not_touch_each_other() -> None:
    requests = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3, top_p=0.7),
        SamplingParams(top_k=3, min_p=0.2),
        SamplingParams(presence_penalty=1.0, bad_token_ids=(1,)),
        SamplingParams(temperature=0, repetition_penalty=1.8),
        SamplingParams(repetition_penalty=1.8, logit_bias={3: 2.0}),
        SamplingParams(frequency_penalty=-0.5),
    ]
    histories = [
        History.of(p, [1, 2], vocab_size=VOCAB) if p.needs_history else None for p in requests
    ]
    owners = [0, 1, 1, 2, 3, 4, 4, 5, 6, 6, 7]
    scores = logits(len(owners))
    row_histories = [h and h.at([7]) for h in (histories[i] for i in owners)]
    together = target_probs(scores, pack_params(requests, rows=owners), row_histories)
    for row, owner in enumerate(owners):
        alone = target_probs(
            scores[row : row + 1],
            pack_params([requests[owner]]),
            [row_histories[row]] if row_histories[row] else (),
        )
        torch.testing.assert_close(together[row : row + 1], alone)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [SamplingParams(temperature=0.5, top_p=0.8), SamplingParams(presence_penalty=1)]
    owners = [0, 1, 1, 0, 0, 1, 0]
    history = History.of(requests[1], [3], vocab_size=VOCAB)
    history.append(5)
    row_histories = [history.at() if owner else None for owner in owners]
    scores = logits(len(owners))
    packed = pack_params(requests, rows=owners)
    whole = target_probs(scores, packed, row_histories)
    monkeypatch.setattr(
        processors, "row_chunks", lambda rows, width: [slice(0, 3), slice(3, 6), slice(6, rows)]
    )
    assert torch.equal(target_probs(scores, packed, row_histories), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_are_left_alone(dtype: torch.dtype) -> None:
    params = SamplingParams(
        temperature=0.5, bad_token_ids=(3,), presence_penalty=1, top_k=5, top_p=0.5
    )
    scores = logits(2).to(dtype)
    before = scores.clone()
    probs = probs_of(scores, params, History.of(params, [0], vocab_size=VOCAB))
    assert torch.equal(scores, before)
    assert probs.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_greedy_takes_the_lowest_of_equal_ids_after_processing() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert probs_of(scores, SamplingParams(temperature=0)).tolist() == [[0, 1, 0, 0]]
    params = SamplingParams(temperature=0, bad_token_ids=(1, 2), logit_bias={0: 1.0})
    history = History.of(params, [0], vocab_size=4)
    assert probs_of(scores, params, history).tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_without_meaning_are_named(temperature: float, bad: float) -> None:
    scores = logits(4)
    scores[1, 50] = bad
    scores[3] = -torch.inf
    probs = probs_of(scores, SamplingParams(temperature=temperature))
    assert failed_rows(probs).nonzero().flatten().tolist() == [1, 3]
    assert probs[[1, 3]].isnan().all()
    assert not failed_rows(probs[[0, 2]]).any()


def test_warped_rows_without_meaning_are_named() -> None:
    scores = logits(3)
    scores[2, 0] = torch.nan
    params = [SamplingParams(temperature=0), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)]
    failed = failed_rows(target_probs(scores, pack_params(params, rows=[0, 1, 1])))
    assert failed.tolist() == [False, False, True]
