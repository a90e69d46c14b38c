"""Requests that are passed on to a server as they came, and its answers back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import httpx

from forerun.errors import ServerUnavailable

_HOP_HEADERS = frozenset(
    "connection content-encoding content-length host keep-alive te trailer transfer-encoding "
    "upgrade proxy-authenticate proxy-authorization authorization".split()
)
"""Headers that hold for one connection alone; the key of a client is not passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedReply:
    """Status and headers of an answer, and its body as it arrives."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]


class Forwarder:
    """Passes requests on to one server, without retries and without a time limit."""

    def __init__(self, address: str) -> None:
        self._http = httpx.AsyncClient(base_url=address, timeout=None)

    async def close(self) -> None:
        await self._http.aclose()

    async def send(
        self, method: str, raw_path: bytes, headers: Iterable[tuple[str, str]], body: bytes
    ) -> ForwardedReply:
        """Send a request and return the answer before its body is read.

        Raises ServerUnavailable where the server cannot be reached, or fails before its answer
        begins.
        """
        url = self._http.base_url.copy_with(raw_path=raw_path)
        kept = [(name, value) for name, value in headers if name not in _HOP_HEADERS]
        request = self._http.build_request(method, url, headers=kept, content=body)
        try:
            reply = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise ServerUnavailable(str(error) or type(error).__name__) from error
        found = {name: value for name, value in reply.headers.items() if name not in _HOP_HEADERS}
        return ForwardedReply(status=reply.status_code, headers=found, chunks=_chunks(reply))


async def _chunks(reply: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in reply.aiter_bytes():
            yield chunk
    finally:
        await reply.aclose()
