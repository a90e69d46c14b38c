"""Random documented settings of every family: refused clearly, or text and logits of transformers.

`FORERUN_DRAWS` is the number of draws (each of one family); `FORERUN_FIRST_DRAW` where they begin.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import transformers
from tests import tiny
from tests.contract.test_families import continued
from tests.contract.test_more_families import MORE, NUM_TOKENS, YARN, network, texts
from tests.natives import native_model

from forerun.errors import InvalidModel
from forerun.models.architecture import read_architecture
from forerun.models.base import LanguageModel
from forerun.models.decoder import unsupported

pytestmark = pytest.mark.usefixtures("unchecked")

FIRST = int(os.environ.get("FORERUN_FIRST_DRAW", "0"))
DRAWS = range(FIRST, FIRST + int(os.environ.get("FORERUN_DRAWS", "40")))
FAMILIES = sorted({*MORE, "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Olmo2", "Phi3"})

THETA = {"rope_theta": 10000.0}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"} | THETA,
    {"rope_type": "default", "partial_rotary_factor": 0.5} | THETA,
    {"rope_type": "linear", "factor": 2.0} | THETA,
    {"rope_type": "llama3", "original_max_position_embeddings": 16} | LLAMA3 | THETA,
    YARN,
    YARN | {"truncate": False, "mscale": 1.2, "mscale_all_dim": 0.8},
)
KINDS = ("full_attention", "sliding_attention")
VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, True),
    "attn_logit_softcapping": (None, 5.0),
    "final_logit_softcapping": (None, 5.0),
    "head_dim": (16, 32),
    "mlp_bias": (False, True),
    "norm_topk_prob": (False, True),
    "num_experts_per_tok": (1, 3),
    "num_key_value_heads": (1, 2),
    "sliding_window": (2, 5, 8, None),  # at 1, transformers' own cache keeps every key
    "tie_word_embeddings": (False, True),
    "use_bias": (False, True),
    "use_qk_norm": (False, True),
    "use_sliding_window": (False, True),
}


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a family and the settings that differ from those of its table row."""
    random_ = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    known = vars(getattr(transformers, f"{family}ForCausalLM").config_class())
    settings = {
        name: random_.choice(values)
        for name, values in VALUES.items()
        if name in known and random_.random() < 0.5
    }
    nested = any(isinstance(part, dict) for part in (known.get("rope_parameters") or {}).values())
    if known.get("rope_parameters") and not nested and random_.random() < 0.5:
        settings["rope_parameters"] = dict(random_.choice(ROPES))
    if set(known.get("layer_types") or ["other"]) <= {*KINDS} and random_.random() < 0.5:
        settings["layer_types"] = [random_.choice(KINDS) for _ in range(4)]
    return family, settings


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", DRAWS)
def test_a_drawn_configuration_is_refused_or_equal(seed):
    family, settings = drawn(seed)
    try:
        made = network(family, **settings)
        prompts = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]
        expected = [continued(made, ids, NUM_TOKENS) for ids in prompts]
        scores = made(torch.tensor(prompts[:1])).logits[0]
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # transformers fails
        pytest.skip(f"transformers: {family} {settings}: {error!r:.200}")
    given = made.config.to_dict()
    try:
        architecture = read_architecture(type(made).__name__, given)
    except InvalidModel:
        return
    models: list[LanguageModel] = [tiny.adapted(made)]
    if unsupported(architecture, given) is None:
        models.append(native_model(made))
    for model in models:
        torch.testing.assert_close(tiny.logits_of(model, prompts[0]), scores, rtol=0, atol=2e-4)
        assert texts(model, k=0) == expected, (family, settings)
