"""Loading of a checked model folder with the requested runner or the fastest available one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from forerun.errors import InvalidModel, InvalidRequest, RunnerUnavailable
from forerun.models.architecture import QUANTISED, Architecture, Runner, WeightFormat
from forerun.models.base import LanguageModel, RowBatch, Span
from forerun.models.checkpoint import Checkpoint
from forerun.models.decoder import Decoder, parameter_shapes, read_decoder, unsupported
from forerun.models.memory import KVGeometry
from forerun.models.tensor_files import check_parameters, has_own_head, tensor_reader

logger = logging.getLogger("forerun.runner")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFiles:
    """Properties of a model folder that are known before its weights are read.

    Attributes:
        checkpoint: its files.
        settings: its configuration, defaults filled in.
        architecture: its sizes.
        geometry: of the KV store it is to have.
        device: where it is to live.
        num_threads: for runners with threads of their own; None: as many as torch has.
        weights: bits of the matrices; fewer than stored only on the native runner.
    """

    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    architecture: Architecture
    geometry: KVGeometry
    device: torch.device
    num_threads: int | None = None
    weights: WeightFormat = "auto"


def run_by(runner: Runner, files: ModelFiles) -> LanguageModel:
    """Load the model with the requested runner; "auto" is the fastest available one."""
    model = _loaded_by(runner, files)
    if files.device.type == "cpu":  # elsewhere a first pass may take seconds to prepare
        try_out(model, f"the weights in {files.checkpoint.folder}")
    return model


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


def _loaded_by(runner: Runner, files: ModelFiles) -> LanguageModel:
    """Load the model with a named runner; "auto" tries all runners, the fastest first."""
    if files.weights in QUANTISED:
        if runner not in ("auto", "native"):
            raise InvalidRequest(
                f"weights in {files.weights} need the native runner, not {runner}; leave one out"
            )
        return native(files)
    if runner != "auto":
        return LOADERS[runner](files)
    reasons: list[str] = []
    for name in PREFERRED[files.device.type]:
        try:
            return LOADERS[name](files)
        except RunnerUnavailable as error:
            if str(error) not in reasons:  # the fast runners have the same form, and its limits
                reasons.append(str(error))
                logger.warning("%s runs slower than it could: %s", files.checkpoint.folder, error)
    return LOADERS["eager"](files)


def native(files: ModelFiles) -> LanguageModel:
    """Load the model for the CPU kernels of this package."""
    if files.device.type != "cpu":
        raise RunnerUnavailable(f"the native runner runs on the CPU, not on {files.device}")
    from forerun.models.runner.native import build_native_model
    from forerun.native.library import load_kernels

    decoder = decoder_of(files)
    kernels = load_kernels(files.num_threads or usual_threads())
    # The kernels keep every core busy; what torch does between passes is too little to share, and
    # its idle threads would spin on the cores the kernels need next.
    torch.set_num_threads(1)
    read = tensor_reader(files.checkpoint, files.geometry.dtype, files.device)
    return build_native_model(decoder, read, files.geometry, kernels, files.weights)


def graphs(files: ModelFiles) -> LanguageModel:
    """Load the model for torch passes that are recorded as CUDA graphs on CUDA."""
    from forerun.models.runner.graphs.model import build_torch_model

    decoder = decoder_of(files)
    read = tensor_reader(files.checkpoint, files.geometry.dtype, files.device)
    return build_torch_model(decoder, read, files.geometry, files.device)


def eager(files: ModelFiles) -> LanguageModel:
    """Load the model into transformers' own modules."""
    from forerun.models.huggingface import adapt, read_weights

    model = read_weights(files.checkpoint, files.geometry.dtype)
    return adapt(
        model.to(files.device),
        num_slots=files.geometry.num_slots,
        max_context=files.geometry.capacity,
        max_staged_rows=files.geometry.max_staged_rows,
    )


# Imported when chosen: the eager one alone costs seconds of start-up.
LOADERS: Mapping[str, Callable[[ModelFiles], LanguageModel]] = MappingProxyType(
    {"native": native, "graphs": graphs, "eager": eager}
)
PREFERRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("native", "graphs"), "cuda": ("graphs",), "mps": ("graphs",)}
)


def decoder_of(files: ModelFiles) -> Decoder:
    """Check the weight files of a model and return its sizes and constants."""
    num_positions = files.geometry.capacity + files.geometry.max_staged_rows
    try:
        if objection := unsupported(files.architecture, files.settings, num_positions):
            raise RunnerUnavailable(f"only the eager runner supports {objection}")
        decoder = read_decoder(files.architecture, files.settings)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidModel(
            f"config.json in {files.checkpoint.folder} cannot be used: "
            f"{type(error).__name__} {error}"
        ) from error
    if decoder.tied and has_own_head(files.checkpoint, files.geometry.dtype):
        decoder = replace(decoder, tied=False)
    check_parameters(files.checkpoint, parameter_shapes(decoder))
    return decoder


@cache
def usual_threads() -> int:
    return torch.get_num_threads()
