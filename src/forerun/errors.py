"""Every error a user can meet; all derive from ForerunError.

ForerunError
├── InvalidRequest      a prompt or a sampling parameter that cannot be honoured
├── InvalidModel        weights, configuration or tokenizer that cannot be used
├── IncompatibleDraft   draft and target do not fit each other
├── NotEnoughMemory     what was asked for does not fit, said before allocating
├── NumericalError      the target returned NaN or no possible token
└── DrafterError        a drafter broke its contract (the engine falls back to plain decoding)
"""

from __future__ import annotations

__all__ = [
    "DrafterError",
    "ForerunError",
    "IncompatibleDraft",
    "InvalidModel",
    "InvalidRequest",
    "NotEnoughMemory",
    "NumericalError",
]


class ForerunError(Exception):
    """Base of all forerun errors; the message names the value and what to do about it."""


class InvalidRequest(ForerunError, ValueError):
    """A prompt or a parameter of a request cannot be honoured."""


class InvalidModel(ForerunError):
    """A model folder is missing, unreadable, truncated or of an unsupported kind."""


class IncompatibleDraft(ForerunError):
    """Draft and target do not fit each other, for example their tokenizers differ."""


class NotEnoughMemory(ForerunError):
    """The requested configuration needs more memory than there is."""


class NumericalError(ForerunError):
    """The target's logits are NaN, or leave no token possible.

    Attributes:
        request_id: whose logits, where that is known; aborting it lets other requests go on.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class DrafterError(ForerunError):
    """A drafter raised, or returned NaN, an out-of-range id or a malformed tree."""
