"""Writes a model folder as a GGUF file that llama.cpp loads, with the tensors as they are stored.

Names and settings are those that llama.cpp's own converter writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.atomic_write import atomic_write
from forerun.errors import InvalidModel, RunnerUnavailable
from forerun.models.checkpoint import ModelFiles
from forerun.models.decoder import Decoder, parameter_shapes
from forerun.models.families import find_family
from forerun.models.gguf.file import ROPE_FACTORS, GGUFFile
from forerun.models.gguf.settings import COMMON, END_NAMES, get_gguf_parts, list_modules
from forerun.models.gguf.splits import DIGIT, GPT2, SPLIT_RULES
from forerun.models.gguf.tokenizer import CONTROL, ROLES, USER_DEFINED
from forerun.models.load import describe_run
from forerun.models.tokenizers import load_by_transformers

WRITTEN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
NORMAL, UNUSED = 1, 5
"""Types of tokens, beside those that are read."""
STORED: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
HEADS: Mapping[str, str] = {
    "self_attn.q_proj": "num_attention_heads",
    "self_attn.k_proj": "num_key_value_heads",
}


def write_gguf(draft: ModelFiles, path: Path, target: ModelFiles) -> None:
    """Write a draft model as a GGUF file.

    Args:
        draft: a folder.
        target: of the draft; if it is a GGUF file, its tokenizer is copied.

    Raises:
        InvalidModel: the family, a setting, the weights or the tokenizer of the draft are of a kind
            that is not written.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    decoder = _read_decoder(draft)
    form, _ = get_gguf_parts(find_family(draft.sizes.name))
    settings = {f"{form.architecture}.{name}": v for name, v in _list_settings(draft).items()}
    with atomic_write(path) as scratch:
        writer = GGUFWriter(scratch, form.architecture)
        for name, value in (settings | _list_tokenizer(draft, target)).items():
            _add_value(writer, name, value)
        for name, tensor in _list_tensors(draft, decoder):
            # The package knows no bf16 of numpy; norms and biases are fp32 in every file.
            stored = tensor.float() if tensor.dim() == 1 else tensor
            writer.add_tensor(
                name,
                stored.contiguous().view(torch.uint8).numpy(),
                raw_dtype=GGMLQuantizationType[STORED[stored.dtype]],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _read_decoder(draft: ModelFiles) -> Decoder:
    """Return the sizes of a draft, or refuse what is not written."""
    name = draft.sizes.name
    if name not in WRITTEN or draft.weights.is_packed or draft.stored_dtype not in STORED.values():
        kind = f"{name} in {draft.stored_dtype}"
        raise InvalidModel(
            f"{draft.folder} cannot be written as a GGUF file: it is {kind}; written are "
            f"{', '.join(WRITTEN)} in fp32, fp16 or bf16"
        )
    run = describe_run(
        draft, dtype="auto", device="cpu", max_batch=1, max_context=None, max_staged_rows=1
    )
    try:
        decoder = run.read_decoder()
    except RunnerUnavailable as error:
        raise InvalidModel(f"{draft.folder} cannot be written as a GGUF file: {error}") from error
    rope = draft.settings["rope_parameters"].get("rope_type", "default")
    is_llama3 = rope == "llama3" and name == WRITTEN[0]
    if decoder.gelu or any(decoder.windows) or not (rope == "default" or is_llama3):
        raise InvalidModel(
            f"{draft.folder} cannot be written as a GGUF file: its gate, its windows or its "
            f"rotation ({rope}) are of a kind that is not written"
        )
    return decoder


def _list_settings(draft: ModelFiles) -> dict[str, Any]:
    """Return the settings by their names in the file, without the prefix."""
    settings, width = draft.settings, draft.sizes.head_dim
    found = {name: settings[ours] for name, ours in COMMON.items()}
    return found | {
        "vocab_size": draft.sizes.vocab_size,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(settings["rope_parameters"]["rope_theta"]),
    }


def _list_tensors(draft: ModelFiles, decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their names in the file."""
    form, variant = get_gguf_parts(find_family(draft.sizes.name))
    layer = {module: short for short, module in list_modules(variant).items()}
    ends = {module: short for short, module in END_NAMES.items()}
    for name in parameter_shapes(decoder):
        tensor = draft.weights.read(name)
        stem, _, kind = name.rpartition(".")
        if stem in ends:
            yield f"{ends[stem]}.{kind}", tensor
            continue
        _, _, index, module = stem.split(".", 3)
        if form.paired_rows and module in HEADS:
            # Pairs that are rotated together lie beside each other, not in two halves of a head.
            halves = tensor.view(draft.settings[HEADS[module]], 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).flatten(0, 2)
        yield f"blk.{index}.{layer[module]}.{kind}", tensor
    width = 2 * len(decoder.inv_freq)
    base = draft.settings["rope_parameters"]["rope_theta"]
    usual = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    if not torch.equal(usual, decoder.inv_freq):
        yield ROPE_FACTORS, usual / decoder.inv_freq


def _add_value(writer: Any, name: str, value: Any) -> None:
    """Add a value of the metadata in the type that llama.cpp expects."""
    from gguf import GGUFValueType as Kind

    number = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    if isinstance(value, list):
        writer.add_array(name, value)
    else:
        writer.add_key_value(name, value, number[type(value)])


def _list_tokenizer(draft: ModelFiles, target: ModelFiles) -> dict[str, Any]:
    """Return the metadata that describe the tokenizer."""
    if isinstance(stored := target.weights, GGUFFile):
        names = [name for name in stored.metadata if name.startswith("tokenizer.")]
        return {name: stored.array(name) or stored.metadata[name] for name in names}
    backend = load_by_transformers(draft.folder)
    content = json.loads(backend.backend_tokenizer.to_str())
    split_name = _find_split_name(content, draft.folder)
    model, size = content["model"], draft.sizes.vocab_size
    tokens = {number: (token, NORMAL) for token, number in model["vocab"].items()}
    for added in content["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        tokens[added["id"]] = (added["content"], kind)
    if max(tokens) >= size:
        raise InvalidModel(f"{draft.folder} has tokens beyond its {size} rows of the embedding")
    listed = [tokens.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    text = backend("a").input_ids
    ids = {f"{role}_token_id": getattr(backend, f"{name}_id", None) for name, role in ROLES.items()}
    values = {
        "model": "gpt2",
        "pre": split_name,
        "tokens": [token for token, _ in listed],
        "token_type": [kind for _, kind in listed],
        "merges": merges,
        "add_bos_token": text[0] == backend.bos_token_id,
        "add_eos_token": text[-1] == backend.eos_token_id,
        **{name: number for name, number in ids.items() if number is not None},
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def _find_split_name(content: Mapping[str, Any], folder: Path) -> str:
    """Return llama.cpp's name of the rule by which a tokenizer.json splits texts."""
    model, before = content["model"], content["pre_tokenizer"] or {}
    normalizer = (content["normalizer"] or {}).get("type")
    is_byte_level = (content["decoder"] or {}).get("type") == "ByteLevel"
    if model["type"] == "BPE" and is_byte_level and normalizer in (None, "NFC"):
        patterns = tuple(map(_read_pattern, before.get("pretokenizers") or [before]))
        wanted = tuple(pattern for pattern in patterns if pattern != "")
        for name, rule in SPLIT_RULES.items():
            if (rule.patterns, rule.whole_first) == (wanted, bool(model.get("ignore_merges"))):
                return name
    raise InvalidModel(
        f"the tokenizer in {folder} ({model['type']}, {json.dumps(before):.200}) is none of those "
        "that llama.cpp knows by name (docs/gguf-tokenizers.md)"
    )


def _read_pattern(step: Mapping[str, Any]) -> str | None:
    """Return the pattern by which a step splits a text, "" for none; None if it is not known."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return GPT2 if step.get("use_regex", True) else ""
        case {
            "type": "Split",
            "behavior": "Isolated",
            "invert": False,
            "pattern": {"Regex": found},
        }:
            return str(found)
        case {"type": "Digits", "individual_digits": True}:
            return DIGIT
    return None
