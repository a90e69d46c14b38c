"""Draft models under training: loading, checks against the target, loss, and saving."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.align.chunked import (
    DraftHead,
    LearnedRows,
    chunked_acceptance,
    chunked_loss,
    length_weights,
)
from forerun.align.config import AlignConfig
from forerun.align.objectives import Objective
from forerun.align.samples import PackedBatch
from forerun.align.teachers.base import TeacherRows
from forerun.align.workspace import write_hashes
from forerun.atomic_write import atomic_folder, remove_unfinished
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.architecture import check_trainable, read_architecture
from forerun.models.checkpoint import read_checkpoint, read_object
from forerun.models.huggingface import quiet_transformers, read_weights
from forerun.models.load import load_tokenizer, read_config
from forerun.models.tensor_files import writing_tensors
from forerun.models.tokenizers import check_vocabularies


def _causal_rows(
    model: Any, batch: PackedBatch
) -> tuple[Float[Tensor, "learned hidden"], DraftHead]:
    hidden = model.get_decoder()(
        input_ids=batch.ids, position_ids=batch.positions, use_cache=False
    ).last_hidden_state[batch.predicts]
    output = model.get_output_embeddings()
    return hidden, DraftHead(weight=output.weight, bias=output.bias)


class DraftLoss(nn.Module):
    """Sum of the loss over packed rows, with the logits of one chunk at a time.

    The head is not called but read, inside this module's own forward pass: the root of a sharded
    module holds what its layers do not, so the head's rows are whole while they are needed. That is
    also why this class has no `get_output_embeddings`: Accelerate would shard the head by itself.

    Args:
        temperature: the one the draft is deployed at; decides which acceptance is reported.
        weighed_for: K of the deployment, to weigh rows by their share of the expected accepted
            length; None weighs all alike.
    """

    def __init__(
        self, model: Any, objective: Objective, temperature: float, weighed_for: int | None = None
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.objective = objective
        self.temperature = temperature
        self.weighed_for = weighed_for
        # Accelerate reads here which layers to shard one by one.
        self._no_split_modules = list(model._no_split_modules or ())

    def forward(
        self, batch: PackedBatch, teacher_rows: TeacherRows | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return loss and acceptance probability, summed over the learned rows of a batch."""
        hidden, head = _causal_rows(self.model, batch)
        rows = LearnedRows(hidden=hidden, labels=batch.labels, teacher=teacher_rows)
        if self.weighed_for is not None:
            rows = self._weighed(rows, head, batch, self.weighed_for)
        total = chunked_loss(
            rows,
            head,
            self.objective,
            temperature=self.temperature,
            with_acceptance=teacher_rows is not None,
        )
        alpha = hidden.new_zeros(()) if total.acceptance is None else total.acceptance
        # FSDP2 hangs its hooks on what comes out, which must be no view of something else.
        return total.loss.clone(), alpha

    def _weighed(
        self, rows: LearnedRows, head: DraftHead, batch: PackedBatch, k: int
    ) -> LearnedRows:
        """Weight the rows by their contribution to the expected accepted length."""
        alphas = chunked_acceptance(rows, head, temperature=self.temperature)
        learned = batch.predicts
        weights = length_weights(alphas, batch.samples[learned], batch.positions[learned], k)
        return replace(rows, weights=weights)


TARGET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
TOKEN_SETTINGS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
ATTENTION = "sdpa"
"""Implementation of transformers that is trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Selects the draft to train and its target.

    Attributes:
        target: folder of the target: its tokenizer and vocabulary are the draft's.
        draft: folder of the draft to begin with; or see `init`.
        init: config.json of a draft to make from nothing.
    """

    target: Path
    draft: Path | None = None
    init: Path | None = None
    seed: int = 0


@runtime_checkable
class TrainedDraft(Protocol):
    """Interface of a trained draft: a draft model, or a head on the target."""

    def loss(self, objective: Objective, config: AlignConfig) -> nn.Module:
        """Return the loss of a batch with its teacher rows, as `DraftLoss` computes it."""

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the folder that the engine loads, with hashes of its files."""


class Draft:
    """A draft model under training; see `TrainedDraft`."""

    def __init__(self, config: DraftConfig, model: Any) -> None:
        self.config = config
        self.model = model

    def loss(self, objective: Objective, config: AlignConfig) -> DraftLoss:
        k = config.evaluation.num_speculative_tokens if config.objective.length_aware else None
        return DraftLoss(self.model, objective, config.draft_temperature, k)

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a Hugging Face folder in bf16: weights, config and the target's tokenizer."""
        merged = _rebuilt(self.config, {n.removeprefix("model."): t for n, t in weights.items()})
        remove_unfinished(folder)  # only one process writes it, under the lock of the folder
        with atomic_folder(folder) as scratch:
            with quiet_transformers(), writing_tensors():
                merged.to(torch.bfloat16).save_pretrained(scratch)
            copy_tokenizer(self.config.target, scratch)
            write_hashes(scratch)


def load_draft(config: DraftConfig) -> Draft:
    """Load or create a draft, and check that it can be trained for its target."""
    if config.draft is not None:
        try:
            check_vocabularies(load_tokenizer(config.target), load_tokenizer(config.draft))
        except IncompatibleDraft as error:
            raise IncompatibleDraft(
                f"{config.draft}: {error}, or one made from nothing (init)"
            ) from error
    model = base_model(config)
    _check_trainable(model)
    return Draft(config, model)


def base_model(config: DraftConfig) -> Any:
    """Return the draft to start from, in fp32, with the width of the target's vocabulary."""
    target = read_object(config.target / "config.json")
    if config.draft is None:
        return _fresh_model(config, target)
    checkpoint = read_checkpoint(config.draft)
    check_trainable(read_config(checkpoint)[1])  # refuses what the engine could not serve, too
    model = read_weights(checkpoint, torch.float32)
    model.set_attn_implementation(ATTENTION)
    if model.config.vocab_size != target["vocab_size"]:
        # Tokens are the same, padding ids are not: the target's distribution covers the target's.
        model.resize_token_embeddings(target["vocab_size"], mean_resizing=False)
    return model


def _fresh_model(config: DraftConfig, target: Mapping[str, Any]) -> Any:
    """Create a model of a given shape with random weights and the target's vocabulary."""
    if config.init is None:
        raise InvalidModel("neither a draft to begin with nor a config.json to make one from")
    settings = read_object(config.init)
    kind = str(settings.get("model_type", ""))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InvalidModel(
            f"{config.init} names the model_type {kind!r}, which is no decoder of transformers; is "
            "it a model's config.json?"
        )
    settings |= {name: target[name] for name in TOKEN_SETTINGS if name in target}
    shape = AutoConfig.for_model(**settings)
    # Refuses what the engine could not serve.
    check_trainable(read_architecture(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], shape.to_dict()))
    shape._attn_implementation = ATTENTION
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # noqa: TID251 (transformers fills weights from it)
        untyped: Any = AutoModelForCausalLM
        return untyped.from_config(shape, dtype=torch.float32)


def _rebuilt(config: DraftConfig, weights: Mapping[str, Tensor]) -> Any:
    """Build a complete model with the trained weights.

    The model under training may be sharded, or compiled; this one is made anew.
    """
    model = base_model(config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    return model


def copy_tokenizer(target: Path, folder: Path) -> None:
    for name in TARGET_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)


PROBE_TOKENS = 8


def _check_trainable(model: Any) -> None:
    """Refuse a model that packed training does not reproduce: extra logit steps or mixed texts."""
    name = type(model).__name__
    ids = torch.arange(PROBE_TOKENS)[None] % model.config.vocab_size
    positions = torch.arange(PROBE_TOKENS)[None]
    head = model.get_output_embeddings()
    if head is None:
        raise InvalidModel(f"{name} has no head of its own and cannot be trained as a draft")
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits[0]
        packed = model.get_decoder()(
            input_ids=torch.cat([ids.flip(1), ids], 1),
            position_ids=torch.cat([positions, positions], 1),
            use_cache=False,
        ).last_hidden_state[0, PROBE_TOKENS:]
        found = F.linear(packed, head.weight, head.bias)
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise InvalidModel(
            f"{name} cannot be trained as a draft: its logits are scaled or capped after the head, "
            "or it does not keep packed texts apart"
        )
