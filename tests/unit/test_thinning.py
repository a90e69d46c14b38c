"""Combinations that a covering array keeps."""

from __future__ import annotations

from itertools import product

import pytest
from tests.thinning import covering, values_of

FLAGS, NAMES = (False, True), (("one", 1), ("two", 2), ("three", 3))


def grid_of(*sizes: int) -> list[dict[str, int]]:
    return [{f"p{i}": value for i, value in enumerate(one)} for one in product(*map(range, sizes))]


@pytest.mark.parametrize(("sizes", "num_kept"), [((5,), 5), ((4, 3), 4), ((3, 3, 2), 3)])
def test_every_value_occurs(sizes, num_kept):
    grid = grid_of(*sizes)
    kept = [grid[index] for index in covering(grid, 1)]
    assert len(kept) == num_kept
    for name, size in enumerate(sizes):
        assert {one[f"p{name}"] for one in kept} == set(range(size))


def test_values_alternate():
    grid = grid_of(12, 3)
    kept = [grid[index]["p1"] for index in covering(grid, 1)]
    assert [kept.count(value) for value in range(3)] == [4, 4, 4]


def test_every_pair_occurs():
    grid = grid_of(3, 3, 3, 2)
    kept = [grid[index] for index in covering(grid, 2)]
    assert len(kept) < 14
    for first, second in (("p0", "p1"), ("p1", "p2"), ("p2", "p3"), ("p0", "p3")):
        pairs = {(one[first], one[second]) for one in grid}
        assert {(one[first], one[second]) for one in kept} == pairs


def test_only_combinations_of_the_grid_are_kept():
    grid = [{"p0": 0, "p1": 0}, {"p0": 0, "p1": 1}, {"p0": 1, "p1": 1}]
    assert covering(grid, 1) == [0, 2]
    assert covering(grid, 2) == [0, 1, 2]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(("name", "number"), NAMES)
def test_equal_values_of_two_calls_are_one_value(request, flag, name, number):
    values = values_of(request.node)
    assert values == {"flag": id(flag), "name": id(name), "number": id(number)}
    assert values["flag"] in map(id, FLAGS)
    assert values["name"] in [id(one) for one, _ in NAMES]


@pytest.mark.covering
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_combinations(number, letter):
    assert letter * number


def test_only_some_combinations_of_a_marked_test_are_kept(request):
    names = [getattr(item, "originalname", "") for item in request.session.items]
    if request.config.option.markexpr == "not full":
        assert names.count("test_combinations") <= 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(7))
def test_numbers(number):
    assert number % 3 == 0 or number < 7


def test_one_case_in_so_many_is_kept(request):
    mine = [item for item in request.session.items if item.path == request.path]
    names = [item.name for item in mine if item.name.startswith("test_numbers")]
    if request.config.option.markexpr == "not full" and len(names) > 1:
        assert names == ["test_numbers[0]", "test_numbers[3]", "test_numbers[6]"]
