"""Every implementation of LanguageModel, each with what it must return, worked out elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from tests import tiny
from tests.natives import native_model
from tests.recorders import Again, Traced, torch_model
from tests.tabular import TabularModel, tabular_features
from torch import Tensor
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
)

from forerun.models.base import LanguageModel
from forerun.models.huggingface import adapt

VOCAB_SIZE = 61
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with 4 slots of 300 tokens, and the logits and features of every token of a text."""

    model: LanguageModel
    expected: Callable[[Sequence[int]], Tensor]
    features: Callable[[Sequence[int]], Tensor]


def llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_key_value_heads": 2} | changes)))


def mistral() -> PreTrainedModel:
    config = MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=None)
    return MistralForCausalLM(config)


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=4))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16))


NETWORKS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-rope-llama3": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": lambda: llama(rope_parameters=LINEAR_ROPE),
    "llama-rope-yarn": lambda: llama(rope_parameters=YARN_ROPE),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
# What the graphs runner does not carry.
SPECIAL = tuple(family for family in tiny.FAMILIES if family not in tiny.LEAN)


RUNNERS: dict[str, Callable[[PreTrainedModel], LanguageModel]] = {
    "eager": lambda network: adapt(copy.deepcopy(network), num_slots=4, max_context=300),
    "torch": lambda network: torch_model(network, None, max_context=300),
    "rectangles": lambda network: torch_model(network, Again(), max_context=300),
    "traced": lambda network: torch_model(network, Traced(), max_context=300),
    "native": lambda network: native_model(network, max_context=300),
    "native-2": lambda network: native_model(network, num_threads=2, max_context=300),
}


def network_case(name: str, runner: str) -> Case:
    network = random_network(name)
    model = RUNNERS[runner](network)

    def expected(ids: Sequence[int]) -> Tensor:
        return network(torch.tensor([list(ids)])).logits[0]

    def features(ids: Sequence[int]) -> Tensor:
        return hidden_states(network, ids)

    return Case(model=model, expected=expected, features=features)


def hidden_states(network: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """What enters every layer, as transformers reports it in fp64, and what leaves the last one.

    Two results in fp32 differ by the rounding of both.
    """
    leaving = []
    network = copy.deepcopy(network).double()
    network.set_experts_implementation("eager")  # others have no product of matrices in fp64
    names = {"transformer.h", "gpt_neox.layers", "model.decoder.layers", "model.layers"}
    (layers,) = (module for name, module in network.named_modules() if name in names)
    hook = layers[-1].register_forward_hook(lambda _, __, output: leaving.append(output))
    output = network(torch.tensor([list(ids)]), output_hidden_states=True)
    hook.remove()
    last = leaving[0][0] if isinstance(leaving[0], tuple) else leaving[0]
    found = [*[states[0] for states in output.hidden_states[:-1]], last[0]]
    return torch.stack(found, dim=1).float()


def random_network(name: str) -> PreTrainedModel:
    if name in SPECIAL:
        # With larger weights transformers' own fp32 is further from fp64 than the tests allow.
        scale = 0.15 if name == "gemma3" else 0.2
        return tiny.network(name, scale=scale, vocab_size=VOCAB_SIZE, max_context=512)
    network = NETWORKS[name]().eval().requires_grad_(False)
    # Biases start at 0 and norms at 1, which would hide their being forgotten.
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.add_(torch.empty_like(parameter).normal_(0, 0.12, generator=generator))
    return network


def tabular_case(order: int) -> Case:
    model = TabularModel.from_seed(
        1, vocab_size=VOCAB_SIZE, order=order, num_slots=4, max_context=300
    )

    def expected(ids: Sequence[int]) -> Tensor:
        laws = [model.probs(ids[: end + 1]) for end in range(len(ids))]
        return torch.stack(laws).log().float()

    def features(ids: Sequence[int]) -> Tensor:
        rows = [ids[: end + 1] for end in range(len(ids))]
        layers = range(model.num_layers + 1)
        return torch.tensor([[tabular_features(row, layer) for layer in layers] for row in rows])

    return Case(model=model, expected=expected, features=features)


FULL = pytest.mark.full


def belongs_to_full(name: str, runner: str) -> bool:
    """Rotations and biases are ours in the native kernels; elsewhere two networks stand for all."""
    return runner != "native" and name not in ("llama", "qwen3")


# Tracing is slow, and sees no difference between networks of the same operations.
CASES = [
    *(
        pytest.param((name, runner), marks=FULL if belongs_to_full(name, runner) else ())
        for runner in RUNNERS
        for name in NETWORKS
        if runner != "traced"
    ),
    *(
        pytest.param((name, "eager"), marks=FULL if index % 2 else ())
        for index, name in enumerate(SPECIAL)
    ),
    *((name, "native") for name in tiny.NATIVE),
    *(
        pytest.param((name, "traced"), marks=FULL, id=f"{name}-traced")
        for name in ("llama", "qwen2")
    ),
    ("qwen3", "traced"),
    ("tabular", "1"),
    ("tabular", "2"),
]


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, kind = request.param
    yield tabular_case(int(kind)) if name == "tabular" else network_case(name, kind)
