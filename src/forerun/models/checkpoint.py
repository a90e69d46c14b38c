"""Checks of a model folder that read no weights but headers, and hashes of its files."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from forerun.bounded_read import ReadLimits, check_regular, parse_json, read_bytes, read_json
from forerun.cache import HASH_LENGTH, hash_of
from forerun.errors import InvalidModel, UnreadableInput
from forerun.models.architecture import SUPPORTED, text_class, unsupported_class
from forerun.terminal_text import printable, shell_command

if TYPE_CHECKING:
    from forerun.models.gguf_file import GGUFFile
    from forerun.models.quantised_folder import QuantisedFolder

GGUF = ".gguf"
SAMPLE_BYTES = 4096
"""Bytes from the middle of every tensor that its sample hash covers."""
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
ITEM_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
"""Element types that are supported, in safetensors' spelling."""
FLOATS = frozenset(ITEM_BYTES)
MAX_HEADER_BYTES = 32 << 20
"""Most bytes of a safetensors header; those of the largest published models have a few MB."""
MAX_TENSORS = 1 << 16
"""Most tensors of one safetensors file; those of the largest published models have some thousand.
More would take longer to describe than a user waits."""
HEADER_LIMITS = ReadLimits(max_bytes=MAX_HEADER_BYTES, max_values=4_000_000)
JSON_LIMITS = ReadLimits(max_bytes=32 << 20)
"""Limits of config.json and of the index of the weights."""
FROM_TRANSFORMERS: Mapping[str, bool] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}
)
"""Options for transformers' `from_pretrained`, which then fetches and runs nothing."""
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
CONVERT_PICKLE = (
    'python -c "import sys, torch, safetensors.torch as s; s.save_file({{k: v.contiguous() for k, '
    f"v in torch.load(sys.argv[1], weights_only=True).items()}}}}, '{WEIGHTS}')\" {{name}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model folder, or a GGUF file, that is present and complete.

    Attributes:
        stored_dtype: most common element type, in safetensors' spelling ("BF16"); of GGUF files
            with blocks of fewer bits the one that the rest is computed in.
        packed: what reads its tensors where some are blocks of integers: the GGUF file, or a folder
            with quantised matrices; None where all are in floating point.
        notice: message for the user on tensors that are dequantised or not read; None without.
        zero_biases: stored biases of zeros, which the model need not have.
        has_vision: the model is the text part of one that reads images too.
    """

    folder: Path
    architecture: str
    weight_files: tuple[Path, ...]
    num_parameters: int
    stored_dtype: str
    stored_types: Mapping[str, float] = field(default_factory=dict)
    gguf: GGUFFile | None = None
    packed: GGUFFile | QuantisedFolder | None = None
    notice: str | None = None
    zero_biases: frozenset[str] = frozenset()
    has_vision: bool = False


def read_checkpoint(folder: Path) -> Checkpoint:
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
    elements: Counter[str] = Counter()
    for file in files:
        elements += count_elements(file)
    if method:
        return _with_quantised(described, files, elements, method)
    if not elements or not elements.keys() <= FLOATS:
        found = ", ".join(sorted(elements)) or "nothing"
        raise InvalidModel(
            f"weights in {folder} are {found}; supported are {', '.join(sorted(FLOATS))}"
        )
    return replace(
        described,
        weight_files=files,
        num_parameters=elements.total(),
        stored_dtype=elements.most_common(1)[0][0],
        stored_types=_shares(elements),
    )


def read_described(folder: Path) -> Checkpoint:
    """Return the model that config.json describes, without files and number of parameters.

    Raises:
        InvalidModel: as for `read_checkpoint`, except for faults of the weight files.
    """
    return _read_description(folder)[0]


def _read_description(folder: Path) -> tuple[Checkpoint, Mapping[str, Any]]:
    """Return the model that config.json describes, and its quantisation settings, empty if none."""
    settings, architecture = read_named(folder)
    method = settings.get("quantization_config") or {}
    text = None if method else text_class(architecture, settings)
    inner = settings["text_config"] if text else settings
    named = (place.get(key) for place in (inner, settings) for key in ("dtype", "torch_dtype"))
    dtype = {"bfloat16": "BF16", "float16": "F16"}.get(str(next(filter(None, named), None)), "F32")
    described = Checkpoint(
        folder=folder,
        architecture=text or architecture,
        weight_files=(),
        num_parameters=0,
        stored_dtype=dtype,
        notice=text and f"{folder} reads images too: its text part is served, as {text}",
        has_vision=text is not None,
    )
    if not method:
        return described, {}
    from forerun.models.quantised_folder import METHOD, read_scheme

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


def _read_gguf(path: Path) -> Checkpoint:
    from forerun.models.gguf_file import open_gguf
    from forerun.models.gguf_tokenizer import split_rule

    gguf = open_gguf(path)
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2":
        split_rule(gguf)  # refuses an unknown one before weights are read
    counts = gguf.type_counts
    if not counts:
        raise InvalidModel(f"{path} holds no tensors")
    return Checkpoint(
        folder=path,
        architecture=gguf.architecture,
        weight_files=(path,),
        num_parameters=counts.total(),
        stored_dtype=counts.most_common(1)[0][0] if counts.keys() <= FLOATS else "BF16",
        stored_types=_shares(counts),
        gguf=gguf,
        packed=gguf,
        notice=gguf.notice,
    )


def _with_quantised(
    described: Checkpoint,
    files: tuple[Path, ...],
    elements: Counter[str],
    settings: Mapping[str, Any],
) -> Checkpoint:
    """Return the checkpoint of a folder with quantised matrices."""
    from forerun.models.quantised_folder import open_quantised

    packed = open_quantised(described.folder / "config.json", files, settings)
    counts: Counter[str] = Counter()
    for name, shape in packed.shapes.items():
        counts[packed.stored_type(name)] += math.prod(shape)
    if not counts:
        raise InvalidModel(f"{described.folder} holds no tensors")
    return replace(
        described,
        weight_files=files,
        num_parameters=counts.total(),
        stored_dtype=_computed_in([kind for kind, _ in elements.most_common()]),
        stored_types=_shares(counts),
        packed=packed,
        notice=packed.notice,
        zero_biases=packed.zero_biases,
    )


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {kind: number / counts.total() for kind, number in counts.most_common()}


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


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _TensorEntry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


def count_elements(path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Counter[str]:
    """Count the elements per data type in a safetensors file, from its header."""
    size_bytes = path.stat().st_size
    header, header_bytes = _read_header(path, size_bytes, max_header_bytes)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise InvalidModel(
            f"{path} has {len(header)} tensors; at most {MAX_TENSORS} of one file are read"
        )
    elements: Counter[str] = Counter()
    ranges = []
    for name, entry in header.items():
        start, end, num_elements = _tensor_range(path, name, entry)
        elements[entry["dtype"]] += num_elements
        ranges.append((start, end, name))
    declared_bytes = header_bytes
    for start, end, name in sorted(ranges):
        if header_bytes + start != declared_bytes:
            raise malformed(path, f"tensor {name!r} overlaps another or leaves a gap before it")
        declared_bytes = header_bytes + end
    if size_bytes != declared_bytes:
        raise InvalidModel(
            f"{path} has {size_bytes} bytes, its header declares {declared_bytes}: "
            "the file is incomplete or damaged; fetch it again"
        )
    return elements


def _tensor_range(path: Path, name: str, entry: Any) -> tuple[int, int, int]:
    """First byte, byte after the last and number of elements of a tensor in a header."""
    try:
        tensor = msgspec.convert(entry, _TensorEntry)
    except msgspec.ValidationError as error:
        raise malformed(path, f"tensor {name!r} is {entry!r:.80} ({error})") from error
    (start, end), dtype, num_elements = tensor.data_offsets, tensor.dtype, math.prod(tensor.shape)
    expected = num_elements * ITEM_BYTES.get(dtype, 0)
    if end < start or (dtype in ITEM_BYTES and end - start != expected):
        raise malformed(path, f"tensor {name!r} has {end - start} bytes for {num_elements} {dtype}")
    return start, end, num_elements


def malformed(path: Path, reason: str) -> InvalidModel:
    """The error for a safetensors header that contradicts itself."""
    return InvalidModel(f"{path} has a malformed safetensors header: {reason}")


def _read_header(
    path: Path, size_bytes: int, max_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and where its data begin: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size_bytes - 8:
                raise InvalidModel(
                    f"{path} has {size_bytes} bytes, its header alone declares {8 + length}: "
                    "the file is truncated or no safetensors file; fetch it again"
                )
            if length > max_bytes:
                raise malformed(path, f"it has {length} bytes; at most {max_bytes} are read")
            header = parse_json(file.read(length), "its header", HEADER_LIMITS)
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise malformed(path, "it is no JSON object")
    return header, 8 + length


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
        header, data_starts = _read_header(path, path.stat().st_size)
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
