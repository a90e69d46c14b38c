"""The prompts of a request that are queued while its client leaves."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun.engine.thread import Ticket
from forerun.server.app import Generation


def test_prompts_whose_client_leaves_while_they_are_queued_are_aborted():
    may_end, aborted = threading.Event(), threading.Event()

    def submit() -> list[Ticket]:
        assert may_end.wait(60)
        return [Ticket("a", 1, 3, aborted.set)]

    async def leave(pool: ThreadPoolExecutor) -> None:
        beginning = asyncio.ensure_future(Generation.begin(submit, 1, pool))
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        may_end.set()
        assert await asyncio.to_thread(aborted.wait, 60)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(leave(pool))
