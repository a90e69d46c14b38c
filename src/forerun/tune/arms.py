"""What `forerun tune` compares: settings of speculation, servers that use them, and loads."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from forerun.client.urls import hide_keys, shown_url
from forerun.errors import InvalidRequest

NONE = "none"
"""Method and name of the arm that decodes without speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a server drafts.

    Attributes:
        method: the engine's own word, such as "ngram", "eagle3" or "draft-simple"; "none" decodes
            plainly.
        draft: folder, file or name of the draft's weights; None for methods without any.
        k: tokens drafted per step; None leaves them to the engine.
        options: further settings of speculation in the engine's own words, in the order given.
    """

    method: str = NONE
    draft: str | None = None
    k: int | None = None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """Return a short name that is unique among the arms of one run."""
        draft = "" if self.draft is None else f" {self.draft.rstrip('/').rpartition('/')[2]}"
        k = "" if self.k is None else f" K={self.k}"
        return f"{self.method}{draft}{k}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A command line that starts a server, without its speculation, host and port.

    Attributes:
        engine: "vllm", "llamacpp", "sglang" or "forerun".
        program: words that start the server, such as ("vllm", "serve").
        arguments: the other words, in their order; what tune does not know stays as it is.
        model: the target.
        speculation: what the command asked for.
        environment: variables that stood before the command.
        typed: words of the speculation, as the user wrote them.
        address: words of host, port and API key, as the user wrote them.
    """

    engine: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    model: str | None = None
    speculation: Speculation = field(default_factory=Speculation)
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    typed: tuple[str, ...] = ()
    address: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One server that is measured: one that tune starts, or one that runs already.

    Attributes:
        name: unique within a run; "none" is the baseline without speculation.
        speculation: None where the user wrote the command or the address.
        command: words that start the server, on the port that tune chose; empty for a URL.
        typed: the command as the user would type it, with a host and port of their own; empty for
            that which tune starts.
        url: address of the API, ending in /v1.
    """

    name: str
    url: str
    command: tuple[str, ...] = ()
    speculation: Speculation | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    typed: str = ""

    @property
    def words(self) -> list[str]:
        """Return variables and words of the command that tune starts, secrets included."""
        return [*(f"{name}={value}" for name, value in self.environment.items()), *self.command]

    @property
    def started_command(self) -> str:
        """Return the command that tune starts, as one would type it, or else the URL."""
        return hide_keys(shlex.join(self.words)) or shown_url(self.url)

    @property
    def shown_command(self) -> str:
        """Return the command to use once this arm is chosen; the URL of a running server."""
        return hide_keys(self.typed) or self.started_command


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Load:
    """A number of clients that send requests at a temperature, each after its last answer.

    Raises:
        InvalidRequest: a value is out of range.
    """

    clients: int = 1
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= MOST_CLIENTS:
            raise InvalidRequest(f"--clients is {self.clients}; it must be 1 to {MOST_CLIENTS}")
        if not 0.0 <= self.temperature <= 2.0:
            raise InvalidRequest(f"--temperature is {self.temperature:g}; it must be 0 to 2")

    @property
    def label(self) -> str:
        unit = "client" if self.clients == 1 else "clients"
        return f"{self.clients} {unit}, T={self.temperature:g}"


MOST_CLIENTS = 256
