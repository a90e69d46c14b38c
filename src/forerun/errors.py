"""Every error a user can meet; all derive from ForerunError.

ForerunError
├── InvalidRequest      a prompt or a sampling parameter that cannot be honoured
├── InvalidModel        weights, configuration or tokenizer that cannot be used
├── InvalidProfile      a cost profile that cannot be read, or was made elsewhere
├── InvalidTrace        a trace that cannot be read, or holds nothing of one
├── IncompatibleDraft   draft and target do not fit each other
├── NotEnoughMemory     what was asked for does not fit, said before allocating
├── QueueFull           too many requests wait; the same request may be accepted later
├── EngineStopped       an engine's thread has ended, and what it was to do with it
├── RunnerUnavailable   a runner cannot be had here (the engine takes another unless it was named)
├── NumericalError      the target returned NaN or no possible token
│   └── MaskError       the token mask of a request raised
└── DrafterError        a drafter broke its contract (the engine falls back to plain decoding)
"""

from __future__ import annotations

__all__ = [
    "DrafterError",
    "EngineStopped",
    "ForerunError",
    "IncompatibleDraft",
    "InvalidModel",
    "InvalidProfile",
    "InvalidRequest",
    "InvalidTrace",
    "MaskError",
    "NotEnoughMemory",
    "NumericalError",
    "QueueFull",
    "RunnerUnavailable",
]


class ForerunError(Exception):
    """Base of all forerun errors; the message names the value and what to do about it."""


class InvalidRequest(ForerunError, ValueError):
    """A prompt or a parameter of a request cannot be honoured."""


class InvalidModel(ForerunError):
    """A model folder is missing, unreadable, truncated or of an unsupported kind."""


class InvalidProfile(ForerunError):
    """A cost profile is damaged, of a newer format, or of another machine, pair or set-up."""


class InvalidTrace(ForerunError):
    """A trace cannot be read at all; damage within one is reported beside what is whole."""


class IncompatibleDraft(ForerunError):
    """Draft and target do not fit each other, for example their tokenizers differ."""


class NotEnoughMemory(ForerunError):
    """The requested configuration needs more memory than there is."""


class QueueFull(ForerunError):
    """As many requests wait as may; nothing was queued."""


class EngineStopped(ForerunError):
    """The thread that drove an engine was closed, or ended by an error."""


class RunnerUnavailable(ForerunError):
    """A runner cannot be had: no compiler, or a model it is not written for."""


class NumericalError(ForerunError):
    """The target's logits are NaN, or leave no token possible.

    Attributes:
        request_id: whose logits, where that is known; aborting it lets other requests go on.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class MaskError(NumericalError):
    """The token mask of a request raised; like NaN it concerns that request alone."""


class DrafterError(ForerunError):
    """A drafter raised, or returned NaN, an out-of-range id or a malformed tree."""
