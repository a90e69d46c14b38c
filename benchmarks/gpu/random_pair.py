"""Models of real shapes with random weights, made on the device: only their cost is of interest."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import islice, product

import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TokenizersBackend

from forerun.measure.rigs import ModelFacts
from forerun.models.architecture import read_architecture
from forerun.models.decoder import parameter_shapes, read_decoder
from forerun.models.huggingface import geometry_of
from forerun.models.runner.graphs.model import TorchModel, build_torch_model
from forerun.models.tokenizers import Tokenizer, adopt

__all__ = ["SHAPES", "Room", "Shape", "facts_of", "random_model", "static_model", "tokenizer_of"]

WEIGHT_SCALE = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 32000
    head_dim: int = 128

    def config(self) -> LlamaConfig:
        """As transformers has it."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return LlamaConfig(
            **sizes,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
        )


# The drafts have their targets' vocabularies. The last two exist to try this script on a CPU.
SHAPES = {
    "llama-2-7b": Shape(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
    ),
    "llama-3-8b": Shape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "300m": Shape(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
    ),
    "tiny": Shape(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        head_dim=32,
    ),
    "tiny-draft": Shape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=1000,
        head_dim=32,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Room:
    """Sequences at once, and tokens of each."""

    num_slots: int
    capacity: int


def random_model(shape: Shape, room: Room, dtype: torch.dtype, device: torch.device) -> TorchModel:
    """The torch runner over fresh weights; no file and no second copy is made."""
    config = shape.config()
    architecture = read_architecture("LlamaForCausalLM", config.to_dict())
    decoder = read_decoder(architecture, config.to_dict())
    shapes = parameter_shapes(decoder)
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, WEIGHT_SCALE, generator=generator)

    geometry = geometry_of(
        architecture,
        num_slots=room.num_slots,
        capacity=room.capacity,
        max_staged_rows=64,
        dtype=dtype,
    )
    return build_torch_model(decoder, read, geometry, device)


def static_model(shape: Shape, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """The same shape as a transformers model, for `generate` with its static cache."""
    config = shape.config()
    config.dtype = dtype
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)


def facts_of(name: str, model: TorchModel) -> ModelFacts:
    """What a pass reads; there is no file to hash."""
    ends, geometry = model.weights.ends, model.store.geometry
    rows_only = 0 if ends.head is ends.embedding else ends.embedding.numel()
    heads = geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    return ModelFacts(
        name=f"{name} (random weights)",
        content_hash="random",
        dtype=str(model.dtype).removeprefix("torch."),
        pass_bytes=(model.num_parameters - rows_only) * model.dtype.itemsize,
        kv_token_bytes=2 * heads * model.dtype.itemsize,
    )


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """As many tokens as the model has: bytes, then strings of two and three of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = ("".join(parts) for size in (2, 3) for parts in product(alphabet, repeat=size))
    pieces = ["<|end|>", *alphabet, *islice(longer, vocab_size - len(alphabet) - 1)]
    backend = BackendTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return adopt(TokenizersBackend(tokenizer_object=backend, eos_token="<|end|>"))
