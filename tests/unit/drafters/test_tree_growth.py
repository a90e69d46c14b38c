"""How a draft tree of a draft model grows: its noise by level, and the nodes it expands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forerun.control.base import Tree
from forerun.drafters.draft_sequence import DraftSequence
from forerun.drafters.tree_growth import BestFirst, Drawn
from forerun.sampling.config import Choice
from forerun.sampling.noise import position_key

pytestmark = pytest.mark.usefixtures("unchecked")


def sequence(shape: Tree, **changes: Any) -> DraftSequence:
    request = SimpleNamespace(noise_key=11)
    fields = {"tree_shape": shape, "first_acceptance": 0.6, "num_committed": 5, "request": request}
    fields |= {"tree_choice": Choice.COUPLED, "stop_reason": None}
    return cast(DraftSequence, SimpleNamespace(**(fields | changes)))


def test_every_level_of_a_coupled_tree_has_the_noise_of_its_position():
    tree = Drawn(sequence(Tree(num_nodes=7, depth=3, width=2)))
    for level in range(2):
        keys = {key for row in tree.noise_keys() for key in row}
        assert keys == {position_key(11, 5 + level)}
        num = len(tree.frontier)
        tree.add([[1, 2]] * num, [[0.5, 0.4]] * num, torch.zeros(num, 8))


def test_the_worst_node_of_a_full_tree_is_not_expanded():
    """No child of it can be better than it, so its pass would be for nothing."""
    tree = BestFirst(sequence(Tree(num_nodes=2, depth=3, width=2)))
    tree.add([[4, 9]], [[0.7, 0.2]], torch.empty(0))
    assert tree.frontier == [(4,)]
    roomy = BestFirst(sequence(Tree(num_nodes=3, depth=3, width=2)))
    roomy.add([[4, 9]], [[0.7, 0.2]], torch.empty(0))
    assert len(roomy.frontier) == 2
