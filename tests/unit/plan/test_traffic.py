from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from forerun.plan.simulation import draw_requests
from forerun.plan.workload import (
    Constant,
    Lognormal,
    Phase,
    Poisson,
    SimulatedServerConfig,
    Uniform,
    Workload,
    key_of,
    normals,
    uniforms,
)
from forerun.theory.splitmix import INCREMENT, finalise

COUNT = 20_000


def requests(seed=5, **changes):
    values = {
        "requests": COUNT,
        "prompt_tokens": 3,
        "output_tokens": 9,
        "phases": (Phase(share=1.0, acceptance=Constant(alpha=0.5)),),
        "server": SimulatedServerConfig(max_k=4),
    }
    return draw_requests(Workload(**(values | changes)), seed)


def test_numbers_are_those_of_splitmix_and_do_not_depend_on_how_many_are_asked_for():
    key = key_of(7, 1)
    expected = [(finalise(key + i * INCREMENT) >> 11) * 2.0**-53 for i in (1, 2, 3)]
    assert uniforms(key, 3).tolist() == expected
    assert uniforms(key, 9).tolist()[:3] == expected


def test_keys_differ_by_every_part_and_its_place():
    keys = {key_of(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (-1, 0)]}
    assert len(keys) == 7


def test_normal_numbers_have_mean_0_and_deviation_1():
    found = normals(key_of(3), COUNT).tolist()
    assert len(found) == COUNT
    assert fmean(found) == pytest.approx(0.0, abs=0.03)
    assert pstdev(found) == pytest.approx(1.0, abs=0.02)
    assert len(normals(key_of(3), 7)) == 7


def test_poisson_arrivals_have_their_rate_and_exponential_gaps():
    times = [r.arrival_s for r in requests(arrivals=Poisson(rate_per_s=50.0))]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.02)
    assert pstdev(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert min(gaps) >= 0.0


def test_recorded_arrivals_are_kept():
    times = (0.0, 0.5, 0.5)
    assert [r.arrival_s for r in requests(requests=3, arrivals=times)] == [0.0, 0.5, 0.5]


def test_lengths():
    uniform = [r.num_output for r in requests(output_tokens=Uniform(least=4, most=8))]
    assert set(uniform) == {4, 5, 6, 7, 8}
    assert fmean(uniform) == pytest.approx(6.0, abs=0.05)
    listed = [r.num_prompt for r in requests(requests=5, prompt_tokens=(7, 9))]
    assert listed == [7, 9, 7, 9, 7]
    long = [
        r.num_output for r in requests(output_tokens=Lognormal(median=100.0, sigma=1.0, most=300))
    ]
    assert sorted(long)[COUNT // 2] == pytest.approx(100, rel=0.05)
    assert max(long) == 300
    assert min(long) >= 1
    # Without the cut, e^1 of the texts' logarithm above the median is one deviation: 84.1%.
    assert sum(n <= 271 for n in long) / COUNT == pytest.approx(0.841, abs=0.01)


def test_prompts_and_outputs_are_drawn_apart():
    lengths = Uniform(least=1, most=1000)
    found = requests(prompt_tokens=lengths, output_tokens=lengths)
    assert [r.num_prompt for r in found] != [r.num_output for r in found]


def test_phases_change_suddenly():
    phases = (
        Phase(share=0.25, acceptance=Constant(alpha=0.65)),
        Phase(share=0.75, acceptance=Constant(alpha=0.35)),
    )
    found = requests(requests=8, phases=phases)
    assert [request.phase for request in found] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [request.alphas[0] for request in found] == pytest.approx([0.65] * 2 + [0.35] * 6)


def test_acceptance_by_position_is_made_conditional_and_goes_on():
    phases = (Phase(share=1.0, acceptance=(0.8, 0.4)),)
    assert requests(requests=1, phases=phases)[0].alphas == pytest.approx((0.8, 0.5, 0.5, 0.5))
    never = (Phase(share=1.0, acceptance=(0.5, 0.0, 0.0)),)
    assert requests(requests=1, phases=never)[0].alphas == (0.5, 0.0, 0.0, 0.0)


def test_texts_depend_on_seed_and_request_only():
    one, same, other = requests(requests=4), requests(requests=9), requests(requests=4, seed=6)
    assert one[2].text == same[2].text
    assert one[2].text != one[3].text
    assert one[2].text != other[2].text
    assert len(one[0].text) == 9 + 4 + 1
