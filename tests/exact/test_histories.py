"""The symbolic noise on cases small enough to do by hand."""

from __future__ import annotations

import pytest
import torch

from forerun.doctor.exact.trees import Histories, Inexact, decisive_tests

KEY, OTHER = 1, 2


def rows(*weights: float) -> torch.Tensor:
    return torch.tensor([[weights]], dtype=torch.float64)


def level(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def test_fresh_keys_are_independent() -> None:
    begin = Histories.begin(1)
    both = begin.compare(KEY, level(0.25), True).compare(OTHER, level(0.5), False)
    assert both.weights.item() == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ((0.25, True), (0.5, True), 0.25),
        ((0.5, True), (0.25, True), 0.25),
        ((0.5, True), (0.25, False), 0.25),
        ((0.25, True), (0.5, False), 0.0),
        ((0.25, False), (0.5, True), 0.25),
        ((0.25, False), (0.5, False), 0.5),
    ],
)
def test_a_key_remembers_what_it_decided(
    first: tuple[float, bool], second: tuple[float, bool], share: float
) -> None:
    found = Histories.begin(1).compare(KEY, level(first[0]), first[1])
    found = found.compare(KEY, level(second[0]), second[1])
    assert found.weights.item() == pytest.approx(share)


def test_a_draw_splits_at_its_running_sums() -> None:
    drawn = Histories.begin(1).draw(KEY, rows(1, 0, 2, 1))
    assert drawn.weights[0].tolist() == [0.25, 0, 0.5, 0.25]
    low, high = drawn.interval(KEY)
    assert low[0].tolist() == [0, 0.25, 0.25, 0.75]
    assert high[0].tolist() == [0.25, 0.25, 0.75, 1]


def test_a_draw_repeated_with_its_key_repeats_its_token() -> None:
    twice = Histories.begin(1).draw(KEY, rows(1, 3)).draw(KEY, rows(1, 3).expand(1, 2, 2))
    assert twice.weights[0].tolist() == [0.25, 0, 0, 0.75]


def test_children_find_the_intervals_of_their_ancestors() -> None:
    family = Histories.begin(1).compare(KEY, level(0.5), True).draw(OTHER, rows(1, 1))
    again = family.compare(KEY, torch.full((1, 2), 0.25, dtype=torch.float64), True)
    assert again.weights[0].tolist() == [0.125, 0.125]


def test_commit_and_mass_by_text() -> None:
    drawn = Histories.begin(1).draw(KEY, rows(1, 3))
    done = drawn.commit(torch.tensor([[1, 0], [1, 0]]), 2)
    assert done.length == 2
    assert done.mass(4)[0].tolist() == [0, 0, 1, 0]


def test_decisive_tests_of_both_rules() -> None:
    assert decisive_tests("token", 2) == [
        ((0, False),),
        ((0, True), (1, False)),
        ((0, True), (1, True)),
    ]
    assert decisive_tests("block", 2) == [
        ((0, False), (1, False)),
        ((0, True), (1, False)),
        ((1, True),),
    ]
    assert decisive_tests("block", 0) == [()]


def test_a_draw_stage_that_is_no_conjunction_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.doctor.exact import trees as chains

    def by_count(accept: torch.Tensor, uniforms: torch.Tensor, rule: str) -> torch.Tensor:
        return (uniforms < accept).sum(-1)

    monkeypatch.setattr(chains, "num_accepted", by_count)
    with pytest.raises(Inexact, match="no conjunction"):
        decisive_tests("block", 2)
