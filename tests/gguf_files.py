"""GGUF files for tests, written with the gguf package from a folder or from random blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Choose = Callable[[str], Kind]


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def all_of(kind: Kind) -> Choose:
    """Matrices of one type; norms in fp32, as llama.cpp has them."""
    return lambda name: Kind.F32 if "norm" in name else kind


def interleaved(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp has them: the two halves of the rotation in turn."""
    width = weights.shape[0] // num_heads
    halves = weights.reshape(num_heads, 2, width // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    folder: Path,
    choose: Choose,
    *,
    blocks: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a Llama model with its tokenizer, in types by the names of transformers.

    Args:
        path: of the file.
        folder: with config.json, the weights and tokenizer.json.
        choose: type of a tensor.
        blocks: raw bytes of tensors, in place of those made from the weights.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        add_tensor(writer, name, tensor, choose(name), config, (blocks or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(
        [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in content["model"]["merges"]
        ]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: Tensor,
    kind: Kind,
    config: Mapping[str, int],
    blocks: np.ndarray | None,
) -> None:
    if blocks is not None:
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
        return
    values = tensor.float().numpy()
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name:
            values = interleaved(values, config[key])
    values = np.ascontiguousarray(values)
    if kind in (Kind.F32, Kind.F16):
        stored = values.astype(np.float32 if kind == Kind.F32 else np.float16)
        writer.add_tensor(gguf_name(name), stored)
    else:
        writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)


SCALE_PLACES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,)}
"""First bytes of the fp16 scales of a block."""


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int = 0) -> np.ndarray:
    """Blocks of any bits with scales that are small numbers."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    num_blocks = shape[1] // per_block
    raw = generator.integers(0, 256, (shape[0], num_blocks, block_bytes), dtype=np.uint8)
    for place in SCALE_PLACES[kind]:
        scales = generator.uniform(1e-5, 3e-5, (shape[0], num_blocks)).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def dequantised(path: Path) -> dict[str, Tensor]:
    """Tensors by their names in the file, as the gguf package reads them."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: torch.from_numpy(
            np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in reader.tensors
    }


def write_tiny_folder(place: Path) -> Path:
    """Write a Llama of one layer whose tokens are 255 bytes and a pair, a few kB in all.

    gguf writes no empty list of merges, and transformers needs one in the file.
    """
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    LlamaForCausalLM(config).save_pretrained(place)
    tokens = [*sorted(ByteLevel.alphabet())[:-1], "th"]
    vocab = {token: at for at, token in enumerate(tokens)}
    tokenizer = Backend(BPE(vocab=vocab, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def add_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add a tokenizer of 255 bytes and a pair."""
    tokens = [*sorted(ByteLevel.alphabet())[:-1], "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
