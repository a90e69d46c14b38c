"""Interface of models that draft whole chains and trees in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float32, Int64
from torch import Tensor

from forerun.models.base import RowBatch
from forerun.theory.stop_rule import StopRule
from forerun.theory.tree import TokenTree


class SampledTokens(NamedTuple):
    """Token chains drawn in one call.

    Attributes:
        probs: the distribution each was drawn from.
        stop_values: what stop rules measured before each draw, -1 where nothing did; None without.
    """

    tokens: Int64[Tensor, "num_tokens sequences"]
    probs: Float32[Tensor, "num_tokens sequences vocab"]
    stop_values: Float32[Tensor, "num_tokens sequences"] | None = None


class LikelyTree(NamedTuple):
    """The nodes with the most probable paths, depth-first.

    Attributes:
        rows: rows of the nodes' KV after the row of the last committed token; -1 where a node was
            not fed.
        log_probs: of the path down to every node.
    """

    tree: TokenTree
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    log_probs: tuple[float, ...]


@runtime_checkable
class DraftsInOneCall(Protocol):
    """A model that drafts all tokens of chains, or of trees, in one call."""

    def sampled_chain(
        self,
        batch: RowBatch,
        keys: Int64[Tensor, "num_tokens sequences"],
        temperatures: Float32[Tensor, " sequences"],
        vocab_size: int,
        *,
        by_race: bool,
        stops: Sequence[StopRule | None] = (),
    ) -> SampledTokens:
        """Feed `batch`, then continue every sequence with tokens drawn at its temperature.

        Stages rows as `LanguageModel.greedy_chain` does.

        Args:
            temperatures: 0 is greedy.
            vocab_size: width of the distributions, 0 past the model's own vocabulary; one is NaN
                throughout where logits are NaN or infinite, and so are those after it.
            by_race: draw as `sampling.walk.race` does, not by the inverse of the distribution.
            stops: per sequence, when not to go on; drafting ends once all have stopped. Empty: none
                stops.
        """

    def likely_trees(
        self,
        batch: RowBatch,
        shapes: Sequence[tuple[int, int, int]],
        temperatures: Sequence[float],
        vocab_size: int,
    ) -> list[LikelyTree]:
        """Feed `batch`, then grow a tree of the most probable paths after every sequence.

        One pass per level feeds the last row of every sequence once more, and the nodes that may
        have children (EAGLE-2, 2406.16858). Stages the rows of `batch`, as
        `LanguageModel.greedy_chain` takes it, and those of the last pass over each tree; the caller
        commits. A tree has no nodes where the first distribution is not valid.

        Args:
            shapes: per sequence the most nodes, levels and children of a node.
            temperatures: of the distributions that rank the paths, above 0.
            vocab_size: tokens from here on are left out.
        """
