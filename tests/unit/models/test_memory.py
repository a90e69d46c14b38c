"""The arithmetic of memory, and what a user is told when it does not work out."""

from __future__ import annotations

import ctypes

import psutil
import pytest
import torch

from forerun.errors import NotEnoughMemory
from forerun.models import memory
from forerun.models.architecture import Architecture
from forerun.models.memory import geometry_of

ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=1000,
    max_positions=128,
)
GEOMETRY = geometry_of(
    ARCHITECTURE, num_slots=4, capacity=100, max_staged_rows=28, dtype=torch.bfloat16
)
CPU = torch.device("cpu")
BYTES_PER_ROW = 2 * 2 * 2 * 8 * 2 * 4


def test_estimate():
    needed = memory.estimate(5000, ARCHITECTURE, GEOMETRY)
    assert needed.weights_bytes == 5000 * 2
    assert needed.kv_bytes == 128 * BYTES_PER_ROW
    assert needed.logits_bytes == 4 * 29 * 1000 * 4
    assert needed.total_bytes == needed.weights_bytes + needed.kv_bytes + needed.logits_bytes


def test_available_on_cpu_is_what_the_system_says():
    assert 0 < memory.available_bytes(CPU) <= psutil.virtual_memory().total


@pytest.fixture
def available(monkeypatch):
    """Sets how much memory there is."""

    def set_bytes(num_bytes: int) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda device: num_bytes)

    return set_bytes


def test_what_fits_passes(available):
    needed = memory.estimate(5000, ARCHITECTURE, GEOMETRY)
    available(needed.total_bytes)
    memory.check_fits("tiny", needed, GEOMETRY, CPU)


def test_message_has_needs_and_means_and_a_context_that_fits(available):
    needed = memory.estimate(5000, ARCHITECTURE, GEOMETRY)
    available(needed.weights_bytes + needed.logits_bytes + 90 * BYTES_PER_ROW)
    with pytest.raises(NotEnoughMemory) as error:
        memory.check_fits("tiny", needed, GEOMETRY, CPU)
    assert str(error.value) == (
        "tiny needs 526.9 KiB on cpu, 507.9 KiB are available: weights 9.8 KiB, KV 64.0 KiB for "
        "4 sequences of 100 tokens, logits 453.1 KiB. max_context=62 would fit; or lower max_batch"
    )


def test_when_no_context_fits_other_remedies_are_named(available):
    needed = memory.estimate(5000, ARCHITECTURE, GEOMETRY)
    available(1000)
    with pytest.raises(NotEnoughMemory, match=r"1000 B are available.* or use a smaller model"):
        memory.check_fits("tiny", needed, GEOMETRY, CPU)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3072.0 GiB"),
    ],
)
def test_readable(num_bytes, text):
    assert memory.readable(num_bytes) == text


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc has it")
def test_freed_memory_goes_back_to_the_system():
    blocks = [torch.ones(3000) for _ in range(4000)]  # below the size that is mapped on its own
    small = blocks[::40]  # what stays between the holes
    full = psutil.Process().memory_info().rss
    del blocks
    memory.return_freed_memory()
    assert full - psutil.Process().memory_info().rss > 30e6
    assert len(small) == 100
