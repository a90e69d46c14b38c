"""Rebuild the shipped pair: `python recipes/zoo/build.py --corpora DIR --out DIR`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from corpus import build as build_corpus
from distil import distil
from evaluate import write_cards
from prompts import write as write_prompts
from train import TrainConfig, train
from unloop import unloop

TARGET = TrainConfig(
    name="code-11m",
    tokens="python.npy",
    hidden_size=256,
    num_layers=12,
    intermediate_size=704,
    num_heads=4,
    num_kv_heads=2,
    num_steps=1600,
)
DRAFT = replace(
    TARGET,
    name="code-2m",
    hidden_size=128,
    num_layers=2,
    intermediate_size=384,
    num_heads=2,
    num_kv_heads=2,
    num_steps=1000,
    seed=1,
)
RUNS = {
    "code-11m": TARGET,
    "code-2m": DRAFT,
    "books-1m": replace(DRAFT, name="books-1m", tokens="books.npy", seed=2),
}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train the shipped target and its drafts; a second call goes on where the first stopped."""

    corpora: Path
    """Folder with classics/, peps.txt and thealgorithms-python.txt."""
    out: Path
    """Work folder: data, checkpoints, logs, models. `touch OUT/PAUSE` makes training wait."""
    only: str = ""
    """Train just this run (code-11m, code-2m or books-1m)."""
    zoo: Path | None = None
    """Copy the judged models here, if they pass the gates (src/forerun/models/zoo)."""
    threads: int = 2
    """CPU threads."""


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    build_corpus(args.corpora, args.out)
    chosen = {name: run for name, run in RUNS.items() if args.only in ("", name)}
    folders = {name: train(run, args.out, args.out / name) for name, run in chosen.items()}
    if args.only:
        return
    folders["code-11m"] = unloop(folders["code-11m"], args.out, args.out / "code-11m" / "unlooped")
    folders["code-2m"] = distil(
        folders["code-11m"], folders["code-2m"], args.out / "code-2m" / "distilled"
    )
    failed = write_cards(folders, RUNS, args.out)
    for reason in failed:
        print(f"gate failed: {reason}")
    if failed:
        raise SystemExit(1)
    if args.zoo is not None:
        write_prompts(args.zoo)
        for name, folder in folders.items():
            shutil.copytree(folder, args.zoo / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
