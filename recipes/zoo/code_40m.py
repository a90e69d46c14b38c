"""Build `zoo:code-40m` and its draft: `python recipes/zoo/code_40m.py --corpora DIR --out DIR`.

The target is `zoo:code-11m` widened to twice its width without a change of its output (`widen.py`)
and trained on. A second call resumes from the last checkpoint; `touch OUT/PAUSE` makes training
wait, so that a benchmark has the machine to itself.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from corpus import build_library
from distil import DistilConfig, distil
from edits import build_edits
from evaluate import write_card
from train import TrainConfig, train
from transformers import PreTrainedTokenizerFast
from unloop import UnloopConfig, unloop

ZOO = Path(__file__).parents[2] / "src" / "forerun" / "models" / "zoo"
TARGET = TrainConfig(
    name="code-40m",
    tokens="library.npy",
    hidden_size=512,
    num_layers=12,
    intermediate_size=1408,
    num_heads=8,
    num_kv_heads=4,
    micro_batch=8,
    accumulate=2,
    num_steps=250,
    warmup_steps=20,
    decay_share=0.6,
    muon_lr=1e-3,
    adam_lr=5e-4,
    edits_every=5,
    edits_from=80,
    attention="sdpa",  # at this width faster than eager
    start=str(ZOO / "code-11m"),
)
UNLOOP = UnloopConfig(
    tokens="library.npy",
    num_continuations=192,
    temperatures=(0.1, 0.4, 0.7),
    num_steps=36,
    data_windows=6,
    own_windows=6,
    lr=4e-5,  # at 2e-4, that of the narrow target, the loss on data doubles within ten steps
    tuned_share=0.2,  # at 0.5 the held-out loss rises above that of the narrow target
)
DRAFT = DistilConfig(
    num_prompts=400,
    max_tokens=128,
    num_steps=500,
    learning_rate="1e-3",
)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train code-40m, tune it against loops, distil its draft, write both cards."""

    corpora: Path
    """Folder with peps.txt and thealgorithms-python.txt."""
    out: Path
    """Work folder: data, checkpoints, logs, models."""
    steps: int = TARGET.num_steps
    """Optimiser steps of 8,192 tokens; may be raised until the learning rate begins to fall."""
    threads: int = 2
    """CPU threads."""
    zoo: Path | None = None
    """Copy the finished models here (src/forerun/models/zoo)."""


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    data = args.out / "data"
    build_library(args.corpora, ZOO / "code-11m", data)
    build_edits(PreTrainedTokenizerFast.from_pretrained(data / "tokenizer"), data, TARGET.window)
    config = replace(TARGET, num_steps=args.steps)
    trained = train(config, data, args.out / "code-40m")
    target = unloop(trained, data, args.out / "unlooped", UNLOOP)
    write_card("code-40m", target, config, data)
    draft = distil(target, ZOO / "code-2m", args.out / "draft", DRAFT)
    if args.zoo is not None:
        for name, folder in {"code-40m": target, "code-2m-for-40m": draft}.items():
            shutil.copytree(folder, args.zoo / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
