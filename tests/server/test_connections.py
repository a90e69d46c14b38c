"""Connections without a request, clients that leave, and the end of the time to drain."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import FastAPI
from tests.server.conftest import TIMEOUT_S, Held, serving, tiny_engine, wait_until_idle
from tests.server.test_completions import PROMPT

from forerun.server import run
from forerun.server.app import Generation
from forerun.server.config import ServerConfig

LONG = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "seed": 1}


def held_engine(monkeypatch, kind, method):
    """Return an engine that goes on after its first steps once a method has been called."""
    engine, held, call = tiny_engine(), Held(), getattr(kind, method)
    engine.observers.append(held)

    def noted(called):
        result = call(called)
        held.go_on.set()
        return result

    monkeypatch.setattr(kind, method, noted)
    return engine


def address_of(client):
    return client.base_url.host, client.base_url.port


def head_of(body: bytes, **headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(f"{n}: {v}" for n, v in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(TIMEOUT_S)
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_idle_connections_give_way_to_requests(monkeypatch):
    monkeypatch.setattr(run, "max_connections", lambda: 20)
    with serving(tiny_engine()) as client:
        idle = [socket.create_connection(address_of(client)) for _ in range(60)]
        assert httpx.get(f"{client.base_url}/health", timeout=TIMEOUT_S).status_code == 200
        idle[0].settimeout(TIMEOUT_S)
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream, monkeypatch):
    engine = held_engine(monkeypatch, Generation, "close")
    with serving(engine) as client:
        connection = socket.create_connection(address_of(client))
        flag = b"true" if stream else b"false"
        body = b'{"prompt": "x", "max_tokens": 80, "ignore_eos": true, "stream": %s}' % flag
        connection.sendall(head_of(body))
        ends_s = time.monotonic() + TIMEOUT_S
        while engine.stats().num_emitted == 0:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        connection.close()
        wait_until_idle(engine)
        assert engine.stats().num_emitted < 60
        assert 'finished_reason="abort"' in client.get("/metrics").text


def test_a_client_that_leaves_within_its_body_is_one_line_of_the_log(caplog):
    caplog.set_level("INFO")
    with serving(tiny_engine()) as client:
        whole = head_of(b'{"prompt": "x", "max_tokens": 2}')
        with socket.create_connection(address_of(client)) as connection:
            connection.sendall(whole[:-3])
        while not (lines := [r for r in caplog.records if r.name == "forerun.requests"]):
            time.sleep(0.01)
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert " status=499 " in lines[0].getMessage()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_server_is_ready_unless_it_starts_ends_or_is_full(monkeypatch):
    engine, held = tiny_engine(max_batch=1, max_waiting=0), Held()
    engine.observers.append(held)
    with serving(engine) as client:
        running = client.app.state.server.engine
        assert client.get("/ready").json() == {"status": "ready"}
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()  # without a name for it the connection would be closed
            next(lines)
            full = client.get("/ready")
            alive = client.get("/health")
            held.go_on.set()
        assert (full.status_code, alive.status_code) == (503, 200)
        assert "the queue is full" in full.text
        wait_until_idle(engine)
        client.app.state.is_draining = True
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        client.app.state.is_draining = False
        monkeypatch.setattr(running, "_is_open", False)
        assert client.get("/ready").status_code == 503
        monkeypatch.undo()


def test_a_signal_to_end_makes_the_server_not_ready():
    app = FastAPI()
    server = run.DrainingServer(run.uvicorn_config(app, ServerConfig()))
    server.handle_exit(signal.SIGTERM, None)
    assert app.state.is_draining and server.should_exit


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlasts_the_drain_gets_an_error_and_no_traceback(
    stream, caplog, monkeypatch
):
    config = ServerConfig(port=0, drain_s=0)
    engine = held_engine(monkeypatch, Generation, "close")
    with ThreadPoolExecutor(1) as pool:
        with serving(engine, config) as client:
            body = LONG | {"stream": stream}
            url = f"{client.base_url}/v1/completions"
            answer = pool.submit(httpx.post, url, json=body, timeout=TIMEOUT_S)
            while engine.stats().num_emitted == 0:
                time.sleep(0.01)
        found = answer.result(TIMEOUT_S)
    assert found.status_code == (200 if stream else 503)
    assert "the server is stopping" in found.text
    assert not [record for record in caplog.records if record.exc_info]
