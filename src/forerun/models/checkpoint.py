"""`ModelFiles`: a model that is found, checked and open; and hashes of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from forerun.bounded_read import ReadLimits, check_regular, read_bytes, read_json
from forerun.cache import HASH_LENGTH, cache_folder, cached_json, hash_of
from forerun.errors import InvalidModel, UnreadableInput
from forerun.models.architecture import Architecture, check_layer_count, read_architecture
from forerun.models.catalog import model_folder
from forerun.models.decoder import StoredWeights
from forerun.models.families import FAMILIES, explain_refusal, find_family, find_text_class
from forerun.models.gguf.file import GGUFFile, open_gguf
from forerun.models.gguf.tokenizer import ENDS, build_tokenizer, special_tokens
from forerun.models.quantised_folder import METHOD, open_quantised, read_scheme
from forerun.models.stored_tensors import ITEM_BYTES, FloatWeights, parse_header
from forerun.models.tokenizers import (
    FROM_TRANSFORMERS,
    Tokenizer,
    TokenizerDefinition,
    list_versions,
    read_tokenizer,
    render_template,
)
from forerun.terminal_text import printable, shell_command

SAMPLE_BYTES = 4096
"""Bytes from the middle of every tensor that its sample hash covers."""
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
"""Weights of Medusa heads in the reference's form."""
FLOATS = frozenset(ITEM_BYTES)
JSON_LIMITS = ReadLimits(max_bytes=32 << 20)
"""Limits of config.json and of the index of the weights."""
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
CONVERT_PICKLE = (
    'python -c "import sys, torch, safetensors.torch as s; s.save_file({{k: v.contiguous() for k, '
    f"v in torch.load(sys.argv[1], weights_only=True).items()}}}}, '{WEIGHTS}')\" {{name}}"
)


class Description(NamedTuple):
    """What config.json says of a model.

    Attributes:
        architecture: class of the model in transformers, of the text part where there are others.
        quantisation: settings of quantised weights; empty without.
    """

    architecture: str
    has_vision: bool
    quantisation: Mapping[str, Any]


class ModelFiles:
    """A model on disk: what its files say before a weight is read. Every file is read once.

    `ModelFiles.open` is the only place that knows what a source can be. Everything else passes the
    opened model on, so that no name is looked up and no file is checked again. This class is of
    folders; of a GGUF file it is `GGUFModel`.

    Attributes:
        name: the source as the user gave it.
        folder: the model folder, or the GGUF file.
    """

    generation_names: Mapping[str, str] = MappingProxyType({})
    """What the files call sampling parameters, for messages; by default as they are called here."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    @classmethod
    def find(cls, source: str | Path | ModelFiles) -> ModelFiles:
        """Find a model or a head, without a check of its files; `source` as for `open`."""
        if isinstance(source, ModelFiles):
            return source
        folder = model_folder(source)
        if not folder.is_file():
            return ModelFiles(str(source), folder)
        return GGUFModel(str(source), folder)

    @classmethod
    def open(cls, source: str | Path | ModelFiles) -> ModelFiles:
        """Find and check a model; reads configuration and headers only, and fetches what is needed.

        Args:
            source: a folder, also with quantised weights, a GGUF file, a name on the Hugging Face
                hub, a model of the zoo such as "zoo:smollm2-135m", or a model that is open.

        Raises:
            InvalidModel: there is none, a file is missing, unreadable or truncated, or the model
                needs what is not supported: remote code, adapters, pickled weights.
        """
        files = cls.find(source)
        files.check()
        return files

    def check(self) -> None:
        """Refuse adapters, heads, code of its own, and weights that are missing or damaged."""
        if (self.folder / "adapter_config.json").exists():
            raise InvalidModel(
                f"{self.folder} holds an adapter (LoRA); merge it into its base model first"
            )
        _ = self.description  # refusals of what config.json says come before those of weights
        self.check_tensors()

    def check_tensors(self) -> None:
        """Refuse weights that are damaged, or none."""
        if not self.weights.type_counts:
            raise InvalidModel(f"{self.folder} holds no tensors")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The contents of config.json; empty of a GGUF file."""
        return read_object(self.folder / "config.json")

    @cached_property
    def description(self) -> Description:
        """What the configuration says of the model (InvalidModel)."""
        settings, where = self.config, self.folder / "config.json"
        architectures = settings.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise InvalidModel(f"{where} names no architecture (architectures)")
        architecture = str(architectures[0])
        _refuse_own_code(self.folder, settings, architecture)
        _refuse_heads(self.folder, settings, architecture)
        method = settings.get("quantization_config") or {}
        text = None if method else find_text_class(architecture, settings)
        if not isinstance(method, dict):
            raise InvalidModel(
                f"{where} has quantization_config={method!r:.60}; it must be an object"
            )
        if method and method.get("quant_method") != METHOD:
            read_scheme(where, method)
        find_family(text or architecture)
        return Description(text or architecture, text is not None, method)

    @property
    def architecture(self) -> str:
        """The class of the model in transformers, of the text part where there are others."""
        return self.description.architecture

    @property
    def has_vision(self) -> bool:
        """Whether the model is the text part of one that reads images too."""
        return self.description.has_vision

    @property
    def notice(self) -> str | None:
        """Message for the user on tensors that are dequantised or not read; None without."""
        if self.has_vision:
            name = self.architecture
            return f"{self.folder} reads images too: its text part is served, as {name}"
        return self.weights.notice

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights (InvalidModel)."""
        return weight_files(self.folder)

    @cached_property
    def weights(self) -> StoredWeights:
        """The stored tensors, read one by one: of safetensors, of GGUF, or in few bits."""
        if method := self.description.quantisation:
            return open_quantised(self.folder / "config.json", self.weight_files, method)
        weights = FloatWeights(self.weight_files)
        kinds = weights.type_counts.keys()
        if not kinds or not kinds <= FLOATS:
            raise InvalidModel(
                f"weights in {self.folder} are {', '.join(sorted(kinds)) or 'nothing'}; supported "
                f"are {', '.join(sorted(FLOATS))}"
            )
        return weights

    @property
    def num_parameters(self) -> int:
        return self.weights.type_counts.total()

    @property
    def stored_types(self) -> Mapping[str, float]:
        """Shares of the parameters by the type in which they are stored."""
        counts = self.weights.type_counts
        return {kind: number / counts.total() for kind, number in counts.most_common()}

    @cached_property
    def stored_dtype(self) -> str:
        """Most common element type, in safetensors' spelling ("BF16").

        Where matrices have fewer bits it is what models compute in: any but fp16, or else bf16.
        """
        if self.description.quantisation:
            counts = FloatWeights(self.weight_files).type_counts
            kinds = (kind for kind, _ in counts.most_common())
            return next((kind for kind in kinds if kind in FLOATS - {"F16"}), "BF16")
        return self.weights.type_counts.most_common(1)[0][0]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration with its defaults, in the form of transformers' `config.to_dict()`."""
        settings = read_settings(self)
        if self.description.quantisation:  # which has been checked
            settings.pop("quantization_config", None)
        return settings

    @cached_property
    def sizes(self) -> Architecture:
        """The sizes of the model; raises InvalidModel where it is not supported."""
        try:
            return read_architecture(self.architecture, self.settings)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidModel(
                f"the configuration in {self.folder} cannot be used: {type(error).__name__} {error}"
            ) from error

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with its chat template (InvalidModel)."""
        return read_tokenizer(self.folder)

    @property
    def generation_path(self) -> Path:
        """The file that states sampling parameters, which need not exist."""
        return self.folder / "generation_config.json"

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """What the files state on generation, by transformers' names; empty without."""
        return read_object(self.generation_path) if self.generation_path.exists() else {}

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Collect the end-of-text ids from generation settings, configuration and tokenizer."""
        found = {tokenizer.eos_token_id}
        config = self.folder / "config.json"
        for path, values in ((self.generation_path, self.generation_config), (config, self.config)):
            listed = values.get("eos_token_id")
            ids = listed if isinstance(listed, list) else [listed]
            if not all(token is None or _is_token_id(token) for token in ids):
                raise InvalidModel(
                    f"{path} has eos_token_id={listed!r:.60}; it must be a token id or a list"
                )
            found |= set(ids)
        return frozenset(token for token in found if token is not None)

    @cached_property
    def content_hash(self) -> str:
        """Hash of all bytes of the weight files, of a head too."""
        medusa = self.folder / MEDUSA_WEIGHTS
        return weights_hash([medusa] if medusa.is_file() else self.weight_files)

    @cached_property
    def sample_hash(self) -> str:
        """Hash of the headers and of 4 KiB from the middle of every tensor.

        For a warning at every start, where reading hundreds of gigabytes twice is too much.
        Training moves nearly all values of a tensor; a hand that changes a few may go unnoticed.
        """
        return hash_samples(self.weight_files)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of tokenizer.json, or of a GGUF file's header (InvalidModel)."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidModel(f"{path} is missing; is {self.folder} a model folder?")
        return weights_hash([path])

    @cached_property
    def template_hash(self) -> str:
        """Hash of the files with chat templates, of nothing without one (InvalidModel)."""
        parts, folder = [], self.folder
        files = [folder / "chat_template.jinja", folder / "chat_template.json"]
        for path in [*files, *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
            if path.is_file():
                parts.append(path.name.encode() + b"\0" + hashlib.sha256(read_bytes(path)).digest())
        settings = folder / "tokenizer_config.json"
        if settings.is_file():
            template = read_object(settings).get("chat_template")
            parts.append(b"" if template is None else json.dumps(template, sort_keys=True).encode())
        return hash_of(b"".join(parts))

    @property
    def settings_key(self) -> bytes:
        """The bytes on which `settings` depend."""
        check_layer_count(self.config)
        return json.dumps(self.config).encode()

    def read_transformers_config(self) -> Any:
        """Return transformers' configuration object; raises whatever transformers raises."""
        from transformers import AutoConfig  # takes seconds

        return text_config(AutoConfig.from_pretrained(self.folder, **FROM_TRANSFORMERS))

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return all parameters, dequantised; None where transformers reads the files itself."""
        return None


class GGUFModel(ModelFiles):
    """A model in one GGUF file."""

    config: Mapping[str, Any] = MappingProxyType({})
    generation_names = MappingProxyType(
        {
            "temperature": "general.sampling.temp",
            "top_p": "general.sampling.top_p",
            "top_k": "general.sampling.top_k",
            "min_p": "general.sampling.min_p",
            "repetition_penalty": "general.sampling.penalty_repeat",
        }
    )

    @cached_property
    def weights(self) -> GGUFFile:
        """The checked file."""
        return open_gguf(self.folder)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return (self.folder,)

    def check(self) -> None:
        """Refuse a file without tensors, or with a tokenizer whose rule is unknown."""
        if self.weights.metadata.get("tokenizer.ggml.model") == "gpt2":
            _ = self.tokenizer
        self.check_tensors()

    @cached_property
    def description(self) -> Description:
        return Description(self.weights.architecture, False, {})

    @property
    def stored_dtype(self) -> str:
        """Most common element type; bf16 for files with blocks of fewer bits."""
        counts = self.weights.type_counts
        return counts.most_common(1)[0][0] if counts.keys() <= FLOATS else "BF16"

    @property
    def settings_key(self) -> bytes:
        return json.dumps(self.weights.settings, sort_keys=True).encode()

    def read_transformers_config(self) -> Any:
        """Return transformers' configuration object; raises whatever transformers raises."""
        return self.weights.config()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters, dequantised."""
        return {name: self.weights.read(name) for name in self.weights.tensors}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer and the chat template in the metadata (InvalidModel)."""
        file = self.weights
        template = file.metadata.get("tokenizer.chat_template")
        key = hash_of(list_versions() + file.header_hash.encode())
        kept = cached_json(
            cache_folder(),
            f"tokenizer-of-gguf-{version('forerun')}-{key}",
            lambda: {"content": build_tokenizer(file).to_str(), "special": special_tokens(file)},
        )
        definition = TokenizerDefinition(
            content=kept["content"],
            eos_token_id=file.token_id("eos"),
            splits_special_tokens=False,
            chat_template=template if isinstance(template, str) and template else None,
        )
        return Tokenizer(
            definition,
            lambda other: render_template(other or str(definition.chat_template), kept["special"]),
        )

    @property
    def generation_path(self) -> Path:
        return self.folder

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The sampling parameters in the metadata, by their names here."""
        metadata = self.weights.metadata
        return {name: metadata.get(key) for name, key in self.generation_names.items()}

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Collect the end-of-text ids that the metadata name, and the tokens known to end texts."""
        added = tokenizer.added.items()
        known = {token for token, (text, is_special) in added if is_special and text in ENDS}
        stated = tokenizer.eos_token_id
        known |= set() if stated is None else {stated}
        return self.weights.eos_token_ids | known

    @cached_property
    def sample_hash(self) -> str:
        return hash_of(self.weights.sample(SAMPLE_BYTES))[:HASH_LENGTH]

    @property
    def tokenizer_hash(self) -> str:
        return self.weights.header_hash

    @property
    def template_hash(self) -> str:
        """Hash of nothing: the template is a part of the header, which `tokenizer_hash` covers."""
        return hash_of(b"")


def _is_token_id(token: object) -> bool:
    return type(token) is int and -1 <= token < 1 << 31  # some files have -1 for none


def read_settings(files: ModelFiles, folder: Path | None = None) -> dict[str, Any]:
    """Return the configuration with all defaults filled in, in the form of `config.to_dict()`."""
    key = hash_of(files.settings_key + b"\0" + version("transformers").encode())
    return cached_json(folder or cache_folder(), f"settings-{key}", lambda: understood(files))


def understood(files: ModelFiles) -> dict[str, Any]:
    """Read the configuration with transformers and convert it to JSON types."""
    try:
        config = files.read_transformers_config()
    except Exception as error:
        raise InvalidModel(f"the configuration in {files.folder} is refused: {error}") from error
    settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return settings


HEAD_SETTINGS = ("draft_vocab_size", "eagle_config", "medusa_num_heads", "speculators_model_type")
"""Settings that only drafting heads have, whatever their architecture is called."""


def _refuse_heads(folder: Path, settings: Mapping[str, Any], architecture: str) -> None:
    """Refuse a head on hidden states that is of no supported kind, before its weights are read."""
    named = any(kind in architecture.lower() for kind in ("eagle", "dflash", "medusa"))
    if named or any(settings.get(name) is not None for name in HEAD_SETTINGS):
        raise InvalidModel(
            f"{folder} is a head of the architecture {architecture:.60}, which is not supported; "
            "supported are EAGLE-3 heads of one Llama layer (LlamaForCausalLMEagle3, "
            "Eagle3Speculator), DFlash networks (DFlashDraftModel) and Medusa heads (MedusaModel)"
        )


def _refuse_own_code(folder: Path, settings: Mapping[str, Any], architecture: str) -> None:
    """Refuse models that need their own Python code, which is never run.

    Some still name the code they came with before transformers had their class, Phi-3 for one;
    for a supported class of the same name transformers' own is used.
    """
    if "auto_map" not in settings:
        return
    code = settings["auto_map"] if isinstance(settings["auto_map"], dict) else {}
    own_class = str(code.get("AutoModelForCausalLM")).rpartition(".")[2]
    if own_class != architecture or architecture not in FAMILIES:
        reason = "" if architecture in FAMILIES else f". {explain_refusal(architecture)}"
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
    names = _read_index(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
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


def _read_index(index: Path) -> list[str]:
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


def hash_samples(weight_files: Iterable[Path]) -> str:
    """Hash the headers and samples of the tensors in safetensors files."""
    total = hashlib.sha256()
    for path in sorted(weight_files):
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


def weights_hash(files: Iterable[Path]) -> str:
    """Hash the hashes of files in the order of their names, so that file boundaries matter."""
    digests = []
    for path in sorted(files):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return hash_of(b"".join(digests))
