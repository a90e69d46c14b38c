"""The families of models, one row each: all that a new one takes beside its class in transformers.

Modules of transformers compute everything but attention, so a family of which attention is all that
it needs of us has an empty row. `tests/contract` runs every row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from forerun.errors import InvalidModel
from forerun.models.family import (
    MATRIX_PARTS,
    DecoderVariant,
    ExpertNames,
    Family,
    GGUFForm,
    States,
)

FUSED_QKV = ("self_attn.qkv_proj",)
FUSED_GATE_UP = ("mlp.gate_up_proj",)

QWEN_EXPERTS = ExpertNames(
    router="mlp.gate",
    parts=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    num_experts="num_local_experts",
    size="moe_intermediate_size",
    normalised="norm_topk_prob",
)
MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    parts=(
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    num_experts="num_local_experts",
    size="intermediate_size",
    normalised="always",
)

GEMMA = DecoderVariant(one_plus_norms=True, root_embedding=True)
GEMMA2 = DecoderVariant(
    attention_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    feed_forward_norm="post_feedforward_layernorm",
    one_plus_norms=True,
    windows="listed",
    gate="hidden_activation",
    root_embedding=True,
    query_scalar=True,
    score_cap=True,
    logit_cap=True,
)
GLM = DecoderVariant(
    parts=(MATRIX_PARTS[0], MATRIX_PARTS[1], FUSED_GATE_UP, MATRIX_PARTS[3]),
    qkv_bias="attention_bias",
    partial_rotation=True,
    interleaved=True,
)
OLMO2 = DecoderVariant(
    input_norm=None,
    attention_norm="post_attention_layernorm",
    post_norm=None,
    feed_forward_norm="post_feedforward_layernorm",
    qk_norm="whole",
)

EACH = Family(heads="each")
LATENT = Family(heads="latent")
SHORT_CONVOLUTION = ("hidden_size", "conv_L_cache")
MAMBA = ("intermediate_size", "state_size", "conv_kernel")
MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")

WINDOW: Mapping[str, str] = {"attention.sliding_window": "sliding_window"}
BY_KIND = {**WINDOW, "attention.sliding_window_pattern": "", "rope.freq_base_swa": ""}
EXPERTS: Mapping[str, str] = {"expert_used_count": "num_experts_per_tok"}
LOGIT_CAP = {"final_logit_softcapping": "final_logit_softcapping"}

_ROWS: Mapping[str, Family] = {
    **dict.fromkeys(
        # Families of which attention is all that they need.
        "Afmoe Apertus Arcee BitNet Cohere Cohere2 Cohere2Moe Dots1 Emu3 Ernie4_5_Moe ExaoneMoe "
        "FlexOlmo Glm4Moe GptOss GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 "
        "HunYuanDenseV1 HunYuanMoEV1 Jais2 Laguna Mellum MiniMaxM2 Nemotron Olmo "
        "Persimmon Phi SolarOpen StableLm Starcoder2".split(),
        Family(),
    ),
    "Bamba": Family(states=States(module="BambaMixer", kind="mamba2", sizes=MAMBA2)),
    "Cwm": Family(variant=DecoderVariant(windows="listed")),
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Ernie4_5": Family(
        model_type="ernie4_5",
        variant=DecoderVariant(interleaved=True),
        gguf=GGUFForm(architecture="ernie4_5"),
    ),
    "Exaone4": Family(
        model_type="exaone4",
        variant=replace(OLMO2, qk_norm="heads", windows="listed", unrotated="full_attention"),
        gguf=GGUFForm(
            architecture="exaone4",
            settings={**WINDOW, "attention.sliding_window_pattern": ""},
            fixed={"sliding_window": None, "sliding_window_pattern": None},
            window_period=4,
        ),
    ),
    "Falcon": Family(heads="falcon"),
    "FalconH1": Family(states=States(module="FalconH1Mixer", kind="mamba2", sizes=MAMBA2)),
    "FalconMamba": Family(
        states=States(
            module="FalconMambaMixer",
            kind="mamba",
            sizes=MAMBA,
            is_scanned_from_zero=True,
            attends=False,
        )
    ),
    "GPT2LMHeadModel": Family(heads="each", positions="table"),
    "GPTNeoX": EACH,
    "Gemma": Family(model_type="gemma", variant=GEMMA, gguf=GGUFForm(architecture="gemma")),
    "Gemma2": Family(
        model_type="gemma2",
        variant=GEMMA2,
        gguf=GGUFForm(
            architecture="gemma2",
            settings={
                **WINDOW,
                **LOGIT_CAP,
                "attn_logit_softcapping": "attn_logit_softcapping",
                "attention.sliding_window_pattern": "",
            },
            fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None},
            window_period=2,
            layers_scaled_by_hidden=46,
        ),
    ),
    "Gemma3": Family(
        model_type="gemma3_text",
        variant=replace(GEMMA2, qk_norm="heads", score_cap=False),
        vision="Gemma3ForConditionalGeneration",
        gguf=GGUFForm(
            architecture="gemma3",
            settings={**BY_KIND, **LOGIT_CAP},
            window_period=6,
            rope_by_kind=True,
            window_theta=10000.0,
            layers_scaled_by_hidden=62,
        ),
    ),
    "Gemma4": Family(model_type="gemma4_text", vision="Gemma4ForConditionalGeneration"),
    "Glm": Family(
        model_type="glm",
        variant=GLM,
        gguf=GGUFForm(architecture="chatglm", rotates_part=True),
    ),
    "Glm4": Family(
        model_type="glm4",
        variant=replace(
            GLM, attention_norm="post_self_attn_layernorm", feed_forward_norm="post_mlp_layernorm"
        ),
        gguf=GGUFForm(architecture="glm4", rotates_part=True),
    ),
    "Glm4MoeLite": LATENT,
    "Granite": Family(
        model_type="granite",
        variant=DecoderVariant(multipliers=True),
        gguf=GGUFForm(
            architecture="granite",
            settings={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            paired_rows=True,
        ),
    ),
    "GraniteMoeHybrid": Family(
        states=States(module="GraniteMoeHybridMambaLayer", kind="mamba2", sizes=MAMBA2)
    ),
    "Helium": Family(variant=DecoderVariant(qkv_bias="attention_bias", interleaved=True)),
    "HyperCLOVAX": Family(multiplies_logits=True),
    "Jamba": Family(
        states=States(
            module="JambaMambaMixer",
            kind="mamba",
            sizes=("mamba_expand", "hidden_size", "mamba_d_state", "mamba_d_conv"),
            is_scanned_from_zero=True,
        )
    ),
    "KimiLinear": Family(
        heads="latent",
        states=States(
            module="KimiLinearDeltaAttention",
            kind="kimi",
            sizes=("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
        ),
    ),
    **{
        name: Family(
            states=States(module=f"{name}ShortConv", kind="convolution", sizes=SHORT_CONVOLUTION)
        )
        for name in ("Lfm2", "Lfm2Moe", "Lfm3")
    },
    "Llama": Family(
        model_type="llama",
        variant=DecoderVariant(),
        gguf=GGUFForm(architecture="llama", paired_rows=True),
    ),
    "Llama4": Family(positions="chunked"),
    "Mamba": Family(
        states=States(
            module="MambaMixer",
            kind="mamba",
            sizes=MAMBA,
            is_scanned_from_zero=True,
            attends=False,
        )
    ),
    "Mamba2": Family(
        states=States(
            module="Mamba2Mixer",
            kind="mamba2",
            sizes=("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
            attends=False,
        )
    ),
    "MiMoV2Flash": Family(heads="doubled"),
    "Ministral": Family(variant=DecoderVariant(windows="listed")),
    "Ministral3": Family(model_type="ministral3", vision="Mistral3ForConditionalGeneration"),
    "Mistral": Family(
        model_type="mistral",
        variant=DecoderVariant(windows="all"),
        vision="Mistral3ForConditionalGeneration",
    ),
    "Mistral4": Family(
        model_type="mistral4", heads="latent", vision="Mistral3ForConditionalGeneration"
    ),
    "Mixtral": Family(
        model_type="mixtral",
        variant=DecoderVariant(windows="all", experts=MIXTRAL_EXPERTS),
        gguf=GGUFForm(
            architecture="llama",
            setting="expert_count",
            settings={"expert_count": "num_local_experts", **EXPERTS},
            fixed={"sliding_window": None},
            paired_rows=True,
        ),
    ),
    "NanoChat": Family(norms_embedding=True),
    "NemotronH": Family(
        states=States(
            module="NemotronHMamba2Mixer",
            kind="mamba2",
            sizes=(
                *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
                "conv_kernel",
            ),
        )
    ),
    "OPT": Family(heads="each", positions="table"),
    "Olmo2": Family(model_type="olmo2", variant=OLMO2, gguf=GGUFForm(architecture="olmo2")),
    "Olmo3": Family(
        model_type="olmo3",
        variant=replace(OLMO2, windows="listed"),
        gguf=GGUFForm(
            architecture="olmo2",
            setting="attention.sliding_window",
            settings=BY_KIND,
            window_period=4,
            rope_by_kind=True,
        ),
    ),
    "OlmoHybrid": Family(states=States(module="OlmoHybridGatedDeltaNet")),
    "Olmoe": Family(
        model_type="olmoe",
        variant=DecoderVariant(
            qk_norm="whole",
            experts=replace(QWEN_EXPERTS, num_experts="num_experts", size="intermediate_size"),
        ),
        gguf=GGUFForm(
            architecture="olmoe",
            settings={"expert_count": "num_experts", **EXPERTS},
            fixed={"norm_topk_prob": False},
        ),
    ),
    "Phi3": Family(
        model_type="phi3",
        variant=DecoderVariant(
            parts=(FUSED_QKV, MATRIX_PARTS[1], FUSED_GATE_UP, MATRIX_PARTS[3]),
            windows="all",
            partial_rotation=True,
        ),
        gguf=GGUFForm(
            architecture="phi3",
            settings={
                **WINDOW,
                "rope.scaling.attn_factor": "",
                "rope.scaling.original_context_length": "original_max_position_embeddings",
            },
            rotates_part=True,
            strips_after_special=True,
        ),
    ),
    "Phimoe": Family(windows="masked"),
    "Qwen2": Family(
        model_type="qwen2",
        variant=DecoderVariant(qkv_bias=True, windows="switched"),
        gguf=GGUFForm(architecture="qwen2"),
    ),
    "Qwen2Moe": Family(windows="masked"),
    "Qwen3": Family(
        model_type="qwen3",
        variant=DecoderVariant(qk_norm="heads", windows="switched"),
        gguf=GGUFForm(architecture="qwen3"),
    ),
    "Qwen3Moe": Family(
        model_type="qwen3_moe",
        variant=DecoderVariant(qk_norm="heads", windows="all", experts=QWEN_EXPERTS),
        gguf=GGUFForm(
            architecture="qwen3moe",
            settings={
                "expert_count": "num_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
                **EXPERTS,
            },
            fixed={"norm_topk_prob": True},
        ),
    ),
    "Qwen3Next": Family(states=States(module="Qwen3NextGatedDeltaNet")),
    "Qwen3_5": Family(
        model_type="qwen3_5_text",
        states=States(module="Qwen3_5GatedDeltaNet"),
        vision="Qwen3_5ForConditionalGeneration",
    ),
    "Qwen3_5Moe": Family(
        model_type="qwen3_5_moe_text",
        states=States(module="Qwen3_5MoeGatedDeltaNet"),
        vision="Qwen3_5MoeForConditionalGeneration",
    ),
    "SeedOss": Family(
        model_type="seed_oss",
        variant=DecoderVariant(qkv_bias="attention_bias"),
        gguf=GGUFForm(architecture="seed_oss", fixed={"attention_out_bias": False}),
    ),
    "SmolLM3": Family(
        model_type="smollm3",
        variant=DecoderVariant(windows="switched", unrotated="no_rope_layers"),
        windows="stated",
        gguf=GGUFForm(architecture="smollm3", paired_rows=True),
    ),
    "VaultGemma": Family(variant=replace(GEMMA2, attention_norm=None, feed_forward_norm=None)),
    "Youtu": LATENT,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        name: replace(row, name=name)
        for short, row in _ROWS.items()
        for name in (short if short.endswith("Model") else f"{short}ForCausalLM",)
    }
)
"""The rows by the class in transformers. Families without one are in `REASONS`."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "Bloom Mpt": "its attention has biases by distance (ALiBi)",
        "DeepseekV32 DeepseekV4 GlmMoeDsa HYV4": "its attention chooses keys by an index",
        "Doge": "its attention mask is computed from the values",
        "Gemma3n": "it has several residual streams",
        "Gemma4Assistant Gemma4UnifiedAssistant": "it drafts from the keys and values of its "
        "target, which no drafter here reads; for Gemma 4 use the draft suffix, self:N or a "
        "smaller Gemma 4",
        "MiMo": "transformers has no class for it; its layers are those of Qwen2: it runs, and mtp "
        "drafts, with architectures Qwen2ForCausalLM and model_type qwen2 in its config.json",
        "MiniMax RecurrentGemma Rwkv Zamba Zamba2": "transformers keeps its recurrent state in a "
        "way of its own",
        "T5 Bart MBart Pegasus Whisper": "it has an encoder",
    }
)
"""Why families of other classes are not supported."""


def find_family(name: str) -> Family:
    """Return the row of a class of transformers; raises InvalidModel where it has none."""
    if name not in FAMILIES:
        raise InvalidModel(explain_refusal(name))
    return FAMILIES[name]


def explain_refusal(name: str) -> str:
    """Say that a class is not supported, for which reason, and which has a similar name."""
    family = re.split("For|LMHead", name)[0]
    reason = next((why for names, why in REASONS.items() if family in names.split()), "")
    near = get_close_matches(name, FAMILIES, n=1, cutoff=0.7)
    nearest = f"; of similar name is {near[0]}" if near else ""
    return (
        f"{name} is not supported{reason and f': {reason}'}{nearest}. {len(FAMILIES)} model "
        "classes of transformers are (docs/models.md)"
    )


def find_text_class(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return the class of the text part of a model with a vision tower; None for others."""
    text = settings.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    rows = (row.name for row in FAMILIES.values() if (row.vision, row.model_type) == (name, kind))
    return next(rows, None)


def find_by_gguf(architecture: str, settings: Mapping[str, Any]) -> Family | None:
    """Return the family of a GGUF file; None where it is not supported."""
    rows = [r for r in FAMILIES.values() if r.gguf and r.gguf.architecture == architecture]
    for row in rows:
        if row.gguf and row.gguf.setting and settings.get(row.gguf.setting, 0) != 0:
            return row
    return next((row for row in rows if row.gguf and row.gguf.setting is None), None)
