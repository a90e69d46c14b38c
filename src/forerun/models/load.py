"""Loading of models and tokenizers: files, configuration, memory, runner, weights, in this order.

Everything is checked before memory is allocated.

To read a configuration transformers loads a good part of itself and torch's compiler: a second of
every start, for a handful of numbers. So the result is cached on disk by the content of the file
and the version that read it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from forerun.errors import InvalidModel, InvalidRequest, RunnerUnavailable
from forerun.models.architecture import (
    QUANTISED,
    WEIGHT_FORMATS,
    Architecture,
    Runner,
    WeightFormat,
)
from forerun.models.base import LanguageModel, RowBatch, Span
from forerun.models.checkpoint import ModelFiles
from forerun.models.decoder import (
    Decoder,
    StoredWeights,
    join_formats,
    list_fused,
    parameter_shapes,
    read_decoder,
    unsupported,
)
from forerun.models.memory import KVGeometry, MemoryEstimate, check_fits, estimate, geometry_of

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp16": torch.float16,
        "float16": torch.float16,
        "fp32": torch.float32,
        "float32": torch.float32,
    }
)
STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float32}
)
preparation = logging.getLogger("forerun.preparation")
logger = logging.getLogger("forerun.runner")

HEAD = "lm_head.weight"

LARGE_BYTES = 1 << 30
"""Bytes of weights from which on loading is announced, because it takes seconds."""


def load_model(  # noqa: PLR0913 (a model and seven settings of how it is to run)
    source: str | Path | ModelFiles,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_batch: int = 8,
    max_context: int | None = None,
    max_staged_rows: int = 64,
    runner: Runner = "auto",
    num_threads: int | None = None,
    weights: WeightFormat = "auto",
) -> LanguageModel:
    """Load a model with room for the KV of a batch.

    Args:
        source: a folder, a name on the Hugging Face hub, or a shipped model such as "zoo:code-11m".
        dtype: "bfloat16", "float16", "float32", or "auto" for the one the weights are stored in.
            Greedy and coupled text with a draft equals plain text in float32, and on the native
            runner in bfloat16 too, since its logits do not depend on the other rows of a pass. On
            the eager and graphs runners bfloat16 and float16 products round differently with the
            number of rows: where two logits tie within that rounding, the texts may part.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" for the fastest there is.
        max_context: tokens a sequence may have, cut to what the model was made for (None: all).
        max_staged_rows: rows that may be staged past the context (nodes of the largest tree).
        num_threads: of the native runner; None: as many as torch uses.
        weights: "int8", "int4" or "int4-int8" quantise the matrices layer by layer while they are
            read, for the native runner; "bf16" is the dtype of that name.

    Raises:
        InvalidModel: files are missing, damaged or of an unsupported kind.
        InvalidRequest: an argument cannot be honoured.
        RunnerUnavailable: the runner named cannot run this model here.
        NotEnoughMemory: weights, KV and logits do not fit; nothing has been allocated yet.
    """
    if weights not in WEIGHT_FORMATS:
        raise InvalidRequest(f"weights {weights!r} are unknown; use {', '.join(WEIGHT_FORMATS)}")
    files = ModelFiles.open(source)
    run = describe_run(
        files,
        dtype=dtype,
        device=device,
        max_batch=max_batch,
        max_context=max_context,
        max_staged_rows=max_staged_rows,
        num_threads=num_threads,
        weights=weights,
    )
    _warn_of_limit(max_context, files.sizes)
    return _prepare(runner, run, files.name)


def describe_run(  # noqa: PLR0913 (as `load_model`)
    files: ModelFiles,
    *,
    dtype: str,
    device: str,
    max_batch: int,
    max_context: int | None,
    max_staged_rows: int,
    num_threads: int | None = None,
    weights: WeightFormat = "auto",
) -> ModelRun:
    """Return how a model is to run, before its weights are read; arguments as of `load_model`.

    Raises:
        InvalidModel: the configuration is refused.
        InvalidRequest: an argument cannot be honoured.
    """
    return ModelRun(
        files=files,
        geometry=geometry_of(
            files.sizes,
            num_slots=max_batch,
            capacity=_choose_context(max_context, files.sizes),
            max_staged_rows=max_staged_rows,
            dtype=choose_dtype("bf16" if weights == "bf16" else dtype, files),
        ),
        device=choose_device(device),
        num_threads=num_threads,
        weights=weights,
        keeps_blocks=dtype == "auto" and weights == "auto",
    )


def _prepare(runner: Runner, run: ModelRun, name: str) -> LanguageModel:
    """Check the memory and load the weights; says how long it takes if they are large."""
    needed = run.memory
    check_fits(name, needed, run.geometry, run.device)
    num_bytes = needed.weights_bytes
    is_packed = run.files.weights.is_packed
    if (run.keeps_blocks or not is_packed) and (notice := run.files.notice):
        preparation.info("%s", notice)
    if num_bytes < LARGE_BYTES:
        return run_by(runner, run)
    preparation.info("preparing %.1f GB of weights of %s ...", num_bytes / 1e9, name)
    start_s = time.monotonic()
    model = run_by(runner, run)
    preparation.info("prepared them in %.1f s", time.monotonic() - start_s)
    return model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelRun:
    """A model and how it is to run, before its weights are read.

    Attributes:
        num_threads: for runners with threads of their own; None: as many as torch has.
        weights: bits of the matrices; fewer than stored only on the native runner.
        keeps_blocks: whether the native runner packs blocks of a GGUF file as they are stored.
    """

    files: ModelFiles
    geometry: KVGeometry
    device: torch.device
    num_threads: int | None = None
    weights: WeightFormat = "auto"
    keeps_blocks: bool = False

    @property
    def architecture(self) -> Architecture:
        return self.files.sizes

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, by the configuration."""
        return bool(self.files.settings.get("tie_word_embeddings"))

    @property
    def memory(self) -> MemoryEstimate:
        weights, is_tied = self.files.weights, self.is_tied
        needed = estimate(
            self.files.num_parameters,
            self.architecture,
            self.geometry,
            self.weights,
            is_tied=is_tied,
        )
        if weights.is_packed and self.keeps_blocks:
            kept = count_kept_bytes(weights, self.geometry.dtype.itemsize, is_tied=is_tied)
            return replace(needed, weights_bytes=kept)
        return needed

    def read_decoder(self) -> Decoder:
        """Check the weight files and return the sizes and constants of the model."""
        files, weights = self.files, self.files.weights
        num_positions = self.geometry.capacity + self.geometry.max_staged_rows
        try:
            if objection := unsupported(files.sizes, files.settings):
                raise RunnerUnavailable(f"only the eager runner supports {objection}")
            decoder = read_decoder(files.sizes, files.settings).within(num_positions)
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidModel(
                f"the configuration in {files.folder} cannot be used: "
                f"{type(error).__name__} {error}"
            ) from error
        if (factors := weights.rope_factors) is not None:
            if factors.shape != decoder.inv_freq.shape or not bool((factors > 0).all()):
                raise InvalidModel(f"{files.folder} has factors of the rotation of a wrong form")
            decoder = replace(decoder, inv_freq=decoder.inv_freq / factors)
        if decoder.tied and _has_own_head(weights, self.geometry.dtype):
            decoder = replace(decoder, tied=False)
        _check_parameters(weights, parameter_shapes(decoder), files.folder)
        return decoder


def _check_parameters(
    weights: StoredWeights, expected: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Refuse files whose parameters are not exactly those of the model."""
    found = weights.shapes
    tied_head = {HEAD} if HEAD not in expected else set()
    misshapen = {n for n, shape in expected.items() if found.get(n, shape) != shape}
    problems = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys() - tied_head - weights.zero_biases,
        "mismatched": misshapen,
    }
    for problem, names in problems.items():
        if names:
            raise InvalidModel(
                f"the weights in {folder} do not fit its configuration: "
                f"{len(names)} {problem}, the first {min(names)}"
            )


def _has_own_head(weights: StoredWeights, dtype: torch.dtype) -> bool:
    """Whether the files contain a head that is stored separately from the embedding.

    transformers then takes it, even where the configuration says that the two are tied.
    """
    if weights.is_packed or HEAD not in weights.names:
        return HEAD in weights.names
    read = weights.reader(dtype, torch.device("cpu"))
    return not torch.equal(read(HEAD), read("model.embed_tokens.weight"))


def count_kept_bytes(packed: StoredWeights, element_bytes: int, *, is_tied: bool) -> int:
    """Return the bytes of weights whose quantised matrices stay quantised in memory."""
    total = 0
    for name, shape in packed.shapes.items():
        groups, num_weights = join_formats(packed, list_fused(name)), math.prod(shape)
        is_embedding = name == "model.embed_tokens.weight"
        if groups is None or is_embedding:
            total += num_weights * element_bytes
        if groups is not None and (not is_embedding or is_tied):
            total += int(num_weights * groups.bits_per_weight / 8)
    return total


def run_by(runner: Runner, run: ModelRun) -> LanguageModel:
    """Load the model with the requested runner; "auto" is the fastest available one."""
    if run.weights in QUANTISED and runner not in ("auto", "native"):
        raise InvalidRequest(
            f"weights in {run.weights} need the native runner, not {runner}; leave one out"
        )
    wanted = "native" if run.weights in QUANTISED else runner
    model = LOADERS[wanted](run) if wanted != "auto" else _run_by_fastest(run)
    if run.device.type == "cpu":  # elsewhere a first pass may take seconds to prepare
        try_out(model, f"the weights in {run.files.folder}")
    return model


def _run_by_fastest(run: ModelRun) -> LanguageModel:
    reasons: list[str] = []
    for name in PREFERRED[run.device.type]:
        try:
            return LOADERS[name](run)
        except RunnerUnavailable as error:
            if str(error) not in reasons:  # both fast runners give the same reason
                reasons.append(str(error))
                logger.warning("%s runs slower than it could: %s", run.files.folder, error)
    return _load_eager(run)


def try_out(model: LanguageModel, name: str) -> None:
    """Run a test pass over one token and refuse a model whose pass fails or returns NaN."""
    slot = model.store.reserve()
    tokens = torch.zeros(1, dtype=torch.int64, device=model.device)
    span = Span(slot=slot, start=0, num_chain=1)
    batch = RowBatch(tokens=tokens, positions=tokens, spans=(span,), logit_rows=tokens)
    try:
        logits = model.forward(batch).logits
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidModel(f"{name} cannot be run with its configuration: {error}") from error
    finally:
        model.store.free(slot)
    if not logits.isfinite().all():
        raise InvalidModel(
            f"{name}: the logits of the first token are NaN or infinite; the weights are damaged, "
            "or too large for this dtype (try float32)"
        )


def _load_native(run: ModelRun) -> LanguageModel:
    if run.device.type != "cpu":
        raise RunnerUnavailable(f"the native runner runs on the CPU, not on {run.device}")
    from forerun.models.runner.native import build_native_model
    from forerun.native.library import load_kernels

    decoder = run.read_decoder()
    kernels = load_kernels(run.num_threads or _count_threads())
    # The kernels keep every core busy; what torch does between passes is too little to share, and
    # its idle threads would spin on the cores the kernels need next.
    torch.set_num_threads(1)
    read = run.files.weights.reader(run.geometry.dtype, run.device)
    packed = run.files.weights
    kept = packed if run.keeps_blocks and packed.is_packed else None
    return build_native_model(decoder, read, run.geometry, kernels, run.weights, kept)


def _load_graphs(run: ModelRun) -> LanguageModel:
    from forerun.models.runner.graphs.model import build_torch_model

    decoder = run.read_decoder()
    if objection := decoder.beyond_graphs:
        raise RunnerUnavailable(f"the graphs runner does not support {objection}")
    read = run.files.weights.reader(run.geometry.dtype, run.device)
    return build_torch_model(decoder, read, run.geometry, run.device)


def _load_eager(run: ModelRun) -> LanguageModel:
    if run.files.weights.is_packed:
        raise RunnerUnavailable(
            f"{run.files.folder} has quantised weights or is a GGUF file, which only the "
            "native and the graphs runner read; give a folder with bf16 or fp32 weights"
        )
    from forerun.models.huggingface import adapt, check_passes, read_class, read_weights

    check_passes(*read_class(run.files))
    return adapt(
        read_weights(run.files, run.geometry.dtype).to(run.device).requires_grad_(False),
        num_slots=run.geometry.num_slots,
        max_context=run.geometry.capacity,
        max_staged_rows=run.geometry.max_staged_rows,
    )


# Imported when chosen: the eager one alone costs seconds of start-up.
LOADERS: Mapping[str, Callable[[ModelRun], LanguageModel]] = MappingProxyType(
    {"native": _load_native, "graphs": _load_graphs, "eager": _load_eager}
)
PREFERRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("native", "graphs"), "cuda": ("graphs",), "mps": ("graphs",)}
)


@cache
def _count_threads() -> int:
    return torch.get_num_threads()


def choose_dtype(dtype: str, files: ModelFiles) -> torch.dtype:
    """Return the requested dtype; "auto" is the dtype of most stored elements.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if dtype == "auto":
        return STORED_DTYPES[files.stored_dtype]
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def choose_device(device: str) -> torch.device:
    """Return the requested device; "auto" is a GPU if there is one."""
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        if has_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if has_mps else "cpu")
    try:
        named = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(f"device {device!r} is unknown; use auto, cpu, cuda or mps") from None
    if not {"cpu": True, "cuda": has_cuda, "mps": has_mps}.get(named.type, False):
        raise InvalidRequest(f"this machine has no device {device!r}; use auto or cpu")
    return named


def _choose_context(max_context: int | None, architecture: Architecture) -> int:
    if max_context is None:
        return architecture.max_positions
    if max_context < 1:
        raise InvalidRequest(f"max_context is {max_context}; it must be at least 1")
    return min(max_context, architecture.max_positions)


def _warn_of_limit(max_context: int | None, architecture: Architecture) -> None:
    """Say why a context is cut where the model's own settings name a longer one."""
    if architecture.position_limit is None or max_context is None:
        return
    if max_context > architecture.max_positions:
        logger.warning(
            "the context of %s ends at %d tokens: %s",
            architecture.name,
            architecture.max_positions,
            architecture.position_limit,
        )
