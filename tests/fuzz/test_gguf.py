"""Hostile GGUF files: refused by one of our errors, in bounded time and memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from tests.fuzz.harness import fuzz_test
from tests.gguf_files import all_of, write_gguf, write_tiny_folder

from forerun.models.checkpoint import ModelFiles
from forerun.models.load import load_model

SCRATCH = Path(tempfile.mkdtemp(prefix="forerun-gguf-"))
write_tiny_folder(SCRATCH)
SEEDS = [
    write_gguf(SCRATCH / f"{kind.name}.gguf", SCRATCH, all_of(kind)).read_bytes()
    for kind in (Kind.Q8_0, Kind.Q4_1)
]


def read(data: bytes) -> None:
    path = SCRATCH / "x.gguf"
    path.write_bytes(data)
    load_model(path, device="cpu", max_batch=1, num_threads=1)
    _ = ModelFiles.find(path).tokenizer


test_files = fuzz_test(read, SEEDS, num_examples=40)
