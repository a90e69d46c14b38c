"""Decoding of one HTTP request: one ticket per prompt, and numbering of all samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from forerun.engine.asynchronous import AsyncEngine
from forerun.engine.config import RequestTerms
from forerun.engine.intake import Prompt
from forerun.engine.results import RequestOutput, StreamChunk
from forerun.engine.thread import Ticket
from forerun.errors import ForerunError
from forerun.sampling.config import SamplingParams
from forerun.sampling.mask import TokenMask

__all__ = ["Generation"]

END = None
"""Put into a queue of chunks where one ticket has no more."""


class Generation:
    """The prompts of one HTTP request in the engine, from queueing to their outputs.

    The choices of the response are numbered prompt by prompt: sample i of prompt p is choice
    p * n + i.

    Args:
        tickets: one per prompt.
        num_samples: n, samples per prompt.

    Attributes:
        finished: outputs of the prompts, once they have all ended.
    """

    def __init__(self, tickets: Sequence[Ticket], num_samples: int) -> None:
        self.tickets = tickets
        self.num_samples = num_samples
        self.finished: list[RequestOutput] = []

    @property
    def is_over(self) -> bool:
        """Whether the outputs of all prompts have been returned."""
        return len(self.finished) == len(self.tickets)

    @classmethod
    async def begin(
        cls,
        engine: AsyncEngine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        terms: RequestTerms,
        mask: TokenMask | None = None,
    ) -> Generation:
        """Queue all prompts, or none if one of them is refused.

        Raises:
            InvalidRequest: a prompt or a parameter cannot be honoured.
            QueueFull: there is no room for all of them.
            EngineStopped: the engine has ended.
        """
        tickets: list[Ticket] = []
        try:
            for prompt in prompts:
                tickets.append(await engine.enqueue(prompt, params, terms, mask))
        except BaseException:
            for ticket in tickets:
                ticket.abort()
            raise
        return cls(tickets, params.n)

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yield every chunk with the index of its choice, as chunks are decoded."""
        if len(self.tickets) == 1:
            async for chunk in self.tickets[0]:
                yield chunk.index, chunk
        else:
            async for at, chunk in merged(self.tickets):
                yield at * self.num_samples + chunk.index, chunk

    async def outputs(self) -> list[RequestOutput]:
        """Wait until all prompts have ended and return their outputs, in order."""
        self.finished = [await ticket.wait() for ticket in self.tickets]
        return self.finished

    def close(self) -> None:
        """Abort the unfinished prompts, which frees their slots after the current step."""
        for ticket in self.tickets:
            ticket.abort()


async def merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Yield the chunks of several tickets in order of arrival, each with its ticket's index."""
    chunks: asyncio.Queue[tuple[int, StreamChunk | ForerunError | None]] = asyncio.Queue()

    async def pass_on(at: int, ticket: Ticket) -> None:
        try:
            async for chunk in ticket:
                chunks.put_nowait((at, chunk))
            chunks.put_nowait((at, END))
        except ForerunError as error:
            chunks.put_nowait((at, error))

    tasks = [asyncio.ensure_future(pass_on(*each)) for each in enumerate(tickets)]
    try:
        num_left = len(tasks)
        while num_left:
            at, chunk = await chunks.get()
            if isinstance(chunk, ForerunError):
                raise chunk
            if chunk is END:
                num_left -= 1
            else:
                yield at, chunk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
