"""Time of a DFlash network's draft in plain steps of its target, by block and draft vocabulary.

    python benchmarks/speed/block_drafts.py --form int8

The networks have random weights: only their shape matters. A draft is what a step adds: keys and
values of three committed rows, the block, and the choice of the tokens of a chain. Drafts and plain
steps take turns; a figure is the ratio of the medians of `--rounds` rounds. With --threads 1 times
are of the processor, on which other processes have less influence.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.dflash.load import load_dflash, write_dflash
from forerun.drafters.dflash.network import DFlashConfig, DFlashNetwork
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.load import load_model
from forerun.sampling.config import SamplingParams

CONTEXT = 256
WARM_UP = 5  # rounds before the first that counts
COMMITTED = 3  # rows that a step commits


def make_network(target: LanguageModel, k: int, draft_vocab_size: int) -> DFlashNetwork:
    """Return a random network of two layers as `forerun align` shapes it."""
    num_layers, width = target.num_layers, target.hidden_size
    config = DFlashConfig(
        target_hidden_size=width,
        target_vocab_size=target.vocab_size,
        feature_layers=(2, num_layers // 2, num_layers - 3),
        draft_vocab_size=draft_vocab_size,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_heads=width // 64,
        num_kv_heads=max(1, width // 192),
        head_dim=64,
        num_layers=2,
        max_positions=target.max_context,
        block_size=k + 1,
        mask_token_id=0,
        own_output=draft_vocab_size < target.vocab_size,
        windows=(None, None),
        causal=(False, False),
    )
    return DFlashNetwork(config).requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:smollm2-135m")
    parser.add_argument("--form", choices=("speculators", "int8"), default="speculators")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--k", type=int, nargs="+", default=(3, 7, 15))
    parser.add_argument("--vocab", type=int, nargs="+", default=(4736, 1 << 24))
    options = parser.parse_args()
    target = load_model(options.model, weights="bf16", max_context=512, num_threads=options.threads)
    torch.set_num_threads(options.threads)
    for vocab_size in options.vocab:
        for k in options.k:
            network = make_network(target, k, min(vocab_size, target.vocab_size))
            with tempfile.TemporaryDirectory() as folder:
                write_dflash(network, Path(folder), target=options.model, form=options.form)
                times = measure(Path(folder), target, k, options.rounds)
            plain, keys, block = (1e3 * statistics.median(column) for column in times)
            print(
                f"{network.config.draft_vocab_size} tokens, K={k}: plain step {plain:.2f} ms, "
                f"context {keys:.2f}, block {block:.2f}, together {(keys + block) / plain:.3f}",
                flush=True,
            )


def measure(
    folder: Path, target: LanguageModel, k: int, num_rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Return seconds of plain steps, of the context rows and of the blocks."""
    drafter = load_dflash(folder, target)
    generator = torch.Generator().manual_seed(0)
    ids = torch.empty(CONTEXT + 1, dtype=torch.int64).random_(1000, generator=generator).tolist()
    context = Context(target.store, ids)
    feed = pack([context.span(CONTEXT)], ids[:CONTEXT], [], target.device)
    target.forward(feed)
    context.commit(range(CONTEXT))
    step = pack([context.span(1)], ids[CONTEXT:], [0], target.device)
    params, plan = SamplingParams(temperature=0.0), Plan.chain(drafter.method, k)
    shape = (CONTEXT, len(drafter.required_features), target.hidden_size)
    features = torch.empty(shape, dtype=target.dtype).normal_(generator=generator)
    parts = features[:-COMMITTED], features[-COMMITTED:]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(WARM_UP + num_rounds):
        request = DraftRequest(
            request_id=str(number),
            ids=ids,
            num_prompt=CONTEXT,
            params=params,
            noise_key=0,
            history=None,
            coupled=False,
        )
        first, last = (
            StepOutcome(request=request, first_row=start, num_rows=len(part), features=part)
            for start, part in zip((0, CONTEXT - COMMITTED), parts, strict=True)
        )
        drafter.observe([first])
        moments = [clock()]
        target.forward(step)
        moments.append(clock())
        drafter.observe([last])
        moments.append(clock())
        (proposal,) = drafter.propose([request], [plan])
        moments.append(clock())
        assert proposal is not None and len(proposal.tokens) == k
        drafter.forget(request.request_id)
        if number >= WARM_UP:
            for column, (before, after) in zip(times, pairwise(moments), strict=True):
                column.append(after - before)
    context.close()
    return times


if __name__ == "__main__":
    main()
