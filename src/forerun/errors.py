"""All errors that users can meet, derived from ForerunError, and checks of numeric settings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The range of valid values of a numeric field."""

    name: str
    low: float
    high: float = math.inf
    above_low: bool = False
    integer: bool = False
    optional: bool = False

    def check(self, value: object) -> None:
        """Raise InvalidRequest unless `value` is a finite number in range."""
        if value is None and self.optional:
            return
        kind = int if self.integer else (int, float)
        if isinstance(value, kind) and not isinstance(value, bool) and self._has(value):
            return
        raise InvalidRequest(f"{self.name} is {value!r}; it must be {self}")

    def _has(self, value: float) -> bool:
        above = value > self.low if self.above_low else value >= self.low  # false for NaN
        return above and value <= self.high and value < math.inf

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        low = f" {'above' if self.above_low else 'at least'} {self.low:.12g}"
        high = f" and at most {self.high:.12g}"
        bounds = (low if self.low > -math.inf else "") + (high if self.high < math.inf else "")
        return kind + bounds + (" or None" if self.optional else "")


def check_ranges(config: object, *ranges: Range) -> None:
    """Raise InvalidRequest for the first field of an object that is out of range."""
    for limits in ranges:
        limits.check(getattr(config, limits.name))


class ForerunError(Exception):
    """Base of all forerun errors; the message states the value and what to do about it."""


class InvalidRequest(ForerunError, ValueError):
    """A prompt or a parameter of a request cannot be honoured."""


class PromptTooLong(InvalidRequest):
    """A prompt does not leave room for one output token in the context."""


class UnreadableInput(ForerunError, ValueError):
    """A file, standard input or an HTTP body cannot be read or exceeds a limit."""


class InvalidModel(ForerunError):
    """A model folder is missing, unreadable, truncated or of an unsupported kind."""


class InvalidCheckpoint(ForerunError):
    """A training run cannot resume from a file that is damaged or has other settings."""


class InvalidProfile(ForerunError):
    """A cost profile is damaged, has a newer format, or is of another machine, pair or set-up."""


class InvalidTrace(ForerunError):
    """A trace cannot be read at all; damaged records within a trace are reported separately."""


class InvalidCache(ForerunError):
    """A teacher cache was made with another target, tokenizer, template or text."""


class CacheTooLarge(ForerunError):
    """A teacher cache does not fit on its disk; the finished part is kept."""


class IncompatibleDraft(ForerunError):
    """Draft and target do not fit each other, for example their tokenizers differ."""


class NotEnoughMemory(ForerunError):
    """The requested configuration needs more memory than is available."""


class QueueFull(ForerunError):
    """The queue of waiting requests is full, and the new request was not queued.

    Attributes:
        retry_after_s: seconds after which there is probably a place.
    """

    retry_after_s: float = 1.0


class EngineBusy(ForerunError):
    """Another thread is using the engine, or the engine was created before this process forked."""


class EngineStopped(ForerunError):
    """The thread that runs an engine was closed, or ended by an error."""


class RunnerUnavailable(ForerunError):
    """A runner cannot be used: there is no compiler, or the runner does not support the model."""


class NumericalError(ForerunError):
    """The target's logits are NaN, allow no token, or cannot be verified for one request.

    Attributes:
        request_id: whose logits, where that is known; aborting it lets other requests go on.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class MaskError(NumericalError):
    """The token mask of a request raised an error, which ends this request only."""


class DrafterError(ForerunError):
    """A drafter raised an error, or returned NaN, an out-of-range id or a malformed tree."""


class ServerUnavailable(ForerunError):
    """A server that generates responses is unreachable, too busy or failing, even after retries."""


class TrainingDiverged(ForerunError):
    """Loss or gradient is NaN or infinite; the last checkpoint is kept."""


class UnsupportedFeatures(ForerunError):
    """A drafter needs features, an embedding or a head that the target model does not have."""


_KINDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "<=": "at most",
    ">=": "at least",
    "<": "below",
    ">": "above",
    "|": "or",
}


def explain_invalid(error: Exception, found: object, kind: object) -> str:
    """Rewrite an error of `msgspec.convert(found, kind)`: the place, its value, what is allowed."""
    words, _, place = str(error).partition(" - at `$")
    path = place.removesuffix("`").removeprefix(".")
    try:
        for index, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path):
            found = found[int(index)] if index else found[name]  # type: ignore[index]
    except (IndexError, KeyError, TypeError, ValueError):
        return str(error)
    if words.startswith("Invalid") and (choices := _list_choices(kind, path)):
        return f"{path} is {found!r:.80}; it is one of {', '.join(map(str, choices))}"
    if not words.startswith("Expected"):
        return f"{path}: {words}" if path else words
    allowed = words.removeprefix("Expected ").partition(", got ")[0].replace("`", "")
    allowed = " ".join(_KINDS.get(word, word) for word in allowed.split())
    return f"{path or 'it'} is {found!r:.80}; it must be {allowed}"


def _list_choices(kind: object, path: str) -> list[object]:
    """Return the values of a type at the place of a path, tags of structs included."""
    from msgspec import inspect

    candidates: list[Any] = [inspect.type_info(kind)]
    choices: list[object] = []
    for name in re.findall(r"[^.\[\]]+", path):
        flat = [one for each in candidates for one in getattr(each, "types", (each,))]
        choices = [one.tag for one in flat if getattr(one, "tag_field", None) == name]
        items = [getattr(one, "item_type", None) for one in flat]
        named = [field for one in flat for field in getattr(one, "fields", ())]
        candidates = [one for one in items if one is not None and name.isdigit()]
        candidates += [field.type for field in named if field.encode_name == name]
    flat = [one for each in candidates for one in getattr(each, "types", (each,))]
    return choices + [value for one in flat for value in getattr(one, "values", ())]
