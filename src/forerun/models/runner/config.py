"""Names of the runners; this module does not import torch."""

from __future__ import annotations

from typing import Literal

__all__ = ["RUNNERS", "Runner"]

Runner = Literal["auto", "native", "graphs", "eager"]
"""native: our own CPU kernels. graphs: lean torch passes, recorded as CUDA graphs on CUDA. eager:
transformers' own modules. auto: the fastest that the device and the model allow."""

RUNNERS: tuple[Runner, ...] = ("auto", "native", "graphs", "eager")
