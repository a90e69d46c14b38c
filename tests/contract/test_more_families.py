"""Families that need nothing of us but attention: text, features and head equal transformers' own.

A row of MORE is all that a new one needs here, and one in `families.FAMILIES`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from tests import tiny
from tests.contract.test_families import continued
from tests.natives import native_model
from transformers import PreTrainedModel

from forerun.control.base import Tree
from forerun.drafters.draft_model import SelfDraft
from forerun.errors import InvalidModel, InvalidRequest
from forerun.models import attention
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.families import FAMILIES
from forerun.models.huggingface import adapt
from forerun.sampling.config import SamplingParams
from forerun.theory.tree import NO_TREE

pytestmark = pytest.mark.usefixtures("unchecked")

FULL = pytest.mark.full
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WINDOW = {"sliding_window": 8}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE: dict[str, dict[str, Any]] = {
    "Afmoe": ROUTED | WINDOW | {"num_experts": 4, "num_shared_experts": 1, "mup_enabled": True},
    "Apertus": {},
    "Arcee": {},
    "BitNet": {},
    "Cohere": {"use_qk_norm": True},
    "Cohere2": WINDOW,
    "Cohere2Moe": WINDOW | {"num_experts": 4, "num_shared_experts": 1},
    "Cwm": WINDOW,
    "DeepseekV2": LATENT | ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "DeepseekV3": LATENT | ROUTED | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "Dots1": ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "Emu3": {},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "Exaone4": WINDOW,
    "ExaoneMoe": ROUTED | WINDOW | {"num_experts": 4, "n_group": 1, "topk_group": 1},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 1, "bias": True},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Gemma": {},
    "Gemma2": WINDOW,
    "Gemma4": WINDOW
    | {
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": tiny.VOCAB_SIZE,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "Glm": {},
    "Glm4": {},
    "Glm4Moe": ROUTED | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "Glm4MoeLite": LATENT | ROUTED | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "GptOss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "GraniteMoeShared": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeSWA": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteSWA": WINDOW,
    "HYV3": ROUTED | {"num_experts": 4, "num_local_experts": 4},
    "Helium": {"attention_bias": True},
    "HunYuanDenseV1": {},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2},
    "HyperCLOVAX": {"logits_scaling": 0.4, "attention_multiplier": 0.3},
    "Jais2": {},
    "Laguna": ROUTED | WINDOW | {"num_experts": 4},
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    "Mellum": ROUTED | WINDOW | {"num_experts": 4},
    "MiMoV2Flash": ROUTED | WINDOW | {"n_routed_experts": 4, "v_head_dim": 8},
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ministral": WINDOW,
    "Ministral3": WINDOW | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    "Mistral4": LATENT
    | ROUTED
    | {"n_routed_experts": 4, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "NanoChat": {},
    "Nemotron": {"attention_bias": True},
    "Olmo": {"clip_qkv": 1.5},
    "Olmo3": WINDOW,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Persimmon": {"num_key_value_heads": 2},
    "Phi": {"qk_layernorm": True},
    "Qwen2Moe": ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "SeedOss": {},
    "SmolLM3": {"use_sliding_window": True, "sliding_window": 8},
    "SolarOpen": ROUTED | {"n_routed_experts": 4, "num_experts": 4, "n_group": 1, "topk_group": 1},
    "Starcoder2": WINDOW,
    "StableLm": {"qk_layernorm": True, "use_qkv_bias": True},
    "VaultGemma": WINDOW,
    "Youtu": LATENT,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
SHARED = ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 16}
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
RECURRENT: dict[str, dict[str, Any]] = {
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA,
    "FalconMamba": {"state_size": 8},
    "GraniteMoeHybrid": MAMBA
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "KimiLinear": ROUTED
    | LATENT
    | {
        "num_experts": 4,
        "layer_types": DELTA["layer_types"],
        "linear_attn_config": {"head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4},
    },
    "Lfm2": CONVOLVED,
    "Lfm2Moe": ROUTED | CONVOLVED | {"num_experts": 4, "num_dense_layers": 1},
    "Lfm3": WINDOW | {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2},
    "NemotronH": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
    },
    "OlmoHybrid": DELTA,
    "Qwen3Next": DELTA | SHARED,
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": DELTA | SHARED,
}
MORE |= RECURRENT
# Networks that with their first seed hardly say more than one token: another seed.
SEEDS = {"Apertus": 5, "Cohere2Moe": 2, "HyperCLOVAX": 3, "Nemotron": 3}
# What differs from the others in attention, positions or head; the rest is in the full grid.
TELLING = (
    "Cohere2",
    "DeepseekV3",
    "FalconH1",
    "Gemma2",
    "Glm4Moe",
    "GptOss",
    "Lfm2",
    "Mamba",
    "Ministral3",
    "Mixtral",
    "Phi",
    "Qwen3Next",
)


def network(family: str, **changes: Any) -> PreTrainedModel:
    """A random network of four layers, so that every kind of layer occurs."""
    model_class = getattr(transformers, f"{family}ForCausalLM")
    sizes = {
        "vocab_size": tiny.VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": tiny.MAX_CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": tiny.EOS,
        "pad_token_id": 0,
    }
    if isinstance(getattr(model_class.config_class, "head_dim", None), property):
        del sizes["head_dim"]  # it follows from the others
    config = model_class.config_class(**(sizes | MORE.get(family, {}) | changes))
    made = model_class._from_config(config, attn_implementation="eager")
    made.eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        parameter.fill_(float(tiny.is_norm(name) and name.endswith("weight")))
    tiny.perturb(made, SEEDS.get(family, 0), 0.3)
    return made


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A network, and a model over a copy of it."""

    network: PreTrainedModel
    model: LanguageModel


PAIRS = [
    *((f, "eager") if f in TELLING else pytest.param((f, "eager"), marks=FULL) for f in MORE),
    *((f, "native") for f in MORE if FAMILIES[f"{f}ForCausalLM"].variant),
]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    family, runner = request.param
    made = network(family)
    return Pair(network=made, model=(native_model if runner == "native" else tiny.adapted)(made))


def texts(model: LanguageModel, drafter: SelfDraft | None = None, **changes: Any) -> list[Any]:
    prompts = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]
    engine = tiny.engine_over(model, drafter, **changes)
    return [list(output.token_ids) for output in engine.generate(prompts, GREEDY)]


def test_the_table_and_what_is_supported_are_the_same():
    rest = {f"{family}ForCausalLM" for family in MORE}
    assert {name for _, (name, _) in tiny.FAMILIES.items()} | rest == FAMILIES.keys()


@pytest.mark.one_in(4)
def test_text_is_that_of_transformers_whatever_is_drafted(pair):
    prompts = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]
    expected = [continued(pair.network, ids, NUM_TOKENS) for ids in prompts]
    assert min(len(set(ids)) for ids in expected) > 2
    assert texts(pair.model, k=0) == expected
    assert texts(pair.model, k=0, prefill_chunk=5, max_batch=1) == expected
    drafter = SelfDraft(pair.model.first_layers(1), pair.model.vocab_size)
    assert texts(pair.model, drafter, k=4) == expected
    tree = Tree(num_nodes=7, depth=3, width=2)
    assert texts(pair.model, drafter, k=3, tree=tree) == expected
    assert pair.model.store.num_free == 4


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.3, 1.7, 2.0, 2.5, 3.0, 3.5, 4.0],
    "long_factor": [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0],
}
RESCALED = {
    "longrope": ("Phi3", LONGROPE),
    "longrope and scales": ("Phimoe", LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}),
    "dynamic by alpha": ("HunYuanDenseV1", {"rope_type": "dynamic", "factor": 1.0, "alpha": 9.0}),
}


@pytest.mark.parametrize("kind", RESCALED)
def test_text_ends_where_the_rotation_would_be_rescaled(kind):
    """Drafts are staged past the last position, and must not rescale what is before it."""
    family, rope = RESCALED[kind]
    prompts = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS[:2]]
    limit = max(map(len, prompts)) + NUM_TOKENS
    longest: dict[str, Any] = {"max_position_embeddings": limit}
    if rope["rope_type"] == "longrope":
        rope = rope | {"original_max_position_embeddings": limit}
        # Phi-3 has a setting of this name, which comes before the one of its rotation.
        longest = {"max_position_embeddings": 4 * limit, "original_max_position_embeddings": limit}
    made = network(family, rope_parameters=dict(rope), **longest)
    expected = [continued(made, ids, NUM_TOKENS) for ids in prompts]
    model = adapt(copy.deepcopy(made), num_slots=4, max_context=limit)
    assert model.architecture.max_positions == limit
    drafter = SelfDraft(model.first_layers(2), model.vocab_size)
    engine = tiny.engine_over(model, drafter, k=4, max_context=limit)
    assert [list(output.token_ids) for output in engine.generate(prompts, GREEDY)] == expected
    if model.architecture.position_limit is not None:
        with pytest.raises(InvalidRequest, match=f"has {limit} positions and no more: past them"):
            adapt(made, num_slots=1, max_context=limit + 1)


def test_features_lead_to_the_logits(pair):
    model, ids = pair.model, tiny.tokenizer().encode(tiny.PROMPTS[0])
    context = Context(model.store, ids, None)
    rows = range(len(ids))
    batch = pack([context.span(len(ids), NO_TREE)], ids, list(rows), model.device)
    output = model.forward(replace(batch, feature_layers=(0, model.architecture.num_layers)))
    context.close(0)
    assert output.features is not None
    expected = pair.network(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-4)  # other order of sums
    embedded, last = output.features.unbind(1)
    torch.testing.assert_close(model.embed(torch.tensor(ids)), embedded)
    torch.testing.assert_close(model.head(model.final_norm(last)), output.logits)


def test_an_unknown_request_of_a_layer_to_its_attention_is_refused(monkeypatch):
    made = network("Gemma2")
    model = adapt(made, num_slots=1, max_context=tiny.MAX_CONTEXT)
    monkeypatch.setattr(attention, "NOT_ATTENDED", frozenset())
    with pytest.raises(InvalidModel, match="asks its attention for"):
        tiny.engine_over(model).generate([[1, 2]], GREEDY)
