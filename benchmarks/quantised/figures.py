"""Speed of weights in fewer bits, of self-drafts, and of llama.cpp on the same GGUF files.

    python -m benchmarks.quantised.figures [--llama build/peers/llamacpp/debian]

About a quarter of an hour on two cores, nothing else running. Samples are appended to --out, and
what is there already is not measured again; the last lines are the tables, which --report prints
alone. Arms take turns, and intervals are bootstrapped over the turns. Times are of decoding
alone, from the first token on. "wide" is zoo:code-40m with its matrices repeated, 262M parameters
in all: its output, and so its acceptance, is that of the small model. "random" has random weights
and serves timing only.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch
from benchmarks.pairs import SHAPES, random_target, train_tokenizer
from benchmarks.peers.llama_server import kernel_folder, model_arguments, server_command
from gguf import GGMLQuantizationType as Kind
from tests.gguf_files import all_of, write_gguf
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.architecture import WeightFormat
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.catalog import held_out_prompts, zoo_path
from forerun.models.load import load_model
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio

SMALL, DRAFT = "zoo:code-40m", "zoo:code-2m-for-40m"
FORMATS: tuple[WeightFormat, ...] = ("bf16", "int8", "int4")
ROWS = (1, 2, 3, 4, 5, 6, 8)
KS = (2, 3, 4, 5, 6, 8)
DRAFT_KS = (2, 4)
KINDS = {"Q8_0": Kind.Q8_0, "Q4_0": Kind.Q4_0}
PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much is measured; the defaults take a quarter of an hour on two cores."""

    out: Path
    llama: Path | None
    scratch: Path
    threads: int
    turns: int
    tokens: int
    sections: Sequence[str]


class Samples:
    """Seconds per token by section, model and arm, one of every turn, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.found: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def take(self, key: str, turns: int, arms: Mapping[str, Callable[[int], float]]) -> None:
        """Measure the turns that are missing; the first warms up and is not kept."""
        done = sum(sample["key"] == key for sample in self.found)
        for turn in range(done - 1 if done < turns else turns, turns):
            names = [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]
            taken = {name: arms[name](max(turn, 0)) for name in names}
            if turn >= done:
                self.found.append({"key": key, "turn": turn, "arms": {n: taken[n] for n in arms}})
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(self.found[-1]) + "\n")
                print(key, turn, {n: f"{s * 1e3:.2f} ms" for n, s in taken.items()}, flush=True)

    def is_done(self, key: str, turns: int) -> bool:
        return sum(sample["key"] == key for sample in self.found) >= turns

    def of(self, key: str) -> dict[str, list[float]]:
        rows = [sample["arms"] for sample in self.found if sample["key"] == key]
        return {name: [row[name] for row in rows] for name in rows[0]}


# --------------------------------------------------------------------------------------- models


def write_wide(folder: Path) -> Path:
    """Write the shipped target with twice its width and heads, and four times its inner units.

    What reads n copies is divided by n, a power of two, so the output is that of the small model.
    """
    if (folder / "model.safetensors").exists():
        return folder
    source = zoo_path(SMALL)
    small = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = LlamaConfig.from_pretrained(source)
    config.hidden_size *= 2
    config.num_attention_heads *= 2
    config.num_key_value_heads *= 2
    config.intermediate_size *= 4
    config.tie_word_embeddings = False
    times = {"gate_proj": (4, 2), "up_proj": (4, 2), "down_proj": (2, 4)}
    weights = dict(small.state_dict())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    wide = {}
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        outputs, inputs = times.get(
            part, {"embed_tokens": (1, 2), "lm_head": (1, 2)}.get(part, (2, 2))
        )
        if tensor.ndim == 1:
            wide[name] = tensor.repeat(2)
        else:
            wide[name] = tensor.repeat(outputs, inputs) / (1 if part == "embed_tokens" else inputs)
    model = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict(wide)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def write_random(folder: Path) -> Path:
    if not (folder / "model.safetensors").exists():
        random_target(SHAPES["292m"]).bfloat16().save_pretrained(folder)
        train_tokenizer().save_pretrained(folder)
    return folder


def model_path(name: str, options: Options) -> str:
    if name == "code-40m":
        return SMALL
    write = write_wide if name == "wide" else write_random
    return str(write(options.scratch / name))


# --------------------------------------------------------------------------------------- sections


def measure_passes(name: str, options: Options, samples: Samples) -> None:
    key = f"pass {name}"
    if samples.is_done(key, options.turns):
        return
    source = model_path(name, options)
    arms = {}
    for arm, path in (*((weights, source) for weights in FORMATS), ("draft", DRAFT)):
        weights: WeightFormat = "bf16" if arm == "draft" else arm  # type: ignore[assignment]
        model = load_model(
            path,
            max_batch=1,
            max_context=512,
            weights=weights,
            num_threads=options.threads,
        )
        arms |= {f"{arm} {n}": pass_timer(model, n) for n in (ROWS if arm != "draft" else (1,))}
    samples.take(key, options.turns, arms)


def pass_timer(model: LanguageModel, num_rows: int) -> Callable[[int], float]:
    """Return a function that takes the mean time of two passes after 64 tokens."""

    def timed(turn: int) -> float:
        ids = torch.arange(PROMPT_TOKENS + num_rows) + turn
        context = Context(model.store, ids.tolist())
        first = pack([context.span(PROMPT_TOKENS)], ids[:PROMPT_TOKENS], [], model.device)
        model.forward(first)
        context.commit(range(PROMPT_TOKENS))
        batch = pack([context.span(num_rows)], ids[PROMPT_TOKENS:], range(num_rows), model.device)
        model.forward(batch)
        start_s = time.perf_counter()
        model.forward(batch)
        model.forward(batch)
        taken_s = (time.perf_counter() - start_s) / 2
        context.close()
        return taken_s

    return timed


def decode_timer(engine: Engine, options: Options, temperature: float) -> Callable[[int], float]:
    """Return a function that takes the seconds per token of a text, from its first token on."""
    prompts = [engine.tokenizer.encode(p.text)[:PROMPT_TOKENS] for p in held_out_prompts()]
    params = SamplingParams(max_tokens=options.tokens, temperature=temperature, ignore_eos=True)

    def timed(turn: int) -> float:
        first_s, num_after = 0.0, 0
        for chunk in engine.stream(prompts[turn % len(prompts)], params):
            if not first_s:
                first_s = time.perf_counter()
            else:
                num_after += len(chunk.token_ids)
        return (time.perf_counter() - first_s) / num_after

    return timed


def load(source: str, options: Options, weights: WeightFormat = "auto") -> Engine:
    config = EngineConfig(
        max_batch=1,
        max_context=512,
        controller="fixed",
        num_speculative_tokens=max(KS),
        num_threads=options.threads,
        weights=weights,
    )
    return Engine.load(source, device="cpu", config=config)


def measure_formats(name: str, options: Options, samples: Samples) -> None:
    key = f"plain {name}"
    if not samples.is_done(key, options.turns):
        source = model_path(name, options)
        engines = {weights: load(source, options, weights) for weights in FORMATS}
        samples.take(
            key, options.turns, {n: decode_timer(e, options, 0.0) for n, e in engines.items()}
        )


def measure_self(name: str, options: Options, samples: Samples) -> None:
    turns = 2 * options.turns
    keys = {f"self T={t:g} {name}": t for t in (0.0, 1.0)}
    if all(samples.is_done(key, turns) for key in keys):
        return
    engine = load(model_path(name, options), options)
    drafter = engine.with_draft("self:int4").drafter
    arms = {"plain": engine} | {f"K={k}": engine.with_draft(drafter, k) for k in KS}
    for key, temperature in keys.items():
        samples.take(
            key, turns, {n: decode_timer(e, options, temperature) for n, e in arms.items()}
        )


def measure_llama(name: str, kind: str, options: Options, samples: Samples) -> None:
    """Ours and llama.cpp's decoding of the same file, plain and with the same draft in 8 bits."""
    key = f"gguf {kind} {name}"
    if options.llama is None or samples.is_done(key, options.turns):
        return
    folder = zoo_path(SMALL) if name == "code-40m" else Path(model_path(name, options))
    file = as_gguf(folder, options.scratch / f"{name}-{kind}.gguf", KINDS[kind])
    draft = as_gguf(zoo_path(DRAFT), options.scratch / "draft-Q8_0.gguf", Kind.Q8_0)
    plain = load(str(file), options)
    ours = {"plain": plain} | {f"K={k}": plain.with_draft(str(draft), k) for k in DRAFT_KS}
    ours |= {f"self K={k}": plain.with_draft("self:int4", k) for k in DRAFT_KS if kind == "Q8_0"}
    arms = {f"ours {n}": decode_timer(e, options, 0.0) for n, e in ours.items()}
    prompts = [plain.tokenizer.encode(p.text)[:PROMPT_TOKENS] for p in held_out_prompts()]
    with llama_servers(options.llama, file, draft, options) as ports:
        arms |= {f"llama.cpp {n}": llama_timer(port, prompts, options) for n, port in ports.items()}
        samples.take(key, options.turns, arms)


def as_gguf(folder: Path, path: Path, kind: Kind) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(path.with_suffix(".part"), folder, all_of(kind)).rename(path)
    return path


@contextmanager
def llama_servers(
    system: Path, file: Path, draft: Path, options: Options
) -> Iterator[dict[str, int]]:
    """Yield the ports of a plain server and one of every K; a server that waits takes no time."""
    ports, running = {}, []
    try:
        for k in (0, *DRAFT_KS):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = ports["plain" if k == 0 else f"K={k}"] = free.getsockname()[1]
            arguments = model_arguments(
                file, draft, k=k, threads=options.threads, places=1, max_context=512
            )
            running.append(
                subprocess.Popen(
                    server_command(system, arguments, port),
                    cwd=kernel_folder(system),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        for port in ports.values():
            while asked(port, "GET", "/health") is None:
                time.sleep(0.2)
        yield ports
    finally:
        for process in running:
            process.terminate()
            process.wait()


def asked(port: int, method: str, path: str, body: str | None = None) -> Any:
    """Return a server's answer; None while it loads."""
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return json.loads(response.read()) if response.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def llama_timer(
    port: int, prompts: Sequence[Sequence[int]], options: Options
) -> Callable[[int], float]:
    """Return a function that takes seconds per token by the server's own clock, prompt left out."""

    def timed(turn: int) -> float:
        body = {
            "prompt": prompts[turn % len(prompts)],
            "n_predict": options.tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        timings = asked(port, "POST", "/completion", json.dumps(body))["timings"]
        return float(timings["predicted_ms"]) / 1e3 / int(timings["predicted_n"])

    return timed


# --------------------------------------------------------------------------------------- tables


def ratio(base: Sequence[float], times: Sequence[float]) -> str:
    """How many times as fast as the base, with a 95% bootstrap interval over the turns."""
    found = bootstrap_ratio(base, times, seed=0)
    return f"{found.estimate:.2f} ({found.low:.2f}–{found.high:.2f})"


def report(samples: Samples) -> None:
    for key in dict.fromkeys(sample["key"] for sample in samples.found):
        section = key.split()[0]
        arms = samples.of(key)
        print(f"\n{key}, {len(next(iter(arms.values())))} turns")
        if section == "pass":
            report_passes(arms)
            report_cascade(arms, accepted=0.97, cheap={"2M draft": 0.59, "suffix": 0.54})  # T=0
            report_cascade(arms, accepted=0.87, cheap={"2M draft": 0.30})  # T=1
        elif section == "gguf":
            for arm, times in arms.items():
                peer = arms.get(arm.replace("ours", "llama.cpp"), arms["llama.cpp plain"])
                print(f"| {arm} | {tokens_per_s(times):.1f} | {ratio(peer, times)} |")
            if len(arms["ours plain"]) >= 4:
                report_best(arms, "ours", "llama.cpp")
        else:
            base = next(iter(arms.values()))
            for arm, times in arms.items():
                print(f"| {arm} | {tokens_per_s(times):.1f} | {ratio(base, times)} |")
            if section == "self":
                best = best_on_half(arms, "K=")
                print(
                    f"best on one half of the prompts: {best}, on the other half "
                    f"{ratio(base[1::2], arms[best][1::2])}"
                )


def best_on_half(arms: Mapping[str, Sequence[float]], prefix: str) -> str:
    return min((a for a in arms if a.startswith(prefix)), key=lambda arm: sum(arms[arm][::2]))


def report_best(arms: Mapping[str, Sequence[float]], ours: str, theirs: str) -> None:
    """Compare the fastest arms of two engines, chosen on one half of the turns, on the other."""
    mine, other = best_on_half(arms, ours), best_on_half(arms, theirs)
    print(
        f"best on one half: {mine} beside {other}, on the other half "
        f"{ratio(arms[other][1::2], arms[mine][1::2])}"
    )


def tokens_per_s(times: Sequence[float]) -> float:
    return len(times) / sum(times)


def report_passes(arms: Mapping[str, list[float]]) -> None:
    print("| rows | " + " | ".join(FORMATS) + " | int8 | int4 |")
    for rows in ROWS:
        times = [arms[f"{weights} {rows}"] for weights in FORMATS]
        medians = " | ".join(f"{sorted(t)[len(t) // 2] * 1e3:.2f}" for t in times)
        print(f"| {rows} | {medians} | {ratio(times[1], times[0])} | {ratio(times[2], times[0])} |")
    for weights in FORMATS:
        print(
            f"five rows of {weights} in rows: {ratio(arms[f'{weights} 5'], arms[f'{weights} 1'])}"
        )


def report_cascade(
    arms: Mapping[str, list[float]], accepted: float, cheap: Mapping[str, float]
) -> None:
    """Estimate what a cheap draft below the copy in 4 bits would gain over that copy alone.

    A round of the copy reads j + 1 rows, j of them drafted, and yields the tokens of a constant
    acceptance; rounds follow one another until K tokens are there for the target. Acceptances are
    those that the target shows for the copy and the cheap drafts, in docs/choosing.md at T=0.
    """
    cost = {arm: sorted(times)[len(times) // 2] for arm, times in arms.items()}

    def length(alpha: float, k: int) -> float:
        return sum(alpha**i for i in range(k + 1))

    def rate(level_s: float, k: int) -> float:
        return length(accepted, k) / (k * level_s + cost[f"bf16 {k + 1}"])

    ks = [rows - 1 for rows in ROWS[1:]]
    alone = max(rate(cost["int4 1"], k) for k in ks)
    print(f"estimate: plain 1.00, the copy in 4 bits {alone * cost['bf16 1']:.2f}")
    for name, alpha in cheap.items():
        draft_s = 0.0 if name == "suffix" else cost["draft 1"]
        levels = {
            j: (j * draft_s + cost[f"int4 {j + 1}"]) / length(alpha, j) for j in ks if j < max(ks)
        }
        j = min(levels, key=levels.__getitem__)
        best = max(rate(min(levels[j], cost["int4 1"]), k) for k in ks)
        print(
            f"estimate: {name} below it, {j} drafted a round: {best / alone:.3f} of the copy alone"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/quantised.jsonl"))
    parser.add_argument("--llama", type=lambda given: Path(given).resolve())
    parser.add_argument("--scratch", type=Path, default=Path("build/quantised").resolve())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    sections = ("pass", "plain", "self", "gguf")
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--models", nargs="+", default=("code-40m", "wide", "random"))
    parser.add_argument("--report", action="store_true")
    given = vars(parser.parse_args())
    models, only_report = given.pop("models"), given.pop("report")
    options = Options(**given)
    samples = Samples(options.out)
    torch.set_num_threads(1)
    for section in () if only_report else options.sections:
        for name in models:
            if section == "pass":
                measure_passes(name, options, samples)
            elif section == "plain":
                measure_formats(name, options, samples)
            elif name != "random" and section == "self":
                measure_self(name, options, samples)
            elif name != "random":
                for kind in KINDS:
                    measure_llama(name, kind, options, samples)
    report(samples)


if __name__ == "__main__":
    main()
