"""Proposals of drafters, and the verdicts of verification on them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.config import Choice, TokenSource
from forerun.theory.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assurance:
    """A drafter's guarantee that the values of a proposal are valid and need no check.

    It says: every id is an argmax of, or a draw from, a row over the target's vocabulary; every row
    is a softmax in fp32 without NaN. It holds for these very tensors: a proposal with any other
    beside it is checked in full.
    """

    tokens: Int64[Tensor, " nodes"]
    draft_probs: Float[Tensor, "parents vocab"] | None

    def covers(self, proposal: Proposal) -> bool:
        """Whether the guarantee refers to the tensors of this proposal."""
        return self.tokens is proposal.tokens and self.draft_probs is proposal.draft_probs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """Token tree that one drafter proposes for one sequence in a step.

    Attributes:
        tokens: token id of every node, in the order of `tree.parents`.
        choice: how the nodes were chosen; it decides which verifiers are exact.
        draft_probs: where `choice.is_drawn`, the rows that tokens were drawn from: one per node
            with children, the root included, in node order. For a chain row i is the distribution
            that node i was drawn from. A `COUPLED` proposal may carry its rows too, for
            `Verdict.expected_accepted` and the trace; no token depends on them. None otherwise.
        stop_reason: why drafting ended ("budget", "context", "score"; "invalid_probs": the next
            distribution was NaN).
        assurance: spares the check of values that the drafter guarantees.
    """

    tokens: Int64[Tensor, " nodes"]
    tree: TokenTree
    choice: Choice
    draft_probs: Float[Tensor, "parents vocab"] | None = None
    stop_reason: str = "budget"
    assurance: Assurance | None = None

    @property
    def is_assured(self) -> bool:
        """Whether the drafter guarantees that the proposal's values are valid."""
        return self.assurance is not None and self.assurance.covers(self)

    @property
    def num_drafted(self) -> int:
        return len(self.tree.parents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of verifying one proposal.

    Attributes:
        path: accepted nodes from the root down (indices into the proposal).
        tokens: every emitted token: the accepted ones, then one recovered or bonus token.
        expected_accepted: E[num_accepted | proposal, target] under the verifier in use; of coupled
            trees see `expected_on_walk`, and without `draft_probs` that of a coupled proposal
            equals `num_accepted`.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    expected_accepted: float

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens, one fewer than emitted."""
        return len(self.path)
