"""Cards of drafts."""

from __future__ import annotations

from forerun.models.draft_card import DraftCard


def card_for(made_for):
    """The card of a draft that was aligned to "my/target", without figures."""
    return DraftCard(
        target="my/target",
        target_hash="",
        made_for=made_for,
        data_hash="",
        objective="lk",
        temperature=1.0,
    )
