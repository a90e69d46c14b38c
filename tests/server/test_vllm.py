"""vLLM behind the live page, with a program in its place that answers and counts as it does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.server.keyless import wrongly_answered

from forerun.doctor.live import VllmView
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.server.config import ServerConfig
from forerun.server.guard import ApiKey
from forerun.server.live_page import LiveSnapshot
from forerun.server.run import open_socket, uvicorn_config
from forerun.server.vllm import create_proxy, fetch, speculative_config, vllm_running

K = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> str:
    """The program, run by this interpreter."""
    script = Path(__file__).with_name("fake_vllm.py")
    path = tmp_path_factory.mktemp("bin") / "vllm"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def address(program) -> Iterator[str]:
    with vllm_running("target", K, program=program, timeout_s=300.0) as vllm:
        vllm.wait_until_ready()
        yield vllm.address


def client_of(app: FastAPI) -> TestClient:
    return TestClient(app, base_url="http://localhost")


def proxy_of(address: str, **parts: object) -> FastAPI:
    return create_proxy(address, VllmView(partial(fetch, address), target="t", methods=[]), **parts)


def test_requests_and_streams_are_passed_on(address):
    with client_of(proxy_of(address)) as client:
        body = {"model": "m", "prompt": "count"}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == (
            "one two three four"
        )
        streamed = client.post("/v1/completions", json=body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.count("data: ") == 5
        assert client.get("/v1/models").json()["data"][0]["id"] == "m"
        assert client.get("/nothing").status_code == 404
        assert client.get("http://localhost//127.0.0.1:9/v1/models").status_code == 404
        assert client.get("/v1/models?of=all").status_code == 404  # the query arrives too
        assert client.get("/").text.startswith("<!doctype html>")
        assert client.get("/live").json()["setup"]["version"] == "0.0.fake"


def test_keys_are_checked_here_and_not_passed_on(address):
    key = ApiKey.of("default", "a key of enough characters")
    app = proxy_of(address, keys=[key])
    with client_of(app) as client:
        body = {"model": "m", "prompt": "count"}
        assert client.post("/v1/completions", json=body).status_code == 401
        assert client.get("/live").status_code == 401
        assert client.get("/").status_code == 200
        headers = {"Authorization": "Bearer a key of enough characters"}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["authorization"] is None


SECRET = "a key of enough characters"
BEARER = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def limited(address):
    sha256 = ApiKey.of("b", SECRET).sha256
    key = ApiKey(tenant="b", sha256=sha256, max_tokens=40, priority=5)
    with client_of(proxy_of(address, keys=[key])) as client:
        yield client


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": "x", "priority": 4}, "priority is 4; this key may ask for 5"),
        (COMPLETIONS, {"prompt": "x", "priority": None}, "priority is 0"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 41}, "1 choices of 41 tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": None}, "rest of the context"),
        (COMPLETIONS, {"prompt": "x", "n": 3}, "3 choices of 16 tokens"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "3 choices of 16 tokens"),
        (COMPLETIONS, {"prompt": ["x", "y", "z"]}, "3 choices of 16 tokens"),
        (COMPLETIONS, {"prompt": [[1], [2], [3]]}, "3 choices of 16 tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "4"}, "max_tokens is '4'"),
        (COMPLETIONS, {"prompt": "x", "n": 1.0}, "n is 1.0"),
        ("/v1/%63ompletions", {"prompt": "x", "max_tokens": 41}, "1 choices of 41 tokens"),
        (CHAT, {"messages": []}, "rest of the context"),
        (CHAT, {"max_tokens": 4, "max_completion_tokens": 41}, "41 tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 41}, "41 tokens"),
        ("/v1/messages", {"max_tokens": 41}, "41 tokens"),
        ("/invocations", {"prompt": "x", "max_tokens": 4}, "'/invocations'"),
        (COMPLETIONS, [], "must be a JSON object"),
    ],
)
def test_limits_of_a_key_hold_for_vllm(limited, path, body, message):
    if isinstance(body, dict):
        body = {"priority": 5, **body}
    answer = limited.post(path, json=body, headers=BEARER)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_requests_within_the_limits_of_a_key_reach_vllm(limited):
    for body in (
        {"prompt": [1, 2, 3], "max_tokens": 40, "priority": 5},
        {"prompt": ["x", "y"], "priority": 9},
    ):
        assert limited.post(COMPLETIONS, json=body, headers=BEARER).status_code == 200
    assert limited.get("/v1/models", headers=BEARER).status_code == 200


def test_the_live_page_shows_what_vllm_counts(address):
    now_s = [100.0]
    with httpx.Client(base_url=address) as client:
        view = VllmView(
            lambda path: client.get(path).content,
            target="t",
            methods=["draft_model"],
            clock=lambda: now_s[0],
        )
        assert view.snapshot().acceptance_length is None
        for _ in range(3):
            httpx.post(f"{address}/v1/completions", json={"prompt": "x"})
        now_s[0] += 2.0
        found = view.snapshot()
        view.diagnose()
        assert view.snapshot().diagnosis is not None
    assert found.setup.engine == "vllm"
    assert found.acceptance_length == 2.0
    assert [(p.num_drafted, p.num_accepted) for p in found.positions] == [(300, 180), (300, 120)]
    assert found.tokens_per_s == pytest.approx(300.0)
    assert found.load.num_waiting == 2
    assert found.load.kv_share == 0.25
    (point,) = found.history
    assert point.num_speculative_tokens == 2.0
    assert point.methods == {"draft_model": 300}
    assert msgspec.json.decode(msgspec.json.encode(found), type=LiveSnapshot) == found


def test_a_server_that_is_gone_leaves_the_page_and_an_error_in_the_usual_shape():
    with client_of(proxy_of("http://127.0.0.1:9")) as client:
        assert client.get("/live").json()["totals"]["num_emitted"] == 0
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "vLLM does not answer" in answer.json()["error"]["message"]


def test_a_program_that_is_missing_or_ends_is_an_error(program):
    with (
        pytest.raises(InvalidRequest, match="no program 'no-such-vllm'"),
        vllm_running("target", {}, program="no-such-vllm"),
    ):
        pass
    with (
        pytest.raises(ServerUnavailable, match="ended with code 3"),
        vllm_running("broken", {}, program=program) as vllm,
    ):
        vllm.wait_until_ready()


def test_the_program_ends_with_the_server(program):
    with vllm_running("target", {}, program=program) as vllm:
        vllm.wait_until_ready()
        assert httpx.get(f"{vllm.address}/health").is_success
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{vllm.address}/health")


def test_the_configuration_is_that_of_the_alignment_where_there_is_one(tmp_path):
    assert speculative_config(None, None) == {}
    assert speculative_config("draft", 0) == {}
    assert speculative_config("draft", 2) == K
    assert speculative_config("draft", None)["num_speculative_tokens"] == 4
    assert speculative_config("suffix", 7) == {"method": "suffix", "num_speculative_tokens": 7}
    settings = tmp_path / "serving" / "vllm.json"
    settings.parent.mkdir()
    aligned = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 6}
    settings.write_text(json.dumps({"model": "t", "speculative_config": aligned}))
    assert speculative_config(str(tmp_path), None) == aligned
    assert speculative_config(str(tmp_path), 3) == aligned | {"num_speculative_tokens": 3}
    settings.write_text(json.dumps({"model": "t"}))  # the alignment found no gain
    assert speculative_config(str(tmp_path), None) == {}
    for bad in ("[]", '{"speculative_config": 3}'):
        settings.write_text(bad)
        with pytest.raises(InvalidRequest, match="no speculative_config that is an object"):
            speculative_config(str(tmp_path), None)


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_configuration_may_come_from_a_file(tmp_path):
    file = tmp_path / "found.json"
    own = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5, "max_model_len": 9}
    assert speculative_config(None, None, written(file, own)) == own
    assert speculative_config(None, 2, written(file, own)) == own | {"num_speculative_tokens": 2}
    exported = {"model": "t", "speculative_config": own}
    assert speculative_config(None, None, written(file, exported)) == own
    assert speculative_config("other", 0, written(file, exported)) == {}
    assert speculative_config(None, None, written(file, {"model": "t"})) == {}
    for bad in ([], {}, {"model": "t", "speculative_config": 1}):
        with pytest.raises(InvalidRequest, match="has no speculative_config that is an object"):
            speculative_config(None, None, written(file, bad))


def test_the_configuration_may_be_what_a_plan_recommends(tmp_path, capsys):
    from tests.profiles import profile_of

    from forerun.cli.main import main
    from forerun.measure.profile import write_profile
    from forerun.theory.cost import CostLine, CostTable

    line = CostLine(rows=(1, 16), verify_s=(0.01, 0.011), plain_s=0.01, draft_s=0.0005)
    table = CostTable(lines=(line,))
    profile = tmp_path / "profile.json"
    write_profile(profile_of(greedy=table, sampled=table), profile)
    assert main(["plan", "--profile", str(profile), "--acceptance", "0.9", "--json"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    k = json.loads(file.read_text())["best"]["num_speculative_tokens"]
    assert k > 0
    expected = {"method": "draft_model", "model": "draft", "num_speculative_tokens": k}
    assert speculative_config("draft", None, file) == expected
    with pytest.raises(InvalidRequest, match="does not name the draft"):
        speculative_config(None, None, file)

    def planned(**best: object) -> dict[str, object]:
        return speculative_config(None, None, written(file, {"best": best}))

    assert planned(draft=None, num_speculative_tokens=0) == {}
    assert planned(draft="suffix", num_speculative_tokens=8)["method"] == "suffix"
    shipped = planned(draft="zoo:code-2m", num_speculative_tokens=3)
    assert Path(str(shipped["model"])).is_dir()
    with pytest.raises(InvalidRequest, match="vLLM has no drafter"):
        planned(draft="self:2", num_speculative_tokens=3)
    with pytest.raises(InvalidRequest, match="is no plan"):
        planned(draft="d")


@contextlib.contextmanager
def proxied(address: str, keys: Sequence[ApiKey] = (), **changes: object) -> Iterator[str]:
    """The proxy in a server of its own, as the command runs it."""
    config = ServerConfig(port=0, **changes)
    listener = open_socket(config)
    app = proxy_of(address, config=config, keys=keys)
    server = uvicorn.Server(uvicorn_config(app, config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60.0)


def comes_true(check: Callable[[], bool]) -> bool:
    """Whether something happens at all: what is waited for takes milliseconds."""
    return any(check() or time.sleep(0.02) for _ in range(1500))


def raw_request(path: str, body: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


WAITING = raw_request("/v1/completions", '{"prompt": "wait"}')


def test_a_client_that_leaves_stops_its_request_and_gives_its_place_back(address):
    """The request was worked on to its end, and counted among those of its key until then."""
    before = httpx.get(f"{address}/left").json()
    with proxied(address, max_requests=1) as url:
        with connected(url) as peer:
            peer.sendall(WAITING)
            assert comes_true(lambda: httpx.post(f"{url}/tokenize", json={}).status_code == 429)
        assert comes_true(lambda: httpx.get(f"{address}/left").json() == before + 1)
        assert comes_true(lambda: httpx.post(f"{url}/tokenize", json={}).status_code == 200)


def test_more_than_a_hundred_requests_at_once_hang_nothing(program):
    """httpx opened at most 100 connections, and every further request waited for one of them."""
    with vllm_running("target", {}, program=program) as vllm, contextlib.ExitStack() as stack:
        vllm.wait_until_ready()
        url = stack.enter_context(proxied(vllm.address))
        peers = [stack.enter_context(connected(url)) for _ in range(120)]
        for peer in peers:
            peer.sendall(WAITING)
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert httpx.get(url + path).status_code == 200
        assert httpx.get(f"{vllm.address}/release").status_code == 200
        for peer in peers:
            peer.settimeout(60.0)
            assert peer.recv(12) == b"HTTP/1.1 200"


def test_an_answer_that_vllm_breaks_off_ends_without_an_end(address, caplog):
    with proxied(address) as url, pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{url}/v1/completions", json={"prompt": "break off"})
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
    assert "broke off an answer" in caplog.text


def test_probes_answer_while_vllm_loads():
    ready = False
    app = proxy_of("http://127.0.0.1:9", is_ready=lambda: ready)
    with client_of(app) as client:
        assert client.get("/health").json() == {"status": "loading"}
        for answer in (client.get("/ready"), client.post("/v1/completions", json={})):
            assert answer.status_code == 503
            assert "loading the model" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
        assert client.get("/").status_code == 200
        ready = True  # and gone
        for path in ("/health", "/ready"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "does not answer" in answer.json()["error"]["message"]


def test_origins_are_decided_here(address):
    origin = {"Origin": "https://page.example"}
    for allowed, found in (((), None), (("https://page.example",), "https://page.example")):
        config = ServerConfig(allowed_origins=allowed)
        with client_of(proxy_of(address, config=config)) as client:
            answer = client.get("/v1/models", headers=origin)
            assert answer.headers.get("access-control-allow-origin") == found
            asked = origin | {"Access-Control-Request-Method": "POST"}
            answer = client.options("/v1/completions", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == found


def test_without_a_key_only_listed_methods_and_paths_are_answered(address):
    """The path that is compared is the one that is passed on, byte for byte."""
    with proxied(address, keys=[ApiKey.of("default", SECRET)]) as url:
        host, port = url.removeprefix("http://").split(":")
        assert wrongly_answered(host, int(port)) == {}


def served_command(program: str, target: str) -> list[str]:
    command = [sys.executable, "-m", "forerun", "serve", target, "--engine", "vllm"]
    return [*command, "--vllm", program, "--port", "0", "--draft", "suffix"]


def test_a_vllm_that_dies_ends_the_server_with_a_clear_line(program):
    for target, words in (("broken", "code 3 before it was ready"), ("dying", "code 5")):
        with subprocess.Popen(
            served_command(program, target),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            if target == "dying":
                url = process.stdout.readline().split()[4].rstrip(";").removesuffix("/v1")
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"{url}/release")
            try:
                assert process.wait(120.0) == 1
            finally:
                process.kill()
            # The request that lets vLLM die may be logged too.
            lines = process.stderr.read().splitlines()
            (line,) = [line for line in lines if line.startswith("forerun: ")]
            assert f"vLLM ended with {words}" in line


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_vllm_while_it_loads(program, name):
    with subprocess.Popen(
        served_command(program, "loading"),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert comes_true(lambda: bool(psutil.Process(process.pid).children()))
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(getattr(signal, name))
        try:
            process.wait(60.0)
        finally:
            process.kill()  # otherwise the end of the block waits for it
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_command_starts_the_server_and_ends_with_it(program, tmp_path):
    found = {"method": "suffix", "num_speculative_tokens": 6}
    file = written(tmp_path / "found.json", found)
    command = [sys.executable, "-m", "forerun", "serve", "target"]
    command += ["--speculative-config", str(file), "--engine", "vllm", "--vllm", program]
    command += ["--port", "0", "--vllm-args", "--max-num-seqs 4"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert json.dumps(found) in process.stdout.readline()
            address = process.stdout.readline().split()[4].rstrip(";").removesuffix("/v1")
            assert httpx.get(f"{address}/live").json()["setup"]["methods"] == ["suffix"]
            models = httpx.get(f"{address}/v1/models").json()
            assert models["data"][0]["id"] == "target"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0
