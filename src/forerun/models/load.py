"""Loading of models and tokenizers; everything is checked before memory is allocated.

To read a configuration transformers loads a good part of itself and torch's compiler: a second of
every start, for a handful of numbers. So the result is cached on disk by the content of the file
and the version that read it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from forerun.cache import cache_folder, cached_json, hash_of
from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.architecture import (
    WEIGHT_FORMATS,
    Architecture,
    Runner,
    WeightFormat,
    check_layer_count,
    read_architecture,
)
from forerun.models.base import LanguageModel
from forerun.models.catalog import PREFIX, zoo_path
from forerun.models.checkpoint import Checkpoint, read_checkpoint, read_object
from forerun.models.memory import check_fits, estimate, geometry_of
from forerun.models.runner.choose import ModelFiles, run_by, try_out
from forerun.models.tokenizers import Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_settings(checkpoint: Checkpoint, folder: Path | None = None) -> dict[str, Any]:
    """Return the configuration with all defaults filled in, in the form of `config.to_dict()`.

    Args:
        checkpoint: whose.
        folder: cache to use instead of `cache_folder()`.

    Raises:
        InvalidModel: transformers refuses it.
    """
    check_layer_count(read_object(checkpoint.folder / "config.json"))
    content = (checkpoint.folder / "config.json").read_bytes()
    key = hash_of(content + b"\0" + version("transformers").encode())
    return cached_json(folder or cache_folder(), f"settings-{key}", lambda: understood(checkpoint))


def understood(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the configuration with transformers and convert it to JSON types."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise InvalidModel(
            f"the configuration in {checkpoint.folder} is refused: {error}"
        ) from error
    settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return settings


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
# The last are the golden rows of EAGLE-3 heads.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "golden.rows")
# Second copies of the weights, and subfolders with formats of other systems.
IGNORED_HUB_FILES = (
    "consolidated*",
    "*/*.safetensors",
    "*/*.json",
    "*/*.model",
    "*/*.txt",
)
LOOKUP_NAMES = frozenset(
    {"ngram", "[ngram]", "n-gram", "lookup", "prompt-lookup", "prompt_lookup", "pld"}
)
"""What other systems call drafting from the text itself."""


def load_model(  # noqa: PLR0913 (a model and seven settings of how it is to run)
    source: str | Path,
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
        max_batch: sequences at once.
        max_context: tokens a sequence may have, cut to what the model was made for (None: all).
        max_staged_rows: rows that may be staged past the context (nodes of the largest tree).
        runner: what carries its passes; "auto" for the fastest that device and model allow.
        num_threads: of the native runner; None: as many as torch uses.
        weights: "int8", "int4" or "int4-int8" quantise the matrices layer by layer while they are
            read, for the native runner; "bf16" is the dtype of that name.

    Raises:
        InvalidModel: files are missing, damaged or of an unsupported kind.
        InvalidRequest: an argument cannot be honoured.
        RunnerUnavailable: the runner named cannot run this model here.
        NotEnoughMemory: weights, KV and logits do not fit; nothing has been allocated yet.
    """
    checkpoint = read_checkpoint(model_folder(source))
    settings, architecture = read_config(checkpoint)
    chosen_device = choose_device(device)
    check_weights(weights)
    geometry = geometry_of(
        architecture,
        num_slots=max_batch,
        capacity=_choose_context(max_context, architecture),
        max_staged_rows=max_staged_rows,
        dtype=choose_dtype("bf16" if weights == "bf16" else dtype, checkpoint),
    )
    is_tied = bool(settings.get("tie_word_embeddings"))
    needed = estimate(checkpoint.num_parameters, architecture, geometry, weights, is_tied=is_tied)
    check_fits(str(source), needed, geometry, chosen_device)
    files = ModelFiles(
        checkpoint=checkpoint,
        settings=settings,
        architecture=architecture,
        geometry=geometry,
        device=chosen_device,
        num_threads=num_threads,
        weights=weights,
    )
    return _run_by(runner, files, needed.weights_bytes)


def _run_by(runner: Runner, files: ModelFiles, num_bytes: int) -> LanguageModel:
    """Load the model, and log how long it takes if it is large."""
    if num_bytes < LARGE_BYTES:
        return run_by(runner, files)
    folder = files.checkpoint.folder
    logger.info("preparing %.1f GB of weights of %s ...", num_bytes / 1e9, folder)
    start_s = time.monotonic()
    model = run_by(runner, files)
    logger.info("prepared them in %.1f s", time.monotonic() - start_s)
    return model


def check_weights(weights: str) -> None:
    """Refuse a format of weights that does not exist.

    Raises:
        InvalidRequest: naming those there are.
    """
    if weights not in WEIGHT_FORMATS:
        raise InvalidRequest(f"weights {weights!r} are unknown; use {', '.join(WEIGHT_FORMATS)}")


def share_loaded(
    model: PreTrainedModel,
    *,
    max_batch: int = 8,
    max_context: int | None = None,
    max_staged_rows: int = 64,
) -> LanguageModel:
    """A model that transformers has loaded, ready for an engine.

    It runs through transformers' own modules, on its device and in its dtype. Its weights are
    shared, not copied; the model itself stays as it is and can still be used. A folder given to
    `load_model` runs faster, since its weights can be packed for the native runner.

    Args:
        model: of a supported architecture.
        max_batch: sequences at once.
        max_context: tokens a sequence may have, cut to what the model was made for (None: all).
        max_staged_rows: rows that may be staged past the context (nodes of the largest tree).

    Raises:
        InvalidModel: the model is not supported.
        InvalidRequest: an argument cannot be honoured.
        NotEnoughMemory: KV and logits do not fit; nothing has been allocated yet.
    """
    from transformers import PreTrainedModel

    from forerun.models.huggingface import adapt, sharing

    if not isinstance(model, PreTrainedModel):
        raise InvalidModel(f"{type(model).__name__} is no transformers model")
    name = type(model).__name__
    architecture = _checked_architecture(name, model.config.to_dict(), f"the loaded {name}")
    geometry = geometry_of(
        architecture,
        num_slots=max_batch,
        capacity=_choose_context(max_context, architecture),
        max_staged_rows=max_staged_rows,
        dtype=model.dtype,
    )
    check_fits(name, estimate(0, architecture, geometry), geometry, model.device)
    adapted = adapt(
        sharing(model),
        num_slots=max_batch,
        max_context=geometry.capacity,
        max_staged_rows=max_staged_rows,
        freeze=False,
    )
    try_out(adapted, f"the loaded {name}")
    return adapted


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
    if folder.is_file():
        gguf = "; GGUF files are not supported" if folder.suffix == ".gguf" else ""
        raise InvalidModel(
            f"{folder} is a file, not a model folder{gguf}; give the folder with config.json and "
            "*.safetensors"
        )
    if folder.suffix.lower() == ".gguf":
        raise InvalidModel(
            f"there is no file {folder}, and GGUF files are not supported; give a folder with "
            "config.json and *.safetensors"
        )
    if name.lower() == "none":
        raise InvalidModel(
            f"there is no model {name!r}; to decode without a draft, give no draft (None)"
        )
    if name.lower() in LOOKUP_NAMES:
        raise InvalidModel(f'there is no model {name!r}; did you mean the drafter "suffix"?')
    if not HUB_NAME.fullmatch(name):
        raise InvalidModel(f"there is no model folder {folder}")
    return fetched(name)


def fetched(name: str) -> Path:
    """The local copy of a model of the Hugging Face hub, fetched if it is not there yet."""
    # Imported when needed: it costs a third of a second of every start.
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                name, allow_patterns=list(HUB_FILES), ignore_patterns=list(IGNORED_HUB_FILES)
            )
        )
    except Exception as error:
        raise InvalidModel(
            f"{name!r} is neither a folder nor a model that can be fetched: {error}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise InvalidModel(
            f"{name!r} has no safetensors weights in its main folder; pickled weights (*.bin) and "
            "GGUF files are not fetched: use a revision or a copy converted to safetensors"
        )
    return folder


def read_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], Architecture]:
    """Read the configuration with its defaults and the sizes of the model.

    Raises:
        InvalidModel: transformers refuses it, or the model is not supported.
    """
    settings = read_settings(checkpoint)
    where = f"config.json in {checkpoint.folder}"
    return settings, _checked_architecture(checkpoint.architecture, settings, where)


def _checked_architecture(name: str, settings: Mapping[str, Any], where: str) -> Architecture:
    """Read the sizes of a configuration, turning any malformed value into InvalidModel."""
    try:
        return read_architecture(name, settings)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidModel(f"{where} cannot be used: {type(error).__name__} {error}") from error


def choose_dtype(dtype: str, checkpoint: Checkpoint) -> torch.dtype:
    """Return the requested dtype; "auto" is the dtype of most stored elements.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if dtype == "auto":
        return STORED_DTYPES[checkpoint.stored_dtype]
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def choose_device(device: str) -> torch.device:
    """Return the requested device; "auto" is a GPU if there is one."""
    if device != "auto":
        return _named_device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _named_device(name: str) -> torch.device:
    """Return the device of that name, if this machine has it."""
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


def _choose_context(max_context: int | None, architecture: Architecture) -> int:
    """Return the tokens per sequence, at most as many as the model supports."""
    if max_context is None:
        return architecture.max_positions
    if max_context < 1:
        raise InvalidRequest(f"max_context is {max_context}; it must be at least 1")
    return min(max_context, architecture.max_positions)
