"""API keys: the tenant of each key, and its limits."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from forerun.bounded_read import read_bytes
from forerun.errors import InvalidRequest, Range, check_ranges

RANGES = (
    Range("requests_per_minute", 0, above_low=True, optional=True),
    Range("max_concurrent", 1, integer=True, optional=True),
    Range("max_tokens", 1, integer=True, optional=True),
    Range("priority", -1_000_000, 1_000_000, integer=True),
)
MIN_KEY_CHARACTERS = 16
SHA256 = re.compile("[0-9a-f]{64}")
BUSY_RETRY_S = 1.0


class LimitReached(InvalidRequest):
    """A tenant, or the server, has reached a limit; the request may be sent again later."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One API key: its tenant and its limits.

    Attributes:
        tenant: requests of one tenant may share KV of a common beginning; those of two do not.
        sha256: of the key, in hexadecimal digits; None for requests without a key.
        requests_per_minute: on average; as many may come at once after a minute of silence.
        max_concurrent: requests that may be worked on at once.
        max_tokens: output tokens of a request, all its choices together.
        priority: the most urgent (lowest) priority that a request may ask for.

    Raises:
        InvalidRequest: a value is out of range; the message names it.
    """

    tenant: str
    sha256: str | None = None
    requests_per_minute: float | None = None
    max_concurrent: int | None = None
    max_tokens: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        check_ranges(self, *RANGES)
        if not self.tenant or not isinstance(self.tenant, str):
            raise InvalidRequest(f"the tenant of a key is {self.tenant!r}; it must be a name")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
            raise InvalidRequest(
                f"sha256 of a key of {self.tenant!r} must be 64 lower-case hexadecimal digits"
            )

    def check(self, priority: int, num_choices: int, max_tokens: int | None) -> None:
        """Refuse a request that exceeds the limits of its key; raises InvalidRequest.

        `num_choices` counts all choices of it; each has `max_tokens`, None to the end of the
        context.
        """
        if self.sha256 is not None and priority < self.priority:
            raise InvalidRequest(
                f"priority is {priority}; this key may ask for {self.priority} and above"
            )
        most = self.max_tokens
        if most is not None and (max_tokens is None or num_choices * max_tokens > most):
            asked = "the rest of the context" if max_tokens is None else f"{max_tokens} tokens"
            raise InvalidRequest(
                f"the request asks for {num_choices} choices of {asked}; this key may have {most} "
                "output tokens per request: lower max_tokens or n"
            )

    @classmethod
    def of(cls, tenant: str, key: str) -> ApiKey:
        """Return an entry without limits for a key in plain text, long enough to be a secret."""
        return cls(tenant=tenant, sha256=_digest_of(key))


def _digest_of(key: str) -> str:
    """Return the SHA-256 of a key; a key that is too short is refused."""
    if len(key) < MIN_KEY_CHARACTERS:
        raise InvalidRequest(
            f"an API key has {len(key)} characters; it needs {MIN_KEY_CHARACTERS}: make one with "
            "`openssl rand -hex 32`"
        )
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """Read the keys of a TOML file, one table `[[keys]]` each, with `key` or its `sha256`.

    Raises:
        InvalidRequest: it is no such file, or an entry is wrong; the message names it.
        UnreadableInput: it cannot be read.
    """
    try:
        tables = tomllib.loads(read_bytes(path).decode()).get("keys", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from error
    known = {field.name for field in fields(ApiKey)} | {"key"}
    if not isinstance(tables, list) or not tables:
        raise InvalidRequest(f"{path} has no [[keys]] table")
    return [key_of(table, known, f"{path}, key {n}") for n, table in enumerate(tables, start=1)]


def key_of(table: object, known: set[str], name: str) -> ApiKey:
    """Return the key of one table."""
    if not isinstance(table, dict) or set(table) - known:
        wrong = ", ".join(sorted(set(table) - known)) if isinstance(table, dict) else "no table"
        raise InvalidRequest(f"{name}: {wrong}; there are {', '.join(sorted(known))}")
    values = dict(table)
    key = values.pop("key", None)
    if (key is None) == ("sha256" not in values):
        raise InvalidRequest(f"{name} needs one of key and sha256")
    if key is not None:
        values["sha256"] = _digest_of(str(key))
    if "tenant" not in values:
        raise InvalidRequest(f"{name} has no tenant")
    try:
        return ApiKey(**values)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from error


NO_KEY = ApiKey(tenant="everyone")
"""Of every request where the server has no keys."""


class Keyring:
    """Finds the API key of a request, and counts the running requests of each key, on one thread.

    Without any keys every request is let in. `max_requests` limits those of all keys together.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        max_requests: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = tuple(keys)
        self.max_requests = max_requests
        self.num_running = 0
        self._clock = clock
        self._running: dict[ApiKey, int] = {}
        self._allowances: dict[ApiKey, tuple[float, float]] = {}

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key in an `Authorization: Bearer` header; None if it is unknown.

        The time it takes depends neither on the key nor on where it differs from a known one.
        """
        if not self.keys:
            return NO_KEY
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256 or ""):
                found = key
        return found if scheme.lower() == "bearer" else None

    @contextmanager
    def admitted(self, key: ApiKey) -> Iterator[None]:
        """Count a request as running while the block runs, or refuse it at a limit."""
        running = self._running.get(key, 0)
        if self.num_running >= self.max_requests:
            raise LimitReached(
                f"{self.num_running} requests are being worked on, at most {self.max_requests} may",
                BUSY_RETRY_S,
            )
        if key.max_concurrent is not None and running >= key.max_concurrent:
            raise LimitReached(
                f"{running} requests of this key are being worked on, at most "
                f"{key.max_concurrent} may",
                BUSY_RETRY_S,
            )
        self._use_allowance(key)
        self.num_running += 1
        self._running[key] = running + 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._running[key] -= 1

    def _use_allowance(self, key: ApiKey) -> None:
        """Take one request from the token bucket of a key, which holds a minute's allowance."""
        rate = key.requests_per_minute
        if rate is None:
            return
        now_s = self._clock()
        most = max(1.0, rate)
        left, at_s = self._allowances.get(key, (most, now_s))
        left = min(most, left + (now_s - at_s) * rate / 60)
        if left < 1:
            self._allowances[key] = (left, now_s)
            raise LimitReached(
                f"this key may send {rate:g} requests per minute", (1 - left) * 60 / rate
            )
        self._allowances[key] = (left - 1, now_s)
