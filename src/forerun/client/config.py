"""Settings of the client of one OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import Range, check_ranges

_CHAT = "/chat"
_COMPLETIONS = "/completions"
_RANGES = (
    Range("max_connections", 1, integer=True),
    Range("num_tries", 1, integer=True),
    Range("first_wait_s", 0),
    Range("max_wait_s", 0),
    Range("timeout_s", 0, above_low=True),
    Range("stream_s", 0, above_low=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Address of a server, and how requests to it are retried and limited.

    Attributes:
        url: with or without /v1, or the address of /completions or /chat/completions itself.
        model: its name on the server; None takes the first one that the server lists.
        key_variable: environment variable with the API key; None takes OPENAI_API_KEY if it is set.
        max_connections: connections at once.
        num_tries: of a request, before the server counts as unavailable.
        first_wait_s: seconds before the second try; doubled for every further one.
        max_wait_s: most seconds between two tries, also if the server asks for more.
        timeout_s: seconds for a whole answer, headers included, or for the next event of a stream.
        stream_s: seconds for a whole stream.
    """

    url: str
    model: str | None = None
    key_variable: str | None = None
    max_connections: int = 64
    num_tries: int = 7
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    timeout_s: float = 600.0
    stream_s: float = 3600.0

    def __post_init__(self) -> None:
        check_ranges(self, *_RANGES)

    @property
    def base(self) -> str:
        """Address that the paths of the API are appended to."""
        url = self.url.rstrip("/")
        if url.endswith(_COMPLETIONS):
            return url.removesuffix(_COMPLETIONS).removesuffix(_CHAT)
        return url if url.endswith("/v1") else url + "/v1"

    @property
    def is_chat(self) -> bool:
        """Whether the address is that of /chat/completions."""
        return self.url.rstrip("/").endswith(_CHAT + _COMPLETIONS)
