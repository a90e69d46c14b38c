"""A 7B-shaped random target and a 300M draft on one GPU: passes, drafting, and what they add up to.

    python benchmarks/gpu/run.py --out benchmarks/<date>-gpu/gpu.json

Measured: the read limit over a buffer of the target's size; v(n), the draft and the time outside
both, by the rounds of `forerun profile`; then plain decoding, speculation with planted acceptance
(see `planted.py`) and transformers' `generate` with its static cache, compiled on CUDA, in
interleaved blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from planted import PlantedTarget
from random_pair import SHAPES, Room, facts_of, random_model, static_model, tokenizer_of

from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.measure.profile import Profile, ProfileConfig
from forerun.measure.rigs import Stopwatch, measure_pair
from forerun.models.base import LanguageModel
from forerun.models.runner.graphs.model import TorchModel
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio

PROMPT_TOKENS = 128
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One arm once: tokens after the first of every sequence, and the seconds they took."""

    num_tokens: int
    seconds: float
    acceptance_length: float = 1.0


Arm = Callable[[], Block]


def engine_arm(engine: Engine, prompts: Sequence[list[int]], num_tokens: int, device: Any) -> Arm:
    """Decoding, timed from the end of the prefill."""
    stopwatch = Stopwatch(time.perf_counter, device)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def run() -> Block:
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        engine.step()  # every prompt fits one prefill chunk, so all have their first token now
        started_s = stopwatch.now_s()
        while engine.has_unfinished:
            engine.step()
        seconds = stopwatch.now_s() - started_s
        counts = [engine.take_output(i).completions[0].acceptance for i in ids]
        num_steps = sum(sum(count.steps.values()) for count in counts)
        return Block(
            num_tokens=len(prompts) * (num_tokens - 1),
            seconds=seconds,
            acceptance_length=sum(c.acceptance_length * sum(c.steps.values()) for c in counts)
            / num_steps,
        )

    return run


def transformers_arm(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> Arm:
    """`generate` with the static cache, which it compiles on CUDA; less a run of one token."""
    device = next(model.parameters()).device
    ids = torch.tensor(list(prompts), device=device)
    stopwatch = Stopwatch(time.perf_counter, device)

    def generate(num_new: int) -> float:
        settings = {"do_sample": False, "min_new_tokens": num_new, "max_new_tokens": num_new}
        return stopwatch.seconds(
            lambda: model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache_implementation="static",
                pad_token_id=0,
                **settings,
            )
        )

    def run() -> Block:
        seconds = generate(num_tokens) - generate(1)
        return Block(num_tokens=len(prompts) * (num_tokens - 1), seconds=seconds)

    return run


def engine_over(
    target: LanguageModel, draft: TorchModel | None, tokenizer: Any, config: EngineConfig
) -> Engine:
    """Plain without a draft."""
    drafter = None if draft is None else DraftModel(draft, target.vocab_size)
    return Engine(target=target, tokenizer=tokenizer, drafter=drafter, config=config)


def figures(
    blocks: dict[str, list[Block]], profile: Profile, batch: int, k: int
) -> dict[str, object]:
    """Rates, and how near they come to what reading and the cost table allow."""
    found: dict[str, object] = {"batch": batch}
    for name, of_arm in blocks.items():
        tokens, seconds = [float(b.num_tokens) for b in of_arm], [b.seconds for b in of_arm]
        found[f"{name}_tokens_per_s"] = asdict(bootstrap_ratio(tokens, seconds, seed=0))
        found[f"{name}_blocks"] = [asdict(block) for block in of_arm]
    plain, spec = blocks["plain"], blocks["speculative"]
    tau = sum(b.acceptance_length for b in spec) / len(spec)
    context = PROMPT_TOKENS + plain[0].num_tokens // batch // 2
    limit_s = profile.limit.pass_s(batch, context)
    steps_s = [b.seconds / (b.num_tokens / batch) for b in plain]
    speedup = bootstrap_ratio([b.seconds for b in plain], [b.seconds for b in spec], seed=0)
    table = profile.greedy
    ideal = tau / (k * table.draft_cost(context, batch) + table.verify_cost(k + 1, context, batch))
    return found | {
        "plain_share_of_read_limit": asdict(
            bootstrap_ratio([limit_s] * len(steps_s), steps_s, seed=0)
        ),
        "speedup": asdict(speedup),
        "acceptance_length": tau,
        "ideal_speedup": ideal,
        "speedup_share_of_ideal": speedup.estimate / ideal,
        "verify_cost": {n: table.verify_cost(n, context, batch) for n in (1, k + 1)},
        "draft_cost": table.draft_cost(context, batch),
        "overhead": table.overhead(k, context, batch),
    }


def interleaved(arms: dict[str, Arm], num_blocks: int) -> dict[str, list[Block]]:
    """Every arm once unmeasured, which records and compiles, then in turn."""
    for name, arm in arms.items():
        started_s = time.perf_counter()
        arm()
        say(f"first block of {name}: {time.perf_counter() - started_s:.1f} s")
    found: dict[str, list[Block]] = {name: [] for name in arms}
    for _ in range(num_blocks):
        for name, arm in arms.items():
            found[name].append(arm())
    return found


def say(text: str) -> None:
    """Progress, apart from results."""
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--draft", choices=SHAPES, default="300m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--profile-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    options = parse()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batches = tuple(int(batch) for batch in options.batches.split(","))
    room = Room(num_slots=max(batches), capacity=1024)
    target, draft = (
        random_model(SHAPES[name], room, dtype, device) for name in (options.target, options.draft)
    )
    tokenizer = tokenizer_of(target.vocab_size)
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=options.k,
        max_batch=max(batches),
        max_context=room.capacity,
    )
    profile = measure_pair(
        Engine(
            target=target,
            drafter=DraftModel(draft, target.vocab_size),
            tokenizer=tokenizer,
            config=config,
        ),
        (facts_of(options.target, target), facts_of(options.draft, draft)),
        ProfileConfig(
            rows=ROWS,
            batches=batches,
            contexts=(PROMPT_TOKENS, 512),
            drafted=tuple(sorted({1, options.k})),
            max_pass_rows=max(128, max(batches) * (options.k + 1)),
            budget_s=options.profile_s,
        ),
        clock=time.perf_counter,
        notify=lambda rounds, error: say(f"round {rounds}: within {error:.1%}"),
    )
    peer = static_model(SHAPES[options.target], dtype, device)
    results = []
    for batch in batches:
        prompts = [
            [1 + (7 * token + sequence) % (target.vocab_size - 1) for token in range(PROMPT_TOKENS)]
            for sequence in range(batch)
        ]
        planted = PlantedTarget(target, options.acceptance, seed=batch)
        plain = engine_over(target, None, tokenizer, config)
        speculative = engine_over(planted, draft, tokenizer, config)
        arms = {
            "plain": engine_arm(plain, prompts, options.tokens, device),
            "speculative": engine_arm(speculative, prompts, options.tokens, device),
            "transformers": transformers_arm(peer, prompts, options.tokens),
        }
        blocks = interleaved(arms, options.blocks)
        results.append(figures(blocks, profile, batch, options.k))
        shown = {k: v for k, v in results[-1].items() if not k.endswith("_blocks")}
        say(json.dumps(shown, indent=1))
    report = {
        "command": ["python", *sys.argv],
        "note": "random weights; the acceptance is planted, times are measured",
        "planted_acceptance": options.acceptance,
        "profile": profile.to_dict(),
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
