"""Tiny models for tests of the engine: random networks, tabular laws, and engines over them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TokenizersBackend,
)

from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.engine.stopping import TokenStops
from forerun.models.huggingface import HuggingFaceModel, adapt
from forerun.models.tabular import TabularModel
from forerun.models.tokenizer_files import adopt
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import SamplingParams

EOS = 0
VOCAB_SIZE = 300
MAX_CONTEXT = 96
PROMPTS = (
    "def add(left, right):\n    return",
    "import os\n",
    "class Stack:\n    def __init__(self, items):\n        self.items = items\n",
    "x",
)
CORPUS = (*PROMPTS, "for name in names:\n    print(name)\n", "héllo wörld 😀 … naïve\n")

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        {"num_key_value_heads": 2, "sliding_window": None},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
}


@cache
def backend(extra: tuple[str, ...] = ()) -> TokenizersBackend:
    """A byte-level BPE of 300 tokens; `extra` ones make it another vocabulary."""
    tokenizer = BackendTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in extra])
    return TokenizersBackend(tokenizer_object=tokenizer, eos_token="<|end|>")


def tokenizer() -> Tokenizer:
    return adopt(backend())


def network(
    family: str = "llama",
    *,
    seed: int = 0,
    jitter: float = 0.0,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_context: int = MAX_CONTEXT,
) -> PreTrainedModel:
    """A random network; with `jitter` a cousin of the one without, which often agrees with it."""
    config_class, model_class, changes = FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
        **changes,
    )
    model = model_class(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.fill_(float("norm" in name))
    perturb(model, seed, 0.4)
    perturb(model, seed + 1, jitter)
    return model


def perturb(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Norms and biases too, whose usual ones and zeros would hide their being forgotten."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.empty_like(parameter).normal_(0, scale, generator=generator))


def adapted(model: PreTrainedModel, num_slots: int = 4) -> HuggingFaceModel:
    """The network as a LanguageModel, the original left as it was."""
    max_context = model.config.max_position_embeddings
    return adapt(copy.deepcopy(model), num_slots=num_slots, max_context=max_context)


def settings(k: int = 3, **changes: int) -> EngineConfig:
    defaults = {"max_batch": 4, "max_context": MAX_CONTEXT, "num_speculative_tokens": k}
    return EngineConfig(**(defaults | changes))


def drafting(model: Any, vocab_size: int = VOCAB_SIZE) -> DraftModel:
    return DraftModel(model, vocab_size)


def engine_over(
    target: Any, drafter: Drafter | None = None, *, k: int = 3, **changes: int
) -> Engine:
    """An engine over models that are already there."""
    return Engine(
        target=target,
        tokenizer=tokenizer(),
        drafter=drafter,
        config=settings(k, **changes),
        eos_token_ids=frozenset({EOS}),
    )


def sequence(name: str = "r", num_prompt: int = 3) -> Sequence:
    """A sequence that waits."""
    params = SamplingParams()
    return Sequence(
        request_id=name,
        index=0,
        params=params,
        ids=list(range(num_prompt)),
        num_prompt=num_prompt,
        noise_key=0,
        stops=TokenStops(params, frozenset(), 10),
        detokenizer=Detokenizer(tokenizer()),
        history=None,
        arrived_at_s=0.0,
    )


def tabular(
    seed: int = 0, *, vocab_size: int = 8, num_slots: int = 4, scale: float = 1.5, order: int = 2
) -> TabularModel:
    return TabularModel.from_seed(
        seed,
        vocab_size=vocab_size,
        order=order,
        num_slots=num_slots,
        max_context=MAX_CONTEXT,
        scale=scale,
    )


def cousin(model: TabularModel, seed: int, *, scale: float = 0.7) -> TabularModel:
    """A draft whose law resembles that of `model`."""
    other = tabular(seed, vocab_size=model.vocab_size, scale=scale, order=model.order)
    num_slots, capacity = model.store.num_free, model.max_context
    return TabularModel(
        log_probs=(model.log_probs + other.log_probs).log_softmax(-1),
        order=model.order,
        store=type(model.store)(num_slots, capacity, max_staged_rows=64),
    )
