"""`forerun serve` as a process: the shipped pair, and the end of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from tests.documents import in_process

from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams

PARAMS = {"seed": 11, "max_tokens": 40, "temperature": 1.0}
PROMPT = "def quicksort(items):"
LINES = "{{ messages | map(attribute='content') | join('\\n') }}"
FLAGS = ["--port", "0", "--threads", "1", "--max-batch", "2", "--max-context", "512"]


def start(*flags: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "forerun", "serve", "zoo:code-11m", *FLAGS, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.usefixtures("unchecked")
def test_texts_of_the_shipped_pair_and_a_graceful_end(tmp_path):
    template = tmp_path / "lines.jinja"
    template.write_text(LINES)
    with start("--chat-template", str(template)) as process:
        line = process.stdout.readline()
        url = line.split()[-1].removesuffix("/v1")
        assert "zoo:code-11m is served at http://127.0.0.1:" in line
        with httpx.Client(base_url=url, timeout=300) as client:
            body = {"prompt": PROMPT, **PARAMS}
            text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            chat = {"messages": [{"role": "user", "content": PROMPT}], **PARAMS}
            answer = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
            assert answer["message"]["content"] == text
            long = body | {"max_tokens": 300, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=long) as response:
                lines = response.iter_lines()
                found = [next(lines)]
                process.send_signal(signal.SIGTERM)
                found += [line for line in lines if line]
        assert found[-1] == "data: [DONE]"
        last = json.loads(found[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(300) == 0
        assert "Traceback" not in process.stderr.read()
    engine = Engine.load("zoo:code-11m", num_threads=1, max_batch=2, max_context=512)
    assert engine.generate([PROMPT], SamplingParams(**PARAMS))[0].text == text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host", "0.0.0.0"), "needs API keys"),
        (("--host", "203.0.113.9", "--api-keys", "missing.toml"), "missing.toml"),
        (("--max-body-bytes", "1"), "max_body_bytes is 1"),
        (("--chat-template", "missing.jinja"), "missing.jinja"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message):
    code, errors = in_process(["serve", "zoo:code-11m", *FLAGS, *flags])
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
