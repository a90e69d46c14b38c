"""Plain and speculative decoding of the real model, beside llama.cpp on the same file.

    python benchmarks/speed/real-model/run.py --llama-python ENV/bin/python --out DIR

ENV has llama-cpp-python. Every arm continues a chat before the next chat comes, in an order that
rotates; llama.cpp's process waits for its line meanwhile. In bf16, llama.cpp reads the weights of
the same file written out in bf16. Tokens over wall time, prefill included, end of text ignored;
greedy texts end where the plain text begins to loop.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.measure.bench.compare import build_controlled_engine
from forerun.measure.prompt_files import prompt_ids, read_prompts, shipped_prompts
from forerun.models.catalog import zoo_path
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import first_repeat
from forerun.theory.intervals import bootstrap_ratio

TARGET = "zoo:smollm2-135m"
MAX_CONTEXT = 1024
Generate = Callable[[Sequence[int], int], tuple[list[int], float]]
"""From the ids of a prompt and a number of tokens: greedy tokens and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine, format of the weights and way of drafting."""

    name: str
    weights: str
    generate: Generate


class LlamaWorker:
    """llama.cpp in a process of its own."""

    def __init__(self, python: Path, file: Path, num_threads: int) -> None:
        script = Path(__file__).parent / "llamacpp_worker.py"
        self.process = subprocess.Popen(
            [python, script, file, str(num_threads), str(MAX_CONTEXT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = json.loads(self._read())["version"]

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def generate(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """Let the worker continue one prompt; its own clock is read."""
        assert self.process.stdin is not None
        print(
            json.dumps({"ids": list(ids), "num_tokens": num_tokens}),
            file=self.process.stdin,
            flush=True,
        )
        found = json.loads(self._read())
        return found["tokens"], found["seconds"]


def timed(engine: Engine, temperature: float) -> Generate:
    """Return what times an engine on one prompt."""

    def generate(ids: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
        started_s = time.perf_counter()
        (output,) = engine.generate([list(ids)], params)
        return list(output.token_ids), time.perf_counter() - started_s

    return generate


def write_bf16(python: Path, source: Path, file: Path) -> None:
    """Let llama.cpp write the weights of a file in bf16."""
    code = (
        "import sys, llama_cpp as l; p = l.llama_model_quantize_default_params();"
        "p.ftype = l.LLAMA_FTYPE_MOSTLY_BF16; p.allow_requantize = True;"
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    subprocess.run([python, "-c", code, source, file], check=True, stderr=subprocess.DEVNULL)


def arms_of(options: argparse.Namespace) -> tuple[list[Arm], str]:
    """Load everything that is measured; returns the version of llama.cpp's package too."""
    file = zoo_path(TARGET)
    arms, version = [], ""
    for weights, dtype in (("4 bits", "auto"), ("bf16", "bfloat16")):
        config = EngineConfig(
            controller="fixed",
            num_speculative_tokens=max(options.ks),
            max_batch=1,
            max_context=MAX_CONTEXT,
            num_threads=options.threads,
            sharing="none",
        )
        plain = Engine.load(TARGET, dtype=dtype, config=config)
        engines = {"forerun plain": plain}
        for draft in options.drafts:
            name = Path(draft).name.removeprefix("zoo:")
            drafter = plain.with_draft(draft, max(options.ks)).drafter
            for k in options.ks:
                engines[f"forerun {name} K={k}"] = plain.with_draft(drafter, k)
            engines[f"forerun {name} auto"] = build_controlled_engine(
                plain, drafter, max(options.ks), "auto"
            )
        arms += [
            Arm(name=name, weights=weights, generate=timed(engine, options.temperature))
            for name, engine in engines.items()
        ]
        if options.llama_python is not None and options.temperature == 0:
            read = file
            if weights == "bf16":
                read = options.scratch / "bf16.gguf"
                options.scratch.mkdir(parents=True, exist_ok=True)
                write_bf16(options.llama_python, file, read)
            worker = LlamaWorker(options.llama_python, read, options.threads)
            version = worker.version
            arms.append(Arm(name="llama.cpp plain", weights=weights, generate=worker.generate))
    return arms, version


def main() -> None:
    """Measure, print, and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--drafts", nargs="*", default=[])
    parser.add_argument("--ks", nargs="+", type=int, default=[3, 5])
    parser.add_argument("--prompts", type=Path, help="default: the shipped chats")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("build/real-model"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arms, version = arms_of(options)
    tokenizer = Engine.load(TARGET).tokenizer
    entries = (
        read_prompts(options.prompts) if options.prompts else shipped_prompts(tokenizer, raw=False)
    )
    prompts = [prompt_ids(entry, tokenizer, raw=False) for entry in entries][: options.rounds]
    for arm in arms:
        arm.generate(prompts[0], 16)
    rounds: list[dict[str, dict[str, float]]] = []
    for number, prompt in enumerate(prompts):
        lengths = {}
        for weights in dict.fromkeys(arm.weights for arm in arms):
            plain = next(arm for arm in arms if arm.weights == weights)
            tokens, _ = plain.generate(prompt, options.max_tokens)
            greedy = options.temperature == 0
            lengths[weights] = first_repeat(tuple(tokens)) if greedy else options.max_tokens
        if min(lengths.values()) < 16:
            continue
        shift = number % len(arms)
        found = {}
        for arm in (*arms[shift:], *arms[:shift]):
            tokens, seconds = arm.generate(prompt, lengths[arm.weights])
            found[f"{arm.weights}, {arm.name}"] = {"tokens": len(tokens), "seconds": seconds}
        rounds.append(found)
        print(f"{number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    rows = [row_of(arm, rounds) for arm in arms]
    for row in rows:
        print("{weights:7} {name:32} {tokens_per_s:6.1f}/s  {speedup}".format(**row))
    content = {
        "command": shlex.join(["python", *sys.argv]),
        "llama-cpp-python": version,
        "provenance": collect({TARGET: content_hash(TARGET)}, options.threads).to_dict(),
        "rows": rows,
        "rounds": rounds,
    }
    (options.out / "results.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def row_of(arm: Arm, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Return tokens per second of an arm, and its speed over plain decoding of forerun."""
    own = [found[f"{arm.weights}, {arm.name}"] for found in rounds]
    plain = [found[f"{arm.weights}, forerun plain"] for found in rounds]
    ratio = bootstrap_ratio(
        [p["seconds"] / p["tokens"] for p in plain],
        [o["seconds"] / o["tokens"] for o in own],
        seed=0,
    )
    return {
        "weights": arm.weights,
        "name": arm.name,
        "tokens_per_s": sum(o["tokens"] for o in own) / sum(o["seconds"] for o in own),
        "speedup": f"{ratio.estimate:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
    }


if __name__ == "__main__":
    main()
