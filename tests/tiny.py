"""Tiny models for tests of the engine: random networks, tabular laws, and engines over them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import transformers
from tests.tabular import TabularModel, TokenStore
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedModel, TokenizersBackend

from forerun.control.base import Controller, Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.results import TokenStops
from forerun.engine.scheduler import PLAIN, ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.huggingface import HuggingFaceModel, adapt
from forerun.models.tokenizers import Detokenizer, Tokenizer, adopt
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal, Verdict
from forerun.theory.tree import TokenTree

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

WINDOW = 8
QWEN_MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PARTLY_MIXED = {"mlp_only_layers": [0], "norm_topk_prob": True}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GEMMA3 = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
    "query_pre_attn_scalar": 40,
    "final_logit_softcapping": 6.0,
}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
PROJECTED = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}

# A line per family, and one per variant that runs other code; classes are imported when used.
# Everything random, nothing at its default that could be forgotten unnoticed; windows end long
# before the texts of the tests do.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral-sliding": ("MistralForCausalLM", {"num_key_value_heads": 1, "sliding_window": WINDOW}),
    "qwen2-mixed": ("Qwen2ForCausalLM", {"num_key_value_heads": 1} | QWEN_MIXED),
    "qwen3-mixed": ("Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 16} | QWEN_MIXED),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"num_key_value_heads": 1, "head_dim": 16} | MOE),
    "qwen3-moe-mixed": (
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16} | MOE | QWEN_MIXED | PARTLY_MIXED,
    ),
    "gemma3": ("Gemma3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 16} | GEMMA3),
    "phi3": ("Phi3ForCausalLM", {"num_key_value_heads": 1, "rope_parameters": HALF_ROTATED}),
    "phi3-sliding": ("Phi3ForCausalLM", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt2-scaled": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"rope_parameters": HALF_ROTATED}),
    "gpt-neox-serial": ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48}),
    "opt-projected": ("OPTForCausalLM", {"ffn_dim": 48} | PROJECTED),
    "olmo2": ("Olmo2ForCausalLM", {"num_key_value_heads": 1}),
    "granite": ("GraniteForCausalLM", {"num_key_value_heads": 1} | MULTIPLIERS),
}
# Those that every runner carries, those that the native runner carries too, and those some of whose
# layers forget.
LEAN = ("llama", "mistral", "qwen2", "qwen3")
NATIVE = (
    *("mistral-sliding", "qwen2-mixed", "qwen3-mixed", "gemma3", "phi3", "phi3-sliding", "olmo2"),
    *("granite", "qwen3-moe", "qwen3-moe-mixed"),
)
SLIDING = ("mistral-sliding", "qwen2-mixed", "qwen3-mixed", "gemma3", "phi3-sliding")

# Networks that with their first seed hardly say more than one token: another seed.
SEEDS = {"gpt-neox-serial": 7, "olmo2": 7, "opt-projected": 3}


def byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int = VOCAB_SIZE,
    *,
    end: str = "<|end|>",
    extra: tuple[str, ...] = (),
) -> TokenizersBackend:
    """A byte-level BPE trained on texts; `extra` tokens come behind its vocabulary."""
    tokenizer = BackendTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in extra])
    return TokenizersBackend(tokenizer_object=tokenizer, eos_token=end)


@cache
def backend(extra: tuple[str, ...] = ()) -> TokenizersBackend:
    """A byte-level BPE of 300 tokens; `extra` ones make it another vocabulary."""
    return byte_level_bpe(CORPUS, extra=extra)


def tokenizer() -> Tokenizer:
    return adopt(backend())


def network(
    family: str = "llama",
    *,
    seed: int = 0,
    jitter: float = 0.0,
    scale: float = 0.4,
    hidden_size: int = 32,
    num_layers: int = 2,
    vocab_size: int = VOCAB_SIZE,
    max_context: int = MAX_CONTEXT,
) -> PreTrainedModel:
    """A random network; with `jitter` a cousin of the one without, which often agrees with it."""
    class_name, changes = FAMILIES[family]
    model_class = getattr(transformers, class_name)
    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    model = model_class(model_class.config_class(**(common | changes)))
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.fill_(float(is_norm(name) and name.endswith("weight")))
    seed += SEEDS.get(family, 0)
    perturb(model, seed, scale)
    perturb(model, seed + 1, jitter)
    return model


def is_norm(name: str) -> bool:
    return "norm" in name or ".ln_" in name


def perturb(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Norms and biases too, whose usual ones and zeros would hide their being forgotten.

    Biases get less: large ones drown the text, and every text ends in one repeated token.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter).normal_(0, scale, generator=generator)
        parameter.add_(noise / 4 if name.endswith("bias") else noise)


def adapted(model: PreTrainedModel, num_slots: int = 4) -> HuggingFaceModel:
    """The network as a LanguageModel, the original left as it was."""
    max_context = model.config.max_position_embeddings
    return adapt(copy.deepcopy(model), num_slots=num_slots, max_context=max_context)


def logits_of(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """Logits of a pass over a sequence from its beginning."""
    context = Context(model.store, ids)
    batch = pack([context.span(len(ids))], torch.tensor(ids), range(len(ids)), model.device)
    logits = model.forward(batch).logits.clone()
    context.close()
    return logits


def settings(k: int = 3, **changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "max_batch": 4,
        "max_context": MAX_CONTEXT,
        "num_speculative_tokens": k,
        "controller": "fixed",
    }
    return EngineConfig(**(defaults | changes))


def drafting(model: Any, vocab_size: int = VOCAB_SIZE) -> DraftModel:
    return DraftModel(model, vocab_size)


def engine_over(
    target: Any,
    drafter: Drafter | None = None,
    *,
    k: int = 3,
    controller: Controller | None = None,
    **changes: Any,
) -> Engine:
    """An engine over models that are already there."""
    return Engine(
        target=target,
        tokenizer=tokenizer(),
        drafter=drafter,
        controller=controller,
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


def scheduled(sequence: Sequence, plan: Plan = PLAIN) -> ScheduledSequence:
    """A running sequence of which nothing is cached, with a slot of a store of its own."""
    sequence.context = Context(TokenStore(1, 100, 64), sequence.ids)
    entry = ScheduledSequence.of(sequence)
    entry.plan = plan
    return entry


def outcome(request: DraftRequest, verdict: Verdict) -> StepOutcome:
    """What a drafter is told of a chain with this verdict, its tokens committed."""
    accepted = verdict.tokens[:-1]
    drafted = Proposal(
        tokens=torch.tensor(accepted, dtype=torch.int64),
        tree=TokenTree.chain(len(accepted)),
        choice=Choice.DETERMINISTIC,
    )
    return StepOutcome(
        request=request,
        first_row=len(request.ids) - len(verdict.tokens) - 1,
        num_rows=len(verdict.tokens),
        verdict=verdict,
        proposal=drafted,
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
