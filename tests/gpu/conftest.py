"""Where these tests run: on a CUDA device, or, for Triton's kernels alone, in Triton's interpreter.

Without either they are skipped. The interpreter needs no GPU:

    TRITON_INTERPRET=1 pytest tests/gpu/test_triton_kernels.py
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def triton_device() -> torch.device:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return torch.device("cuda", torch.cuda.current_device())
