"""How much of a bare forward and backward loop the trainer keeps: the shipped draft, in turns.

    python benchmarks/align/training_rate.py --threads 2 [--clock cpu] [--out FILE.json]

Three arms over the same packed rows, model, objective and distribution:

- bare: the draft's decoder, the chunked loss and backward under bf16 autocast, on ready batches;
- logits: what one would write first, with all logits at once, torch's KL and autograd's gradient;
- trainer: an optimiser step as `forerun align` runs it, packing, acceptance, clipping, AdamW and
  metrics included.

The target's distribution is one fixed tensor, so that no teacher's cost dilutes the difference.
Every second block runs backwards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from forerun.align.config import TrainingConfig
from forerun.align.methods.base import MethodConfig
from forerun.align.methods.draft_model import DraftLoss, DraftModelMethod
from forerun.align.objectives import (
    CHUNK_ROWS,
    OBJECTIVES,
    DenseDistribution,
    DraftHead,
    LearnedRows,
    TargetDistribution,
    chunked_loss,
)
from forerun.align.samples import PackedBatch, Packing, Sample
from forerun.align.trainer import Trainer, make_accelerator
from forerun.align.workspace import StepMetrics
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash
from forerun.theory.intervals import bootstrap_ratio

TARGET, DRAFT = "zoo:code-11m", "zoo:books-1m"
OBJECTIVE = "fkl"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""On a machine that does other work too, the processor's own time says more."""
NUM_PROMPT = 16
"""Tokens of a sample that are not learned."""


class FixedRows:
    """The same distributions for whatever rows."""

    def __init__(self, target_probs: torch.Tensor, num_rows: int) -> None:
        self.target_probs = target_probs
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def distribution(self, rows: slice) -> TargetDistribution:
        return DenseDistribution(target_probs=self.target_probs[: len(range(self.num_rows)[rows])])


class FixedTeacher:
    """A teacher that costs nothing."""

    exact = True

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.empty(CHUNK_ROWS, vocab_size).normal_(0, 3, generator=generator)
        self.target_probs = logits.softmax(-1)

    def prepare(self, samples: object) -> None: ...

    def rows(self, batch: PackedBatch) -> FixedRows:
        return FixedRows(self.target_probs, int(batch.predicts.sum()))


def samples() -> list[Sample]:
    """The shipped held-out prompts; their text is what is learned."""
    tokenizer = ModelFiles.find(TARGET).tokenizer
    texts = [tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    joined = [token for text in texts for token in text]
    cut = [joined[start : start + 160] for start in range(0, len(joined) - 160, 160)]
    return [
        Sample(prompt_hash=f"{i:016x}", token_ids=tuple(ids), spans=((NUM_PROMPT, len(ids)),))
        for i, ids in enumerate(cut)
    ]


def bare(module: DraftLoss, batches: list[PackedBatch], teacher: FixedTeacher) -> None:
    """Forward and backward, and nothing else."""
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = module.model.model(
                input_ids=batch.ids, position_ids=batch.positions, use_cache=False
            ).last_hidden_state[batch.predicts]
            rows = LearnedRows(hidden=hidden, labels=batch.labels, teacher=teacher.rows(batch))
            head = DraftHead(weight=module.model.lm_head.weight)
            loss, _ = chunked_loss(rows, head, module.objective, temperature=1.0)
        loss.backward()
    module.zero_grad()


def logits(module: DraftLoss, batches: list[PackedBatch], teacher: FixedTeacher) -> None:
    """Forward and backward through the logits of all rows."""
    for batch in batches:
        rows = teacher.rows(batch)
        whole = -(-len(rows) // CHUNK_ROWS)
        target_probs = teacher.target_probs.repeat(whole, 1)[: len(rows)]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = module.model.model(
                input_ids=batch.ids, position_ids=batch.positions, use_cache=False
            ).last_hidden_state[batch.predicts]
            draft_logits = module.model.lm_head(hidden).float()
        loss = F.kl_div(draft_logits.log_softmax(-1), target_probs, reduction="sum")
        loss.backward()
    module.zero_grad()


def measure(
    arms: dict[str, Callable[[], None]], num_blocks: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every arm in every block, the order turned round from block to block."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(-1, num_blocks):
        for name in list(arms) if block % 2 else reversed(arms):
            start_s = clock()
            arms[name]()
            if block >= 0:
                found[name].append(clock() - start_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = TrainingConfig(num_steps=1000)
    draft = DraftModelMethod(MethodConfig(target=TARGET, draft=DRAFT))
    draft.load()
    module = draft.loss(OBJECTIVES[OBJECTIVE])
    teacher = FixedTeacher(draft.model.config.vocab_size)
    packing = Packing(samples(), window=config.window, seed=0)
    num_rows = config.tokens_per_step // config.window
    batches = [
        packing.batch(first, config.rows_per_pass)
        for first in range(0, num_rows, config.rows_per_pass)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            config=config,
            module=module,
            teacher=teacher,
            accelerator=make_accelerator("cpu"),
            folder=Path(folder),
            identity={},
        )
        trainer.save = lambda: None  # type: ignore[method-assign]  # a checkpoint is no step
        told: list[StepMetrics] = []
        arms = {
            "bare": lambda: bare(module, batches, teacher),
            "logits": lambda: logits(module, batches, teacher),
            "trainer": lambda: trainer.run(packing, trainer.step + 1, told.append),
        }
        found = measure(arms, options.blocks, CLOCKS[options.clock])
    num_tokens = num_rows * config.window
    rows = {}
    for name, spent_s in found.items():
        ratio = bootstrap_ratio(found["bare"], spent_s, seed=0)
        rows[name] = {
            "tokens_per_s": num_tokens * len(spent_s) / sum(spent_s),
            "rate_to_bare": [ratio.estimate, ratio.low, ratio.high],
        }
        print(f"{name:8} {json.dumps(rows[name])}")
    if options.out is not None:
        hashes = {name: content_hash(name) for name in (TARGET, DRAFT)}
        content = {
            "rows": rows,
            "num_blocks": options.blocks,
            "clock": options.clock,
            "training": asdict(config),
            "objective": OBJECTIVE,
            "learned_share": sum(int(b.predicts.sum()) for b in batches) / num_tokens,
            "provenance": collect(hashes, options.threads).to_dict(),
        }
        options.out.write_text(json.dumps(content, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
