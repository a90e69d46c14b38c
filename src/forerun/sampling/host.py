"""Copies numbers from a device to the host."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__ = ["on_host"]


def on_host(*columns: Tensor) -> list[list[Any]]:
    """Copy all columns to the host with a single synchronisation; token ids fit fp64."""
    if columns[0].is_cpu:
        return [column.tolist() for column in columns]
    together: list[float] = torch.cat([column.to(torch.float64) for column in columns]).tolist()
    numbers = iter(together)
    return [
        [
            number if column.is_floating_point() else int(number)
            for number in islice(numbers, len(column))
        ]
        for column in columns
    ]
