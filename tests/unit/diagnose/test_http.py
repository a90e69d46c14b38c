"""The time limit of an HTTP exchange covers the status line, headers, body and trailers.

The servers run in a process of their own, because tests may not open network connections.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

import pytest

SCRIPT = """
import json, socket, threading, time
from forerun.bounded_read import ReadLimits
from forerun.diagnose.readers.sources import http_get
from forerun.errors import UnreadableInput

OK = b"HTTP/1.1 200 OK\\r\\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\\r\\n\\r\\n2\\r\\nhi\\r\\n0\\r\\n"
ANSWERS = {
    "complete": (OK + b"Content-Length: 2\\r\\n\\r\\nhi", b"", 0.0),
    "status": (b"HTTP/1.1 2", b"0", 0.05),
    "headers": (OK, b"X", 0.05),
    "many_headers": (OK, b"X: y\\r\\n", 0.05),
    "continue": (b"", b"HTTP/1.1 100 Continue\\r\\n\\r\\n", 0.05),
    "trailers": (CHUNKED, b"X", 0.05),
    "long_trailers": (CHUNKED, b"X: " + b"y" * 60000 + b"\\r\\n", 0.0),
}

def serve(listener, start, piece, pause_s):
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        try:
            connection.sendall(start)
            while piece:
                connection.sendall(piece)
                time.sleep(pause_s)
        except OSError:
            pass

found = {}
for name, answer in ANSWERS.items():
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, *answer), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    seconds = 60.0 if name in ("complete", "long_trailers") else 1.0
    begun_s = time.monotonic()
    try:
        body = http_get(url, ReadLimits(max_bytes=1000, max_seconds=seconds))
        found[name] = {"body": body.decode()}
    except UnreadableInput as error:
        found[name] = {"error": str(error)}
    found[name]["seconds"] = time.monotonic() - begun_s
print(json.dumps(found))
"""


@lru_cache(maxsize=1)
def exchanged() -> dict:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(run.stdout)


def test_a_complete_answer_is_read():
    assert exchanged()["complete"]["body"] == "hi"


@pytest.mark.parametrize("name", ["status", "headers", "many_headers", "continue", "trailers"])
def test_a_server_that_sends_without_an_end_is_left_at_the_time_limit(name: str):
    answer = exchanged()[name]
    assert "takes more than 1 s" in answer["error"]
    assert answer["seconds"] < 60.0  # the servers would send for minutes


def test_trailers_without_an_end_are_limited_in_bytes():
    answer = exchanged()["long_trailers"]
    assert "more than" in answer["error"] and "bytes" in answer["error"]
