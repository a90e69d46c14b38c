"""Look at the diagnosis of a served pair under load, and count the verdicts.

    python benchmarks/verdicts/page.py --looks 200 --out page.json

Six clients ask for texts of 16 to 120 tokens without a pause, at T=0, 0.7 and 1. A look is a new
diagnosis of the metrics that the page would show, from the callable that `serve` gives it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from forerun.doctor.diagnosis import diagnose
from forerun.doctor.live import PageDiagnosis
from forerun.doctor.readers.sources import read_source
from forerun.provenance import collect

TARGET = "zoo:code-40m"
NUM_CLIENTS = 6
PROMPTS = (
    "def sort(items):",
    "class Stack:",
    "import os\n",
    "for index in range(",
    "# Reads a file",
)


def main() -> None:
    """Serve, load, look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=200)
    parser.add_argument("--interval-s", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=8471)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "forerun", "serve", TARGET, "--draft", "auto"]
    command += ["--max-context", "1024", "--port", str(options.port), "--max-batch", "6"]
    url = f"http://127.0.0.1:{options.port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            looks, of_file = look(url, options.looks, options.interval_s)
        finally:
            server.terminate()
    for found in looks:
        if found["verdict"] == "problem":
            print(found)
    counts = Counter(str(found["verdict"]) for found in looks)
    print(dict(counts), "file:", of_file)
    if options.out:
        summary = {"num_looks": len(looks), "verdicts": dict(counts), "file": of_file}
        document = {"provenance": collect({}).to_dict(), "summary": summary, "looks": looks}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def look(url: str, num_looks: int, interval_s: float) -> tuple[list[dict[str, object]], str]:
    """Diagnose the metrics as often as asked; returns the verdict on their last file too."""
    wait_for(url)
    done = threading.Event()
    for number in range(NUM_CLIENTS):
        threading.Thread(target=ask, args=(url, number, done), daemon=True).start()
    found: list[dict[str, object]] = []
    see, page = PageDiagnosis(), ""
    while len(found) < num_looks:
        time.sleep(interval_s)
        page = get(f"{url}/metrics")
        if (seen := see(page)) is not None:
            found.append({name: seen[name] for name in ("verdict", "headline", "num_steps")})
    done.set()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.txt"
        file.write_text(page)
        verdict = diagnose(read_source(str(file), interval_s=1.0)).verdict
    return found, verdict


def wait_for(url: str) -> None:
    """Wait until the server answers."""
    for _ in range(600):
        try:
            get(f"{url}/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    sys.exit("the server did not start within five minutes")


def get(url: str) -> str:
    """Return a page."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def ask(url: str, number: int, done: threading.Event) -> None:
    """Ask for one text after another."""
    for turn in itertools.count(number):
        if done.is_set():
            return
        body = {
            "model": TARGET,
            "prompt": PROMPTS[turn % len(PROMPTS)],
            "max_tokens": 16 + 37 * turn % 105,
            "temperature": (0.0, 0.7, 1.0)[turn % 3],
        }
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
        except OSError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
