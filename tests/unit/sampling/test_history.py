from __future__ import annotations

import pytest
import torch

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, occurrences, runs
from forerun.theory.tree import TokenTree


def test_allowed_bias_and_bad_tokens_are_one_row() -> None:
    params = SamplingParams(
        allowed_token_ids=(0, 1, 3), logit_bias={0: 2.5, 2: 1.0, 3: -1.0}, bad_token_ids=(3,)
    )
    history = History.of(params, [0], vocab_size=5)
    assert history.bias is not None
    assert history.bias.tolist() == [2.5, 0.0, -torch.inf, -torch.inf, -torch.inf]
    assert history.counts is None


@pytest.mark.parametrize("prompt_counts", [True, False])
def test_counts_grow_with_the_output_only(prompt_counts: bool) -> None:
    params = SamplingParams(presence_penalty=1, repetition_penalty=1.1 if prompt_counts else 1)
    history = History.of(params, [1, 1, 4], vocab_size=5)
    for token in (2, 2, 4):
        history.append(token)
    assert history.bias is None
    assert history.counts is not None
    found = zip(history.counts.tokens.tolist(), history.counts.counts.tolist(), strict=True)
    assert dict(found) == ({1: 0, 4: 1, 2: 2} if prompt_counts else {4: 1, 2: 2})
    assert history.num_output == 3


def test_stop_ids_are_held_back_along_a_path_until_min_tokens() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(2,))
    history = History.of(params, [0], vocab_size=9, eos_token_ids=(7,))
    history.append(1)
    assert history.at().held_back == (2, 7)
    assert history.at([5]).held_back == (2, 7)
    assert history.at([5, 5]).held_back == ()


def test_a_harmless_end_of_sequence_is_not_held_back() -> None:
    params = SamplingParams(min_tokens=3, ignore_eos=True)
    assert History.of(params, [0], vocab_size=9, eos_token_ids=(7,)).at().held_back == ()


def test_rows_along_a_tree_are_those_at_its_paths() -> None:
    params = SamplingParams(min_tokens=2, presence_penalty=1, stop_token_ids=(3,))
    history = History.of(params, [0], vocab_size=9)
    tree, tokens = TokenTree((-1, -1, 0, 2)), [5, 6, 7, 5]
    rows = history.along(tree, tokens)
    assert [row.path for row in rows] == [(), (5,), (6,), (5, 7), (5, 7, 5)]
    assert [row.held_back for row in rows] == [(3,), (3,), (3,), (), ()]
    assert all(row.base is history for row in rows)


def test_rows_of_one_request_run_together() -> None:
    one, other = (History.of(SamplingParams(min_tokens=1), [0], vocab_size=3) for _ in range(2))
    rows = [None, one.at(), one.at([1]), other.at(), None, None, one.at(), None]
    found = [(base, first, len(run)) for base, first, run in runs(rows)]
    assert found == [(one, 1, 2), (other, 3, 1), (one, 6, 1)]
    assert occurrences(rows) is None
