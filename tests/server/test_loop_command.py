"""`forerun loop run` as a process: it serves, trains when the target changed, ends, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from tests.documents import in_process
from tests.system.conftest import byte_tokenizer, save_model

from forerun.loop.journal import read_journal
from forerun.models.draft_card import DraftCard, TargetIdentity, write_card

TRAIN = (
    *("--temperature", "0", "--max-tokens", "12", "--no-prediction", "--threads", "1", "--k", "2"),
    *("--num-steps", "2", "--num-evaluations", "1", "--max-prompts", "4", "--window", "48"),
    *("--tokens-per-step", "96", "--held-out-share", "0.3"),
)


@pytest.fixture
def config(tmp_path):
    """A draft whose card names another target, so that the loop begins to train at once."""
    for name, seed in (("target", 0), ("draft", 1)):
        save_model(tmp_path / name, num_layers=1, seed=seed)
        byte_tokenizer().save_pretrained(tmp_path / name)
    card = DraftCard(
        target="before",
        target_hash="0",
        made_for=TargetIdentity(weights="0", tokenizer="0", template="0"),
        data_hash="0",
        objective="fkl",
        temperature=0.0,
    )
    write_card(card, tmp_path / "draft")
    serve = [str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--port", "0"]
    serve += ["--threads", "1", "--max-batch", "2", "--max-context", "96", "--k", "2"]
    path = tmp_path / "loop.json"
    path.write_text(json.dumps({"serve": serve, "folder": "out", "train": TRAIN, "min_texts": 12}))
    return path


class Running:
    """The process, with a client of its server."""

    def __init__(self, config):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "loop", "run", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(os.environ),
        )
        url = self.process.stdout.readline().split("http://")[1].split("/v1")[0]
        self.client = httpx.Client(base_url=f"http://{url}", timeout=120)

    def ask(self, number, **fields):
        body = {"prompt": f"text {number}", "temperature": 0, "max_tokens": 8, "store": True}
        return self.client.post("/v1/completions", json={**body, **fields}).raise_for_status()

    def end(self, number):
        self.client.close()
        self.process.send_signal(number)
        code = self.process.wait(120)
        self.process.stdout.close()
        return code


def test_a_loop_trains_is_killed_and_goes_on(config):
    folder = config.parent / "out"
    running = Running(config)
    for number in range(14):
        running.ask(number, ignore_eos=True)
    ends_s = time.monotonic() + 200
    while len(read_journal(folder)) < 2:
        assert time.monotonic() < ends_s
        assert running.process.poll() is None
        running.ask(0)
    code, errors = in_process(["loop", "run", str(config)])
    assert code == 2
    assert "another run of forerun loop uses" in errors
    running.end(signal.SIGKILL)
    watch, train = read_journal(folder)[:2]
    assert "was aligned to before" in watch.why
    assert train.is_good, train.why
    running = Running(config)
    running.ask(1)
    assert running.end(signal.SIGINT) == 0
    assert [record.stage for record in read_journal(folder)[:2]] == ["watch", "train"]
