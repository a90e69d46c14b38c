"""Names for how draft tokens were chosen and where emitted tokens came from; torch-free."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Choice", "TokenSource"]


class Choice(StrEnum):
    """Method by which the nodes of a proposal were chosen."""

    DETERMINISTIC = "deterministic"
    """A function of committed tokens alone: argmax, top-k, n-gram."""
    SAMPLED = "sampled"
    """Drawn from `draft_probs` with noise independent of the target's draws."""
    COUPLED = "coupled"
    """Drawn from the draft with the target's own position-keyed noise."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Sampled; siblings were drawn one after the other from the same row, each without those before
    it, and are numbered in that order."""
    TOP_AND_SAMPLED = "top_and_sampled"
    """The last child of every node was drawn from its row of `draft_probs`, where its siblings, a
    function of the committed tokens, have probability 0."""

    @property
    def is_drawn(self) -> bool:
        """Whether verification needs the distributions that tokens were drawn from."""
        return self in (Choice.SAMPLED, Choice.WITHOUT_REPLACEMENT, Choice.TOP_AND_SAMPLED)


class TokenSource(StrEnum):
    """Origin of an emitted token: accepted draft token, recovered token or bonus token."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
