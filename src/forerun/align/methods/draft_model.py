"""Draft models under training: loading, checks against the target, loss, and saving."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.align.methods.base import Method, MethodConfig
from forerun.align.objectives import DraftHead, LearnedRows, Objective, TeacherRows, chunked_loss
from forerun.align.samples import PackedBatch, Sample
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.architecture import check_trainable, read_architecture
from forerun.models.checkpoint import ModelFiles, read_object
from forerun.models.huggingface import quiet_transformers, read_weights
from forerun.models.stored_tensors import writing_tensors
from forerun.models.tokenizers import check_vocabularies


def _compute_rows(
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
    """

    def __init__(self, model: Any, objective: Objective, temperature: float) -> None:
        super().__init__()
        self.model: Any = model
        self.objective = objective
        self.temperature = temperature
        # Accelerate reads here which layers to shard one by one.
        self._no_split_modules = list(model._no_split_modules or ())

    def forward(
        self, batch: PackedBatch, teacher_rows: TeacherRows | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return loss and acceptance probability, summed over the learned rows of a batch."""
        hidden, head = _compute_rows(self.model, batch)
        rows = LearnedRows(hidden=hidden, labels=batch.labels, teacher=teacher_rows)
        loss, alpha = chunked_loss(rows, head, self.objective, temperature=self.temperature)
        # FSDP2 attaches hooks to the outputs, which must not be views of other tensors.
        return loss.clone(), alpha.clone()


TARGET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
TOKEN_SETTINGS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
ATTENTION = "sdpa"
"""Attention implementation of transformers used in training."""


class DraftModelMethod(Method):
    """A model of its own, trained whole.

    Attributes:
        model: the draft in transformers; set by `load`.
    """

    model: Any

    def load(self) -> None:
        """Load or create the draft, and check that it can be trained for its target."""
        config = self.config
        if self.target.folder.is_file():
            raise InvalidModel(
                f"{self.target.name} is one file, and a draft model takes its tokenizer from a "
                "folder of its target: give the folder that the file was made from, or --method "
                "eagle3"
            )
        if config.draft is not None:
            try:
                check_vocabularies(
                    self.target.tokenizer,
                    ModelFiles.find(config.draft).tokenizer,
                )
            except IncompatibleDraft as error:
                raise IncompatibleDraft(
                    f"{config.draft}: {error}, or one made from nothing (init)"
                ) from error
        self.model = base_model(config)
        _check_trainable(self.model)

    def start(self, samples: Sequence[Sample]) -> None:
        """Nothing depends on the texts."""

    def loss(self, objective: Objective) -> DraftLoss:
        return DraftLoss(self.model, objective, self.config.temperature)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write a Hugging Face folder in bf16: weights, config and the target's tokenizer."""
        # The model under training may be sharded, or compiled; this one is made anew.
        whole = base_model(self.config)
        parameters = dict(whole.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name.removeprefix("model.")].copy_(tensor)
        with quiet_transformers(), writing_tensors():
            whole.to(torch.bfloat16).save_pretrained(folder)
        target = self.target.folder
        for name in TARGET_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)


def base_model(config: MethodConfig) -> Any:
    target = ModelFiles.find(config.target).config
    if config.draft is None:
        return _make_model(config, target)
    files = ModelFiles.open(config.draft)
    check_trainable(files.sizes)  # refuses what the engine could not serve, too
    model = read_weights(files, torch.float32)
    model.set_attn_implementation(ATTENTION)
    if model.config.vocab_size != target["vocab_size"]:
        # The tokens are equal, but the target's distribution has its own number of padding ids.
        model.resize_token_embeddings(target["vocab_size"], mean_resizing=False)
    return model


def _make_model(config: MethodConfig, target: Mapping[str, Any]) -> Any:
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
