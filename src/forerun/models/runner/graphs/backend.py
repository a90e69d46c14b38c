"""Choice of the kernels of which recorded passes consist."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch

from forerun.models.runner.graphs.elementwise import TorchElementwise
from forerun.models.runner.graphs.layers import Elementwise
from forerun.models.runner.graphs.passes import AttendRows
from forerun.models.runner.graphs.torch_attention import torch_attention

__all__ = ["Kernels", "kernels_for", "torch_kernels", "working_or_torch"]

Kernels = tuple[AttendRows, Elementwise]

logger = logging.getLogger("forerun.graphs")


def kernels_for(device: torch.device) -> Kernels:
    """Return Triton's kernels on CUDA if they work there, otherwise torch's."""
    if device.type != "cuda" or find_spec("triton") is None:
        return torch_kernels()
    return working_or_torch(triton_kernels, device)


def torch_kernels() -> Kernels:
    """Return kernels made of torch operations, for any device."""
    return torch_attention, TorchElementwise()


def triton_kernels() -> Kernels:
    """Return Triton kernels, which fuse several torch operations into one launch."""
    from forerun.models.runner.graphs.triton_rows import TritonElementwise, triton_attention

    return triton_attention, TritonElementwise()


def working_or_torch(make: Callable[[], Kernels], device: torch.device) -> Kernels:
    """Return kernels after a test run on `device`; log a warning and return torch's if it fails."""
    try:
        attend_rows, elementwise = make()
        rows = torch.ones((1, 16), device=device)
        elementwise.add_norm(rows, rows, rows[0], 1e-5)
    except Exception as error:  # noqa: BLE001 (no compiler, no driver, an older GPU: any of it)
        logger.warning(
            "Triton does not work here (%s: %s): passes use torch's kernels, which are slower",
            type(error).__name__,
            error,
        )
        return torch_kernels()
    return attend_rows, elementwise
