"""Hides secrets in messages, logs and reports: those in URLs and in the commands of servers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from forerun.errors import InvalidRequest

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]*", re.IGNORECASE)
_CREDENTIALS = re.compile(r"([a-z][a-z0-9+.-]*:/{1,2})[^\s/]*@", re.IGNORECASE)
_SHORTEST_SECRET = 4
"""Characters below which a value is not hidden in a log: it may be a part of any word."""
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
_WORD = re.compile(r"""(?:'[^']*'?|"(?:\\.|[^"\\])*"?|\\[^\n]|[^\s'"\\])+""", re.DOTALL)
"""A word of a command line as it was typed, quotes included."""
_SECRET = re.compile(
    r"([\w.-]*[_.-])?(pass|pwd|auth)"
    r"|[\w.-]*(key|token|secret|passw(or)?d|passphrase|credentials?)|-hft",
    re.IGNORECASE,
)
"""The name of a flag or of a variable that holds a secret."""
_PAGES = "/metrics /health /version /v1 /models /v1/models".split()
_PUBLIC = {
    "",
    *_PAGES,
    *(f"{v1}{chat}/completions" for v1 in ("", "/v1") for chat in ("", "/chat")),
}
"""Paths that hold no secret."""
HIDDEN = "…"


def is_url(name: str) -> bool:
    """Whether a name is the address of a server, and not a file.

    Raises InvalidRequest for an address with another scheme.
    """
    if name.lower().startswith(("http://", "https://")):
        return True
    if _URL.fullmatch(name):
        raise InvalidRequest(f"{shown_url(name)} must begin with http:// or https://")
    return False


def shown_url(url: str) -> str:
    """Return a URL for people: scheme, host, port, and its path only if that is a public one."""
    scheme, mark, rest = url.partition("://")
    if not mark or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]{0,19}", scheme):
        return HIDDEN
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return f"{scheme}://{HIDDEN}"
    # After a "/" in a password, what looks like host and port may be the beginning of the secret.
    if "@" in rest.partition("/")[2] or not re.fullmatch(r"[\w.:-]+", host, re.ASCII):
        return f"{scheme}://{HIDDEN}"
    host = f"[{host}]" if ":" in host else host
    is_public = parts.path.rstrip("/") in _PUBLIC and not parts.query and not parts.fragment
    return f"{scheme}://{host}{port}{parts.path if is_public else '/' + HIDDEN}"


def shown_source(name: str) -> str:
    """Return the name of a file as it is, and a URL as `shown_url` renders it."""
    return shown_url(name) if is_url(name) else name


def hide_credentials(text: str) -> str:
    """Return a text in which no URL has a user and a password, one taken for a path included."""
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", text)


def hide_urls(text: object) -> str:
    """Return a text in which every URL is as `shown_url` renders it."""
    return _URL.sub(lambda found: shown_url(found.group()), str(text))


def hide_keys(command: str) -> str:
    """Return a command line with "..." for keys, tokens and passwords, those in URLs included.

    An API key may be several words (vLLM), so that all words up to the next flag are hidden.
    """
    num_left = 0  # words still to hide

    def hide(found: re.Match[str]) -> str:
        nonlocal num_left
        word = re.sub(r"['\"\\]", "", found[0]).strip()
        name, mark, value = word.partition("=")
        is_flag = word.startswith("-")
        if num_left and word and not is_flag:
            num_left -= 1
            return "..."
        is_secret = _SECRET.fullmatch(name) is not None
        if word:
            most = len(command) if name[-7:] in ("api-key", "api_key") else 1
            num_left = most if is_secret and is_flag and not mark else 0
        if is_secret and value:
            return f"{name}=..."
        return _QUERY.sub(r"\1...", hide_credentials(found[0]))

    return _WORD.sub(hide, command)


def hide_printed_keys(text: str, command: Sequence[str]) -> str:
    """Return what a program printed, with "..." for the secrets of its command."""
    for word, shown in zip(command, shlex.split(hide_keys(shlex.join(command))), strict=True):
        secret = word if shown == "..." else word.partition("=")[2]
        if shown.endswith("...") and len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "...")
    return text
