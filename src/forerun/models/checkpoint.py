"""`ModelFiles`: a model that is found, checked and open; and hashes of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bounded_read import ReadLimits, check_regular, read_bytes, read_json
from forerun.cache import HASH_LENGTH, cache_folder, cached_json, hash_of
from forerun.errors import InvalidModel, UnreadableInput
from forerun.models.architecture import (
    SUPPORTED,
    Architecture,
    check_layer_count,
    read_architecture,
    text_class,
    unsupported_class,
)
from forerun.models.catalog import GGUF, model_folder
from forerun.models.decoder import Weights
from forerun.models.quantised_folder import METHOD, open_quantised, read_scheme
from forerun.models.stored_tensors import ITEM_BYTES, FloatWeights, parse_header
from forerun.models.tokenizers import FROM_TRANSFORMERS, Tokenizer, read_tokenizer
from forerun.terminal_text import printable, shell_command

if TYPE_CHECKING:
    from forerun.models.gguf_file import GGUFFile

SAMPLE_BYTES = 4096
"""Bytes from the middle of every tensor that its sample hash covers."""
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FLOATS = frozenset(ITEM_BYTES)
JSON_LIMITS = ReadLimits(max_bytes=32 << 20)
"""Limits of config.json and of the index of the weights."""
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
CONVERT_PICKLE = (
    'python -c "import sys, torch, safetensors.torch as s; s.save_file({{k: v.contiguous() for k, '
    f"v in torch.load(sys.argv[1], weights_only=True).items()}}}}, '{WEIGHTS}')\" {{name}}"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFiles:
    """A model on disk: what its files say before a weight is read.

    `ModelFiles.open` is the only place that knows what a source can be. Everything else passes the
    opened model on, so that no name is looked up and no file is checked again.

    Attributes:
        name: the source as the user gave it.
        folder: the model folder, or the GGUF file.
        architecture: class of the model in transformers.
        weights: the stored tensors, read one by one: of safetensors, of GGUF, or in few bits.
        weight_files: the files that hold them; none of a model that config.json alone describes.
        stored_dtype: most common element type, in safetensors' spelling ("BF16"); of GGUF files
            with blocks of fewer bits the one that the rest is computed in.
        stored_types: shares of the parameters by the type in which they are stored.
        gguf: the file, where the model is one.
        notice: message for the user on tensors that are dequantised or not read; None without.
        has_vision: the model is the text part of one that reads images too.
    """

    name: str
    folder: Path
    architecture: str
    weights: Weights
    weight_files: tuple[Path, ...] = ()
    num_parameters: int = 0
    stored_dtype: str
    stored_types: Mapping[str, float] = field(default_factory=dict)
    gguf: GGUFFile | None = None
    notice: str | None = None
    has_vision: bool = False

    @classmethod
    def open(cls, source: str | Path | ModelFiles) -> ModelFiles:
        """Find and check a model; reads configuration and headers only, and fetches what is needed.

        Args:
            source: a folder, also with quantised weights, a GGUF file, a name on the Hugging Face
                hub, a model of the zoo such as "zoo:smollm2-135m", or a model that is open.

        Raises:
            InvalidModel: there is none, or as `read_checkpoint`.
        """
        if isinstance(source, ModelFiles):
            return source
        return replace(read_checkpoint(model_folder(source)), name=str(source))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration with its defaults, in the form of transformers' `config.to_dict()`."""
        settings = read_settings(self)
        # What reads the matrices, or `read_described`, has checked this setting.
        if self.weights.is_packed or not self.weight_files:
            settings.pop("quantization_config", None)
        return settings

    @cached_property
    def sizes(self) -> Architecture:
        """The sizes of the model; raises InvalidModel where it is not supported."""
        return check_sizes(self.architecture, self.settings, f"the configuration in {self.folder}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with its chat template (`chat_template` of its definition)."""
        return read_tokenizer(self.folder)

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The contents of generation_config.json; empty without one, and of a GGUF file."""
        path = self.folder / "generation_config.json"
        return read_object(path) if path.exists() else {}

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Collect the end-of-text ids from generation settings, configuration and tokenizer."""
        found = {tokenizer.eos_token_id}
        if self.gguf is not None:
            from forerun.models.gguf_tokenizer import ENDS

            added = tokenizer.added.items()
            found |= {token for token, (text, is_special) in added if is_special and text in ENDS}
            return (
                frozenset(token for token in found if token is not None) | self.gguf.eos_token_ids
            )
        config = self.folder / "config.json"
        for path, values in (
            (self.folder / "generation_config.json", self.generation_config),
            (config, read_object(config)),
        ):
            listed = values.get("eos_token_id")
            ids = listed if isinstance(listed, list) else [listed]
            if not all(token is None or _is_token_id(token) for token in ids):
                raise InvalidModel(
                    f"{path} has eos_token_id={listed!r:.60}; it must be a token id or a list"
                )
            found |= set(ids)
        return frozenset(token for token in found if token is not None)

    def transformers_config(self) -> Any:
        """Return transformers' configuration object; raises whatever transformers raises."""
        from transformers import AutoConfig  # takes seconds

        if self.gguf is not None:
            return self.gguf.config()
        return text_config(AutoConfig.from_pretrained(self.folder, **FROM_TRANSFORMERS))


def _is_token_id(token: object) -> bool:
    return type(token) is int and -1 <= token < 1 << 31  # some files have -1 for none


def read_settings(files: ModelFiles, folder: Path | None = None) -> dict[str, Any]:
    """Return the configuration with all defaults filled in, in the form of `config.to_dict()`."""
    if files.gguf is None:
        check_layer_count(read_object(files.folder / "config.json"))
        content = (files.folder / "config.json").read_bytes()
    else:
        content = json.dumps(files.gguf.settings, sort_keys=True).encode()
    key = hash_of(content + b"\0" + version("transformers").encode())
    return cached_json(folder or cache_folder(), f"settings-{key}", lambda: understood(files))


def understood(files: ModelFiles) -> dict[str, Any]:
    """Read the configuration with transformers and convert it to JSON types."""
    try:
        config = files.transformers_config()
    except Exception as error:
        raise InvalidModel(f"the configuration in {files.folder} is refused: {error}") from error
    settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return settings


def check_sizes(name: str, settings: Mapping[str, Any], where: str) -> Architecture:
    """Read the sizes of a configuration, turning any malformed value into InvalidModel."""
    try:
        return read_architecture(name, settings)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidModel(f"{where} cannot be used: {type(error).__name__} {error}") from error


def read_checkpoint(folder: Path) -> ModelFiles:
    """Check a model folder or a GGUF file; reads configuration and headers only.

    Raises:
        InvalidModel: a file is missing, unreadable or truncated, or the folder needs what is not
            supported: remote code, adapters, pickled or quantised weights.
    """
    if folder.suffix.lower() == GGUF and folder.is_file():
        return _read_gguf(folder)
    if not folder.is_dir():
        raise InvalidModel(f"there is no model folder {folder}")
    if (folder / "adapter_config.json").exists():
        raise InvalidModel(f"{folder} holds an adapter (LoRA); merge it into its base model first")
    described, method = _read_description(folder)
    files = weight_files(folder)
    weights = FloatWeights(files)
    elements = weights.type_counts
    if method:
        packed = open_quantised(folder / "config.json", files, method)
        described = replace(described, notice=packed.notice)
        dtype = _computed_in([kind for kind, _ in elements.most_common()])
        return _with_weights(described, packed, files, dtype)
    if not elements or not elements.keys() <= FLOATS:
        found = ", ".join(sorted(elements)) or "nothing"
        raise InvalidModel(
            f"weights in {folder} are {found}; supported are {', '.join(sorted(FLOATS))}"
        )
    return _with_weights(described, weights, files, elements.most_common(1)[0][0])


def _with_weights(
    described: ModelFiles, weights: Weights, files: tuple[Path, ...], dtype: str
) -> ModelFiles:
    """Add what is known of the stored tensors."""
    counts = weights.type_counts
    if not counts:
        raise InvalidModel(f"{described.folder} holds no tensors")
    return replace(
        described,
        weights=weights,
        weight_files=files,
        num_parameters=counts.total(),
        stored_dtype=dtype,
        stored_types={kind: number / counts.total() for kind, number in counts.most_common()},
    )


def read_described(folder: Path) -> ModelFiles:
    """Return the model that config.json describes, without files and number of parameters.

    Raises:
        InvalidModel: as for `read_checkpoint`, except for faults of the weight files.
    """
    return _read_description(folder)[0]


def _read_description(folder: Path) -> tuple[ModelFiles, Mapping[str, Any]]:
    """Return the model that config.json describes, and its quantisation settings, empty if none."""
    settings, architecture = read_named(folder)
    method = settings.get("quantization_config") or {}
    text = None if method else text_class(architecture, settings)
    inner = settings["text_config"] if text else settings
    named = (place.get(key) for place in (inner, settings) for key in ("dtype", "torch_dtype"))
    dtype = {"bfloat16": "BF16", "float16": "F16"}.get(str(next(filter(None, named), None)), "F32")
    described = ModelFiles(
        name=str(folder),
        folder=folder,
        architecture=text or architecture,
        weights=FloatWeights(()),
        stored_dtype=dtype,
        notice=text and f"{folder} reads images too: its text part is served, as {text}",
        has_vision=text is not None,
    )
    if not method:
        return described, {}
    where = folder / "config.json"
    if not isinstance(method, dict):
        raise InvalidModel(f"{where} has quantization_config={method!r:.60}; it must be an object")
    if (name := method.get("quant_method")) != METHOD:
        read_scheme(where, method)
    notice = f"its matrices are quantised ({name})"
    return replace(described, stored_dtype=_computed_in({dtype}), notice=notice), method


def _computed_in(stored: Collection[str]) -> str:
    """Return the first stored type that quantised models compute in: any but fp16, or else bf16."""
    return next((kind for kind in stored if kind in FLOATS and kind != "F16"), "BF16")


def read_named(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the contents of config.json and its model class; refuses heads and own code."""
    settings = read_object(folder / "config.json")
    architectures = settings.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise InvalidModel(f"{folder / 'config.json'} names no architecture (architectures)")
    _refuse_own_code(folder, settings, str(architectures[0]))
    _refuse_heads(folder, settings, str(architectures[0]))
    return settings, str(architectures[0])


def _read_gguf(path: Path) -> ModelFiles:
    from forerun.models.gguf_file import open_gguf
    from forerun.models.gguf_tokenizer import split_rule

    gguf = open_gguf(path)
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2":
        split_rule(gguf)  # refuses an unknown one before weights are read
    counts = gguf.type_counts
    described = ModelFiles(
        name=str(path),
        folder=path,
        architecture=gguf.architecture,
        weights=gguf,
        stored_dtype="BF16",
        gguf=gguf,
        notice=gguf.notice,
    )
    dtype = counts.most_common(1)[0][0] if counts and counts.keys() <= FLOATS else "BF16"
    return _with_weights(described, gguf, (path,), dtype)


HEAD_SETTINGS = ("draft_vocab_size", "eagle_config", "medusa_num_heads", "speculators_model_type")
"""Settings that only drafting heads have, whatever their architecture is called."""


def _refuse_heads(folder: Path, settings: Mapping[str, Any], architecture: str) -> None:
    """Refuse a head on hidden states that is of no supported kind, before its weights are read."""
    named = any(kind in architecture.lower() for kind in ("eagle", "medusa"))
    if named or any(settings.get(name) is not None for name in HEAD_SETTINGS):
        raise InvalidModel(
            f"{folder} is a head of the architecture {architecture:.60}, which is not supported; "
            "supported are EAGLE-3 heads of one Llama layer (LlamaForCausalLMEagle3, "
            "Eagle3Speculator) and Medusa heads (MedusaModel)"
        )


def _refuse_own_code(folder: Path, settings: dict[str, Any], architecture: str) -> None:
    """Refuse models that need their own Python code, which is never run.

    Some still name the code they came with before transformers had their class, Phi-3 for one;
    for a supported class of the same name transformers' own is used.
    """
    if "auto_map" not in settings:
        return
    code = settings["auto_map"] if isinstance(settings["auto_map"], dict) else {}
    own_class = str(code.get("AutoModelForCausalLM")).rpartition(".")[2]
    if own_class != architecture or architecture not in SUPPORTED:
        reason = "" if architecture in SUPPORTED else f". {unsupported_class(architecture)}"
        raise InvalidModel(
            f"{folder} needs code of its own (auto_map); remote code is never run{reason}"
        )


def text_config(config: Any) -> Any:
    """Return the configuration of the text part, with the whole model's setting for a tied head."""
    text = config.get_text_config()
    if text is not config:
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raises InvalidModel where there is none."""
    if not path.exists():
        raise InvalidModel(f"{path} is missing; is {path.parent} a model folder?")
    try:
        check_regular(path)
        content = read_json(path, JSON_LIMITS)
    except UnreadableInput as error:
        reason = str(error).removeprefix(f"{path} ")
        raise InvalidModel(f"{path} cannot be read: it {reason}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path} holds no JSON object")
    return content


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model, which may be one file or several.

    Raises:
        InvalidModel: there are none, or the index names one that is missing.
    """
    if folder.is_file():
        return (folder,)
    if not folder.is_dir():
        raise InvalidModel(f"there is no model folder {folder}")
    names = _indexed_files(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if names and not missing:
        return tuple(folder / name for name in names)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled:
        raise InvalidModel(
            f"{folder} has only pickled weights ({', '.join(map(printable, pickled))}), which can "
            "run code when loaded; convert them to safetensors, in that folder:\n"
            + shell_command(CONVERT_PICKLE, name=pickled[0])
        )
    raise InvalidModel(f"{folder} lacks its weights: {', '.join(missing) or 'the index is empty'}")


def _indexed_files(index: Path) -> list[str]:
    """Return the weight files named by an index, which must lie in its folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidModel(f"{index} has no weight_map from tensors to files")
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    outside = sorted(name for name in names if name != Path(name).name or name in ("", ".", ".."))
    if outside or not all(isinstance(name, str) for name in weight_map.values()):
        raise InvalidModel(
            f"{index} names {outside[0] if outside else min(names)!r:.100} as a weight file; only "
            "files of the same folder are read"
        )
    return sorted(names)


def weights_hash(weight_files: Iterable[Path]) -> str:
    """SHA-256 of safetensors files in the order of their names: its first 16 hexadecimal digits."""
    return combined(sorted(weight_files))


def weights_sample_hash(weight_files: Iterable[Path]) -> str:
    """Hash of the headers and of 4 KiB from the middle of every tensor.

    For a warning at every start, where reading hundreds of gigabytes twice is too much. Training
    moves nearly all values of a tensor; a hand that changes a few may go unnoticed.
    """
    total = hashlib.sha256()
    for path in sorted(weight_files):
        if path.suffix.lower() == GGUF:
            from forerun.models.gguf_file import open_gguf

            total.update(open_gguf(path).sample(SAMPLE_BYTES))
            continue
        header, data_starts = parse_header(path, path.stat().st_size)
        header.pop("__metadata__", None)
        total.update(json.dumps(header, sort_keys=True).encode())
        with path.open("rb") as file:
            for name in sorted(header):
                start, end = header[name]["data_offsets"]
                length = min(SAMPLE_BYTES, end - start)
                file.seek(data_starts + start + (end - start - length) // 2)
                total.update(file.read(length))
    return total.hexdigest()[:HASH_LENGTH]


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of the tokenizer in a folder, or of a GGUF file's header: its first 16 digits.

    Raises:
        InvalidModel: the folder has no tokenizer.json.
    """
    if folder.is_file():
        from forerun.models.gguf_file import open_gguf

        return open_gguf(folder).header_hash
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidModel(f"{path} is missing; is {folder} a model folder?")
    return combined([path])


def template_hash(folder: Path) -> str:
    """SHA-256 of a folder's chat template, of nothing without one: its first 16 hexadecimal digits.

    Raises:
        InvalidModel: the tokenizer's settings cannot be read.
    """
    parts = []
    files = [folder / "chat_template.jinja", folder / "chat_template.json"]
    for path in [*files, *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if path.is_file():
            parts.append(path.name.encode() + b"\0" + hashlib.sha256(read_bytes(path)).digest())
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        template = read_object(settings).get("chat_template")
        parts.append(b"" if template is None else json.dumps(template, sort_keys=True).encode())
    return hash_of(b"".join(parts))


def combined(files: Iterable[Path]) -> str:
    """Hash the hashes of the files, so that file boundaries matter."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return hash_of(b"".join(digests))
