from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forerun.sampling.chain import (
    Rule,
    accept_probs,
    expected_accepted,
    final_weights,
    num_accepted,
    prefix_ratios,
    residual_weights,
    token_accept_probs,
    verify_chains,
)
from forerun.sampling.noise import Purpose, chain_keys, draw, step_key, uniform

RULES: tuple[Rule, ...] = ("token", "block")


def random_probs(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator)
    return weights / weights.sum(-1, keepdim=True)


def chains(batch: int = 20, nodes: int = 4, vocab: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    tokens = (torch.arange(batch * nodes) * 7 % vocab).reshape(batch, nodes)
    return random_probs(batch, nodes + 1, vocab), random_probs(batch, nodes, vocab, seed=1), tokens


def full(tokens: Tensor) -> Tensor:
    return torch.full((len(tokens),), tokens.shape[1])


def test_token_rule_by_hand() -> None:
    target = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [1.0, 0, 0]]])
    draft = torch.tensor([[[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]])
    tokens = torch.tensor([[1, 0]])
    found = token_accept_probs(target, draft, tokens, torch.tensor([2]))
    assert found[0].tolist() == pytest.approx([0.6, 0.2])


def test_prefix_ratios_follow_the_recursion() -> None:
    target, draft, tokens = chains()
    found = prefix_ratios(target, draft, tokens, full(tokens))
    for row in range(len(tokens)):
        ratio = 1.0
        assert found[row, 0] == 1
        for node, token in enumerate(tokens[row].tolist()):
            ratio = min(1.0, ratio * float(target[row, node, token] / draft[row, node, token]))
            assert found[row, node + 1].item() == pytest.approx(ratio, rel=1e-12)


def test_block_rule_by_its_definition() -> None:
    target, draft, tokens = chains()
    ratios = prefix_ratios(target, draft, tokens, full(tokens))
    found = accept_probs(target, draft, tokens, full(tokens), "block")
    for row in range(len(tokens)):
        for node in range(tokens.shape[1] - 1):
            ratio = ratios[row, node + 1]
            mass = (ratio * target[row, node + 1] - draft[row, node + 1]).clamp(min=0).sum()
            assert found[row, node].item() == pytest.approx((mass / (mass + 1 - ratio)).item())
        assert found[row, -1] == ratios[row, -1]


@pytest.mark.parametrize("rule", RULES)
def test_padding_is_never_accepted_and_never_read(rule: Rule) -> None:
    target, draft, tokens = chains(batch=5, nodes=4)
    lengths = torch.tensor([0, 1, 2, 3, 4])
    found = accept_probs(target, draft, tokens, lengths, rule)
    for row, length in enumerate(lengths.tolist()):
        assert (found[row, length:] == 0).all()
        alone = accept_probs(
            target[row : row + 1, : length + 1],
            draft[row : row + 1, :length],
            tokens[row : row + 1, :length],
            torch.tensor([length]),
            rule,
        )
        torch.testing.assert_close(found[row : row + 1, :length], alone, rtol=1e-12, atol=0)
        target[row, length + 1 :] = torch.nan
        draft[row, length:] = torch.nan
    again = accept_probs(target, draft, tokens, lengths, rule)
    assert torch.equal(again, found)


@pytest.mark.parametrize("rule", RULES)
def test_zeros_on_either_side_give_no_nan(rule: Rule) -> None:
    target = torch.tensor([[[1.0, 0, 0]] * 4] * 4)
    draft = torch.tensor(
        [[[1.0, 0, 0]] * 3, [[0, 1.0, 0]] * 3, [[0.5, 0.5, 0]] * 3, [[0, 0, 1.0]] * 3]
    )
    tokens = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 1, 2]])
    found = accept_probs(target, draft, tokens, full(tokens), rule)
    assert found.isfinite().all()
    assert found[0].tolist() == [1, 1, 1]  # identical one-hot distributions: 0 / 0 counts as 1
    assert found[1].tolist() == [0, 0, 0]
    assert num_accepted(found, torch.zeros_like(found), rule).tolist() == [3, 0, 1, 1]


def test_an_impossible_token_ends_a_block_for_good() -> None:
    """However large later ratios are: nothing beyond a token the target excludes is accepted."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.9, 0.1, 0], [0.9, 0.1, 0], [0.5, 0.5, 0]]])
    draft = torch.tensor([[[0.3, 0.3, 0.4], [1e-30, 1, 0], [1e-30, 1, 0]]])
    found = accept_probs(target, draft, torch.tensor([[2, 0, 0]]), torch.tensor([3]), "block")
    assert found.tolist() == [[0, 0, 0]]


def test_identical_distributions_accept_everything() -> None:
    target, _, tokens = chains()
    for rule in RULES:
        found = accept_probs(target, target[:, :-1], tokens, full(tokens), rule)
        assert (found == 1).all()


def test_residual_by_hand_and_without_rest() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    draft = torch.tensor([[0.2, 0.6, 0.2], [0.5, 0.3, 0.2]])
    found = residual_weights(target, draft, torch.tensor([1.0, 1.0]).double())
    torch.testing.assert_close(found[0], torch.tensor([0.3, 0.0, 0.0]))
    assert torch.equal(found[1], target[1])
    halved = residual_weights(target, draft, torch.tensor([0.5, 0.5]).double())
    torch.testing.assert_close(halved[0], torch.tensor([0.05, 0.0, 0.0]))


@pytest.mark.parametrize("rule", RULES)
def test_the_final_row_is_the_one_after_the_accepted_tokens(rule: Rule) -> None:
    target, draft, tokens = chains(batch=4, nodes=3)
    lengths = torch.tensor([3, 3, 2, 0])
    accepted = torch.tensor([3, 1, 2, 0])
    found = final_weights(target, draft, tokens, lengths, accepted, rule)
    for row in (0, 2, 3):
        assert torch.equal(found[row], target[row, accepted[row]])
    ratio = prefix_ratios(target, draft, tokens, lengths)[1, 1] if rule == "block" else 1.0
    torch.testing.assert_close(found[1], (ratio * target[1, 1] - draft[1, 1]).clamp(min=0))


@pytest.mark.parametrize(
    ("rule", "passed", "count"),
    [
        ("token", [1, 1, 1], 3),
        ("token", [1, 0, 1], 1),
        ("token", [0, 1, 1], 0),
        ("block", [1, 1, 1], 3),
        ("block", [1, 0, 1], 3),
        ("block", [0, 1, 0], 2),
        ("block", [0, 0, 0], 0),
    ],
)
def test_draw_stage_takes_leading_run_or_last_pass(
    rule: Rule, passed: list[int], count: int
) -> None:
    probs = torch.full((1, 3), 0.5, dtype=torch.float64)
    uniforms = torch.where(torch.tensor([passed]) > 0, 0.1, 0.9).double()
    assert num_accepted(probs, uniforms, rule).tolist() == [count]


@pytest.mark.parametrize("rule", RULES)
def test_draw_stage_compares_strictly(rule: Rule) -> None:
    for threshold in (0.0, 2.0**-53, 0.3, 0.5, 1 - 2.0**-53, 1.0):
        probs = torch.tensor([[threshold]], dtype=torch.float64)
        below = math.nextafter(threshold, 0.0)
        for value, passes in ((below, threshold > 0), (threshold, False)):
            if value < 1:
                uniforms = torch.tensor([[value]], dtype=torch.float64)
                assert num_accepted(probs, uniforms, rule).item() == passes
    certain = torch.ones(1, 1, dtype=torch.float64)
    assert num_accepted(certain, certain - 2.0**-53, rule).item() == 1


@pytest.mark.parametrize("rule", RULES)
def test_expected_accepted_is_the_mean_of_the_draw_stage(rule: Rule) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.75]]).double()
    grid = (torch.arange(8).double() + 0.5) / 8
    uniforms = torch.cartesian_prod(grid, grid, grid)
    mean = num_accepted(probs.expand(512, 3), uniforms, rule).double().mean()
    assert expected_accepted(probs, rule).item() == pytest.approx(mean.item())


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_is_verified_as_each_chain_alone(rule: Rule) -> None:
    target, draft, tokens = chains(batch=40, nodes=4)
    lengths = torch.arange(40) % 5
    keys = torch.tensor([chain_keys(row, 10, 4) for row in range(40)])
    together = verify_chains(target.float(), draft.float(), tokens, lengths, keys, rule)
    for row, length in enumerate(lengths.tolist()):
        alone = verify_chains(
            target[row : row + 1, : length + 1].float(),
            draft[row : row + 1, :length].float(),
            tokens[row : row + 1, :length],
            torch.tensor([length]),
            torch.tensor([chain_keys(row, 10, length)]),
            rule,
        )
        assert alone.num_accepted.item() == together.num_accepted[row]
        assert alone.final_tokens.item() == together.final_tokens[row]
        assert alone.expected_accepted.item() == pytest.approx(
            together.expected_accepted[row].item()
        )
    assert len(set(together.num_accepted.tolist())) == 5


@pytest.mark.parametrize("rule", RULES)
def test_sampled_frequencies_follow_the_target(rule: Rule) -> None:
    """End to end in fp32 with real noise: drafts drawn, verified, first token counted."""
    num = 6_000
    target = random_probs(1, 3, 4).float().expand(num, 3, 4)
    draft = random_probs(1, 2, 4, seed=1).float().expand(num, 2, 4)
    draws = [[step_key(i, 0, node, Purpose.DRAFT) for node in range(2)] for i in range(num)]
    noise = uniform(torch.tensor(draws))
    tokens = torch.stack([draw(draft[:, node], noise[:, node]) for node in range(2)], 1)
    keys = torch.tensor([chain_keys(i, 0, 2) for i in range(num)])
    found = verify_chains(target, draft, tokens, torch.full((num,), 2), keys, rule)
    first = torch.where(found.num_accepted > 0, tokens[:, 0], found.final_tokens)
    shares = torch.bincount(first, minlength=4) / num
    torch.testing.assert_close(shares, target[0, 0], rtol=0, atol=0.025)
    mean = found.num_accepted.double().mean().item()
    assert mean == pytest.approx(found.expected_accepted.mean().item(), abs=0.04)
