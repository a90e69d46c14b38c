"""Bits per byte of zoo:code-40m in fewer bits, and beside llama.cpp's on the same GGUF files.

    python -m benchmarks.quantised.loss [--llama build/peers/llamacpp/debian]

The first table is over held-out prompts, and its intervals are bootstrapped over the prompts. The
second needs the Debian system of `make -f benchmarks/Makefile peers-llamacpp`: every chunk of 512
tokens is read, and its second half counts, as llama-perplexity does it.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from benchmarks.peers.llama_server import kernel_folder, library_folder
from gguf import GGMLQuantizationType as Kind
from tests.gguf_files import all_of, write_gguf

from forerun.models.base import Context, LanguageModel, pack
from forerun.models.catalog import held_out_prompts, zoo_path
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import load_model
from forerun.theory.intervals import bootstrap_ratio

MODEL = "zoo:code-40m"
NUM_TOKENS = 500
CHUNK = 512


def nats(model: LanguageModel, ids: list[int], first: int = 1) -> float:
    """Loss of the tokens from place `first` on, given those before."""
    tokens = torch.tensor(ids)
    context = Context(model.store, ids)
    batch = pack([context.span(len(ids))], tokens, range(len(ids)), model.device)
    rows = model.forward(batch).logits.float().log_softmax(-1)[first - 1 : -1]
    context.close()
    return -float(rows.gather(1, tokens[first:, None]).double().sum())


def compare_formats() -> None:
    tokenizer = ModelFiles.find(MODEL).tokenizer
    texts = [tokenizer.encode(prompt.text)[:NUM_TOKENS] for prompt in held_out_prompts()]
    num_bytes = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in texts)
    whole: list[float] = []
    for weights in ("bf16", "int8", "int4-int8", "int4"):
        model = load_model(MODEL, device="cpu", max_batch=1, max_context=512, weights=weights)
        found = [nats(model, ids) for ids in texts]
        whole = whole or found
        of = bootstrap_ratio(found, whole, seed=0)
        change, low, high = (100 * (each - 1) for each in (of.estimate, of.low, of.high))
        bits = sum(found) / num_bytes / math.log(2)
        print(f"{weights:10} {bits:.4f} bits per byte {change:+.2f}% ({low:+.2f} to {high:+.2f})")
    print(f"{len(texts)} texts, {num_bytes} bytes", flush=True)


def compare_with_llama(system: Path) -> None:
    tokenizer = ModelFiles.find(MODEL).tokenizer
    text = "\n".join(prompt.text for prompt in held_out_prompts())
    ids = tokenizer.encode(text)
    chunks = [ids[at : at + CHUNK] for at in range(0, len(ids) - CHUNK + 1, CHUNK)]
    with tempfile.TemporaryDirectory() as scratch:
        sample = Path(scratch) / "sample.txt"
        sample.write_text(text)
        for kind in (Kind.F32, Kind.Q8_0, Kind.Q4_0):
            path = write_gguf(Path(scratch) / f"{kind.name}.gguf", zoo_path(MODEL), all_of(kind))
            theirs = llama_loss(system, path, sample)
            for dtype in ("auto", "float32"):
                model = load_model(path, dtype=dtype, device="cpu", max_batch=1, max_context=CHUNK)
                total = sum(nats(model, chunk, CHUNK // 2 + 1) for chunk in chunks)
                ours = total / (len(chunks) * (CHUNK // 2 - 1))
                print(
                    f"{kind.name} {dtype}: {ours:.5f} nats per token, llama.cpp {theirs:.5f}: "
                    f"{100 * (ours / theirs - 1):+.3f}%",
                    flush=True,
                )


def llama_loss(system: Path, model: Path, sample: Path) -> float:
    """Return llama.cpp's loss in nats per token."""
    libraries = library_folder(system)
    command = [
        str(libraries / "ld-linux-x86-64.so.2"),
        *("--library-path", f"{libraries}:{libraries / 'llama'}"),
        str(system / "usr/bin/llama-perplexity"),
        *("-m", str(model), "-f", str(sample), "-c", str(CHUNK), "-b", str(CHUNK)),
        *("-t", str(len(os.sched_getaffinity(0)))),
    ]
    run = subprocess.run(
        command, cwd=kernel_folder(system), check=True, capture_output=True, text=True
    )
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", run.stdout + run.stderr)
    if found is None:
        raise SystemExit(f"llama-perplexity printed no estimate: {run.stdout[-500:]}")
    return math.log(float(found[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=Path, help="Debian system with llama.cpp-tools-extra")
    options = parser.parse_args()
    compare_formats()
    if options.llama is not None:
        compare_with_llama(options.llama.resolve())


if __name__ == "__main__":
    main()
