"""Reading and writing of EAGLE-3 heads in speculators' form and in the raw form.

Tensors are named as speculators names them (`layers.0.*`); the raw form of EAGLE, SpecForge and
SGLang calls the layer `midlayer`. Everything is checked: a tensor too many or too few, a wrong
shape or a draft vocabulary outside the target's is an error, because other engines fail silently
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.drafters.eagle3.formats import (
    Eagle3Config,
    config_of,
    is_eagle3,
    raw_settings,
    speculators_settings,
)
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.errors import InvalidModel
from forerun.models.checkpoint import WEIGHTS, read_object, weight_files
from forerun.models.tensor_files import check_tensors, read_tensors, write_files

HeadFormat = Literal["speculators", "raw"]
ADVICE = "correct the sizes and flags in config.json, or fetch the head again"
LAYER, RAW_LAYER = "layers.0.", "midlayer."
EMBEDDING = "embed_tokens.weight"
# Constants some files carry along, which every implementation computes itself.
IGNORED = ("rotary_emb.inv_freq",)
# Copies of the target's own matrices, which speculators keeps for training.
OF_TARGET = ("verifier_norm.", "verifier_lm_head.")
MAX_TARGET_VOCAB = 1 << 24
"""Tokens; the largest published vocabularies have 2^18."""


def read_eagle3_head(folder: Path, *, num_target_layers: int | None = None) -> Eagle3Head:
    """Read an EAGLE-3 head in speculators' form or in the raw form, with weights in fp32."""
    config, tensors = read_parts(folder, num_target_layers=num_target_layers)
    return build_head(config, tensors, str(folder)).float()


def read_parts(
    folder: Path, *, num_target_layers: int | None = None
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Read configuration and tensors of a head, without a check that they fit each other."""
    settings = read_object(folder / "config.json")
    if not is_eagle3(settings):
        raise InvalidModel(f"{folder / 'config.json'} does not describe an EAGLE-3 head")
    tensors = _read_tensors(folder)
    own_embedding = EMBEDDING in tensors
    config = config_of(settings, num_target_layers=num_target_layers, own_embedding=own_embedding)
    return config, tensors


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    stored = [(path, *item) for path in weight_files(folder) for item in read_tensors(path).items()]
    for path, name, tensor in stored:
        own = name.removeprefix("model.")
        if name.endswith(IGNORED) or own.startswith(OF_TARGET):
            continue
        if own.startswith(RAW_LAYER):
            own = LAYER + own.removeprefix(RAW_LAYER)
        if own in tensors:
            raise InvalidModel(f"{path} holds two tensors that stand for {own}")
        tensors[own] = tensor
    return tensors


def build_head(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> Eagle3Head:
    _check_sizes(config, tensors, where)
    target_ids = _target_ids_of(config, tensors, where)
    head = Eagle3Head(config, target_ids)
    given = {**tensors, "d2t": head.d2t}
    found_t2d = given.setdefault("t2d", head.t2d)
    check_tensors(head.state_dict(), given, where, advice=ADVICE)
    if not torch.equal(found_t2d.bool(), head.t2d):
        raise InvalidModel(
            f"t2d in {where} marks {int(found_t2d.bool().sum())} tokens as drafted, but they are "
            f"not the {len(head.d2t)} tokens of d2t"
        )
    head.load_state_dict({**given, "t2d": head.t2d})
    return head.eval()


def _check_sizes(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse sizes of config.json that its tensors do not have, before memory is taken for them."""
    if "fc.bias" in tensors:
        raise InvalidModel(f"{where} has fc.bias; an EAGLE-3 head with a bias is not supported")
    if config.target_vocab_size > MAX_TARGET_VOCAB:
        raise InvalidModel(
            f"config.json in {where} has vocab_size={config.target_vocab_size}; at most "
            f"{MAX_TARGET_VOCAB} are supported"
        )
    width, dim = config.hidden_size, config.head_dim
    attention, num_states = LAYER + "self_attn.", len(config.feature_layers)
    shapes = {
        "fc.weight": (width, num_states * config.target_hidden_size),
        attention + "q_proj.weight": (config.num_heads * dim, 2 * width),
        attention + "k_proj.weight": (config.num_kv_heads * dim, 2 * width),
        LAYER + "mlp.gate_proj.weight": (config.intermediate_size, width),
        "lm_head.weight": (config.draft_vocab_size, width),
    }
    if config.own_embedding:
        shapes[EMBEDDING] = (config.target_vocab_size, width)
    for name, shape in shapes.items():
        given = tuple(tensors[name].shape) if name in tensors else None
        if given not in (None, shape):
            raise InvalidModel(
                f"{name} in {where} has the shape {given}; it must have {shape}: {ADVICE}"
            )
        if given is None:
            raise InvalidModel(f"{where} lacks {name}: {ADVICE}")


def _target_ids_of(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> Tensor:
    """Return the target token id of every draft token."""
    num_draft, num_target = config.draft_vocab_size, config.target_vocab_size
    d2t = tensors.get("d2t")
    if d2t is None:
        if num_draft == num_target:
            return torch.arange(num_target)
        raise InvalidModel(
            f"{where} drafts {num_draft} of {num_target} tokens but has no d2t that names them"
        )
    if d2t.shape != (num_draft,) or d2t.is_floating_point():
        raise InvalidModel(
            f"d2t in {where} is {d2t.dtype} of shape {tuple(d2t.shape)}; it must hold {num_draft} "
            "integers"
        )
    target_ids = d2t.long() + torch.arange(num_draft)
    outside = (target_ids < 0) | (target_ids >= num_target)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise InvalidModel(
            f"d2t in {where} maps draft token {first} to {int(target_ids[first])}, outside the "
            f"target's {num_target} tokens (d2t holds offsets: target id minus draft id)"
        )
    if len(set(target_ids.tolist())) < num_draft:
        raise InvalidModel(
            f"d2t in {where} maps two draft tokens to one target token (d2t holds offsets: target "
            "id minus draft id)"
        )
    return target_ids


def write_eagle3_head(
    head: Eagle3Head,
    folder: Path,
    *,
    form: HeadFormat = "speculators",
    target: str,
    target_architecture: str = "LlamaForCausalLM",
    num_speculative_tokens: int = 5,
) -> None:
    """Write a head in its own dtype: first config.json, then model.safetensors."""
    settings: dict[str, Any]
    if form == "speculators":
        settings = speculators_settings(
            head.config,
            target=target,
            target_architecture=target_architecture,
            num_speculative_tokens=num_speculative_tokens,
        )
    else:
        settings = raw_settings(head.config)
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    settings |= {"dtype": dtype, "torch_dtype": dtype}
    tensors = {renamed(name, form): value for name, value in head.state_dict().items()}
    write_files(folder, settings, WEIGHTS, tensors)


def renamed(name: str, form: HeadFormat) -> str:
    if form == "raw" and name.startswith(LAYER):
        return RAW_LAYER + name.removeprefix(LAYER)
    return name
