"""What a useless draft costs under `auto` where a plain step takes a fraction of a millisecond.

    OMP_NUM_THREADS=1 python benchmarks/control/idle_drafter.py --out FILE [--blocks 20]

The target is the first layer of zoo:books-1m, the draft the same with random weights. Both arms
generate the same prompts in turns; the ratio is plain seconds over those of `auto`, with its
bootstrap interval over blocks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forerun import Engine, SamplingParams
from forerun.engine.config import EngineConfig
from forerun.models.catalog import zoo_path
from forerun.provenance import collect
from forerun.theory.intervals import bootstrap_ratio

NUM_TOKENS = 256


def one_layer(folder: Path, *, seed: int | None) -> Path:
    """Write the first layer of zoo:books-1m, or random weights of the same sizes."""
    source = zoo_path("books-1m")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "forerun.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if ".layers." not in name or ".layers.0." in name
    }
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in tensors.values():
            if tensor.ndim > 1:
                tensor.normal_(std=0.02, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=20)
    arguments = parser.parse_args()
    config = EngineConfig(num_threads=1, max_batch=1, max_context=512, sharing="none")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with tempfile.TemporaryDirectory() as scratch:
        target = one_layer(Path(scratch) / "target", seed=None)
        draft = one_layer(Path(scratch) / "draft", seed=1)
        plain = Engine.load(target, config=config)
        arms = {"plain": plain, "auto": plain.with_draft(draft)}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for block in range(-2, arguments.blocks):
            prompt = [5 + (7 * block + at) % 200 for at in range(16)]
            for name in sorted(arms, reverse=block % 2 == 0):
                start_s = time.perf_counter()
                arms[name].generate([prompt], params)
                seconds[name].append(time.perf_counter() - start_s)
    found = bootstrap_ratio(seconds["plain"][2:], seconds["auto"][2:], seed=0)
    content = {
        "auto_over_plain": asdict(found),
        "plain_step_us": 1e6 * sum(seconds["plain"][2:]) / arguments.blocks / NUM_TOKENS,
        "seconds": seconds,
        "provenance": collect({}).to_dict(),
    }
    print({name: content[name] for name in ("auto_over_plain", "plain_step_us")})
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
