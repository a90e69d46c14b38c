"""Drafting with the target's own first layers, its final norm and its output head, untrained.

The draft shares the target's weights and its KV cache. The rows of committed tokens are there
already, because a layer's rows do not depend on the layers above it. Draft rows are staged in the
target's own slot, and the target's next pass overwrites them. So this drafter needs no memory of
its own and has no tokens to catch up with.

A step costs K passes of one row per sequence through some of the layers and the whole head.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.models.context import Context

__all__ = ["SelfDraft"]


class SelfDraft(DraftModel):
    """A draft model of the target's first layers, which stages its rows in the target's cache."""

    method = "self"

    def _open(self, request: DraftRequest) -> Context:
        assert request.context is not None
        return TargetKVView(request.context)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request; its slot belongs to the target."""
        self._sequences.pop(request_id, None)


class TargetKVView(Context):
    """The target's KV of a sequence, in which a drafter may stage rows but not commit them.

    Args:
        target: the target's context.
    """

    def __init__(self, target: Context) -> None:
        self.store = target.store
        self.ids = target.ids
        self.slot = target.slot

    def commit(self, rows: Sequence[int]) -> None:
        """Do nothing: the target commits its own rows, and the draft's are the same rows."""
