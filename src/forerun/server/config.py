"""Settings of the server; torch-free, so that the command line starts quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.errors import Range, check_ranges

ToolFormatChoice = Literal["auto", "hermes", "mistral", "llama3", "none"]

RANGES = (
    Range("port", 0, 65535, integer=True),
    Range("max_body_bytes", 1024, integer=True),
    Range("body_timeout_s", 0, above_low=True),
    Range("write_timeout_s", 0, above_low=True),
    Range("drain_s", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server; those of the engine are in EngineConfig.

    Attributes:
        host: address to listen on; one that is not of this machine alone needs API keys.
        port: TCP port; 0 takes a free one.
        max_body_bytes: longest body of a request; longer ones are refused with status 413.
        body_timeout_s: seconds that a client may take to send the body.
        write_timeout_s: seconds after which a client that reads nothing is disconnected.
        drain_s: seconds that requests may go on after SIGTERM.
        tool_format: form of the tool calls in the model's text: hermes (also Qwen), mistral or
            llama3; auto decides by the chat template, none finds no calls.
        allowed_hosts: further names in the Host header under which a server on a loopback address
            answers, such as that of a proxy in front of it.
        allowed_origins: web pages that may call this server from a browser, such as
            https://example.org; "*" allows all.

    Raises:
        InvalidRequest: a value is out of range; the message names it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    drain_s: float = 30.0
    tool_format: ToolFormatChoice = "auto"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, *RANGES)
