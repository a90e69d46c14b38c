"""Draft models under training: loading, checks against the target, chunked loss, and saving.

The logits of a whole pass are the largest tensor of training (8,192 rows x 152k tokens are 5 GB in
fp32), and their gradient is as large again. Here the logits, loss and gradient of one chunk exist
at a time: the gradients of hidden rows and head are computed in the forward pass, and the backward
pass only scales them.

Rows may be weighed by their contribution to the expected accepted length. Of K drafted tokens
starting at row s, E_s = sum over k of a_s ... a_(s+k-1) are accepted on average, with a the
acceptance probability of a row: a position after an unlikely one is seldom reached, and the first
one decides about all that follow. The weight of row j is the sum, over the windows that contain it,
of d log E_s / d log a_j: the part of E_s that goes through j, over E_s. With -log alpha as the
objective, the weighted gradient is that of -sum log E_s. D-PACE (arXiv 2605.18810) weights by path
too, and smooths instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.align.config import AlignConfig
from forerun.align.objectives import Objective, acceptance_probability
from forerun.align.samples import PackedBatch
from forerun.align.teachers import TeacherRows
from forerun.align.workspace import write_hashes
from forerun.atomic_write import atomic_folder, remove_unfinished
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.architecture import check_trainable, read_architecture
from forerun.models.checkpoint import ModelFiles, read_object
from forerun.models.huggingface import quiet_transformers, read_weights
from forerun.models.tensor_files import writing_tensors
from forerun.models.tokenizers import check_vocabularies

CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftHead:
    """The draft's last layer, from hidden states to logits."""

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRows:
    """Hidden states, labels and teacher of the learned rows of one pass.

    Attributes:
        teacher: the target's distribution at these rows; None for objectives that need none.
        weights: of each row in the sum; None weighs all 1.
    """

    hidden: Float[Tensor, "rows hidden"]
    labels: Int64[Tensor, " rows"]
    teacher: TeacherRows | None = None
    weights: Float[Tensor, " rows"] | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossSum:
    """Loss summed over rows; the caller divides by the number of rows of all processes.

    Attributes:
        acceptance: sum of alpha under the deployed rule; None if not asked for.
    """

    loss: Float[Tensor, ""]
    acceptance: Float[Tensor, ""] | None
    num_rows: int


def chunked_loss(
    rows: LearnedRows,
    head: DraftHead,
    objective: Objective,
    *,
    temperature: float,
    with_acceptance: bool = False,
) -> LossSum:
    """Return the weighted sum of the objective over rows."""
    if rows.teacher is None and (objective.needs_teacher or with_acceptance):
        raise ValueError(f"{objective.name} and acceptance need a teacher, and there is none")
    asked = _Asked(
        rows=rows,
        objective=objective,
        temperature=temperature,
        with_acceptance=with_acceptance,
        with_gradient=torch.is_grad_enabled(),
        dtype=_product_dtype(rows.hidden),
    )
    loss, acceptance = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch has no annotations here
        rows.hidden, head.weight, head.bias, asked
    )
    return LossSum(
        loss=loss, acceptance=acceptance if with_acceptance else None, num_rows=len(rows)
    )


@torch.no_grad()
def chunked_acceptance(
    rows: LearnedRows, head: DraftHead, *, temperature: float
) -> Float32[Tensor, " rows"]:
    """Return the acceptance probability of every row at a temperature, without a gradient."""
    if rows.teacher is None:
        raise ValueError("acceptance needs a teacher, and there is none")
    dtype = _product_dtype(rows.hidden)
    found = torch.empty(len(rows), device=rows.hidden.device)
    with torch.autocast(rows.hidden.device.type, enabled=False):
        layer = _Layer(rows.hidden, head.weight, head.bias, dtype)
        for chunk in _chunks(len(rows)):
            logits = layer.logits(chunk, temperature)
            found[chunk] = acceptance_probability(
                logits, rows.teacher.distribution(chunk), temperature
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """Arguments of a chunked pass for which autograd computes no gradient."""

    rows: LearnedRows
    objective: Objective
    temperature: float
    with_acceptance: bool
    with_gradient: bool
    dtype: torch.dtype


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function whose forward also computes the gradients, which backward scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked
    ) -> tuple[Tensor, Tensor]:
        wanted = [asked.with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            layer = _Layer(hidden, weight, bias, asked.dtype)
            gradients = _Gradients(layer, wanted)
            sums = [_add_chunk(chunk, layer, asked, gradients) for chunk in _chunks(len(hidden))]
        loss, acceptance = torch.stack(sums).sum(0) if sums else hidden.new_zeros(2)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        ctx.mark_non_differentiable(acceptance)
        return loss, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None


def _add_chunk(chunk: slice, layer: _Layer, asked: _Asked, gradients: _Gradients) -> Tensor:
    """Return loss and acceptance of some rows, summed, and add their gradients."""
    rows = asked.rows
    distribution = None
    if rows.teacher is not None and (asked.objective.needs_teacher or asked.with_acceptance):
        distribution = rows.teacher.distribution(chunk)
    logits = layer.logits(chunk, asked.temperature).requires_grad_(gradients.any_wanted)
    with torch.set_grad_enabled(gradients.any_wanted):
        losses = asked.objective.losses(logits, distribution, rows.labels[chunk])
        loss = losses.sum() if rows.weights is None else losses @ rows.weights[chunk]
    if gradients.any_wanted:
        (of_logits,) = torch.autograd.grad(loss, logits)
        gradients.add(chunk, of_logits, asked.temperature)
    acceptance = loss.new_zeros(())
    if asked.with_acceptance and distribution is not None:
        alphas = acceptance_probability(logits.detach(), distribution, asked.temperature)
        acceptance = alphas.sum()
    return torch.stack([loss.detach(), acceptance])


class _Layer:
    """The output head, converted to the dtype of its matrix products."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.hidden = hidden.to(dtype)
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)

    def logits(self, chunk: slice, temperature: float) -> Tensor:
        """Return fp32 logits (fp64 for fp64 rows), divided by the temperature unless it is 0."""
        logits = F.linear(self.hidden[chunk], self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if temperature in (0, 1) else logits / temperature


class _Gradients:
    """Gradients of hidden rows, weight and bias that are needed, summed in fp32."""

    def __init__(self, layer: _Layer, wanted: Sequence[bool]) -> None:
        hidden, weight, bias = wanted
        exact = torch.promote_types(layer.weight.dtype, torch.float32)
        self._layer = layer
        self.any_wanted = any(wanted)
        self.hidden = torch.empty_like(layer.hidden) if hidden else None
        self.weight = torch.zeros_like(layer.weight, dtype=exact) if weight else None
        self.bias = layer.weight.new_zeros(len(layer.weight), dtype=exact) if bias else None

    def add(self, chunk: slice, of_logits: Tensor, temperature: float) -> None:
        if temperature not in (0, 1):
            of_logits = of_logits / temperature
        if self.bias is not None:
            self.bias += of_logits.sum(0)
        of_logits = of_logits.to(self._layer.weight.dtype)
        if self.hidden is not None:
            torch.mm(of_logits, self._layer.weight, out=self.hidden[chunk])
        if self.weight is not None:
            self.weight += of_logits.T @ self._layer.hidden[chunk]


def _chunks(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, CHUNK_ROWS):
        yield slice(first, min(first + CHUNK_ROWS, num_rows))


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


ALPHA_FLOOR = 1e-6
"""Smallest acceptance probability that is used, so that weights are defined without acceptance."""


@torch.no_grad()
def length_weights(
    acceptance: Float[Tensor, " rows"],
    samples: Int64[Tensor, " rows"],
    positions: Int64[Tensor, " rows"],
    num_speculative_tokens: int,
) -> Float[Tensor, " rows"]:
    """Return the weight of every learned row, from 1 to (K + 1) / 2.

    A window starts at every row and ends after K rows, or where its text does.
    """
    alphas = acceptance.clamp(min=ALPHA_FLOOR)
    reached = _reached(alphas, samples, positions, num_speculative_tokens)
    through = reached.flip(1).cumsum(1).flip(1)
    shares = through / through[:, :1]
    weights = torch.zeros_like(alphas)
    for offset in range(min(num_speculative_tokens, len(alphas))):
        weights[offset:] += shares[: len(alphas) - offset, offset]
    return weights


def _reached(alphas: Tensor, samples: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return the probability that all tokens up to each offset from a row are accepted."""
    columns = []
    so_far = torch.ones_like(alphas)
    for offset in range(window):
        # Rows past the last one wrap around to the first, whose position or text differs.
        same = samples.roll(-offset) == samples
        follows = positions.roll(-offset) - positions == offset
        so_far = so_far * torch.where(same & follows, alphas.roll(-offset), 0.0)
        columns.append(so_far)
    return torch.stack(columns, 1)


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
            # Weights by contribution to the expected accepted length.
            alphas = chunked_acceptance(rows, head, temperature=self.temperature)
            owners, positions = batch.samples[batch.predicts], batch.positions[batch.predicts]
            weights = length_weights(alphas, owners, positions, self.weighed_for)
            rows = replace(rows, weights=weights)
        total = chunked_loss(
            rows,
            head,
            self.objective,
            temperature=self.temperature,
            with_acceptance=teacher_rows is not None,
        )
        alpha = hidden.new_zeros(()) if total.acceptance is None else total.acceptance
        # FSDP2 attaches hooks to the outputs, which must not be views of other tensors.
        return total.loss.clone(), alpha


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
            check_vocabularies(
                ModelFiles.find(config.target).tokenizer, ModelFiles.find(config.draft).tokenizer
            )
        except IncompatibleDraft as error:
            raise IncompatibleDraft(
                f"{config.draft}: {error}, or one made from nothing (init)"
            ) from error
    model = base_model(config)
    _check_trainable(model)
    return Draft(config, model)


def base_model(config: DraftConfig) -> Any:
    target = read_object(config.target / "config.json")
    if config.draft is None:
        return _fresh_model(config, target)
    files = ModelFiles.open(config.draft)
    check_trainable(files.sizes)  # refuses what the engine could not serve, too
    model = read_weights(files, torch.float32)
    model.set_attn_implementation(ATTENTION)
    if model.config.vocab_size != target["vocab_size"]:
        # The tokens are equal, but the target's distribution has its own number of padding ids.
        model.resize_token_embeddings(target["vocab_size"], mean_resizing=False)
    return model


def _fresh_model(config: DraftConfig, target: Mapping[str, Any]) -> Any:
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
