"""Loading of models and tokenizers: files, configuration, memory, runner, weights, in this order.

Everything is checked before memory is allocated.

To read a configuration transformers loads a good part of itself and torch's compiler: a second of
every start, for a handful of numbers. So the result is cached on disk by the content of the file
and the version that read it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from forerun.bounded_read import first_line
from forerun.cache import cache_folder, cached_json, hash_of
from forerun.client.urls import hide_urls
from forerun.errors import InvalidModel, InvalidRequest, RunnerUnavailable
from forerun.models.architecture import (
    QUANTISED,
    WEIGHT_FORMATS,
    Architecture,
    Runner,
    WeightFormat,
    check_layer_count,
    read_architecture,
)
from forerun.models.base import LanguageModel, RowBatch, Span
from forerun.models.catalog import PREFIX, ZOO, zoo_path
from forerun.models.checkpoint import (
    FROM_TRANSFORMERS,
    GGUF,
    Checkpoint,
    read_checkpoint,
    read_object,
    text_config,
)
from forerun.models.decoder import (
    Decoder,
    fused_with,
    join_formats,
    parameter_shapes,
    read_decoder,
    unsupported,
)
from forerun.models.memory import KVGeometry, MemoryEstimate, check_fits, estimate, geometry_of
from forerun.models.tensor_files import check_parameters, has_own_head, tensor_reader
from forerun.models.tokenizers import Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forerun.models.gguf_file import GGUFFile
    from forerun.models.quantised_folder import QuantisedFolder


def read_settings(checkpoint: Checkpoint, folder: Path | None = None) -> dict[str, Any]:
    """Return the configuration with all defaults filled in, in the form of `config.to_dict()`."""
    if checkpoint.gguf is None:
        check_layer_count(read_object(checkpoint.folder / "config.json"))
        content = (checkpoint.folder / "config.json").read_bytes()
    else:
        content = json.dumps(checkpoint.gguf.settings, sort_keys=True).encode()
    key = hash_of(content + b"\0" + version("transformers").encode())
    return cached_json(folder or cache_folder(), f"settings-{key}", lambda: understood(checkpoint))


def understood(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the configuration with transformers and convert it to JSON types."""
    from transformers import AutoConfig

    try:
        if (gguf := checkpoint.gguf) is not None:
            config = gguf.config()
        else:
            found = AutoConfig.from_pretrained(checkpoint.folder, **FROM_TRANSFORMERS)
            config = text_config(found)
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
    {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float32}
)
preparation = logging.getLogger("forerun.preparation")
logger = logging.getLogger("forerun.runner")

LARGE_BYTES = 1 << 30
"""Bytes of weights from which on loading is announced, because it takes seconds."""

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# The last are the golden rows of EAGLE-3 heads.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "golden.rows")
# Second copies of the weights, and subfolders with formats of other systems.
IGNORED_HUB_FILES = ("consolidated*", "*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt")
LOOKUP_NAMES = frozenset(
    {"ngram", "[ngram]", "n-gram", "lookup", "prompt-lookup", "prompt_lookup", "pld"}
)
"""Names that other systems give to drafting by copying from the text."""
KNOWN_NAMES = ("suffix", "recycling", "self", "mtp", "auto")
"""Names of drafts that are no models, suggested when a name is mistyped."""


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
    files = model_files(
        read_checkpoint(model_folder(source)),
        dtype=dtype,
        device=device,
        max_batch=max_batch,
        max_context=max_context,
        max_staged_rows=max_staged_rows,
        num_threads=num_threads,
        weights=weights,
    )
    _warn_of_limit(max_context, files.architecture)
    return _prepare(runner, files, str(source))


def model_files(  # noqa: PLR0913 (as `load_model`)
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: str,
    max_batch: int,
    max_context: int | None,
    max_staged_rows: int,
    num_threads: int | None = None,
    weights: WeightFormat = "auto",
) -> ModelFiles:
    """Return what is known of a model before its weights are read; arguments as of `load_model`.

    Raises:
        InvalidModel: the configuration is refused.
        InvalidRequest: an argument cannot be honoured.
    """
    settings, architecture = read_config(checkpoint)
    return ModelFiles(
        checkpoint=checkpoint,
        settings=settings,
        architecture=architecture,
        geometry=geometry_of(
            architecture,
            num_slots=max_batch,
            capacity=_choose_context(max_context, architecture),
            max_staged_rows=max_staged_rows,
            dtype=choose_dtype("bf16" if weights == "bf16" else dtype, checkpoint),
        ),
        device=choose_device(device),
        num_threads=num_threads,
        weights=weights,
        keeps_blocks=dtype == "auto" and weights == "auto",
    )


def _prepare(runner: Runner, files: ModelFiles, name: str) -> LanguageModel:
    """Check the memory and load the weights; says how long it takes if they are large."""
    needed = files.memory
    check_fits(name, needed, files.geometry, files.device)
    num_bytes = needed.weights_bytes
    is_packed = files.checkpoint.packed is not None
    if (files.keeps_blocks or not is_packed) and (notice := files.checkpoint.notice):
        preparation.info("%s", notice)
    if num_bytes < LARGE_BYTES:
        return run_by(runner, files)
    preparation.info("preparing %.1f GB of weights of %s ...", num_bytes / 1e9, name)
    start_s = time.monotonic()
    model = run_by(runner, files)
    preparation.info("prepared them in %.1f s", time.monotonic() - start_s)
    return model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFiles:
    """Properties of a model that are known before its weights are read.

    Attributes:
        num_threads: for runners with threads of their own; None: as many as torch has.
        weights: bits of the matrices; fewer than stored only on the native runner.
        keeps_blocks: whether the native runner packs blocks of a GGUF file as they are stored.
    """

    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    architecture: Architecture
    geometry: KVGeometry
    device: torch.device
    num_threads: int | None = None
    weights: WeightFormat = "auto"
    keeps_blocks: bool = False

    @property
    def memory(self) -> MemoryEstimate:
        packed = self.checkpoint.packed
        is_tied = bool(self.settings.get("tie_word_embeddings"))
        needed = estimate(
            self.checkpoint.num_parameters,
            self.architecture,
            self.geometry,
            self.weights,
            is_tied=is_tied,
        )
        if packed is not None and self.keeps_blocks:
            kept = kept_bytes(packed, self.geometry.dtype.itemsize, is_tied=is_tied)
            return replace(needed, weights_bytes=kept)
        return needed

    def read_decoder(self) -> Decoder:
        """Check the weight files and return the sizes and constants of the model."""
        num_positions = self.geometry.capacity + self.geometry.max_staged_rows
        try:
            if objection := unsupported(self.architecture, self.settings):
                raise RunnerUnavailable(f"only the eager runner supports {objection}")
            decoder = read_decoder(self.architecture, self.settings).within(num_positions)
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidModel(
                f"the configuration in {self.checkpoint.folder} cannot be used: "
                f"{type(error).__name__} {error}"
            ) from error
        gguf = self.checkpoint.gguf
        if gguf is not None and (factors := gguf.rope_factors) is not None:
            if factors.shape != decoder.inv_freq.shape or not bool((factors > 0).all()):
                raise InvalidModel(f"{gguf.path} has factors of the rotation of a wrong form")
            decoder = replace(decoder, inv_freq=decoder.inv_freq / factors)
        if decoder.tied and has_own_head(self.checkpoint, self.geometry.dtype):
            decoder = replace(decoder, tied=False)
        check_parameters(self.checkpoint, parameter_shapes(decoder))
        return decoder


def kept_bytes(packed: GGUFFile | QuantisedFolder, element_bytes: int, *, is_tied: bool) -> int:
    """Return the bytes of weights whose quantised matrices stay quantised in memory."""
    total = 0
    for name, shape in packed.shapes.items():
        groups, num_weights = join_formats(packed, fused_with(name)), math.prod(shape)
        is_embedding = name == "model.embed_tokens.weight"
        if groups is None or is_embedding:
            total += num_weights * element_bytes
        if groups is not None and (not is_embedding or is_tied):
            total += int(num_weights * groups.bits_per_weight / 8)
    return total


def run_by(runner: Runner, files: ModelFiles) -> LanguageModel:
    """Load the model with the requested runner; "auto" is the fastest available one."""
    if files.weights in QUANTISED and runner not in ("auto", "native"):
        raise InvalidRequest(
            f"weights in {files.weights} need the native runner, not {runner}; leave one out"
        )
    wanted = "native" if files.weights in QUANTISED else runner
    model = LOADERS[wanted](files) if wanted != "auto" else _run_by_fastest(files)
    if files.device.type == "cpu":  # elsewhere a first pass may take seconds to prepare
        try_out(model, f"the weights in {files.checkpoint.folder}")
    return model


def _run_by_fastest(files: ModelFiles) -> LanguageModel:
    reasons: list[str] = []
    for name in PREFERRED[files.device.type]:
        try:
            return LOADERS[name](files)
        except RunnerUnavailable as error:
            if str(error) not in reasons:  # both fast runners give the same reason
                reasons.append(str(error))
                logger.warning("%s runs slower than it could: %s", files.checkpoint.folder, error)
    return _eager(files)


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


def _native(files: ModelFiles) -> LanguageModel:
    if files.device.type != "cpu":
        raise RunnerUnavailable(f"the native runner runs on the CPU, not on {files.device}")
    from forerun.models.runner.native import build_native_model
    from forerun.native.library import load_kernels

    decoder = files.read_decoder()
    kernels = load_kernels(files.num_threads or _usual_threads())
    # The kernels keep every core busy; what torch does between passes is too little to share, and
    # its idle threads would spin on the cores the kernels need next.
    torch.set_num_threads(1)
    read = tensor_reader(files.checkpoint, files.geometry.dtype, files.device)
    kept = files.checkpoint.packed if files.keeps_blocks else None
    return build_native_model(decoder, read, files.geometry, kernels, files.weights, kept)


def _graphs(files: ModelFiles) -> LanguageModel:
    from forerun.models.runner.graphs.model import build_torch_model

    decoder = files.read_decoder()
    if objection := decoder.beyond_graphs:
        raise RunnerUnavailable(f"the graphs runner does not support {objection}")
    read = tensor_reader(files.checkpoint, files.geometry.dtype, files.device)
    return build_torch_model(decoder, read, files.geometry, files.device)


def _eager(files: ModelFiles) -> LanguageModel:
    if files.checkpoint.packed is not None:
        raise RunnerUnavailable(
            f"{files.checkpoint.folder} has quantised weights or is a GGUF file, which only the "
            "native and the graphs runner read; give a folder with bf16 or fp32 weights"
        )
    from forerun.models.huggingface import adapt, check_passes, read_class, read_weights

    check_passes(*read_class(files.checkpoint))
    return adapt(
        read_weights(files.checkpoint, files.geometry.dtype).to(files.device),
        num_slots=files.geometry.num_slots,
        max_context=files.geometry.capacity,
        max_staged_rows=files.geometry.max_staged_rows,
    )


# Imported when chosen: the eager one alone costs seconds of start-up.
LOADERS: Mapping[str, Callable[[ModelFiles], LanguageModel]] = MappingProxyType(
    {"native": _native, "graphs": _graphs, "eager": _eager}
)
PREFERRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("native", "graphs"), "cuda": ("graphs",), "mps": ("graphs",)}
)


@cache
def _usual_threads() -> int:
    return torch.get_num_threads()


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
        max_context: tokens a sequence may have, cut to what the model was made for (None: all).
        max_staged_rows: rows that may be staged past the context (nodes of the largest tree).

    Raises:
        InvalidModel: the model is not supported.
        InvalidRequest: an argument cannot be honoured.
        NotEnoughMemory: KV and logits do not fit; nothing has been allocated yet.
    """
    from transformers import PreTrainedModel

    from forerun.models.huggingface import adapt, check_passes, sharing

    if not isinstance(model, PreTrainedModel):
        raise InvalidModel(f"{type(model).__name__} is no transformers model")
    name = type(model).__name__
    architecture = _checked_architecture(name, model.config.to_dict(), f"the loaded {name}")
    _warn_of_limit(max_context, architecture)
    geometry = geometry_of(
        architecture,
        num_slots=max_batch,
        capacity=_choose_context(max_context, architecture),
        max_staged_rows=max_staged_rows,
        dtype=model.dtype,
    )
    check_fits(name, estimate(0, architecture, geometry), geometry, model.device)
    check_passes(type(model), model.config)
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
    """The local folder or GGUF file of a model, fetched from the Hugging Face hub if need be.

    Raises InvalidModel where there is none.
    """
    name = str(source)
    if name.startswith(PREFIX):
        return zoo_path(name)
    folder = Path(source).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix.lower() == GGUF):
        return folder
    if folder.is_file():
        raise InvalidModel(
            f"{folder} is a file, not a model folder; give the folder with config.json and "
            f"*.safetensors, or a *{GGUF} file"
        )
    if folder.suffix.lower() == GGUF:
        raise InvalidModel(f"there is no file {folder}; check the path")
    if name.lower() == "none":
        raise InvalidModel(
            f"there is no model {name!r}; to decode without a draft, give no draft (None)"
        )
    if name.lower() == "auto":
        raise InvalidModel(
            '"auto" stands for drafts that are found for a target: give it as a draft to '
            "Engine.load, forerun generate, bench or serve"
        )
    if name.lower() in LOOKUP_NAMES:
        raise InvalidModel(f'there is no model {name!r}; did you mean the drafter "suffix"?')
    if not HUB_NAME.fullmatch(name):
        raise InvalidModel(
            f"there is no model folder {folder}, and no model of the Hugging Face hub has such a "
            "name: check it"
        )
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
        near = get_close_matches(name, (*KNOWN_NAMES, *(PREFIX + known for known in ZOO)), n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        reason = hide_urls(first_line(error))
        raise InvalidModel(
            f"{name!r} is neither a folder nor a model that can be fetched from the Hugging Face "
            f"hub.{hint} The hub's client says: {reason}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise InvalidModel(
            f"{name!r} has no safetensors weights in its main folder; pickled weights (*.bin) and "
            "GGUF files are not fetched: give the path of a GGUF file, or use a revision or a copy "
            "converted to safetensors"
        )
    return folder


def fetched_config(name: str) -> Path:
    """The folder of a model's config.json, fetched from the Hugging Face hub without weights."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:
        reason = hide_urls(first_line(error))
        raise InvalidModel(
            f"config.json of {name!r} cannot be fetched from the Hugging Face hub: {reason}"
        ) from error


def read_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], Architecture]:
    """Read the configuration with its defaults and the sizes of the model.

    Raises:
        InvalidModel: transformers refuses it, or the model is not supported.
    """
    settings = read_settings(checkpoint)
    # What reads the matrices, or `read_described`, has checked this setting.
    if checkpoint.packed is not None or not checkpoint.weight_files:
        settings = {key: settings[key] for key in settings if key != "quantization_config"}
    where = f"the configuration in {checkpoint.folder}"
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
