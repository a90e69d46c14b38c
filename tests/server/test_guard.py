"""Requests that are refused: keys, limits, hosts and malformed bodies."""

from __future__ import annotations

import socket
import textwrap
import time
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.exceptions import HTTPException
from tests import tiny
from tests.server.conftest import MODEL, TIMEOUT_S, Held, serving, tiny_engine
from tests.server.keyless import wrongly_answered

from forerun.errors import InvalidRequest
from forerun.server.config import ServerConfig
from forerun.server.errors import LimitReached, response_for
from forerun.server.guard import (
    ApiKey,
    Keyring,
    check_address,
    protect,
    read_keys,
)

KEY, LIMITED = "k" * 32, "m" * 32
JSON = {"Content-Type": "application/json"}
PROMPT = {"prompt": tiny.PROMPTS[0], "max_tokens": 4, "seed": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded():
    limited = ApiKey(
        tenant="b",
        sha256=ApiKey.of("b", LIMITED).sha256,
        requests_per_minute=2,
        max_tokens=8,
        priority=5,
    )
    config = ServerConfig(port=0, max_body_bytes=2000, body_timeout_s=2.0)
    with serving(tiny_engine(), config, keys=[ApiKey.of("a", KEY), limited]) as client:
        yield client


def is_error(response, status: int, part: str) -> bool:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert part in error["message"]
    return True


@pytest.mark.parametrize("headers", [{}, bearer("x" * 32), {"Authorization": f"Basic {KEY}"}])
def test_a_request_without_a_valid_key_is_refused(guarded, headers):
    for path in ("/v1/completions", "/tokenize", "/nowhere"):
        response = guarded.post(path, json=PROMPT, headers=headers)
        assert is_error(response, 401, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert is_error(guarded.get("/metrics", headers=headers), 401, "API key")
    assert guarded.get("/health", headers=headers).status_code == 200


def test_without_a_key_only_listed_methods_and_paths_are_answered(guarded):
    """A POST to a page without a key was an error 500 with a traceback."""
    assert wrongly_answered(guarded.base_url.host, guarded.base_url.port) == {}


def test_the_body_of_a_get_is_limited_too(guarded):
    """A route that reads it, as the proxy in front of vLLM does, read it to its end."""

    def parts():
        for _ in range(30):
            yield b"x" * 100

    app = FastAPI()
    app.add_exception_handler(HTTPException, response_for)
    app.add_api_route("/health", reads_its_body)
    protect(app, ServerConfig(max_body_bytes=2000), [ApiKey.of("a", KEY)], lambda status: None)
    with TestClient(app, base_url="http://localhost") as client:
        request = client.build_request("GET", "/health", content=parts())
        assert is_error(client.send(request), 413, "2000 bytes")
        assert client.get("/health").json() == 0


async def reads_its_body(request: Request) -> int:
    return len(await request.body())


def test_a_key_lets_requests_in(guarded):
    response = guarded.post("/v1/completions", json=PROMPT, headers=bearer(KEY))
    assert response.status_code == 200


def test_limits_of_a_key(guarded):
    def post(**changes):
        return guarded.post("/v1/completions", json=PROMPT | changes, headers=bearer(LIMITED))

    assert is_error(post(), 400, "may ask for 5 and above")
    assert is_error(post(priority=5, n=3), 400, "3 choices of 4 tokens")
    limited = post(priority=5)
    assert is_error(limited, 429, "2 requests per minute")
    assert 1 <= int(limited.headers["retry-after"]) <= 30


def test_bodies_are_limited(guarded):
    headers = bearer(KEY)
    long = guarded.post("/v1/completions", json={"prompt": "x" * 3000}, headers=headers)
    assert is_error(long, 413, "2000 bytes")

    def parts():
        for _ in range(30):
            yield b"x" * 100

    assert is_error(
        guarded.post("/v1/completions", content=parts(), headers=headers | JSON), 413, "2000 bytes"
    )


def test_a_body_of_the_largest_size_is_read(guarded):
    body = b'{"prompt": "%b"}' % (b"x" * (2000 - 14))
    for content in (body, iter([body[:1500], body[1500:]])):
        found = guarded.post("/v1/completions", content=content, headers=bearer(KEY) | JSON)
        assert is_error(found, 400, "the context holds")


def test_a_body_must_be_declared_to_be_json(guarded):
    """A page of another site may send other types to this machine without asking first."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        headers = bearer(KEY) | {"Content-Type": kind}
        response = guarded.post("/v1/completions", content=body, headers=headers)
        assert is_error(response, 415, "send Content-Type: application/json")
    headers = bearer(KEY) | {"Content-Type": "Application/JSON; charset=utf-8"}
    assert guarded.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_a_body_that_does_not_come_ends_the_request(guarded):
    address = guarded.base_url.host, guarded.base_url.port
    with socket.create_connection(address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
        )
        connection.settimeout(20)
        assert b" 408 " in connection.recv(4096)


MALFORMED = [
    (b'{"prompt": "x"', "the body is no JSON"),
    (b"\xff\xfe{}", ""),
    (b"[" * 900, ""),
    (b'{"prompt": "x", "temperature": 9e999}', "temperature"),
    (b'"text"', "the body"),
    (b'{"prompt": "x", "maxtokens": 3}', "maxtokens: is not a known field"),
    (b'{"prompt": "x", "temperature": "hot"}', "temperature: "),
    (b'{"prompt": "x", "top_k": 9223372036854775808}', "top_k is 9223372036854775808"),
    (b'{"prompt": "x", "skip_special_tokens": false}', "skip_special_tokens is not supported"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": -1}', "temperature is -1"),
    (b'{"prompt": "x", "top_p": 0}', "top_p is 0"),
    (b'{"prompt": ""}', "the prompt is empty"),
    (b'{"prompt": []}', "the prompt is empty"),
    (b'{"prompt": [999999]}', "999999"),
    (b'{"prompt": "a\\ud800"}', "character 1 of the text"),
    (b'{"prompt": "x", "\\ud800": 1}', "unicode"),
    (b'{"prompt": "x", "\\n<script>": 1}', "not a known field"),
    (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"999999": 1}}', "999999"),
    (b'{"prompt": "x", "logprobs": 50}', "at most 20"),
    (b'{"prompt": "x", "n": 99}', "are 99 sequences"),
    (b'{"prompt": ["x", "y"], "n": 9}', "are 18 sequences; this server runs and queues 16"),
    (b'{"prompt": "x", "deadline_s": -1}', "deadline_s is -1"),
    (b'{"prompt": "x", "echo": 1}', "echo"),
    (b'{"prompt": "x", "echo": true, "logprobs": 1, "stream": true}', "not streamed"),
    (b'{"prompt": "x", "prompt_logprobs": 50}', "at most 20"),
    (b'{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
    (b'{"prompt": "x", "metadata": ' + b"[" * 200 + b"]" * 200 + b"}", "201 levels"),
    (b'{"prompt": "x", "stream_options": {"include_usage": true}}', "stream_options"),
    (b'{"prompt": "x", "speculation": "medusa"}', "'medusa'; there are draft_model"),
    (b'{"prompt": "x", "speculation": {"num_speculative_tokens": 9}}', "at most 3"),
    (b'{"prompt": "x", "structured_outputs": {"regex": "(("}}', "grammar"),
    (b'{"prompt": "x", "response_format": {"type": "json_schema"}}', "json_schema"),
    (b'{"prompt": "x", "structured_outputs": {"regex": "a", "json": {}}}', "it has json, regex"),
    (b'{"prompt": "x", "structured_outputs": {"regx": "a"}}', "json, regex, choice, grammar"),
    (
        b'{"prompt": "x", "structured_outputs": {"regex": "a"}, '
        b'"response_format": {"type": "json_object"}}',
        "several",
    ),
]


@pytest.mark.parametrize(("body", "part"), MALFORMED)
def test_a_malformed_body_is_refused_by_name(guarded, body, part):
    headers = bearer(KEY) | {"Content-Type": "application/json"}
    assert is_error(guarded.post("/v1/completions", content=body, headers=headers), 400, part)


def test_prompts_beyond_the_context_name_both_numbers(guarded):
    response = guarded.post("/v1/completions", json={"prompt": [5] * 200}, headers=bearer(KEY))
    assert is_error(response, 400, f"200 tokens; the context holds {tiny.MAX_CONTEXT}")


def test_many_fields_are_refused_at_once(long_bodies):
    body = PROMPT | {f"f{i}": 1 for i in range(100_000)}
    response = long_bodies.post("/v1/completions", json=body)
    assert is_error(response, 400, "more than 256 fields")


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenised(long_bodies, monkeypatch):
    intake = long_bodies.app.state.server.engine.engine.intake
    monkeypatch.setattr(type(intake.tokenizer), "encode", None)
    for path in ("/v1/completions", "/tokenize"):
        response = long_bodies.post(path, json={"prompt": "x" * 1_000_000})
        assert is_error(response, 400, "1000000 characters; the context holds")
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": [1] * 200_000}, "the body has 200001 values; at most"),
        ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(range(5000), 1)}, "4096"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * 5000}, "at most 4096 items"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": ["a"] * 90_000}, "stop_token_ids.0"),
    ],
)
def test_large_bodies_are_refused_before_they_take_long(long_bodies, path, body, message):
    response = long_bodies.post(path, json=body)
    assert is_error(response, 400, message)
    assert len(response.text) < 1000


def test_commas_and_braces_in_texts_are_no_values(long_bodies):
    """A table or a program is one value; quotes and backslashes in it end no text."""
    text = '{"a": [1, 2]}, \\ "' * 20_000
    response = long_bodies.post("/tokenize", json={"prompt": text})
    assert is_error(response, 400, f"{len(text)} characters; the context holds")


@pytest.fixture
def long_bodies():
    with serving(tiny_engine()) as client:
        yield client


UNSET = dict.fromkeys(
    "temperature top_p n stream logprobs presence_penalty frequency_penalty stop seed echo".split()
)


def test_fields_that_clients_send_are_accepted(guarded):
    sent = {"parallel_tool_calls": True, "store": False, "service_tier": "auto", "user": None}
    body = PROMPT | UNSET | sent | {"max_tokens": 2}
    headers = bearer(KEY) | {"x-request-id": "mine"}
    response = guarded.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    ignored = "parallel_tool_calls, service_tier, store"
    assert response.headers["x-forerun-ignored"] == ignored
    assert response.headers["x-request-id"] == "mine"
    streamed = guarded.post("/v1/completions", json=body | {"stream": True}, headers=bearer(KEY))
    assert streamed.headers["x-forerun-ignored"] == ignored
    assert len(streamed.headers["x-request-id"]) == 32


@pytest.mark.parametrize(("length", "length_used"), [(128, 128), (129, 32)])
def test_a_name_of_a_request_that_is_too_long_is_replaced(guarded, length, length_used):
    headers = bearer(KEY) | {"x-request-id": "x" * length}
    found = guarded.get("/v1/models", headers=headers)
    assert len(found.headers["x-request-id"]) == length_used


def test_a_path_cannot_forge_a_line_of_the_log(guarded, caplog):
    caplog.set_level("INFO", logger="forerun.requests")
    guarded.get("/a%0Aforged%1b[31m", headers=bearer(KEY))
    while not (records := [r for r in caplog.records if r.name == "forerun.requests"]):
        time.sleep(0.01)  # the line is written after the answer
    lines = [record.getMessage() for record in records]
    assert any("/a%0Aforged%1B" in line for line in lines)
    assert not any("\n" in line or "\x1b" in line for line in lines)


def test_the_model_can_be_asked_for_by_name(guarded):
    headers = bearer(KEY)
    listed = guarded.get("/v1/models", headers=headers).json()["data"]
    assert guarded.get(f"/v1/models/{MODEL}", headers=headers).json() == listed[0]
    assert guarded.get("/v1/models/other", headers=headers).status_code == 404


def test_pages_of_allowed_origins_and_further_host_names_are_answered():
    config = ServerConfig(
        port=0, allowed_origins=("https://page.example",), allowed_hosts=("MODEL.example",)
    )
    with serving(tiny_engine(), config) as client:
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        preflight = client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        other = client.options("/v1/completions", headers=asked | {"Origin": "https://other"})
        assert "access-control-allow-origin" not in other.headers
        assert client.get("/health", headers={"Host": "model.example"}).status_code == 200
        assert client.get("/health", headers={"Host": "other.example"}).status_code == 421
        for name in ("LOCALHOST", "LocalHost:80", "Model.Example:81"):
            assert client.get("/health", headers={"Host": name}).status_code == 200


def test_other_models_and_paths_are_not_found(guarded):
    headers = bearer(KEY)
    response = guarded.post("/v1/completions", json=PROMPT | {"model": "gpt"}, headers=headers)
    assert is_error(response, 404, f"'gpt' is not served; there is '{MODEL}'")
    assert response.json()["error"]["code"] == "model_not_found"
    assert is_error(guarded.get("/nowhere", headers=headers), 404, "Not Found")
    assert is_error(guarded.get("/v1/completions", headers=headers), 405, "Method Not Allowed")


def test_another_host_is_refused_on_loopback(guarded):
    headers = bearer(KEY) | {"Host": "evil.example"}
    assert is_error(guarded.get("/v1/models", headers=headers), 421, "evil.example")


def test_other_addresses_need_a_key():
    config = ServerConfig(host="0.0.0.0")
    with pytest.raises(InvalidRequest, match=r"0\.0\.0\.0 is reachable from other machines"):
        check_address(config, [])
    check_address(config, [ApiKey.of("a", KEY)])
    check_address(ServerConfig(host="::1"), [])


def test_the_queue_is_limited():
    engine, held = tiny_engine(max_batch=1, max_waiting=1), Held()
    engine.observers.append(held)
    with serving(engine) as client:
        long = PROMPT | {"max_tokens": 80, "ignore_eos": True, "stream": True, "n": 2}
        with client.stream("POST", "/v1/completions", json=long) as running:
            lines = running.iter_lines()  # without a name for it the connection would be closed
            next(lines)
            response = client.post("/v1/completions", json=PROMPT)
            held.go_on.set()
        assert is_error(response, 429, "at most 2 may")
        assert response.headers["retry-after"] == "1"
        ends_s = time.monotonic() + TIMEOUT_S  # the queued prompt is aborted after a step
        while client.post("/v1/completions", json=PROMPT).status_code == 429:
            assert time.monotonic() < ends_s


def test_the_token_bucket_refills():
    now = [0.0]
    key = ApiKey(tenant="a", requests_per_minute=60)
    ring = Keyring([key], clock=lambda: now[0])
    for _ in range(60):
        with ring.admitted(key):
            pass
    with pytest.raises(LimitReached) as caught, ring.admitted(key):
        pass
    assert caught.value.retry_after_s == pytest.approx(1.0)
    now[0] = 1.0
    with ring.admitted(key):
        pass


@pytest.mark.parametrize(
    ("a_minute", "num_at_once", "later_s"),
    [pytest.param(2, 2, 3600.0, id="full"), pytest.param(0.5, 1, 120.0, id="below_one")],
)
def test_an_allowance_is_that_of_a_minute_and_at_least_one(a_minute, num_at_once, later_s):
    now = [0.0]
    key = ApiKey(tenant="a", requests_per_minute=a_minute)
    ring = Keyring([key], clock=lambda: now[0])
    for at_s in (0.0, later_s):
        now[0] = at_s
        for _ in range(num_at_once):
            with ring.admitted(key):
                pass
        with pytest.raises(LimitReached), ring.admitted(key):
            pass


def test_an_ended_request_makes_room_however_it_ended():
    key = ApiKey(tenant="a", max_concurrent=1)
    ring = Keyring([key], max_requests=1)
    for _ in range(3):
        with pytest.raises(KeyError), ring.admitted(key):
            raise KeyError
        with ring.admitted(key):
            assert ring.num_running == 1


def test_the_limits_of_a_key_are_allowed_and_one_more_is_not():
    key = ApiKey(tenant="a", sha256="0" * 64, max_tokens=12, priority=5)
    key.check(5, 3, 4)
    key.check(6, 1, 12)
    for priority, num_choices, max_tokens in ((4, 3, 4), (5, 1, 13), (5, 13, 1), (5, 1, None)):
        with pytest.raises(InvalidRequest):
            key.check(priority, num_choices, max_tokens)


def test_requests_at_once_are_counted():
    key = ApiKey(tenant="a", max_concurrent=1)
    other = ApiKey(tenant="b")
    ring = Keyring([key, other], max_requests=2)
    with ring.admitted(key):
        with pytest.raises(LimitReached, match="of this key"), ring.admitted(key):
            pass
        with ring.admitted(other), pytest.raises(LimitReached, match="at most 2"):
            ring.admitted(other).__enter__()
    assert ring.num_running == 0


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\ntenant = "a"\nkey = "{KEY}"\nmax_concurrent = 3\n')
    (key,) = read_keys(path)
    assert key == ApiKey(tenant="a", sha256=ApiKey.of("a", KEY).sha256, max_concurrent=3)
    assert KEY not in repr(key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys", "not TOML"),
        ("a = 1", "no \\[\\[keys\\]\\]"),
        ('[[keys]]\ntenant = "a"\nkey = "short"', "5 characters"),
        (
            f'[[keys]]\ntenant = ""\nkey = "{KEY}"',
            "tenant is ''; it must be .* at least 1",
        ),
        (f'[[keys]]\nkey = "{KEY}"', "missing required field `tenant`"),
        (f'[[keys]]\ntenant = "a"\nkey = "{KEY}"\nrate = 3', "unknown field `rate`"),
        ('[[keys]]\ntenant = "a"', "one of key and sha256"),
        ('[[keys]]\ntenant = "a"\nsha256 = "abc"', "sha256 is 'hidden'; it must be a text"),
        (
            f'[[keys]]\ntenant = "a"\nkey = "{KEY}"\nmax_concurrent = 0',
            "max_concurrent is 0; it must be a whole number at least 1",
        ),
        (
            f'[[keys]]\ntenant = ["a"]\nkey = "{KEY}"',
            "tenant is \\['a'\\]; it must be a text",
        ),
        (
            f'[[keys]]\ntenant = 3\nkey = "{KEY}"',
            "tenant is 3; it must be a text",
        ),
        (
            f'[[keys]]\ntenant = {{}}\nkey = "{KEY}"',
            "tenant is \\{\\}; it must be a text",
        ),
        ('[[keys]]\ntenant = "a"\nkey = 1234567890123456789', "key is a int; it must be a text"),
        ('[[keys]]\ntenant = "a"\nkey = ["0123456789abcdef"]', "key is a list; it must be a text"),
        ('[[keys]]\ntenant = "a"\nkey = 2026-01-01', "key is a date; it must be a text"),
        ('[[keys]]\ntenant = "a"\nkey = "äääääääääääääääääääää"', "use ASCII"),
        ('[[keys]]\ntenant = "a"\nkey = " 0123456789abcdef"', "use ASCII"),
        ('[[keys]]\ntenant = "a"\nsha256 = 3', "sha256 is 'hidden'; it must be a text"),
        ('[[keys]]\ntenant = "a"\nsha256 = ["a"]', "sha256 is 'hidden'; it must be a text"),
        (f'[[keys]]\ntenant = "a"\nsha256 = {"1" * 64}', "sha256 is 'hidden'; it must be a text"),
        (
            f'[[keys]]\ntenant = "a"\nkey = "{KEY}"\nmax_tokens = "3"',
            "max_tokens is '3'; it must be a whole number",
        ),
        (
            f'[[keys]]\ntenant = "a"\nkey = "{KEY}"\nrequests_per_minute = nan',
            "_per_minute is nan; it must be a number",
        ),
        (f'[[keys]]\ntenant = "a"\nkey = "{KEY}"\npriority = true', "priority is True; it must be"),
        ("keys = [3]", "is no table; give"),
        ("keys = {}", "no \\[\\[keys\\]\\]"),
        ("keys = " + "[" * 5000, "not TOML"),
        ("keys = " + "9" * 5000, "not TOML"),
        ("keys = \ud800", "not TOML"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidRequest, match=message):
        read_keys(path)


def test_the_keys_of_the_page_can_be_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    block = page.split("<!-- file: keys.toml -->")[1].lstrip().split("\n\n")[0]
    path = tmp_path / "keys.toml"
    path.write_text(textwrap.dedent("    " + block))
    (key,) = read_keys(path)
    assert (key.tenant, key.max_tokens, key.requests_per_minute) == ("search", 2048, 600)
