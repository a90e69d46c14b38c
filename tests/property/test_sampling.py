"""Processors, draws and verifiers on whatever hypothesis comes up with."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from forerun.sampling.chain import accept_probs, expected_accepted, final_weights
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.noise import draw
from forerun.sampling.processors import failed_rows, pack_params, target_probs
from forerun.sampling.walk import walk
from forerun.theory.tree import TokenTree

VOCAB = 12
quick = settings(max_examples=60)

tokens = st.integers(0, VOCAB - 1)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(-1, VOCAB + 3),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.5, 2.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.none() | st.dictionaries(tokens, st.floats(-5, 5), max_size=3),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=3, max_size=6, unique=True).map(tuple),
    bad_token_ids=st.lists(tokens, max_size=2).map(tuple),
    stop_token_ids=st.just((0,)),
    min_tokens=st.integers(0, 4),
)
finite = st.floats(-50, 50, width=32)


def logits_of(num_rows: int) -> st.SearchStrategy[Tensor]:
    shape = (num_rows, VOCAB)
    return npst.arrays("float32", shape, elements=finite).map(torch.from_numpy)


def laws_of(*shape: int) -> st.SearchStrategy[Tensor]:
    """Laws with zeros, ones and everything between."""
    weight = st.sampled_from([0.0, 0.0, 1e-12, 0.1, 1.0]) | st.floats(0, 1)

    def law(weights: object) -> Tensor:
        found = torch.from_numpy(weights) + 0.0
        found[..., -1] += found.sum(-1) == 0
        return found / found.sum(-1, keepdim=True)

    return npst.arrays("float64", shape, elements=weight).map(law)


@quick
@given(parameters, logits_of(3), st.lists(tokens, max_size=5), st.lists(tokens, max_size=3))
def test_processed_rows_are_laws_that_respect_the_parameters(
    params: SamplingParams, scores: Tensor, output: list[int], path: list[int]
) -> None:
    history = History.of(params, [1, 2], vocab_size=VOCAB)
    for token in output:
        history.append(token)
    rows = [history.at(path)] * 3
    probs = target_probs(scores, pack_params([params], rows=[0, 0, 0]), rows)
    possible = set(params.allowed_token_ids or range(VOCAB)) - set(params.bad_token_ids)
    if len(output) + len(path) < params.min_tokens:
        possible -= {0}
    if not possible:
        assert failed_rows(probs).all()
        return
    assert not failed_rows(probs).any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    support = [set(row.nonzero().flatten().tolist()) for row in probs]
    assert all(found <= possible for found in support)
    if params.greedy:
        assert all(len(found) == 1 for found in support)


@quick
@given(parameters, parameters, logits_of(4))
def test_a_neighbour_in_the_batch_changes_nothing(
    params: SamplingParams, other: SamplingParams, scores: Tensor
) -> None:
    def histories(*requests: SamplingParams) -> list[History]:
        return [History.of(p, [3], vocab_size=VOCAB) for p in requests]

    mine, others = histories(params, other)
    rows = [mine.at(), others.at([4]), mine.at([5]), others.at()]
    together = target_probs(scores, pack_params([params, other], rows=[0, 1, 0, 1]), rows)
    alone = target_probs(scores[[0, 2]], pack_params([params], rows=[0, 0]), [rows[0], rows[2]])
    torch.testing.assert_close(together[[0, 2]], alone, equal_nan=True)


@quick
@given(
    npst.arrays("float32", (4, 9), elements=st.sampled_from([0.0, 1e-38, 1e-7, 0.5, 3.0])),
    npst.arrays("float64", 4, elements=st.floats(0, 1 - 2.0**-53)),
)
def test_draws_are_possible_and_monotone_in_the_noise(weights: object, noise: object) -> None:
    rows = torch.from_numpy(weights)
    rows[:, 4] += 1e-30  # something must be possible
    uniforms = torch.from_numpy(noise)
    drawn = draw(rows, uniforms)
    assert (rows[torch.arange(4), drawn] > 0).all()
    assert (draw(rows, uniforms / 2) <= drawn).all()


@quick
@given(laws_of(3, 3), laws_of(2, 3), st.sampled_from(["token", "block"]))
def test_one_step_emits_the_target_law(target: Tensor, draft: Tensor, rule: str) -> None:
    """Independent of the enumeration suite: rows given by position, first two tokens summed up."""
    drafts = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    weight = draft[0, drafts[:, 0]] * draft[1, drafts[:, 1]]
    num = torch.full((9,), 2)
    rows = target.expand(9, 3, 3), draft.expand(9, 2, 3), drafts, num
    accept = accept_probs(*rows, rule)
    first, second = accept.unbind(-1)
    by_count = {
        "token": (1 - first, first * (1 - second), first * second),
        "block": ((1 - first) * (1 - second), first * (1 - second), second),
    }[rule]
    joint = torch.zeros(3, 3, dtype=torch.float64)
    for count, prob in enumerate(by_count):
        final = final_weights(*rows, torch.full((9,), count), rule)
        final = final / final.sum(-1, keepdim=True)
        for index, (one, two) in enumerate(drafts.tolist()):
            mass = weight[index] * prob[index]
            if count == 0:
                joint += mass * final[index][:, None] * target[1]
            elif count == 1:
                joint[one] += mass * final[index]
            else:
                joint[one, two] += mass
    torch.testing.assert_close(joint, target[0][:, None] * target[1], rtol=0, atol=1e-12)


@quick
@given(laws_of(4, 3), laws_of(3, 3))
def test_block_verification_accepts_no_less_than_the_token_rule(
    target: Tensor, draft: Tensor
) -> None:
    drafts = torch.cartesian_prod(*[torch.arange(3)] * 3)
    weight = draft[torch.arange(3), drafts].prod(-1)
    num = torch.full((27,), 3)
    rows = target.expand(27, 4, 3), draft.expand(27, 3, 3), drafts, num
    mean = {
        rule: float((weight * expected_accepted(accept_probs(*rows, rule), rule)).sum())
        for rule in ("token", "block")
    }
    assert mean["block"] >= mean["token"] - 1e-12


few = st.integers(0, 2)


@quick
@given(st.lists(st.tuples(st.integers(0, 6), few, few), max_size=7), few)
def test_walks_emit_the_targets_own_draws(nodes: list[tuple[int, int, int]], root: int) -> None:
    tree = TokenTree(tuple(seed % (node + 1) - 1 for node, (seed, _, _) in enumerate(nodes)))
    drafts = [token for _, token, _ in nodes]
    draws = [root, *(token for _, _, token in nodes)]
    path, final = walk(tree, drafts, draws)
    rows = [0, *(node + 1 for node in path)]
    assert [*(drafts[node] for node in path), final] == [draws[row] for row in rows]
    last = path[-1] if path else -1
    assert path == (tree.path(last) if path else ())
    assert final not in [drafts[child] for child in tree.children(last)]
