"""Show a shift of domain, the recovery by the loop, and a poisoned draft that is refused.

    python recipes/loop/run.py --chat chats.jsonl --shifted gsm8k.jsonl --out build/loop

It starts `forerun loop run` in a process of its own, sends requests that consent to be trained on,
and draws acceptance length and tokens per second over the requests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forerun import Engine, SamplingParams
from forerun.client.client import Client
from forerun.client.connection import ClientConfig
from forerun.errors import ForerunError
from forerun.loop.journal import Journal, Record, find_draft, find_next, read_journal
from forerun.measure.prompt_files import PromptEntry, read_prompts

TARGET, DRAFT = "zoo:smollm2-135m", "zoo:eagle3-for-smollm2-135m"
MAX_TOKENS = 96
WINDOW = 20  # requests that a point of the picture is the mean of
TRAIN = (
    *("--temperature", "0", "--response-temperature", "1", "--max-tokens", str(MAX_TOKENS)),
    *("--window", "512", "--tokens-per-step", "1024", "--rows-per-pass", "2", "--num-passes", "4"),
    *("--num-steps", "120", "--learning-rate", "3e-4", "--no-prediction", "--threads", "1"),
)


@contextmanager
def serving(config: Path, port: int) -> Iterator[Client]:
    """Run the loop in a process of its own, and yield a client once it answers."""
    command = [sys.executable, "-m", "forerun", "loop", "run", str(config)]
    with config.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        with Client(ClientConfig(url=url, model=TARGET)) as client:
            while True:
                time.sleep(2)
                assert process.poll() is None, f"see {config.with_suffix('.log')}"
                try:
                    client.find_model()
                    break
                except ForerunError:
                    continue
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def ask(client: Client, entry: PromptEntry) -> dict[str, object]:
    """Send one greedy request; returns its tokens per step, tokens per second and text."""
    messages = entry.messages or ({"role": "user", "content": entry.text or ""},)
    asked = [message for message in messages if message["role"] != "assistant"]
    began_s = time.monotonic()
    fields = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "store": True}
    answer = client.chat(asked, fields)
    usage = answer.usage
    assert usage is not None
    counts, num = usage.speculative_decoding, usage.completion_tokens or 0
    steps = counts.num_steps if counts is not None else 0
    return {
        "length": (counts.num_accepted + steps) / steps if counts is not None and steps else None,
        "tokens_per_s": num / (time.monotonic() - began_s),
        "messages": asked,
        "text": answer.text,
    }


def send_until(client: Client, prompts: Iterator[PromptEntry], folder: Path, stages: int) -> list:
    """Send requests until the journal has so many lines."""
    answers = []
    while len(read_journal(folder)) < stages:
        answers.append(ask(client, next(prompts)))
    return answers


def poison(folder: Path, out: Path) -> None:
    """Copy a draft with as much noise as it has weights."""
    shutil.copytree(folder, out)
    generator = torch.Generator().manual_seed(0)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.empty_like(tensor).normal_(generator=generator)
                tensors[name] = tensor + noise * tensor.float().std().to(tensor.dtype)
        save_file(tensors, path)


def draw(answers: list, marks: dict[str, int], path: Path) -> None:
    """Draw acceptance length over requests as an SVG."""
    lengths = [answer["length"] or 1.0 for answer in answers]
    means = [sum(lengths[n : n + WINDOW]) / WINDOW for n in range(len(lengths) - WINDOW)]
    width, height, most = 720, 240, max([*means, 2.0])
    place = [width / max(1, len(means) - 1) * n for n in range(len(means))]
    points = " ".join(
        f"{x:.1f},{height * (1 - mean / most):.1f}" for x, mean in zip(place, means, strict=True)
    )
    lines = "".join(
        f'<line x1="{width * n / len(answers):.0f}" x2="{width * n / len(answers):.0f}" y1="0" '
        f'y2="{height}" stroke="#aaa"/><text x="{width * n / len(answers) + 3:.0f}" y="12" '
        f'font-size="11">{name}</text>'
        for name, n in marks.items()
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'{lines}<polyline fill="none" stroke="#1a7f64" points="{points}"/></svg>\n'
    )


def count_changed(answers: list) -> int:
    """Return how many texts differ from those of plain decoding in fp32."""
    engine = Engine.load(TARGET, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return sum(engine.chat([a["messages"]], params)[0].text != a["text"] for a in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chat", type=Path, required=True)
    parser.add_argument("--shifted", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-before", type=int, default=200)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--check", action="store_true", help="compare texts with plain decoding")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    folder, config = given.out.resolve() / "loop", given.out / "loop.json"
    serve = [TARGET, "--draft", DRAFT, "--port", str(given.port), "--k", "4", "--dtype", "float32"]
    settings = {"serve": serve, "folder": str(folder), "train": TRAIN, "shadow_requests": 60}
    settings |= {"settle_requests": 60, "min_texts": 200, "old_texts": None}
    config.write_text(json.dumps(settings))
    chats, shifted = cycle(read_prompts(given.chat)), cycle(read_prompts(given.shifted))
    marks = {"chat": 0}
    with serving(config, given.port) as client:
        answers = [ask(client, entry) for entry in islice(chats, given.num_before)]
        for name, stages in (("shift", 1), ("noticed", 2), ("trained", 3), ("tried", 5)):
            marks[name] = len(answers)
            answers += send_until(client, shifted, folder, stages)
        marks["settled"] = len(answers)
        answers += [ask(client, entry) for entry in islice(shifted, given.num_before)]
    with Journal(folder) as journal:
        number, _ = find_next(journal.records)
        poisoned = folder / "poisoned"
        poison(Path(find_draft(journal.records, journal.version) or "no draft"), poisoned)
        fields = {"round": number, "is_good": True, "version": journal.version, "why": "poisoned"}
        journal.append(Record(stage="watch", **fields))
        journal.append(Record(stage="train", draft=str(poisoned), **fields))
        num_stages = len(journal.records)
    marks["poisoned"] = len(answers)
    with serving(config, given.port) as client:
        answers += send_until(client, shifted, folder, num_stages + 1)
    draw(answers, marks, given.out / "story.svg")
    for record in read_journal(folder):
        print(f"round {record.round} {record.stage}: {record.why}")
    if given.check:
        print(f"{count_changed(answers)} of {len(answers)} texts differ from plain decoding")


if __name__ == "__main__":
    main()
