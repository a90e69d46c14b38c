"""Train an EAGLE-3 head: `python recipes/zoo/code_40m_eagle3.py --target DIR --out DIR`.

The head is at most 6 MiB in bf16 for a target 512 wide. It learns from the target's own answers to
openings of library functions, whose features are computed once. It first learns one token ahead,
at a third of the cost per step, then three tokens ahead, at last with the vocabulary that fits into
the file. A second call resumes where the first stopped. The card beside the head has acceptance,
and what drafting costs on this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.models.catalog import held_out_prompts
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord

PARADOX = Path(__file__).parents[1] / "paradox"
MAX_BYTES = 6 << 20
"""Of the shipped file."""
MAX_PROMPT = 160
"""Tokens of a prompt; with an answer it fills one packed row, so that little is padding."""
NUM_MEASURED = 12
"""Prompts whose decoding is timed for the card."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Training of a head that goes on from the stage before it."""

    passes: int
    """Tokens ahead."""
    steps: int
    """Optimiser steps of 1,056 tokens."""
    learning_rate: float
    """Peak learning rate."""
    draft_vocab_size: int
    """Tokens the head can draft."""


STAGES = (
    Stage(passes=1, steps=2400, learning_rate=2e-3, draft_vocab_size=2560),
    Stage(passes=3, steps=2000, learning_rate=1.5e-3, draft_vocab_size=2560),
    Stage(passes=3, steps=2000, learning_rate=1e-3, draft_vocab_size=2176),
)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train a head for `zoo:code-40m` or another finished target, and write its card."""

    target: Path
    """Folder of the target."""
    out: Path = Path("eagle3")
    """Work folder; the head is in the `draft` of its last stage."""
    prompts: int = 1850
    """Openings that the target continues."""
    max_tokens: int = 192
    """Longest answer."""
    objective: str = "fkl"
    """What is minimised."""
    intermediate_size: int = 240
    """Width of its feed-forward."""
    heads: int = 4
    """Attention heads, two to a key/value head."""
    fixed_share: float = 0.5
    """Share of learned tokens from the library's own source."""
    threads: int = 2
    """CPU threads."""
    start: Path | None = None
    """Head to go on from; None: a fresh one."""
    first_stage: int = 1
    """Stage to begin with, counted from 1."""
    zoo: Path | None = None
    """Copy the finished head here (src/forerun/models/zoo/NAME)."""


def flags(args: Args, stage: Stage) -> tuple[str, ...]:
    """Flags of `forerun align` for a stage."""
    return (
        *(
            "--method",
            "eagle3",
            "--temperature",
            "1",
            "--temperatures",
            "0",
            "1",
            "--max-tokens",
            str(args.max_tokens),
        ),
        *("--max-prompt-tokens", str(MAX_PROMPT), "--fixed-share", str(args.fixed_share)),
        *("--objective", args.objective, "--num-heads", str(args.heads)),
        *("--num-kv-heads", str(args.heads // 2)),
        *("--intermediate-size", str(args.intermediate_size)),
        *("--num-passes", str(stage.passes), "--num-steps", str(stage.steps)),
        *("--learning-rate", str(stage.learning_rate), "--tokens-per-step", "1056"),
        *("--draft-vocab-size", str(stage.draft_vocab_size)),
        *("--window", str(MAX_PROMPT + args.max_tokens), "--rows-per-pass", "3"),
        *("--num-evaluations", "3", "--max-prompts", "24", "--k", "5"),
        *("--no-prediction", "--threads", str(args.threads)),
        *("--export", "vllm", "--export", "sglang"),
        *("--cache-dir", str(args.out / "cache")),
    )


def main(args: Args) -> None:
    sys.path.insert(0, str(PARADOX))
    from openings import write

    torch.set_num_threads(args.threads)
    prompts, judged = args.out / "prompts" / "library.jsonl", args.out / "held-out.jsonl"
    if not prompts.exists():
        write(prompts, args.prompts)
    records = [{"tag": "held-out modules", "prompt": p.text} for p in held_out_prompts()]
    judged.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    files = ("--prompts", str(prompts), "--held-out", str(judged))
    command = [sys.executable, "-m", "forerun", "align", "--target", str(args.target), *files]
    start = args.start
    for number, stage in enumerate(STAGES, start=1):
        if number < args.first_stage:
            continue
        out = args.out / f"stage-{number}"
        if number > 1 and not out.exists() and (written := previous(out, number)).exists():
            shutil.copytree(written, out / "responses")
        draft = () if start is None else ("--draft", str(start))
        subprocess.run([*command, "--out", str(out), *flags(args, stage), *draft], check=True)
        start = out / "draft"
    head = out / "draft"
    size = (head / "model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{head} has {size:,} bytes, more than {MAX_BYTES:,}: a smaller shape")
    write_card(args, head, out)
    if args.zoo is not None:
        ignored = shutil.ignore_patterns("serving")
        shutil.copytree(head, args.zoo, ignore=ignored, dirs_exist_ok=True)


def previous(out: Path, number: int) -> Path:
    """Return where the stage before keeps the target's answers."""
    return out.with_name(f"stage-{number - 1}") / "responses"


def seconds(engine: Engine, temperature: float) -> tuple[float, list[StepRecord]]:
    """Seconds per token of decoding, one request at a time, and the records of its steps."""
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    num_tokens, spent_s = 0, 0.0
    for index, prompt in enumerate(held_out_prompts()[:NUM_MEASURED]):
        params = SamplingParams(temperature=temperature, max_tokens=96, seed=index)
        if temperature > 0:
            params = SamplingParams(temperature=temperature, max_tokens=96)
        start_s = time.perf_counter()
        (output,) = engine.generate([prompt.text], params)
        spent_s += time.perf_counter() - start_s
        num_tokens += len(output.token_ids)
    return spent_s / num_tokens, records


def costs(args: Args, head: Path, temperature: float) -> str:
    """One line: what a drafted token costs in plain steps, and tokens per second with K=1 to 5."""
    plain = Engine.load(
        str(args.target),
        config=EngineConfig(num_threads=args.threads, num_speculative_tokens=0, max_batch=1),
    )
    seconds(plain, temperature)  # warms up
    plain_s, _ = seconds(plain, temperature)
    cells, drafted = [], 0.0
    for k in range(1, 6):
        config = EngineConfig(
            num_threads=args.threads, num_speculative_tokens=k, max_batch=1, controller="fixed"
        )
        engine = Engine.load(str(args.target), draft=str(head), config=config)
        token_s, records = seconds(engine, temperature)
        cells.append(f"{plain_s / token_s:.2f}")
        full = [record for record in records if record.num_drafted == k]
        drafted = sum(record.draft_s for record in full) / (k * len(full)) / plain_s
    numbers = " | ".join(cells)
    return f"| {temperature:g} | {1 / plain_s:.0f} | {drafted:.3f} | {numbers} |"


def write_card(args: Args, head: Path, out: Path) -> None:
    """Write README.md: acceptance from the report, and costs on this machine."""
    report = json.loads((out / "report.json").read_text("utf-8"))
    size = (head / "model.safetensors").stat().st_size
    lines = [
        f"# EAGLE-3 head for {args.target.name}",
        "",
        f"{size / (1 << 20):.1f} MiB in bf16; it drafts {STAGES[-1].draft_vocab_size:,} tokens.",
        "Trained by `forerun align --method eagle3` on the target's own answers at T=1",
        "(recipes/zoo/code_40m_eagle3.py); judged on 60 prompts from modules kept out of all",
        "training. Intervals are of 95%, over prompts.",
        "",
        "| T | tau at K=5 | alpha | accepted by position |",
        "|---|---|---|---|",
    ]
    for pair in report["judged"]:
        figures = pair["after"]["overall"]
        betas = " ".join(f"{b['estimate']:.2f}" for b in figures["acceptance_rate_per_position"])
        tau, alpha = (
            f"{i['estimate']:.2f} ({i['low']:.2f}–{i['high']:.2f})"
            for i in (figures["acceptance_length"], figures["acceptance_probability"])
        )
        lines.append(f"| {pair['after']['temperature']:g} | {tau} | {alpha} | {betas} |")
    lines += [
        "",
        f"Decoding {NUM_MEASURED} of these prompts one by one, {args.threads} threads; a drafted",
        "token is measured at K=5, in plain steps; speeds are multiples of plain decoding.",
        "",
        "| T | plain tokens/s | drafted token | K=1 | K=2 | K=3 | K=4 | K=5 |",
        "|---|---|---|---|---|---|---|---|",
        *(costs(args, head, temperature) for temperature in (0.0, 1.0)),
    ]
    (head / "README.md").write_text("\n".join(lines).rstrip() + "\n", "utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
