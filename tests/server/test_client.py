"""The client of OpenAI-compatible servers: what it sends and reads, and where it stops reading."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import httpx
import pytest
from tests.replayed import Replayed

from forerun.client import client as client_module
from forerun.client import connection
from forerun.client.client import Client, ServerAnswer, read_answer
from forerun.client.connection import BrokenReply, ClientConfig
from forerun.errors import InvalidRequest, ServerUnavailable


def client_of(reply: Callable[[httpx.Request], httpx.Response], **changes: object) -> Client:
    config = ClientConfig(url="http://server", model="m", num_tries=1, **changes)
    return Client(config, httpx.MockTransport(reply))


def test_it_loads_no_torch_and_no_engine():
    code = (
        "import sys, forerun.client.client; "
        "sys.exit(any(n in sys.modules for n in ('torch', 'forerun.engine', 'forerun.models')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/proxy", "/proxy/v1"),
        ("/v1/completions", "/v1"),
        ("/some/completions", "/some"),
        ("/v1/chat/completions", "/v1"),
    ],
)
def test_addresses(path, base):
    config = ClientConfig(url=f"http://server{path}")
    assert config.base == f"http://server{base}"


@pytest.mark.parametrize("changes", [{"num_tries": 0}, {"timeout_s": 0.0}, {"max_connections": 0}])
def test_limits_that_cannot_work_are_refused(changes):
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        ClientConfig(url="http://server", **changes)


def test_the_key_of_the_environment_is_sent(monkeypatch):
    asked: list[str | None] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OTHER_KEY", "other")
    client_of(reply).find_model()
    client_of(reply, key_variable="OTHER_KEY").find_model()
    monkeypatch.delenv("OPENAI_API_KEY")
    client_of(reply).find_model()
    assert asked == ["Bearer k", "Bearer other", None]
    with pytest.raises(InvalidRequest, match="'NO_KEY', for a key, is not set"):
        client_of(reply, key_variable="NO_KEY")


def test_an_echoed_prompt_has_log_probabilities():
    sent = {}

    def reply(request: httpx.Request) -> httpx.Response:
        sent.update(json.loads(request.content))
        logprobs = {
            "tokens": ["token_id:5", "token_id:6"],
            "token_logprobs": [None, -0.5],
            "top_logprobs": [None, {"token_id:6": -0.5, "b": -2.0}],
        }
        choice = {"text": "ab", "finish_reason": "length", "logprobs": logprobs}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 2}})

    found = client_of(reply).complete(
        [5, 6], {"max_tokens": 1, "top_k": 3}, logprobs=2, echo=True, seed=(1 << 40) + 7
    )
    flags = {name: sent.pop(name) for name in tuple(sent) if name.startswith("return_")}
    assert all(flags.values()) and len(flags) == 2
    assert sent == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 1,
        "top_k": 3,
        "logprobs": 2,
        "echo": True,
        "seed": 7,
    }
    assert found.logprobs is not None and found.usage is not None
    first, second = found.logprobs
    assert (first.token_id, first.logprob, first.top) == (5, None, ())
    assert second.top == (("token_id:6", 6, -0.5), ("b", None, -2.0))
    assert (found.text, found.usage.prompt_tokens) == ("ab", 2)


@pytest.mark.parametrize("found", [3, {"choices": 3}, {"choices": [{"token_ids": [1.5]}]}])
def test_what_is_no_answer_is_an_error(found):
    with pytest.raises(ServerUnavailable, match="no completion in"):
        client_of(lambda _: httpx.Response(200, json=found)).complete("a", {})


def reported(num_tokens: int, num_top: int, form: str) -> dict[str, object]:
    if form == "completion":
        tops = [{f"t{n}": -1.0 for n in range(num_top)}] * num_tokens
        return {"tokens": ["a"] * num_tokens, "top_logprobs": tops}
    top = [{"token": "a", "logprob": -1.0}] * num_top
    return {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": top}] * num_tokens}


@pytest.mark.parametrize("form", ["completion", "chat"])
def test_what_an_answer_may_hold_is_limited(form, monkeypatch):
    """An audit stored 100,000 alternatives at every token of its answers: 3 GB."""

    def read(*shape: int) -> ServerAnswer:
        return read_answer({"choices": [{"logprobs": reported(*shape, form)}]})

    logprobs = read(2, 128).logprobs
    assert logprobs is not None and [len(token.top) for token in logprobs] == [128, 128]
    with pytest.raises(BrokenReply, match="more than 128 alternatives at one token"):
        read(1, 129)
    monkeypatch.setattr(client_module, "MAX_VALUES", 100)
    assert read(20, 4).num_values == 100
    for shape in ((101, 0), (1, 100), (20, 5)):
        with pytest.raises(BrokenReply, match="more than 100 token ids and log-probabilities"):
            read(*shape)
    with pytest.raises(BrokenReply, match="more than 100"):
        read_answer({"choices": [{"token_ids": [1] * 101}]})


def test_what_the_events_of_a_stream_hold_together_is_limited(monkeypatch):
    monkeypatch.setattr(client_module, "MAX_VALUES", 100)
    data = json.dumps({"choices": [{"text": "a", "token_ids": [1] * 30}]}).encode()
    with pytest.raises(ServerUnavailable, match="more than 100"):
        streaming(itertools.repeat(b"data: " + data + b"\n\n"))


@pytest.mark.parametrize("number", [2**31, 2**70, -1])
@pytest.mark.parametrize("entry", [{"id": None}, {"token": "token_id:"}], ids=str)
def test_log_probabilities_of_ids_that_cannot_be_are_left_out(entry, number):
    name, value = next(iter(entry.items()))
    entry = {"logprob": -1.0, name: number if value is None else f"{value}{number}"}
    found = {"choices": [{"logprobs": {"content": [entry]}}]}
    assert read_answer(found).logprobs is None


@pytest.mark.parametrize("usage", [{"completion_tokens": -1}, {"prompt_tokens": 2**70}])
def test_counts_that_cannot_be_are_refused(usage):
    with pytest.raises(BrokenReply, match="no completion"):
        read_answer({"usage": usage})


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "a"}, "a"),
        ({"message": {"content": "a"}}, "a"),
        ({"delta": {"content": "a"}}, "a"),
        ({"text": "b", "message": {"content": "a"}}, "a"),
        ({"message": {"content": None}}, None),
        ({"text": ""}, ""),
        ({}, None),
    ],
    ids=str,
)
def test_the_text_is_that_of_the_completion_or_of_the_message(choice, text):
    assert read_answer({"choices": [choice, {"text": "second"}]}).text == text


# ------------------------------------------------------------------------------ hostile streams


class Body(httpx.SyncByteStream):
    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks


def streaming(chunks: Iterable[bytes], **changes: object) -> list[str | None]:
    client = client_of(lambda _: httpx.Response(200, stream=Body(chunks)), **changes)
    return [piece.text for piece in client.stream("a", {})]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\r\n\r\n"


def test_events_may_be_cut_anywhere():
    body = b": hello\n\n" + event("a") + event("b") + b"data: [DONE]\n\n"
    for size in (1, 2, 7, len(body)):
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        assert streaming(pieces) == ["a", "b"]


def test_a_line_without_an_end_is_refused_in_linear_time():
    """Joining all that had come before with every chunk took 60 MB minutes."""
    started_s = time.process_time()
    with pytest.raises(ServerUnavailable, match="a line over 8388608 bytes"):
        streaming(itertools.repeat(b"x" * 4096))
    with pytest.raises(ServerUnavailable, match="a line over"):
        streaming(itertools.repeat(b"data: " + b"x" * 26))
    assert time.process_time() - started_s < 20.0


def test_lines_are_counted(monkeypatch):
    monkeypatch.setattr(connection, "MAX_LINES", 1000)
    with pytest.raises(ServerUnavailable, match="more than 1000 lines"):
        streaming(itertools.repeat(b"\n" * 10))


def dripping(piece: bytes) -> Iterator[bytes]:
    while True:
        time.sleep(0.01)
        yield piece


def test_comments_do_not_keep_a_stream_open():
    with pytest.raises(ServerUnavailable, match=r"takes more than 0\.2 s to answer"):
        streaming(dripping(b": wait\n\n"), timeout_s=0.2)


def test_a_stream_has_a_total_limit():
    with pytest.raises(ServerUnavailable, match=r"takes more than 0\.3 s to answer"):
        streaming(dripping(event("a")), timeout_s=60.0, stream_s=0.3)


@contextlib.contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve one connection after another with a function until it fails, as for a closed peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):
                    peer.recv(1 << 16)
                    answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10.0)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "start",
    [
        [OK + b"X: ", *itertools.repeat(b"x", 99)],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n", *itertools.repeat(b"0", 99)],
    ],
    ids=["headers", "size of a chunk"],
)
def test_a_dripping_server_is_left_at_the_time_limit(start, monkeypatch):
    server = Replayed(monkeypatch, lambda: start)
    config = ClientConfig(url="http://127.0.0.1:1", model="m", timeout_s=30.0, num_tries=3)
    with Client(config) as client:
        with pytest.raises(ServerUnavailable, match="takes more than 30 s to answer"):
            client.complete("a", {})
        with pytest.raises(ServerUnavailable, match="takes more than 30 s to answer"):
            list(client.stream("a", {}))
    assert server.num_connections == 2


def test_a_silent_server_is_asked_again():
    with raw_server(lambda peer: time.sleep(0.3)) as url:
        config = ClientConfig(url=url, model="m", timeout_s=0.1, num_tries=2, first_wait_s=0.0)
        with Client(config) as client:
            with pytest.raises(ServerUnavailable, match="gave no response in 2 tries: timed out"):
                client.complete("a", {})
            assert client.connection.waits_s == [0.0]


def test_types_of_answers_are_examined_before_threads_read_answers():
    """Two threads that examine the same type end the process in msgspec 0.22."""
    code = (
        "from msgspec import _utils\n"
        "from forerun.client.client import read_answer\n"
        "del _utils._forward_ref\n"
        "answer = {'choices': [{'text': 'x', 'finish_reason': 'stop'}], 'usage': {}}\n"
        "print(read_answer(answer).text)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "x\n", run.stderr
