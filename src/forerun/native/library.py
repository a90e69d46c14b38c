"""Compiles the CPU kernels once per machine and declares their interface, kernels/interface.h."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from forerun.cache import cache_folder, find_cached, hash_of, prepare_folder, unsafe, write_cached
from forerun.errors import RunnerUnavailable

logger = logging.getLogger("forerun.preparation")

SOURCES = Path(__file__).parent / "kernels"
MAIN = "kernels.cpp"
SUFFIX = ".so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")


def compiled_kernels(folder: Path | None = None) -> ctypes.CDLL:
    """Load the kernels from the cache, or compile them."""
    return _load(folder or cache_folder(), find_compiler())


def find_compiler(environment: Mapping[str, str] = os.environ) -> str:
    """Return the path of a C++ compiler: CXX, or the first of the usual names."""
    names = [environment["CXX"]] if environment.get("CXX") else list(COMPILERS)
    for name in names:
        if found := shutil.which(name):
            return found
    raise RunnerUnavailable(
        f"no C++ compiler ({', '.join(names)}); install g++ or clang, or set CXX to one"
    )


@cache
def _load(folder: Path, compiler: str) -> ctypes.CDLL:
    stem = f"kernels-{fingerprint(compiler)}"
    danger = prepare_folder(folder)
    if danger:
        logger.warning(
            "compiled kernels are neither loaded from %s nor kept there: %s; they are compiled at "
            "every start until that is changed or FORERUN_CACHE names another folder",
            folder,
            danger,
        )
        return _compile(compiler)
    kept = find_cached(folder, stem, SUFFIX)
    with nullcontext() if kept else lock_folder(folder):
        if kept := kept or find_cached(folder, stem, SUFFIX):
            try:
                if danger := unsafe(kept):
                    raise OSError(danger)
                return ctypes.CDLL(str(kept))
            except OSError as error:
                message = "the kernels in %s cannot be loaded (%s); compiling again"
                logger.warning(message, kept, error)
        return _compile(compiler, folder, stem)


def _compile(compiler: str, folder: Path | None = None, stem: str = "") -> ctypes.CDLL:
    """Compile the kernels, and keep them in a cache folder if one is given."""
    with create_scratch() as scratch:
        built = scratch / f"kernels{SUFFIX}"
        compile_to(built, compiler)
        library = opened(built, compiler)
        if folder is None:
            return library
        try:
            write_cached(folder, stem, SUFFIX, built.read_bytes())
        except OSError as error:
            logger.warning(
                "compiled kernels cannot be kept in %s (%s): they are compiled again next time; "
                "set FORERUN_CACHE to a folder that can be written",
                folder,
                error,
            )
    return library


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time compile for a folder; a folder that cannot be locked is not."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that compiles the CPU kernels ...")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def create_scratch() -> Iterator[Path]:
    """Create a temporary folder to compile in."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix="forerun-")
    except OSError as error:
        raise RunnerUnavailable(f"no folder to compile the CPU kernels in: {error}") from error
    with scratch as name:
        yield Path(name)


def compile_to(path: Path, compiler: str) -> None:
    """Compile the kernels for this processor."""
    logger.info(
        "compiling the CPU kernels with %s, once for this machine; it takes a minute or two ...",
        compiler,
    )
    start_s = time.monotonic()
    done = _run_compiler(compiler, *FLAGS, _choose_flag(), str(SOURCES / MAIN), "-o", str(path))
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise RunnerUnavailable(f"{compiler} cannot compile the CPU kernels: {reason}")
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - start_s)


def opened(library: Path, compiler: str) -> ctypes.CDLL:
    """Load a library that was just compiled; its file may be deleted afterwards.

    Raises:
        RunnerUnavailable: it is none.
    """
    try:
        made = ctypes.CDLL(str(library))
        made.forerun_interface  # noqa: B018 (raises where there is none)
        return made
    except (OSError, AttributeError) as error:
        raise RunnerUnavailable(f"what {compiler} made cannot be loaded: {error}") from error


def _run_compiler(compiler: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run the compiler and return its exit code and output."""
    try:
        return subprocess.run([compiler, *arguments], capture_output=True, check=False)
    except OSError as error:
        raise RunnerUnavailable(f"{compiler} cannot be run: {error}") from error


def fingerprint(compiler: str) -> str:
    """Hash the sources, compiler, flags and processor that determine the library."""
    parts = [_run_compiler(compiler, "--version").stdout]
    for part in (compiler, *FLAGS, _choose_flag(), platform.platform(), processor()):
        parts.append(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        parts.append(source.name.encode() + b"\0" + source.read_bytes())
    return hash_of(b"".join(parts))


def _choose_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def processor() -> str:
    """Describe the processor, since a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(telling)}))


class Sizes(Structure):
    """ctypes struct of the sizes of a decoder, `ForerunSizes` in kernels/interface.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "intermediate_size", "vocab_size", "tied")),
        *((name, c_int32) for name in ("whole_qk_norm", "interleaved", "gelu")),
        *((name, c_int32) for name in ("num_ropes", "num_pairs", "num_experts")),
        *((name, c_int32) for name in ("experts_per_row", "expert_size", "normalise_experts")),
        *((name, c_float) for name in ("norm_eps", "embedding_scale", "residual_scale")),
        *((name, c_float) for name in ("score_scale", "logit_divisor", "score_cap", "logit_cap")),
        *((name, c_void_p) for name in ("inv_freq", "rope_scales", "layers")),
        *((name, c_int32) for name in ("is_attached", "norm_before_residual")),
        *((name, c_int32) for name in ("norm_output", "borrows_embedding")),
        ("formats", c_void_p),
    )


class PassStruct(Structure):
    """ctypes struct of the rows of a pass, `ForerunPass` in kernels/interface.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_spans", "num_rows", "num_wanted", "num_layers")),
        *((name, c_int32) for name in ("num_features", "is_context")),
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


class FeaturesStruct(Structure):
    """ctypes struct of the features that the target's store keeps, and of the head that reads them.

    `ForerunFeatures` in kernels/interface.h.
    """

    _fields_ = (
        *(("rows", c_void_p), ("num_rows", c_int64), ("row_bytes", c_int64)),
        *(("layers", c_void_p), ("num_layers", c_int64)),
        *(("projection", c_void_p), ("state_size", c_int64)),
    )


class CyclesStruct(Structure):
    """ctypes struct of cycles to run, `ForerunCycles` in kernels/interface.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("target", "draft", "store", "draft_store")),
        ("features", FeaturesStruct),
        *((name, c_void_p) for name in ("members", "unread", "logits", "draft_probs")),
        *((name, c_void_p) for name in ("drafted", "matches", "outcomes", "times")),
        ("budget_s", c_double),
        *((name, c_int32) for name in ("num_layers", "num_draft_layers", "vocab_size")),
        *((name, c_int32) for name in ("draft_context", "num_members", "max_cycles")),
        *((name, c_int32) for name in ("depth", "by_race")),
    )


class VectorKind(IntEnum):
    """Kinds of weight vectors, `ForerunVector` in kernels/interface.h."""

    INPUT_NORM = 0
    POST_NORM = 1
    QUERY_NORM = 2
    KEY_NORM = 3
    QKV_BIAS = 4
    LAST_NORM = 5
    HIDDEN_NORM = 6
    ATTENTION_NORM = 7
    FEED_FORWARD_NORM = 8


class MatrixKind(IntEnum):
    """Kinds of weight matrices, `ForerunMatrix` in kernels/interface.h."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    HEAD = 4
    EMBEDDING = 5
    ROUTER = 6


class MatrixFormat(IntEnum):
    """Storage format of a matrix, `ForerunFormat` in kernels/interface.h."""

    ELEMENT = 0
    INT8_GROUPS_32 = 1
    INT8_GROUPS_64 = 2
    INT4_GROUPS_32 = 3
    INT4_GROUPS_64 = 4
    INT8_GROUPS_16 = 5
    INT8_MINIMA_16 = 6
    INT8_MINIMA_32 = 7
    INT4_MINIMA_32 = 8


ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""Element types the kernels compute with, as `ForerunElement`."""

_PASS = (c_void_p, POINTER(PassStruct), POINTER(StoreStruct))
SIGNATURES = {
    "forerun_interface": (c_size_t, ()),
    "forerun_crew_new": (c_void_p, (c_int32,)),
    "forerun_decoder_new": (c_void_p, (c_void_p, c_int32, POINTER(Sizes))),
    "forerun_decoder_delete": (None, (c_void_p,)),
    "forerun_decoder_bytes": (c_size_t, (c_void_p,)),
    "forerun_decoder_bytes_read": (c_size_t, (c_void_p, c_int32)),
    "forerun_decoder_requantised": (c_void_p, (c_void_p, c_void_p)),
    "forerun_decoder_put_quantised": (
        c_bool,
        (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p),
    ),
    "forerun_decoder_put_vector": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "forerun_decoder_put_matrix": (None, (c_void_p, c_int32, c_int32, c_int32, c_void_p)),
    "forerun_decoder_attach": (None, (c_void_p, c_void_p, c_void_p)),
    "forerun_decoder_embed": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "forerun_decoder_head": (c_bool, (c_void_p, c_void_p, c_int64, c_void_p)),
    "forerun_decoder_forward": (c_bool, (*_PASS, c_void_p)),
    "forerun_decoder_greedy_chain": (c_bool, (*_PASS, c_int32, c_int32, c_void_p)),
    "forerun_decoder_sampled_chain": (
        c_bool,
        (*_PASS, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_void_p),
    ),
    "forerun_decoder_likely_trees": (
        c_bool,
        (*_PASS, c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_void_p),
    ),
    "forerun_largest": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_softmax": (c_bool, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p)),
    "forerun_draw": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "forerun_draw_siblings": (
        None,
        (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    ),
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
    "forerun_cycles": (c_int32, (POINTER(CyclesStruct),)),
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
    structures = (Sizes, PassStruct, StoreStruct, ChainProbsStruct, CyclesStruct)
    for structure in structures:
        expected = (1000 * expected + ctypes.sizeof(structure)) % (1 << 64)
    if library.forerun_interface() != expected:
        raise RunnerUnavailable("the compiled kernels and their declarations in Python disagree")
    return library


@cache
def load_kernels(num_threads: int) -> Kernels:
    """Return the kernels with `num_threads` threads.

    Cached, so that target and draft take turns on one crew instead of fighting with two.

    Raises:
        RunnerUnavailable: see `open_library`.
    """
    return Kernels(open_library(), num_threads)
