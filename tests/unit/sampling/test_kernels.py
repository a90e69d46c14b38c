"""The CPU kernels do what the torch code beside them defines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.sampling import chain, kernels, noise, processors, walk
from forerun.sampling.chain import DrawnChain, verify_chain_batch
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import kernels_for, on_host, sampling_kernels

CALLERS = (chain, kernels, noise, processors, walk)
VOCABS = (1, 3, 15, 16, 17, 100, 257, 5000, 32003)
TEMPERATURES = (0.7, 1.0, 0.0, 2.0)


@pytest.fixture
def by_torch(monkeypatch):
    """Run a function once more without the kernels."""

    def run(function):
        with monkeypatch.context() as patch:
            for module in CALLERS:
                patch.setattr(module, "kernels_for", lambda *rows: None)
            return function()

    return run


@pytest.fixture(params=VOCABS)
def logits(request) -> Tensor:
    generator = torch.Generator().manual_seed(request.param)
    return 4 * torch.randn(len(TEMPERATURES), request.param, generator=generator)


@pytest.fixture
def keys() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (len(TEMPERATURES),), generator=generator)


def probs_of_logits(logits: Tensor) -> Tensor:
    params = [SamplingParams(temperature=temperature) for temperature in TEMPERATURES]
    return processors.target_probs(logits, processors.pack_params(params))


@pytest.mark.parametrize(
    "truncation",
    [
        {"min_p": 0.02},
        {"top_k": 5},
        {"top_k": 3000},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.001, "top_k": 40, "top_p": 0.95},
    ],
    ids=str,
)
def test_truncated_rows(logits, by_torch, truncation):
    """Where thousands of tokens are less likely than a rounding, one may be kept by one alone."""
    params = [SamplingParams(temperature=t, **truncation) for t in TEMPERATURES]
    found = processors.target_probs(logits, processors.pack_params(params))
    expected = by_torch(lambda: processors.target_probs(logits, processors.pack_params(params)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_they_are_there():
    assert sampling_kernels() is not None


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3).t(), torch.zeros(2, 3).bfloat16()],
)
def test_other_rows_are_torchs_business(rows):
    assert kernels_for(rows) is None


def test_distributions_are_as_close_to_the_truth_as_torchs(logits, by_torch):
    ours, torchs = probs_of_logits(logits), by_torch(lambda: probs_of_logits(logits))
    scaled = logits.double() / torch.tensor([t or 1e-9 for t in TEMPERATURES])[:, None].double()
    truth = scaled.softmax(-1)
    error, allowed = ((probs - truth).abs().amax() for probs in (ours, torchs))
    assert error <= 2 * allowed + 1e-7
    assert torch.equal(ours[2], torchs[2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_distribution_is_nan_throughout(value, by_torch):
    scores = torch.zeros(len(TEMPERATURES), 40)
    scores[1:] = torch.randn(len(TEMPERATURES) - 1, 40)
    scores[0] = value
    scores[3, 33] = value
    ours, torchs = probs_of_logits(scores), by_torch(lambda: probs_of_logits(scores))
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert ours[0].isnan().all()
    assert not ours[1].isnan().any()


def test_large_logits_have_a_distribution_at_the_lowest_temperature():
    logits = 1e8 * torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    params = processors.pack_params([SamplingParams(temperature=1e-4)] * len(logits))
    probs = processors.target_probs(logits, params)
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 40).float())


def test_impossible_tokens_stay_impossible():
    scores = torch.full((4, 50), -torch.inf)
    scores[:, 17] = 3.0
    scores[:, 40] = 2.0
    probs = probs_of_logits(scores)
    assert (probs > 0).nonzero()[:, 1].unique().tolist() == [17, 40]


def test_a_row_does_not_depend_on_its_neighbours(logits, keys):
    probs = probs_of_logits(logits)
    tokens = walk.race(probs, keys)
    drawn = noise.draw(probs, noise.uniform(keys))
    for row in range(len(logits)):
        one = slice(row, row + 1)
        assert torch.equal(walk.race(probs[one].contiguous(), keys[one]), tokens[one])
        assert torch.equal(noise.draw(probs[one], noise.uniform(keys[one])), drawn[one])
        alone = processors.target_probs(
            logits[one], processors.pack_params([SamplingParams(temperature=TEMPERATURES[row])])
        )
        assert torch.equal(alone, probs[one])


def test_draws_races_and_maxima_are_torchs(logits, by_torch):
    probs = probs_of_logits(logits)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randint(-(2**62), 2**62, (len(probs),), generator=generator)
        for function in (
            lambda keys=keys: walk.race(probs, keys),
            lambda keys=keys: noise.draw(probs, noise.uniform(keys)),
        ):
            assert torch.equal(function(), by_torch(function))
    for ours, torchs in zip(
        kernels.largest(logits), by_torch(lambda: kernels.largest(logits)), strict=True
    ):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_draws_at_the_edges(uniform):
    weights = torch.zeros(1, 600)
    weights[0, [3, 260, 261, 599]] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    expected = {0.0: 3, 0.25: 260, 0.5: 261, 1 - 2**-53: 599}
    assert noise.draw(weights, torch.tensor([uniform]).double()).item() == expected[uniform]


def test_the_first_of_equals_is_the_largest():
    scores = torch.zeros(1, 100)
    scores[0, [20, 21, 90]] = 5.0
    assert kernels.largest(scores)[1].item() == 20


def test_coupled_matches_are_torchs(logits, by_torch):
    target, draft = probs_of_logits(logits), probs_of_logits(logits + torch.randn(logits.shape[1]))
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.multinomial(draft, 1, generator=generator)[:, 0]

        def match(tokens=tokens):
            return walk.coupled_match_probs(target, draft, tokens)

        torch.testing.assert_close(match(), by_torch(match), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("vocab_size", [3, 40, 5000])
def test_verdicts_are_torchs(rule, vocab_size, by_torch):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = [3, 0, 1, 6]
        target, tokens, chains = random_chains(lengths, vocab_size, generator)

        def verify(target=target, tokens=tokens, chains=chains):
            return verify_chain_batch(target, tokens, chains, rule)

        ours, torchs = verify(), by_torch(verify)
        assert list(ours.num_accepted) == list(torchs.num_accepted)
        assert list(ours.final_tokens) == list(torchs.final_tokens)
        assert list(ours.num_valid) == list(torchs.num_valid) == [n + 1 for n in lengths]
        assert ours.expected_accepted == pytest.approx(torchs.expected_accepted, abs=1e-6)
        assert list(ours.tokens) == list(torchs.tokens)


LAYOUTS = {
    "rows apart": lambda probs: torch.stack([probs, probs.flip(0)], dim=1)[:, 0],
    "tokens apart": lambda probs: probs.t().contiguous().t(),
    "fp64": lambda probs: probs.double(),
}


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_distributions_may_lie_in_memory_as_they_like(rule, layout):
    generator = torch.Generator().manual_seed(0)
    target, tokens, chains = random_chains([4, 2, 1, 5] * 8, 40, generator)
    laid = [replace(chain, draft_probs=layout(chain.draft_probs)) for chain in chains]
    plain, found = (verify_chain_batch(target, tokens, some, rule) for some in (chains, laid))
    assert list(found.num_accepted) == list(plain.num_accepted)
    assert list(found.final_tokens) == list(plain.final_tokens)
    assert found.expected_accepted == pytest.approx(plain.expected_accepted, abs=1e-6)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_chain_ends_where_the_target_has_no_distribution(rule, by_torch):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        target, tokens, chains = random_chains([4, 4, 4], 40, generator)
        target[2] = torch.nan  # after two tokens of the first chain
        target[5] = torch.nan  # the second has none at all

        def verify(target=target, tokens=tokens, chains=chains):
            return verify_chain_batch(target, tokens, chains, rule)

        ours, torchs = verify(), by_torch(verify)
        assert list(ours.num_valid) == list(torchs.num_valid) == [2, 0, 5]
        assert list(ours.num_accepted) == list(torchs.num_accepted)
        assert ours.num_accepted[1] == 0
        for row in (0, 2):
            if ours.num_accepted[row] < ours.num_valid[row]:
                assert ours.final_tokens[row] == torchs.final_tokens[row]


def random_chains(lengths, vocab_size, generator):
    """Chains drawn from drafts that are near the target."""
    logits = 2 * torch.randn(sum(lengths) + len(lengths), vocab_size, generator=generator)
    target = logits.softmax(-1)
    tokens, chains, row = [], [], 0
    for index, length in enumerate(lengths):
        near = logits[row : row + length] + torch.randn(length, vocab_size, generator=generator)
        draft = near.softmax(-1)
        drawn = torch.multinomial(draft, 1, generator=generator)[:, 0] if length else near[:, 0]
        tokens += [0, *(int(token) for token in drawn)]
        chains.append(
            DrawnChain(
                draft_probs=draft if length else None,
                keys=noise.chain_keys(noise.request_key(7, index), 10, length),
            )
        )
        row += length + 1
    return target, torch.tensor(tokens), chains


def key_of(uniform: float) -> int:
    """A key whose uniform is exactly this multiple of 2**-53."""
    bits = int(uniform * 2**53) << 11
    return bits - (1 << 64) if bits >= 1 << 63 else bits  # as a signed integer


JUST_BELOW_HALF = 0.5 - 2**-53


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize(
    ("share", "uniform", "is_accepted"),
    [
        (0.25, 0.5, False),  # equal to the acceptance probability 0.25 / 0.5
        (0.25, JUST_BELOW_HALF, True),
        (0.0, 0.0, False),  # the target cannot draw the token, and u is as small as it gets
        (0.5, 1 - 2**-53, True),
    ],
)
def test_a_token_is_accepted_where_u_is_strictly_below_its_probability(
    share, uniform, is_accepted, is_block
):
    target = torch.tensor([[share, 1 - share, 0.0], [0.0, 0.0, 1.0]])
    draft = torch.tensor([[0.5, 0.25, 0.25]])
    kernels = sampling_kernels()
    keys = [[key_of(uniform), 0, 0]]
    ((accepted, token, *_),) = kernels.verify_chains(
        target, torch.tensor([9, 0]), [draft], keys, is_block=is_block
    )
    assert accepted == is_accepted
    assert token == (2 if is_accepted else 1)


@pytest.mark.parametrize("is_block", [False, True])
def test_the_second_node_is_tested_at_its_own_breakpoint(is_block):
    """Both rules agree on a chain whose first node is certain."""
    target = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    draft = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    for uniform, accepted in ((0.5, 1), (JUST_BELOW_HALF, 2)):
        keys = [[key_of(JUST_BELOW_HALF), key_of(uniform), 0, 0]]
        ((found, *_),) = sampling_kernels().verify_chains(
            target, torch.tensor([9, 0, 0]), [draft], keys, is_block=is_block
        )
        assert found == accepted


def test_a_draw_takes_the_token_whose_interval_holds_u():
    """Intervals are closed at their lower end: u at a bound belongs to the token above it."""
    weights = torch.tensor([[0.25, 0.0, 0.25, 0.5]])
    found = [
        int(sampling_kernels().draw(weights, torch.tensor([uniform], dtype=torch.float64)))
        for uniform in (0.0, 0.25 - 2**-53, 0.25, 0.5 - 2**-53, 0.5, 1 - 2**-53)
    ]
    assert found == [0, 0, 2, 2, 3, 3]


def test_siblings_are_drawn_one_after_another_and_the_rows_left_alone():
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(6, 37, generator=generator)
    weights[4, 3:] = 0  # fewer tokens than siblings
    weights[5] = torch.nan
    uniforms = torch.rand(6, 4, dtype=torch.float64, generator=generator)
    left, before = weights.clone(), weights.clone()
    tokens, chances = sampling_kernels().draw_siblings(weights, uniforms)
    for rank in range(4):
        drawn = sampling_kernels().draw(left, uniforms[:, rank])[:, None]
        assert torch.equal(tokens[:, rank : rank + 1], drawn)
        expected = left.gather(1, drawn)
        torch.testing.assert_close(
            chances[:, rank : rank + 1], expected, atol=0, rtol=0, equal_nan=True
        )
        left.scatter_(1, drawn, 0.0)
    torch.testing.assert_close(weights, before, atol=0, rtol=0, equal_nan=True)
    assert (chances[4, 3:] == 0).all()


class Elsewhere(Tensor):
    """A tensor that is taken to be on another device."""

    is_cpu = False


def test_tensors_of_several_shapes_and_types_are_copied_at_once():
    given = [
        torch.tensor([[[3, 2**40]], [[5, 6]]]),
        torch.tensor([[0.1, float("nan")], [-torch.inf, 2.0]]),
        torch.tensor([True, False]),
        torch.empty(0, 2, dtype=torch.int64),
    ]
    expected = on_host(*given)
    found = on_host(*[column.as_subclass(Elsewhere) for column in given])
    assert repr(found) == repr(expected)
    assert found[0][0][0][1] == 2**40
