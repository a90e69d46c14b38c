"""Servers that answer, are busy, break down, or are not what they should be."""

from __future__ import annotations

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator

import httpx
import pytest
from tests.unit.align.data.conftest import origin, prompt, prompts

from forerun.align.samples import PromptRecord
from forerun.align.texts import ResponseServer, ResponseStore, write_responses_from
from forerun.client.client import Client
from forerun.client.connection import ClientConfig
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(max_tokens=6, seed=1)
TEXT = "import os\n"


class Pauses(threading.Event):
    """Notes how long it would have been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout)
        return self.is_set()


class Server:
    """Answers by a list of replies, the last one for ever; a function makes its own."""

    def __init__(self, *replies: httpx.Response | Callable[[dict], httpx.Response]) -> None:
        self.replies = list(replies)
        self.asked: list[dict] = []
        self.paths: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        self.paths.append(request.url.path)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply(body) if callable(reply) else reply


def told(text: str = TEXT, **changes: object) -> httpx.Response:
    """A completion."""
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    return httpx.Response(200, json={"choices": [choice | changes]})


def client_of(server: Server, tokenizer, *, path: str = "", **changes: object) -> ResponseServer:
    config = ClientConfig(url=f"http://server{path}", model="m", **changes)
    client = Client(config, httpx.MockTransport(server))
    client.connection.closing = Pauses()
    return ResponseServer(client=client, tokenizer=tokenizer)


def respond(server: Server, tokenizer, params: SamplingParams = PARAMS, **changes: object):
    return client_of(server, tokenizer, **changes).respond(prompt(3, 4, 5), params)


# ------------------------------------------------------------------------------------ what is asked


def test_tokens_are_sent_with_the_deployed_parameters(plain):
    server = Server(told())
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_k=7, min_p=0.1, stop="x", logit_bias={3: 1.5}, seed=4
    )
    respond(server, plain, params)
    (body,) = server.asked
    assert 0 <= body.pop("seed") < 2**31
    assert body == {
        "model": "m",
        "prompt": [3, 4, 5],
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 9,
        "top_k": 7,
        "min_p": 0.1,
        "stop": ["x"],
        "logit_bias": {"3": 1.5},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert server.paths == ["/v1/completions"]


def test_prompts_have_seeds_of_their_own(plain):
    server = Server(told())
    client = client_of(server, plain)
    for index in range(3):
        client.respond(prompt(3 + index), PARAMS)
    assert len({body["seed"] for body in server.asked}) == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(), "max_tokens is not set"),
        (SamplingParams(max_tokens=3, bad_token_ids=(4,)), "bad_token_ids cannot be asked"),
    ],
)
def test_parameters_no_server_takes_are_refused_before_asking(tmp_path, plain, params, message):
    server = Server(told())
    store = ResponseStore(tmp_path, origin(params=params))
    with pytest.raises(InvalidRequest, match=message):
        write_responses_from(client_of(server, plain), prompts(2), store)
    assert server.asked == []


def test_conversations_are_sent_to_the_chat_endpoint(plain):
    message = {"role": "user", "content": "hi"}
    record = PromptRecord(
        prompt_ids=(3,), prompt_hash="0" * 16, tag="", where="p:1", messages=(message,)
    )
    choice = {"message": {"role": "assistant", "content": TEXT}, "finish_reason": "length"}
    server = Server(httpx.Response(200, json={"choices": [choice]}))
    client = client_of(server, plain, path="/v1/chat/completions")
    assert client.respond(record, PARAMS).token_ids == tuple(plain.encode(TEXT))
    (body,) = server.asked
    assert body["messages"] == [message]
    with pytest.raises(InvalidRequest, match=r"p\.jsonl:7 is no conversation"):
        client.respond(prompt(3), PARAMS)


# ------------------------------------------------------------------------------- what it answers


def test_ids_are_taken_as_the_server_tells_them(plain):
    """These are not the tokenizer's own choice for the text."""
    ids = [plain.encode(letter)[0] for letter in TEXT]
    assert ids != plain.encode(TEXT)
    assert respond(Server(told(token_ids=ids)), plain).token_ids == tuple(ids)


def test_ids_of_the_end_come_with_them(plain):
    ids = (*plain.encode(TEXT), 0)
    reply = told(token_ids=list(ids), finish_reason="stop")
    found = respond(Server(reply), plain)
    assert (found.token_ids, found.finish_reason) == (ids, "stop")


@pytest.mark.parametrize(
    ("changes", "params", "with_end"),
    [
        ({"finish_reason": "length"}, PARAMS, False),
        ({"finish_reason": "stop"}, PARAMS, True),
        ({"finish_reason": "stop", "stop_reason": None}, PARAMS, True),
        ({"finish_reason": "stop", "stop_reason": "\n"}, PARAMS, False),
        ({"finish_reason": "stop"}, SamplingParams(max_tokens=6, stop=("\n",)), False),
    ],
)
def test_text_alone_is_made_into_tokens(plain, changes, params, with_end):
    found = respond(Server(told(**changes)), plain, params)
    assert found.token_ids == (*plain.encode(TEXT), *((0,) if with_end else ()))


def test_a_server_with_another_tokenizer_is_refused(plain):
    with pytest.raises(InvalidRequest, match="another tokenizer"):
        respond(Server(told(token_ids=[201, 202, 203])), plain)


# --------------------------------------------------------------------------------- what goes wrong


BROKEN = [
    httpx.Response(500, text="oops"),
    httpx.Response(503),
    httpx.Response(429),
    httpx.Response(200, text="<html>"),
    httpx.Response(200, json={"choices": []}),
    httpx.Response(200, json=[]),
    httpx.Response(200, json={"choices": [{"text": None, "finish_reason": "stop"}]}),
    httpx.Response(200, json={"choices": [{"text": "half", "finish_reason": "abort"}]}),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("too slow"),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_asking_again_helps(plain, broken):
    server = Server(broken, broken, told())
    client = client_of(server, plain)
    assert client.respond(prompt(3), PARAMS).token_ids == tuple(plain.encode(TEXT))
    assert client.client.connection.closing.waits_s == [1.0, 2.0]
    assert server.asked[0] == server.asked[2]


def test_waits_grow_to_a_limit_and_then_the_server_is_broken(plain):
    client = client_of(Server(BROKEN[0]), plain, num_tries=6, max_wait_s=5.0)
    with pytest.raises(ServerUnavailable, match=r"in 6 tries: status 500: oops"):
        client.respond(prompt(3), PARAMS)
    assert client.client.connection.closing.waits_s == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("asked", "waited_s"), [("7", 7.0), ("1000", 60.0), ("-1", 1.0), ("soon", 1.0), ("nan", 1.0)]
)
def test_a_busy_server_says_how_long(plain, asked, waited_s):
    client = client_of(Server(httpx.Response(429, headers={"retry-after": asked}), told()), plain)
    client.respond(prompt(3), PARAMS)
    assert client.client.connection.closing.waits_s == [waited_s]


def test_a_refusal_is_final_and_names_the_prompt(plain):
    server = Server(httpx.Response(404, text="no model m"))
    with pytest.raises(
        InvalidRequest, match=r"p\.jsonl:7: .* refuses the request with .*404: no model m"
    ):
        respond(server, plain)
    assert len(server.asked) == 1


def test_a_strict_server_is_asked_without_extensions(plain):
    def strict(body: dict) -> httpx.Response:
        return httpx.Response(400, text="what?") if "return_token_ids" in body else told()

    server = Server(strict)
    client = client_of(server, plain)
    for _ in range(2):
        client.respond(prompt(3), PARAMS)
    assert ["return_token_ids" in body for body in server.asked] == [True, True, False, False]


def test_a_bad_request_without_extensions_is_final(plain):
    server = Server(httpx.Response(400, text="too long"))
    with pytest.raises(InvalidRequest, match="too long"):
        respond(server, plain)
    assert len(server.asked) == 3  # with all flags that ask for ids, with one, without any


# --------------------------------------------------------------------------------------- all of it


def echo(body: dict) -> httpx.Response:
    """Says something else to every prompt."""
    return told("x" * body["prompt"][0])


def test_a_server_that_breaks_down_loses_nothing_and_doubles_nothing(tmp_path, plain):
    num_good = 5
    lock = threading.Lock()

    def failing(body: dict) -> httpx.Response:
        nonlocal num_good
        with lock:
            num_good -= 1
            return echo(body) if num_good >= 0 else httpx.Response(502, text="down")

    everything = prompts(9)
    store = ResponseStore(tmp_path, origin())
    client = client_of(Server(failing), plain, max_connections=3, num_tries=2)
    with pytest.raises(ServerUnavailable, match=r"down; [1-5] responses are kept in .*run again"):
        write_responses_from(client, everything, store)
    num_kept = len(store)

    told_of: list[tuple[int, int]] = []
    server = Server(echo)
    store = ResponseStore(tmp_path, origin())
    assert len(store) == num_kept
    write_responses_from(
        client_of(server, plain), everything, store, on_progress=lambda *done: told_of.append(done)
    )
    assert told_of == [(number, 9) for number in range(num_kept, 10)]
    assert len(server.asked) == 9 - num_kept
    texts = [plain.decode(sample.token_ids[3:]) for sample in store.samples(everything)]
    assert texts == ["x" * (number + 1) for number in range(9)]
    assert len(store.path.read_text().splitlines()) == 1 + 9


def test_nobody_is_waited_for_after_the_end(tmp_path, plain):
    client = client_of(Server(httpx.Response(404)), plain)
    with pytest.raises(InvalidRequest):
        write_responses_from(client, prompts(2), ResponseStore(tmp_path, origin()))
    assert client.client.connection.closing.is_set()


# --------------------------------------------------------------------------- servers that do harm


class Body(httpx.SyncByteStream):
    """A body that is made as it is read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks


def streamed(chunks: Iterable[bytes], **headers: str) -> Server:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Server(lambda body: httpx.Response(200, stream=Body(chunks), headers=named))


def bomb() -> Iterator[bytes]:
    """Zeros, compressed: a thousandth of what they unpack to."""
    packer = zlib.compressobj(wbits=31)
    for _ in range(1 << 12):
        yield packer.compress(bytes(1 << 20))


def dripping() -> Iterator[bytes]:
    while True:
        yield b" "


@pytest.mark.parametrize(
    ("chunks", "headers", "message"),
    [
        (bomb, {"content_encoding": "gzip"}, "sends more than 67108864 bytes"),
        (lambda: itertools.repeat(bytes(1 << 20)), {}, "sends more than 67108864 bytes"),
        (dripping, {}, r"takes more than 0\.2 s to answer"),
        (dripping, {"content_encoding": "gzip, gzip"}, "encoding 'gzip, gzip'"),
        (dripping, {"content_encoding": "br"}, "encoding 'br'"),
    ],
)
def test_a_body_without_end_is_cut_off_at_once(plain, chunks, headers, message):
    timeout_s = 0.2 if "0" in message and "takes" in message else 600.0
    server = streamed(chunks(), **headers)
    with pytest.raises(ServerUnavailable, match=message):
        respond(server, plain, timeout_s=timeout_s)
    assert len(server.asked) == 1


@pytest.mark.parametrize("ids", [[10**30], [-1], [2**31], [2**64 - 1], [299, 300]])
def test_ids_outside_the_vocabulary_are_refused(plain, ids):
    with pytest.raises(InvalidRequest, match="not in the target's vocabulary"):
        respond(Server(told(token_ids=ids)), plain)


@pytest.mark.parametrize("changes", [{"text": "a" * 8000}, {"token_ids": [3] * 40}])
def test_a_response_longer_than_asked_for_is_asked_for_again(plain, changes):
    server = Server(told(**changes), told())
    assert respond(server, plain).token_ids == tuple(plain.encode(TEXT))
    assert len(server.asked) == 2


def test_depth_is_limited(plain):
    deep = httpx.Response(200, content=b"[" * 100_000)
    assert respond(Server(deep, told()), plain).token_ids == tuple(plain.encode(TEXT))


@pytest.mark.parametrize("status", [404, 500])
def test_escape_sequences_do_not_reach_the_terminal(plain, status):
    server = Server(httpx.Response(status, text="\x1b[2Jgone\u202e"))
    with pytest.raises((InvalidRequest, ServerUnavailable), match="gone") as caught:
        respond(server, plain, num_tries=1)
    assert "\x1b" not in str(caught.value) and "\u202e" not in str(caught.value)
