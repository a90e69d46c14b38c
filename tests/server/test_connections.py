"""Connections without a request, half-closed ones, and the end of the time to drain."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.server.conftest import NUM_SLOTS, serving, tiny_engine
from tests.server.test_completions import PROMPT

from forerun.server import run
from forerun.server.config import ServerConfig

LONG = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "seed": 1}


class Slow:
    """An observer that makes every step take a while."""

    is_required = False
    wants_logits = False

    def observe(self, step: object) -> None:
        time.sleep(0.05)


def slow_engine():
    engine = tiny_engine()
    engine.observers.append(Slow())
    return engine


def address_of(client):
    return client.base_url.host, client.base_url.port


def head_of(body: bytes, **headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(f"{n}: {v}" for n, v in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_idle_connections_give_way_to_requests(monkeypatch):
    monkeypatch.setattr(run, "max_connections", lambda: 20)
    with serving(tiny_engine()) as client:
        idle = [socket.create_connection(address_of(client)) for _ in range(60)]
        assert httpx.get(f"{client.base_url}/health", timeout=60).status_code == 200
        idle[0].settimeout(60)
        assert idle[0].recv(1) == b""
        for each in idle:
            each.close()


def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr(run, "REQUEST_TIMEOUT_S", 0.3)
    with serving(tiny_engine()) as client:
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: lo"):
            with socket.create_connection(address_of(client)) as connection:
                connection.sendall(sent)
                assert read_all(connection) == b""


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_a_half_closed_client_gets_its_answer(stream):
    body = b'{"prompt": "x", "max_tokens": 8, "ignore_eos": true, "stream": %s}' % stream
    with serving(slow_engine()) as client, socket.create_connection(address_of(client)) as half:
        half.sendall(head_of(body))
        half.shutdown(socket.SHUT_WR)
        answer = read_all(half)
    assert b"HTTP/1.1 200 OK" in answer
    assert (b"data: [DONE]" if stream == b"true" else b'"completion_tokens":8') in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream):
    engine = slow_engine()
    with serving(engine) as client:
        connection = socket.create_connection(address_of(client))
        flag = b"true" if stream else b"false"
        body = b'{"prompt": "x", "max_tokens": 80, "ignore_eos": true, "stream": %s}' % flag
        connection.sendall(head_of(body))
        ends_s = time.monotonic() + 60
        while engine.stats().num_emitted == 0:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        connection.close()
        while engine.has_unfinished:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        assert engine.stats().num_emitted < 60
        assert engine.target.store.num_free == NUM_SLOTS
        assert 'finished_reason="abort"' in client.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlasts_the_drain_gets_an_error_and_no_traceback(stream, caplog):
    config = ServerConfig(port=0, drain_s=0)
    engine = slow_engine()
    with ThreadPoolExecutor(1) as pool:
        with serving(engine, config) as client:
            body = LONG | {"stream": stream}
            url = f"{client.base_url}/v1/completions"
            answer = pool.submit(httpx.post, url, json=body, timeout=60)
            while engine.stats().num_emitted == 0:
                time.sleep(0.01)
        found = answer.result(60)
    assert found.status_code == (200 if stream else 503)
    assert "the server is stopping" in found.text
    assert not [record for record in caplog.records if record.exc_info]
