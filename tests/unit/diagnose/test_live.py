"""A live page, in a process of its own: tests themselves have no network."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

import pytest

SCRIPT = """
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from forerun.diagnose.readers import sources
from forerun.errors import InvalidRequest

sources.MAX_PAGE_BYTES = 1 << 18
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
        elif self.path == "/huge":
            for _ in range(1000):
                self.wfile.write(b"x" * (1 << 16))
        elif self.path == "/slow":
            for _ in range(100):
                self.wfile.write(b"vllm:a 1\\n")
                self.wfile.flush()
                threading.Event().wait(0.1)

    def log_message(self, *arguments):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
found = {}
for name in ("metrics", "still", "redirect", "missing", "html", "huge", "slow"):
    sources.TIMEOUT_S = 1.0 if name == "slow" else 60.0
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
        ("huge", "more than 262144 bytes"),
        ("slow", "takes more than 1 s"),
        ("refused", "cannot be read"),
        ("file", "cannot be read"),
    ],
)
def test_pages_that_are_none_end_with_a_clear_message(name: str, message: str):
    assert message in served()[name]["error"]
