"""A live page, in a process of its own: tests themselves have no network."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

import pytest
from tests.replayed import Replayed

from forerun.doctor.readers import sources
from forerun.errors import InvalidRequest

SCRIPT = """
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from forerun.doctor.readers import sources
from forerun.errors import InvalidRequest

seen = []

class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        seen.append(self.path)
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/metrics")
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        try:
            self.body()
        except OSError:
            pass

    def body(self):
        count = 100 * seen.count(self.path)
        if self.path == "/metrics":
            self.wfile.write(
                b"vllm:spec_decode_num_drafts_total %d\\n"
                b"vllm:spec_decode_num_draft_tokens_total %d\\n"
                b"vllm:spec_decode_num_accepted_tokens_total %d\\n"
                % (count, 4 * count, 2 * count)
            )
        elif self.path == "/still":
            self.wfile.write(b"vllm:spec_decode_num_drafts_total 7\\n"
                             b"vllm:spec_decode_num_draft_tokens_total 28\\n"
                             b"vllm:spec_decode_num_accepted_tokens_total 14\\n")
        elif self.path == "/html":
            self.wfile.write(b"<html><script>alert(1)</script></html>")

    def log_message(self, *arguments):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
found = {}
for name in ("metrics", "still", "redirect", "missing", "html"):
    sources.TIMEOUT_S = 120.0
    try:
        evidence = sources.read_live(
            f"http://127.0.0.1:{server.server_port}/{name}", interval_s=1.0, sleep=lambda _: None
        )
        facts = {fact.name: fact.value for fact in evidence}
        found[name] = {"facts": facts, "notes": evidence.readings[0].notes}
    except InvalidRequest as error:
        found[name] = {"error": str(error)}
for name, url in (("refused", "http://127.0.0.1:1/metrics"), ("file", "http:///etc/passwd")):
    try:
        sources.read_live(url, interval_s=1.0, sleep=lambda _: None)
    except InvalidRequest as error:
        found[name] = {"error": str(error)}
found["paths"] = seen
print(json.dumps(found))
"""


@lru_cache(maxsize=1)
def served() -> dict:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(run.stdout)


def test_two_samples_give_what_happened_in_between():
    assert served()["metrics"]["facts"] == {
        "engine": "vLLM",
        "num_drafts": 100.0,
        "num_drafted": 400.0,
        "num_accepted": 200.0,
    }


def test_where_nothing_happened_totals_are_used_and_it_says_so():
    found = served()["still"]
    assert found["facts"]["num_drafts"] == 7.0 and "nothing was counted" in found["notes"][0]


def test_a_redirect_is_not_followed():
    assert "not followed" in served()["redirect"]["error"]
    asked = served()["paths"]
    assert asked[asked.index("/redirect") + 1] == "/missing"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "answers 404"),
        ("html", "no metric of an engine"),
        ("refused", "cannot be read"),
        ("file", "cannot be reached: no request can be sent"),
    ],
)
def test_pages_that_are_none_end_with_a_clear_message(name: str, message: str):
    assert message in served()[name]["error"]


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("http://h:1/metrics", "http://h:1/metrics"),
        ("http://h:1/a", "http://h:1/a"),
        ("http://h:1?a=/", "http://h:1?a=/"),
        ("http://h:1/?a", "http://h:1/?a"),
    ],
)
def test_a_server_without_a_path_is_read_at_its_metrics(url, read, monkeypatch):
    fetched = []

    def fetch(address, *_):
        fetched.append(address)
        return b"vllm:num_requests_running 1\nvllm:spec_decode_num_drafts_total 2\n"

    monkeypatch.setattr("forerun.client.door.fetch_page", fetch)
    sources.page_of(url)
    assert fetched == [read]


OK = b"HTTP/1.1 200 OK\r\n"
PAGE = OK + b"\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
HUGE = [b"x" * (1 << 16)] * 9
SLOW = "takes more than 30 s to answer"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([PAGE, *HUGE], "sends more than 262144 bytes"),
        ([PAGE[:9], PAGE[9:] + b"x" * 40_000, *HUGE], "sends more than 262144 bytes"),
        (
            [CHUNKED, *[b"X: " + b"y" * 60_000 + b"\r\n"] * 9],
            "cannot be read: Receive buffer too long",
        ),
        ([PAGE, *[b"vllm:a 1\n"] * 99], SLOW),
        ([b"HTTP/1.1 2", *[b"0"] * 99], SLOW),
        ([OK, *[b"X"] * 99], SLOW),
        ([OK, *[b"X: y\r\n"] * 99], SLOW),
        ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 99, SLOW),
        ([CHUNKED, *[b"X"] * 99], SLOW),
        ([OK + b"Content-Length: 2\r\n\r\nhi"], "holds no metric of an engine"),
    ],
    ids="huge pieces trailers slow status header headers continue trailer whole".split(),
)
def test_a_page_is_limited_however_it_arrives(pieces, message, monkeypatch):
    Replayed(monkeypatch, lambda: pieces)
    monkeypatch.setattr(sources, "MAX_PAGE_BYTES", 1 << 18)
    monkeypatch.setattr(sources, "TIMEOUT_S", 30.0)
    with pytest.raises(InvalidRequest, match=message):
        sources.page_of("http://127.0.0.1:1/metrics")
