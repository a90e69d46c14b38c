"""`forerun bench --url` over our own server and over a fake one that fails in chosen ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.server.conftest import MODEL, serving, tiny_engine

from forerun.cli.main import main

SMALL = ("--blocks", "2", "--max-tokens", "6", "--concurrency", "1,2", "--ignore-eos")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(tiny_engine()) as client:
        yield str(client.base_url)


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    return str(path)


def test_one_server_is_measured_at_every_number_of_clients(address, prompts, tmp_path, capsys):
    out = tmp_path / "load.json"
    arguments = ("--url", address, "--prompts", prompts, "--out", str(out))
    assert main(["bench", *arguments, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "requests/s" in shown
    assert MODEL in shown
    content = json.loads(out.read_text())
    assert [cell["concurrency"] for cell in content["cells"]] == [1, 2]
    for cell in content["cells"]:
        assert cell["num_blocks"] == 2
        figures = cell["figures"][address]
        for figure in figures.values():
            assert 0.0 < figure["low"] <= figure["estimate"] <= figure["high"]
        assert figures["ttft_median_s"]["estimate"] <= figures["ttft_p95_s"]["estimate"]
        assert "first_over_second" not in cell
    blocks = content["blocks"]
    assert [len(block["answers"]) for block in blocks] == [3, 4, 3, 4]
    assert {request["num_tokens"] for block in blocks for request in block["answers"]} == {6}
    for block in blocks:
        assert block["wall_s"] >= max(request["total_s"] for request in block["answers"])


def test_secrets_of_addresses_are_not_shown(address, prompts, tmp_path, capsys):
    """Two addresses that differ in them alone have names that differ."""
    out = tmp_path / "load.json"
    urls = [address.replace("http://", f"http://user:s3cr3t{n}@") for n in range(2)]
    arguments = ["--url", *urls, "--prompts", prompts, "--out", str(out), "--blocks", "2"]
    assert main(["bench", *arguments, "--max-tokens", "2", "--concurrency", "1"]) == 0
    shown = capsys.readouterr()
    names = [item["url"] for item in json.loads(out.read_text())["endpoints"]]
    assert names == [address, f"{address} (2)"]
    assert main(["bench", "--url", *urls, f"{urls[0]}/x"]) == 2
    shown = shown.out + shown.err + out.read_text() + capsys.readouterr().err
    assert "s3cr3t" not in shown


def test_two_servers_of_one_model_have_equal_texts(address, prompts, capsys):
    with serving(tiny_engine(with_draft=False)) as plain:
        urls = ("--url", address, str(plain.base_url))
        assert main(["bench", *urls, "--prompts", prompts, *SMALL, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    for cell, number in zip(content["cells"], (6, 8), strict=True):
        assert cell["first_over_second"].keys() == cell["figures"][address].keys()
        assert cell["equal_texts"]["num_texts"] == number
        assert cell["equal_texts"]["estimate"] == 1.0
    order = [block["arm"] for block in content["blocks"]]
    assert order[:2] == order[4:6][::-1]  # the order is reversed from block to block


def test_texts_of_different_models_differ(address, prompts, capsys):
    with fake([answer("other")] * 20) as server:
        urls = ("--url", address, server.url)
        arguments = ("--prompts", prompts, "--max-tokens", "6", "--blocks", "2")
        assert main(["bench", *urls, *arguments, "--concurrency", "1"]) == 0
    assert "equal texts: 0 of 6" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- bad servers

Answer = tuple[int, dict[str, str], str]


def answer(text: str = "abc", num_tokens: int | None = 3) -> Answer:
    events: list[dict[str, Any]] = [{"choices": [{"text": text}]}]
    events.append({"choices": [{"text": "!", "finish_reason": "stop"}]})
    if num_tokens is not None:
        events.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return 200, {"Content-Type": "text/event-stream"}, "".join(lines) + "data: [DONE]\n\n"


@dataclass
class Fake:
    """A server that sends prepared answers; afterwards the last one again."""

    answers: list[Answer]
    listing: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Fake:
        fake, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(fake.listing)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    fake.bodies.append(json.loads(body))
                    fake.keys.append(self.headers.get("Authorization"))
                    found = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
                self.send(found)

            def send(self, found: Answer) -> None:
                status, headers, text = found
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(text))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


def fake(answers: list[Answer], listing: Answer | None = None) -> Fake:
    return Fake(answers, listing or (200, {}, json.dumps({"data": [{"id": "m"}]})))


@pytest.fixture
def bench(prompts) -> Iterator[Callable[..., int]]:
    with ExitStack() as stack:

        def run(server: Fake, *arguments: str) -> int:
            url = stack.enter_context(server).url
            sizes = ("--blocks", "2", "--concurrency", "1", "--prompts", prompts)
            return main(["bench", "--url", url, *sizes, *arguments])

        yield run


def test_a_busy_server_is_asked_again_after_the_time_it_names(bench, capsys):
    server = fake([answer(), (429, {"Retry-After": "0.01"}, "slow down"), answer()])
    assert bench(server) == 0
    assert "1 retries after 0 s, included" in capsys.readouterr().out


def test_no_prompt_is_sent_twice(bench):
    server = fake([answer()])
    assert bench(server, "--requests", "5") == 0
    sent = [body["prompt"] for body in server.bodies]
    assert len(set(sent)) == len(sent) == 11
    assert {prompt.split("\n", 1)[1] for prompt in sent} == {"one", "two", "three"}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            fake([(401, {}, "no key")]),
            "refuses the request with status 401: no key (the key sent is",
        ),
        (
            fake([answer()], (401, {}, "no key")),
            "refuses the request with status 401: no key (the key sent is",
        ),
        (fake([(404, {}, "no such model")]), "refuses the request with status 404: no such model"),
        (fake([answer()], (200, {}, "{}")), "lists no models"),
        (fake([answer()], (503, {}, "starting")), "gives no answer; status 503: starting"),
        (fake([answer(num_tokens=None)]), "text without its number of tokens"),
        (fake([answer(num_tokens=1)]), "has two tokens"),
        (fake([(200, {}, "data: {}\n\n")]), "before it was complete"),
    ],
)
def test_a_server_that_fails_is_an_error_without_a_traceback(bench, server, message, capsys):
    assert bench(server) == (2 if "refuses" in message or "has two" in message else 1)
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


def test_a_failure_in_the_middle_still_shows_the_blocks_before_it(bench, capsys):
    server = fake([answer()] * 4 + [(400, {}, "broken")])
    assert bench(server) == 2
    shown = capsys.readouterr()
    assert "1 blocks" in shown.out
    assert "broken" in shown.err


def test_keys_are_read_from_the_named_variable(bench, monkeypatch, capsys):
    monkeypatch.setenv("THE_KEY", "secret")
    server = fake([answer()])
    assert bench(server, "--api-key-env", "THE_KEY") == 0
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in capsys.readouterr().out
    monkeypatch.setenv("THE_KEY", "sec\nret")
    assert bench(fake([answer()]), "--api-key-env", "THE_KEY") == 2
    assert bench(fake([answer()]), "--api-key-env", "NO_SUCH_KEY") == 2
    shown = capsys.readouterr().err
    assert "special characters" in shown
    assert "'NO_SUCH_KEY', for a key, is not set" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--url", "nonsense"), "cannot be reached"),
        (("--url", "http://[x"), "cannot be reached"),
        (("--url", "http://a", "http://b", "http://c"), "one server, or two"),
        (("--url", "http://a", "--arms", "zoo:code-2m@2"), "--arms has no effect with --url"),
        (("--url", "http://a", "--trace", "t.jsonl"), "--trace has no effect with --url"),
        (("--url", "http://a", "--temperature", "0", "1"), "one --temperature"),
        (("--url", "http://a", "--blocks", "1"), "at least 2 --blocks"),
        (("--url", "http://a", "--concurrency", "0"), "at most 256"),
        (("--url", "http://a", "--requests", "0"), "--requests is 0"),
        (("--concurrency", "2"), "--concurrency needs --url"),
        (("--url", "http://a", "--api-key-env", "A", "B"), "more often than --url"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message, capsys):
    assert main(["bench", *arguments]) in (1, 2)
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


def test_a_model_that_is_not_served_is_named(address, capsys):
    assert main(["bench", "--url", address, "--model", "other"]) == 2
    assert f"does not serve 'other'; it serves {MODEL}" in " ".join(capsys.readouterr().err.split())
