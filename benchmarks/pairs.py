"""Targets for timing: two random ones with drafts cut from them, and the shipped one made dearer.

A random target needs no training, has the shapes and so the cost of a real one, and its greedy text
hardly repeats. Damping what the layers after the second add to the residual stream lets the first
two layers, cut out with the shared embedding and norm, guess most of the target's tokens: a draft
with a real acceptance. The tokenizer is a byte-level BPE trained on the Python standard library.

    python benchmarks/pairs.py --out build/pairs
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from forerun.models.catalog import zoo_path

__all__ = ["SHAPES", "Shape", "make_deep", "make_pair"]

VOCAB_SIZE = 8192
END = "<|endoftext|>"
WEIGHT_SCALE = 0.05
DRAFT_LAYERS = 2
DEEP = "deep"
DEEP_LAYERS = 60
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target; `damping` scales what every layer after the draft's adds to the residual stream."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    damping: float

    def config(self, num_layers: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            num_hidden_layers=num_layers,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            dtype="bfloat16",
        )


SHAPES = {
    "29m": Shape(
        hidden_size=512,
        num_layers=8,
        intermediate_size=1536,
        num_heads=8,
        num_kv_heads=4,
        damping=0.05,
    ),
    "292m": Shape(
        hidden_size=1024,
        num_layers=24,
        intermediate_size=2816,
        num_heads=16,
        num_kv_heads=8,
        damping=0.02,
    ),
}


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the top modules of this Python's standard library."""
    files = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, model_max_length=2048
    )


def random_target(shape: Shape) -> LlamaForCausalLM:
    """Normal weights, norms of one, the layers a draft will lack damped."""
    target = LlamaForCausalLM(shape.config(shape.num_layers)).float().requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    for parameter in target.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, WEIGHT_SCALE, generator=generator)
    for layer in target.model.layers[DRAFT_LAYERS:]:
        layer.self_attn.o_proj.weight.mul_(shape.damping)
        layer.mlp.down_proj.weight.mul_(shape.damping)
    return target


def first_layers(target: LlamaForCausalLM, shape: Shape) -> LlamaForCausalLM:
    """The embedding, the first layers and the final norm as a model of its own."""
    draft = LlamaForCausalLM(shape.config(DRAFT_LAYERS)).float()
    kept = draft.state_dict().keys()
    draft.load_state_dict({k: v for k, v in target.state_dict().items() if k in kept})
    return draft


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}: {num_parameters / 1e6:.1f} M parameters")


def make_pair(shape: Shape, folder: Path) -> None:
    """Write `target` and `draft` below `folder`."""
    tokenizer = train_tokenizer()
    target = random_target(shape)
    save(first_layers(target, shape), tokenizer, folder / "draft")
    save(target, tokenizer, folder / "target")


def make_deep(folder: Path) -> None:
    """Write the shipped target, made dearer, as `target` below `folder`."""
    source = zoo_path("code-11m")
    shipped = LlamaForCausalLM.from_pretrained(source)
    config = LlamaConfig.from_pretrained(source, num_hidden_layers=DEEP_LAYERS)
    deep = LlamaForCausalLM(config).to(shipped.dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    for layer in deep.model.layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, WEIGHT_SCALE, generator=generator)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    deep.load_state_dict(shipped.state_dict(), strict=False)
    save(deep, AutoTokenizer.from_pretrained(source), folder / "target")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/pairs"))
    parser.add_argument("--sizes", nargs="+", choices=[*SHAPES, DEEP], default=[*SHAPES, DEEP])
    options = parser.parse_args()
    for size in options.sizes:
        if size == DEEP:
            make_deep(options.out / size)
        else:
            make_pair(SHAPES[size], options.out / size)


if __name__ == "__main__":
    main()
