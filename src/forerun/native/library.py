"""ctypes declarations of the CPU kernels, matching kernels/interface.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from forerun.errors import RunnerUnavailable
from forerun.native.compiler import compiled_kernels
from forerun.theory.stop_rule import Measure

__all__ = [
    "ELEMENTS",
    "MEASURES",
    "ChainProbsStruct",
    "Kernels",
    "MatrixKind",
    "PassStruct",
    "Sizes",
    "StopsStruct",
    "StoreStruct",
    "VectorKind",
    "load_kernels",
    "open_library",
]


class Sizes(Structure):
    """ctypes struct of the sizes of a decoder, `ForerunSizes` in kernels/interface.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "intermediate_size", "vocab_size", "tied")),
        ("norm_eps", c_float),
        ("rope_scale", c_float),
        ("inv_freq", c_void_p),
        *((name, c_int32) for name in ("is_attached", "norm_before_residual")),
        *((name, c_int32) for name in ("norm_output", "unused")),
    )


class PassStruct(Structure):
    """ctypes struct of the rows of a pass, `ForerunPass` in kernels/interface.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_spans", "num_rows", "num_wanted", "num_layers")),
        *((name, c_int32) for name in ("num_features", "unused")),
        *((name, c_void_p) for name in ("spans", "parents", "tokens", "wanted")),
        *((name, c_void_p) for name in ("feature_layers", "features", "states", "fed_back")),
    )


class StoreStruct(Structure):
    """ctypes struct of a KV store, `ForerunStore` in kernels/interface.h."""

    _fields_ = (("data", c_void_p), ("num_slots", c_int64), ("width", c_int64))


class ChainProbsStruct(Structure):
    """ctypes struct of chains to verify, `ForerunChainProbs` in kernels/interface.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_chains", "num_nodes", "vocab_size", "is_block")),
        *((name, c_void_p) for name in ("target", "draft", "tokens", "num_drafted")),
    )


class StopsStruct(Structure):
    """ctypes struct of stop rules, `ForerunStops` in kernels/interface.h."""

    _fields_ = tuple((name, c_void_p) for name in ("measures", "thresholds", "values"))


class VectorKind(IntEnum):
    """Kinds of weight vectors, `ForerunVector` in kernels/interface.h."""

    INPUT_NORM = 0
    POST_NORM = 1
    QUERY_NORM = 2
    KEY_NORM = 3
    QKV_BIAS = 4
    LAST_NORM = 5
    HIDDEN_NORM = 6


class MatrixKind(IntEnum):
    """Kinds of weight matrices, `ForerunMatrix` in kernels/interface.h."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    HEAD = 4
    EMBEDDING = 5


ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""Element types the kernels compute with, as `ForerunElement`."""

MEASURES: Mapping[Measure, int] = MappingProxyType({"entropy": 1, "top_probability": 2})
"""What stop rules look at, as `ForerunMeasure`."""

SIGNATURES = {
    "forerun_interface": (c_size_t, ()),
    "forerun_crew_new": (c_void_p, (c_int32,)),
    "forerun_decoder_new": (c_void_p, (c_void_p, c_int32, POINTER(Sizes))),
    "forerun_decoder_delete": (None, (c_void_p,)),
    "forerun_decoder_bytes": (c_size_t, (c_void_p,)),
    "forerun_decoder_put_vector": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "forerun_decoder_put_matrix": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "forerun_decoder_attach": (None, (c_void_p, c_void_p, c_void_p)),
    "forerun_decoder_embed": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "forerun_decoder_head": (c_bool, (c_void_p, c_void_p, c_int64, c_void_p)),
    "forerun_decoder_forward": (
        c_bool,
        (c_void_p, POINTER(PassStruct), POINTER(StoreStruct), c_void_p),
    ),
    "forerun_decoder_greedy_chain": (
        c_bool,
        (c_void_p, POINTER(PassStruct), POINTER(StoreStruct), c_int32, c_int32, c_void_p),
    ),
    "forerun_decoder_sampled_chain": (
        c_bool,
        (
            *(c_void_p, POINTER(PassStruct), POINTER(StoreStruct), c_int32, c_int32),
            *(c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p),
        ),
    ),
    "forerun_largest": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_top": (None, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_softmax": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_draw": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_race": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_coupled_match": (
        None,
        (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p),
    ),
    "forerun_verify_chains": (None, (c_void_p, c_int64, c_int64, c_int32, c_void_p)),
    "forerun_chain_accept": (None, (POINTER(ChainProbsStruct), c_void_p)),
    "forerun_chain_weights": (None, (POINTER(ChainProbsStruct), c_void_p, c_void_p)),
    "forerun_verify_trees": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "forerun_tree_weights": (None, (c_void_p, c_void_p, c_void_p)),
}


class Kernels:
    """The compiled library and its threads, shared by all models of a process.

    Args:
        library: compiled kernels, with their signatures declared.
        num_threads: size of the crew, the calling thread included.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self.crew: int = library.forerun_crew_new(num_threads)


@cache
def open_library(folder: Path | None = None) -> ctypes.CDLL:
    """Load the kernels, compiling them if needed, and declare their signatures.

    Raises:
        RunnerUnavailable: they cannot be compiled, or do not match these declarations.
    """
    library = compiled_kernels(folder)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    expected = 0
    for structure in (Sizes, PassStruct, StoreStruct, ChainProbsStruct, StopsStruct):
        expected = 1000 * expected + ctypes.sizeof(structure)
    if library.forerun_interface() != expected:
        raise RunnerUnavailable("the compiled kernels and their declarations in Python disagree")
    return library


@cache
def load_kernels(num_threads: int, folder: Path | None = None) -> Kernels:
    """Return the kernels with `num_threads` threads.

    Cached, so that target and draft take turns on one crew instead of fighting with two.

    Raises:
        RunnerUnavailable: see `open_library`.
    """
    return Kernels(open_library(folder), num_threads)
