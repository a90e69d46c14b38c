from __future__ import annotations

import torch

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History


def test_allowed_bias_and_bad_tokens_are_one_row() -> None:
    params = SamplingParams(
        allowed_token_ids=(0, 1, 3), logit_bias={0: 2.5, 2: 1.0, 3: -1.0}, bad_token_ids=(3,)
    )
    history = History.of(params, [0], vocab_size=5)
    assert history.bias is not None
    assert history.bias.tolist() == [2.5, 0.0, -torch.inf, -torch.inf, -torch.inf]
    assert history.prompt_mask is None
    assert history.output_counts is None


def test_counts_grow_with_the_output_only() -> None:
    history = History.of(SamplingParams(presence_penalty=1), [1, 1, 4], vocab_size=5)
    for token in (2, 2, 4):
        history.append(token)
    assert history.bias is None
    assert history.prompt_mask is not None
    assert history.prompt_mask.nonzero().flatten().tolist() == [1, 4]
    assert history.output_counts is not None
    assert history.output_counts.tolist() == [0, 0, 2, 0, 1]
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
