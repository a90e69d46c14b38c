"""Names for how draft tokens were chosen and where emitted tokens came from; torch-free."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Choice", "TokenSource"]


class Choice(StrEnum):
    """How the nodes of a proposal were chosen."""

    DETERMINISTIC = "deterministic"
    """A function of committed tokens alone: argmax, top-k, n-gram."""
    SAMPLED = "sampled"
    """Drawn from `draft_probs` with noise independent of the target's draws."""
    COUPLED = "coupled"
    """Drawn from the draft with the target's own position-keyed noise."""


class TokenSource(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
