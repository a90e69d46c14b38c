"""AsyncEngine: chunks without blocking the loop, and rows freed when the reader goes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests import tiny
from tests.server.conftest import Held, tiny_engine, wait_until_idle

from forerun.control.base import Plan
from forerun.engine.config import RequestTerms
from forerun.engine.thread import AsyncEngine
from forerun.errors import EngineStopped, InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.server.app import Disconnected, EventStream, Generation, while_connected

PARAMS = SamplingParams(seed=2, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(seed=2, max_tokens=80, ignore_eos=True)
PROMPT = tiny.PROMPTS[0]


def test_chunks_are_the_text_of_the_library():
    expected = [tiny_engine().generate([p], PARAMS)[0].text for p in tiny.PROMPTS]

    async def main():
        async with AsyncEngine(tiny_engine()) as running:

            async def text(prompt):
                return "".join([chunk.text async for chunk in running.generate(prompt, PARAMS)])

            return await asyncio.gather(*map(text, tiny.PROMPTS))

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_reader_that_goes_frees_its_rows(how):
    engine, held = tiny_engine(), Held()
    engine.observers.append(held)

    async def main():
        async with AsyncEngine(engine) as running:
            chunks = running.generate(PROMPT, LONG)
            await anext(chunks)
            if how == "close":
                await chunks.aclose()
            else:
                waiting = asyncio.ensure_future(anext(chunks))
                await asyncio.sleep(0)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
            held.go_on.set()
            await asyncio.to_thread(wait_until_idle, engine)
            assert engine.stats().num_emitted < 80

    asyncio.run(main())


def test_a_ticket_can_be_awaited_and_then_read():
    async def main():
        async with AsyncEngine(tiny_engine()) as running:
            ticket = await running.enqueue(PROMPT, PARAMS)
            output = await ticket.wait()
            assert "".join([chunk.text async for chunk in ticket]) == output.text
            assert (await ticket.wait()) is output

    asyncio.run(main())


def test_a_closed_engine_ends_its_readers():
    engine, held = tiny_engine(), Held()
    engine.observers.append(held)

    async def main():
        async with AsyncEngine(engine) as running:
            ticket = await running.enqueue(PROMPT, LONG)
            join = running._owner.join
            running._owner.join = lambda: (held.go_on.set(), join())  # once it is told to end
        with pytest.raises(EngineStopped):
            await ticket.wait()
        with pytest.raises(EngineStopped):
            async for _ in ticket:
                pass
        with pytest.raises(EngineStopped):
            running.check_running()

    asyncio.run(main())


def test_the_loop_of_a_reader_may_be_gone():
    engine = tiny_engine()
    running = AsyncEngine(engine)
    running.start()
    ticket = running.submit(PROMPT, LONG)

    async def first():
        async for _ in ticket:
            return

    asyncio.run(first())  # its loop is closed while the request goes on
    assert ticket.result(300).token_ids
    running.close()


def test_none_of_several_prompts_is_queued_where_one_is_refused():
    engine = tiny_engine()

    async def main():
        async with AsyncEngine(engine) as running:
            with pytest.raises(InvalidRequest):
                await Generation.begin(lambda: running.submit_all([PROMPT, ""], LONG), 1, None)
            assert not running._tickets
            await asyncio.to_thread(wait_until_idle, engine)
            assert engine.stats().num_steps == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "plan", [Plan(), Plan.chain("draft_model", 1), Plan.chain("draft_model", 3)]
)
def test_a_request_may_bring_its_plan(plan):
    expected = tiny_engine().generate([PROMPT], PARAMS)[0]
    engine = tiny_engine()
    other = engine.add_request(PROMPT, PARAMS)
    found = engine.generate([PROMPT], PARAMS, RequestTerms(plan=plan))[0].completions[0]
    assert found.text == expected.text
    assert found.acceptance.max_depth == plan.shape.num_nodes
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output(other).text == expected.text


class Gone:
    """A client that leaves once it is told to."""

    def __init__(self):
        self.left = asyncio.Event()

    async def __call__(self):
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_work_is_cancelled_when_the_client_goes():
    async def main():
        gone, ended = Gone(), []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        asyncio.get_running_loop().call_later(0.05, gone.left.set)
        with pytest.raises(Disconnected):
            await while_connected(gone, work())
        assert ended
        assert await while_connected(Gone(), asyncio.sleep(0, "done")) == "done"

    asyncio.run(main())


def test_a_client_that_reads_nothing_is_given_up():
    async def main():
        closed = []

        async def events():
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        async def send(message):
            if message.get("body"):
                await asyncio.sleep(60)

        response = EventStream(events(), lambda: closed.append(True), write_timeout_s=0.05)
        await asyncio.wait_for(response({}, Gone(), send), 50)
        assert closed

    asyncio.run(main())
