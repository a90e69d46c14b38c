"""How many threads carry the passes: one number for torch and for the runner's own."""

from __future__ import annotations

from forerun.errors import InvalidRequest

__all__ = ["use_threads"]


def use_threads(num_threads: int | None) -> int:
    """Let torch use so many threads in this whole process.

    Args:
        num_threads: None leaves torch at what it takes by default.

    Returns:
        How many torch uses now.

    Raises:
        InvalidRequest: there cannot be so few.
    """
    if num_threads is not None and num_threads < 1:
        raise InvalidRequest(f"--threads is {num_threads}; it must be at least 1")
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()
