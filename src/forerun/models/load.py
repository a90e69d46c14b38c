"""From a folder or a name to a model or a tokenizer, with everything checked before allocating."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.architecture import Architecture, read_architecture
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import Checkpoint, read_checkpoint
from forerun.models.memory import check_fits, estimate, geometry_of
from forerun.models.runner.choose import ModelFiles, run_by
from forerun.models.runner.config import Runner
from forerun.models.settings import read_settings
from forerun.models.tokenizer_files import read_tokenizer
from forerun.models.tokenizers import Tokenizer
from forerun.models.zoo.catalog import PREFIX, zoo_path

__all__ = [
    "choose_device",
    "choose_dtype",
    "load_model",
    "load_tokenizer",
    "model_folder",
    "read_config",
]

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
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float32,
    }
)
logger = logging.getLogger("forerun.preparation")

LARGE_BYTES = 1 << 28
"""Weights that take long enough to read for the user to wonder."""

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def load_model(  # noqa: PLR0913 (a model and six settings of how it is to run)
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_batch: int = 8,
    max_context: int | None = None,
    max_staged_rows: int = 64,
    runner: Runner = "auto",
    num_threads: int | None = None,
) -> LanguageModel:
    """Load a model with room for the KV of a batch.

    Args:
        source: a folder, a name on the Hugging Face hub, or a shipped model such as "zoo:code-11m".
        dtype: "bfloat16", "float16", "float32", or "auto" for the one the weights are stored in.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" for the fastest there is.
        max_batch: sequences at once.
        max_context: tokens a sequence may have, cut to what the model was made for (None: all).
        max_staged_rows: rows that may be staged past the context (nodes of the largest tree).
        runner: what carries its passes; "auto" for the fastest that device and model allow.
        num_threads: of the native runner; None: as many as torch uses.

    Raises:
        InvalidModel: files are missing, damaged or of an unsupported kind.
        InvalidRequest: an argument cannot be honoured.
        RunnerUnavailable: the runner named cannot run this model here.
        NotEnoughMemory: weights, KV and logits do not fit; nothing has been allocated yet.
    """
    checkpoint = read_checkpoint(model_folder(source))
    settings, architecture = read_config(checkpoint)
    chosen_device = choose_device(device)
    geometry = geometry_of(
        architecture,
        num_slots=max_batch,
        capacity=choose_context(max_context, architecture),
        max_staged_rows=max_staged_rows,
        dtype=choose_dtype(dtype, checkpoint),
    )
    needed = estimate(checkpoint.num_parameters, architecture, geometry)
    check_fits(str(source), needed, geometry, chosen_device)
    files = ModelFiles(
        checkpoint=checkpoint,
        settings=settings,
        architecture=architecture,
        geometry=geometry,
        device=chosen_device,
        num_threads=num_threads,
    )
    if needed.weights_bytes < LARGE_BYTES:
        return run_by(runner, files)
    logger.info("preparing %.1f GB of weights of %s ...", needed.weights_bytes / 1e9, source)
    start_s = time.monotonic()
    model = run_by(runner, files)
    logger.info("prepared them in %.1f s", time.monotonic() - start_s)
    return model


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load the tokenizer of a model; `source` as for `load_model`.

    Raises:
        InvalidModel: there is none, or it is of an unsupported kind.
    """
    return read_tokenizer(model_folder(source))


def model_folder(source: str | Path) -> Path:
    """The local folder of a model, fetched from the Hugging Face hub if it is not one already.

    Raises:
        InvalidModel: there is no such folder and no such model.
    """
    name = str(source)
    if name.startswith(PREFIX):
        return zoo_path(name)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(name):
        raise InvalidModel(f"there is no model folder {folder}")
    # Imported when needed: it costs a third of a second of every start.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        raise InvalidModel(
            f"{name!r} is neither a folder nor a model that can be fetched: {error}"
        ) from error


def read_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], Architecture]:
    """The configuration with defaults filled in, and the sizes we need of it.

    Raises:
        InvalidModel: transformers refuses it, or the model is not supported.
    """
    settings = read_settings(checkpoint)
    return settings, read_architecture(checkpoint.architecture, settings)


def choose_dtype(dtype: str, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype asked for; for "auto" that of most stored elements.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if dtype == "auto":
        return STORED_DTYPES[checkpoint.stored_dtype]
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def choose_device(device: str) -> torch.device:
    """The device asked for; for "auto" a GPU if there is one."""
    if device != "auto":
        return named_device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def named_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest(f"device {name!r} is unknown; use auto, cpu, cuda or mps") from None
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not present.get(device.type, False):
        raise InvalidRequest(f"this machine has no device {name!r}; use auto or cpu")
    return device


def choose_context(max_context: int | None, architecture: Architecture) -> int:
    """Tokens per sequence: what was asked for, cut to what the model was made for."""
    if max_context is None:
        return architecture.max_positions
    if max_context < 1:
        raise InvalidRequest(f"max_context is {max_context}; it must be at least 1")
    return min(max_context, architecture.max_positions)
