"""Rebuild the shipped pair: `python recipes/zoo/build.py --corpora ../shared/corpora --out DIR`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from corpus import build as build_corpus
from train import TrainConfig, train

TARGET = TrainConfig(
    name="target",
    tokens="python.npy",
    hidden_size=256,
    num_layers=12,
    intermediate_size=704,
    num_heads=4,
    num_kv_heads=2,
    num_steps=2000,
)
DRAFT = replace(
    TARGET,
    name="draft-domain",
    hidden_size=128,
    num_layers=2,
    intermediate_size=384,
    num_heads=2,
    num_kv_heads=2,
    num_steps=1500,
    seed=1,
)
RUNS = {
    "target": TARGET,
    "draft-domain": DRAFT,
    "draft-off-the-shelf": replace(DRAFT, name="draft-off-the-shelf", tokens="books.npy", seed=2),
}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train the shipped target and its drafts; a second call goes on where the first stopped."""

    corpora: Path
    """Folder with classics/, peps.txt and thealgorithms-python.txt."""
    out: Path
    """Work folder: data, checkpoints, logs, models. `touch OUT/PAUSE` makes training wait."""
    only: str = ""
    """Train just this run (target, draft-domain or draft-off-the-shelf)."""
    threads: int = 2
    """CPU threads."""


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    build_corpus(args.corpora, args.out)
    for name, config in RUNS.items():
        if args.only in ("", name):
            print(f"{name}: {train(config, args.out, args.out / name)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
