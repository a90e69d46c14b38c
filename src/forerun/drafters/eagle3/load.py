"""Reads, writes and loads EAGLE-3 heads.

Tensors are named as speculators names them (`layers.0.*`); the raw form of EAGLE, SpecForge and
SGLang calls the layer `midlayer`. Everything is checked: a tensor too many or too few, a wrong
shape or a draft vocabulary outside the target's is an error, because other engines fail silently
there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.drafters.base import check_made_for
from forerun.drafters.eagle3.drafter import (
    AttachedModel,
    Eagle3Drafter,
    Eagle3Model,
    NativeEagle3Model,
)
from forerun.drafters.eagle3.head import (
    Eagle3Config,
    Eagle3Head,
    config_of,
    is_eagle3,
    names_layers,
    origin_of_layers,
    raw_settings,
    speculators_settings,
)
from forerun.errors import IncompatibleDraft, InvalidModel, RunnerUnavailable
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import WEIGHTS, read_object, weight_files
from forerun.models.runner.native import NativeModel
from forerun.models.stored_tensors import check_tensors, read_tensors, write_files

HeadFormat = Literal["speculators", "raw", "int8"]
ADVICE = "correct the sizes and flags in config.json, or fetch the head again"
LAYER, RAW_LAYER = "layers.0.", "midlayer."
EMBEDDING = "embed_tokens.weight"
WEIGHT, SCALE = ".weight", ".weight_scale"
# Constants some files carry along, which every implementation computes itself.
IGNORED = ("rotary_emb.inv_freq",)
# Copies of the target's own matrices, which speculators keeps for training.
OF_TARGET = ("verifier_norm.", "verifier_lm_head.")
MAX_TARGET_VOCAB = 1 << 24
"""Tokens; the largest published vocabularies have 2^18."""


def read_eagle3_head(folder: Path, *, num_target_layers: int | None = None) -> Eagle3Head:
    """Read an EAGLE-3 head in speculators' form or in the raw form, with weights in fp32."""
    settings = read_object(folder / "config.json")
    if not is_eagle3(settings):
        raise InvalidModel(f"{folder / 'config.json'} does not describe an EAGLE-3 head")
    tensors = _read_tensors(folder)
    own_embedding = EMBEDDING in tensors
    config = config_of(settings, num_target_layers=num_target_layers, own_embedding=own_embedding)
    return build_head(config, tensors, str(folder)).float()


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
    _dequantise(tensors, folder)
    return tensors


def _dequantise(tensors: dict[str, Tensor], folder: Path) -> None:
    """Replace matrices stored as int8, one scale per row, by their values in fp32."""
    for scale_name in [name for name in tensors if name.endswith(SCALE)]:
        name, scale = scale_name.removesuffix(SCALE) + WEIGHT, tensors.pop(scale_name)
        stored = tensors.get(name)
        if stored is None or stored.dtype != torch.int8 or scale.shape != (len(stored), 1):
            raise InvalidModel(f"{folder} has {scale_name} but no int8 {name} of as many rows")
        tensors[name] = stored.float() * scale.float()


def build_head(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> Eagle3Head:
    if config.target_vocab_size > MAX_TARGET_VOCAB:
        raise InvalidModel(
            f"config.json in {where} has vocab_size={config.target_vocab_size}; at most "
            f"{MAX_TARGET_VOCAB} are supported"
        )
    with torch.device("meta"):  # sizes that the tensors do not have take no memory
        expected = Eagle3Head(config).state_dict()
    maps = {name: expected[name] for name in ("d2t", "t2d")}
    check_tensors(expected, {**tensors, **maps}, where, advice=ADVICE)
    head = Eagle3Head(config, _target_ids_of(config, tensors, where))
    given = {**tensors, "d2t": head.d2t}
    found_t2d = given.get("t2d", head.t2d)
    if not torch.equal(found_t2d.bool(), head.t2d):
        raise InvalidModel(
            f"t2d in {where} marks {int(found_t2d.bool().sum())} tokens as drafted, but they are "
            f"not the {len(head.d2t)} tokens of d2t"
        )
    head.load_state_dict({**given, "t2d": head.t2d})
    return head.eval()


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
    """Write a head: first config.json, then model.safetensors.

    Args:
        form: "int8" is speculators' with matrices as int8 and one fp32 scale per row, which forerun
            alone reads; in the others all parameters keep their dtype.
    """
    settings: dict[str, Any]
    if form != "raw":
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
    if form == "int8":
        for name in [n for n, value in tensors.items() if n.endswith(WEIGHT) and value.ndim == 2]:
            matrix = tensors[name].float()
            scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            tensors[name] = (matrix / scale).round().to(torch.int8)
            tensors[name.removesuffix(WEIGHT) + SCALE] = scale
    write_files(folder, settings, WEIGHTS, tensors)


def renamed(name: str, form: HeadFormat) -> str:
    if form == "raw" and name.startswith(LAYER):
        return RAW_LAYER + name.removeprefix(LAYER)
    return name


logger = logging.getLogger("forerun.loading")


def load_eagle3(folder: Path, target: LanguageModel) -> Eagle3Drafter:
    head = read_for(folder, target)
    if not head.config.own_embedding:  # a target without one is refused before any request
        target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    if not names_layers(settings := read_object(folder / "config.json")):
        origin = origin_of_layers(settings, head.config.feature_layers)
        logger.warning("the EAGLE-3 head in %s: %s", folder, origin)
    dtype = target.dtype
    head = head.to(device=target.device, dtype=dtype).requires_grad_(False)
    return Eagle3Drafter(model_of(head, target), head.config.feature_layers, target.vocab_size)


def read_for(folder: Path, target: LanguageModel) -> Eagle3Head:
    """Read a head in fp32 and check that its sizes and layers are those of a target."""
    where = str(folder)
    head = read_eagle3_head(folder, num_target_layers=target.num_layers)
    sizes = (head.config.target_hidden_size, head.config.target_vocab_size)
    check_made_for(f"the EAGLE-3 head in {where} was", sizes, target)
    outside = [i for i in head.config.feature_layers if not 0 <= i <= target.num_layers]
    if outside:
        raise IncompatibleDraft(
            f"the EAGLE-3 head in {where} reads layer {outside[0]} of its target, this target has "
            f"{target.num_layers} layers: use a head that was trained for this target"
        )
    return head


def model_of(head: Eagle3Head, target: LanguageModel) -> AttachedModel:
    if isinstance(target, NativeModel):
        try:
            return NativeEagle3Model(head, target)
        except RunnerUnavailable as error:
            logger.info("the EAGLE-3 head runs in torch: %s", error)
    return Eagle3Model(head, target)
