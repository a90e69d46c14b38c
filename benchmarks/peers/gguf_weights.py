"""A Llama of Hugging Face as a GGUF file; runs in the environment of `peers-llamacpp`.

python gguf_weights.py MODEL_FOLDER OUT.gguf bf16
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.utility import SafetensorsLocal

__all__ = ["FILE_TYPES", "write_gguf"]

FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
}
BF16 = gguf.GGMLQuantizationType.BF16


def write_gguf(model: Path, out: Path, kind: str) -> None:
    """Write weights, tokenizer and shape; vectors (the norms) are float32 for every kind.

    Args:
        model: folder with config.json, tokenizer.json (byte-level BPE) and one model.safetensors.
        out: the file to write.
        kind: type of the matrices, a key of FILE_TYPES.

    Raises:
        ValueError: the model is not a Llama with bf16 weights in one file.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{model} is a {config['model_type']}, and only llama is converted")
    writer = gguf.GGUFWriter(out, "llama")
    add_shape(writer, config, kind)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text(encoding="utf-8")))
    for name, bits in tensors(model, config):
        floats = widened(bits)
        if bits.ndim == 1 or kind == "f32":
            writer.add_tensor(name, floats)
        elif kind == "f16":
            writer.add_tensor(name, floats.astype(np.float16))
        else:
            writer.add_tensor(name, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any], kind: str) -> None:
    """The fields of config.json that a pass depends on."""
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(FILE_TYPES[kind])


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    """A byte-level BPE; prompts are given as token ids, so this only has to load."""
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    kinds = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
        for token, _ in vocabulary
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight by its GGUF name, as the 16 bits of bf16."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with SafetensorsLocal(model / "model.safetensors") as stored:
        for name, tensor in stored.items():
            if tensor.dtype != "BF16":
                raise ValueError(f"{name} in {model} is {tensor.dtype}; expected BF16")
            bits = tensor.mmap_bytes().view(np.uint16).reshape(tensor.shape)
            layer = name.split(".")[-2]
            if layer in heads:
                bits = interleaved(bits, heads[layer])
            yield names.get_name(name, try_suffixes=(".weight",)), bits


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order.

    It rotates neighbouring components of a head, where Hugging Face rotates component i of the
    first half with component i of the second.
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def widened(bits: np.ndarray) -> np.ndarray:
    """The bits of bf16 as float32 of the same values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    source, target, kind = sys.argv[1:]
    write_gguf(Path(source), Path(target), kind)
