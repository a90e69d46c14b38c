"""vLLM's own load generator, `vllm bench serve`, against `forerun serve`; needs `peers-vllm`.

    python benchmarks/serve/vllm_client.py --target zoo:code-40m --out build/vllm-client

Fails where a request does. The figures are those of vLLM's client, which takes a core of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from run import start_server

from forerun.models.checkpoint import ModelFiles

COMMAND = Path(__file__).resolve().with_name("vllm_command.py")
FIGURES = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
)


def bench(options: argparse.Namespace, url: str) -> dict[str, object]:
    """Run the client once and return what it measured."""
    command = [sys.executable, str(COMMAND), "bench", "serve"]
    command += ["--backend", "openai", "--endpoint", "/v1/completions", "--base-url", url]
    command += ["--model", options.model, "--tokenizer", str(ModelFiles.find(options.model).folder)]
    command += ["--dataset-name", "random", "--num-prompts", str(options.requests)]
    command += ["--random-input-len", "64", "--random-output-len", str(options.max_tokens)]
    command += ["--max-concurrency", str(options.concurrency), "--ignore-eos"]
    command += ["--seed", "0", "--temperature", "0", "--disable-tqdm", "--save-result"]
    command += ["--result-dir", str(options.out), "--result-filename", "result.json"]
    subprocess.run(command, check=True)
    found: dict[str, object] = json.loads((options.out / "result.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", "--target", default="zoo:code-40m")
    parser.add_argument("--draft", default="zoo:code-2m-for-40m")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("build/vllm-client"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    process, address = start_server(options)
    try:
        found = bench(options, address.rstrip("/"))
    finally:
        process.terminate()
        process.wait(60)
    figures = {name: found.get(name) for name in FIGURES}
    print(json.dumps(figures, indent=1))
    if found.get("failed") or found.get("completed") != options.requests:
        raise SystemExit("some requests failed")
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
