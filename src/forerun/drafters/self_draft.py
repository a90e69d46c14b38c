"""Self-draft: the target's first layers, its last norm and its head, with nothing trained.

They share the target's weights and its KV. The rows of committed tokens are there already, for the
target's pass has stored them and layers never see what is above them; drafted rows are staged in
the target's own slot, and the target's next pass writes over them. So drafting takes no memory and
never catches up.

Cost per step: K passes of one row per sequence through some of the layers and the whole head.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.models.context import Context

__all__ = ["SelfDraft"]


class SelfDraft(DraftModel):
    """A draft model that lives in the target; see `LayeredModel.first_layers`."""

    method = "self"

    def _open(self, request: DraftRequest) -> Context:
        assert request.context is not None
        return Borrowed(request.context)

    def forget(self, request_id: str) -> None:
        """Drop all state of a request; the slot is the target's to give back."""
        self._branches.pop(request_id, None)


class Borrowed(Context):
    """The target's view of a sequence, in which a drafter may stage rows but commit none.

    Args:
        lender: the target's context.
    """

    def __init__(self, lender: Context) -> None:
        self.store = lender.store
        self.ids = lender.ids
        self.slot = lender.slot

    def commit(self, rows: Sequence[int]) -> None:
        """Nothing to do: the target has committed its own rows, and with them the draft's."""
