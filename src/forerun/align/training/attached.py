"""Attached heads under training: how they are created, loaded and saved.

A fresh EAGLE-3 head begins close to the target: the state entering the last of its layers passes
through, and the output matrix has the target's rows. Heads share the target's embedding. Of Medusa
heads (Medusa-1), head k of row t learns token t + k + 2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.config import AlignConfig, AttachedConfig
from forerun.align.data.sample import PackedBatch, Sample, drafted_tokens
from forerun.align.objectives import Objective
from forerun.align.teachers.base import one_per_row
from forerun.align.teachers.hidden import FeatureTeacherRows
from forerun.align.teachers.target import (
    TargetModel,
    adopt_target,
    check_layers,
    embedding_table,
)
from forerun.align.training.chunked import DraftHead
from forerun.align.training.passes import PassLoss, PassStates, UnrolledEagle3
from forerun.align.workspace import write_hashes
from forerun.atomic_write import atomic_folder, remove_unfinished
from forerun.drafters.eagle3.checkpoint import read_eagle3_head, write_eagle3_head
from forerun.drafters.eagle3.formats import Eagle3Config, default_feature_layers
from forerun.drafters.eagle3.golden import write_golden
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.medusa_head import MedusaConfig, MedusaHeads, write_medusa
from forerun.errors import IncompatibleDraft
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import read_checkpoint
from forerun.models.huggingface import MODULE_NAMES, read_weights
from forerun.models.load import model_folder, read_config

LEAST_GOLDEN, MOST_GOLDEN = 8, 12
"""Tokens of the text of golden rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetParts:
    """Parts of the target that heads use unchanged, in fp32.

    Attributes:
        embedding: of every token, as it enters the residual stream.
    """

    settings: Mapping[str, Any]
    architecture: Architecture
    model: TargetModel
    embedding: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, " hidden"]
    head: Float[Tensor, "vocab hidden"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenText:
    """A text with the target's features, from which golden rows are computed; see `golden`."""

    tokens: Int64[Tensor, " tokens"]
    features: Float[Tensor, "tokens layers hidden"]


@dataclass(eq=False)
class AttachedDraft:
    """A head under training; see `TrainedDraft`."""

    config: AlignConfig
    model: UnrolledEagle3 | MedusaOverTarget
    feature_layers: tuple[int, ...]
    golden: GoldenText | None = None

    def loss(self, objective: Objective, config: AlignConfig) -> PassLoss:
        return PassLoss(
            self.model,
            objective,
            temperature=config.draft_temperature,
            num_passes=config.attached.num_passes,
            decay=config.attached.pass_decay,
        )

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the head in bf16, in the form that engines with native support for it read."""
        head = copy.deepcopy(self.model.head).cpu().float()
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name.removeprefix("model.head.")].copy_(tensor)
        remove_unfinished(folder)  # only one process writes it, under the lock of the folder
        with atomic_folder(folder) as scratch:
            self._write(head.to(torch.bfloat16), scratch)
            write_hashes(scratch)

    def _write(self, head: Eagle3Head | MedusaHeads, folder: Path) -> None:
        if isinstance(head, MedusaHeads):
            write_medusa(head, folder, target=self.config.target)
            return
        target = model_folder(self.config.target)
        write_eagle3_head(
            head,
            folder,
            target=self.config.target,
            target_architecture=read_checkpoint(target).architecture,
            num_speculative_tokens=self.config.evaluation.num_speculative_tokens,
        )
        if self.golden is not None and isinstance(self.model, UnrolledEagle3):
            write_golden(
                head,
                folder,
                tokens=self.golden.tokens,
                features=self.golden.features,
                embed=self.model.embed,
            )


def load_attached(config: AlignConfig, samples: Sequence[Sample]) -> AttachedDraft:
    """Load the head to start from, or create one for the training texts."""
    target = read_parts(model_folder(config.target))
    if config.method == "medusa":
        return AttachedDraft(config, _fresh_medusa(config.attached, target), ())
    if config.draft is None:
        seed = config.training.training_seed
        head = _fresh_eagle3(config.attached, target, samples, seed)
    else:
        head = _known_eagle3(model_folder(config.draft), target)
        if config.attached.draft_vocab_size not in (None, head.config.draft_vocab_size):
            head = _with_vocabulary(head, target, samples, config.attached.draft_vocab_size)
    layers = head.config.feature_layers
    model = UnrolledEagle3(head, target.embedding)
    return AttachedDraft(config, model, layers, _golden_text(target.model, layers, samples))


def _golden_text(
    target: TargetModel, layers: tuple[int, ...], samples: Sequence[Sample]
) -> GoldenText | None:
    """Return the beginning of the first text that is long enough, with the target's features."""
    ids = next((s.token_ids for s in samples if len(s.token_ids) >= LEAST_GOLDEN), ())
    if not ids:
        return None
    text = Sample(prompt_hash="", token_ids=ids[:MOST_GOLDEN], spans=((1, len(ids[:MOST_GOLDEN])),))
    states = target.layer_states(one_per_row([text], [0]), layers)[0, :, :-1]
    return GoldenText(tokens=torch.tensor(text.token_ids), features=states)


def read_parts(folder: Path) -> TargetParts:
    checkpoint = read_checkpoint(folder)
    settings, architecture = read_config(checkpoint)
    network = read_weights(checkpoint, torch.float32)
    model = adopt_target(network)
    norm = network.get_submodule(MODULE_NAMES[architecture.name].norm)
    return TargetParts(
        settings=settings,
        architecture=architecture,
        model=model,
        embedding=embedding_table(network).clone(),
        norm=norm.weight.detach().clone(),
        head=network.get_output_embeddings().weight.detach().clone(),
    )


def feature_layers_of(attached: AttachedConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are the features of a new head."""
    layers = attached.feature_layers or default_feature_layers(num_layers)
    check_layers(layers, num_layers)
    return layers


def _fresh_eagle3(
    attached: AttachedConfig, target: TargetParts, samples: Sequence[Sample], seed: int
) -> Eagle3Head:
    sizes, settings = target.architecture, target.settings
    tokens = drafted_tokens(samples, sizes.vocab_size, attached.draft_vocab_size)
    num_heads = attached.num_heads or sizes.num_heads
    own_heads = attached.num_heads is not None
    config = Eagle3Config(
        target_hidden_size=sizes.hidden_size,
        target_vocab_size=sizes.vocab_size,
        feature_layers=feature_layers_of(attached, sizes.num_layers),
        draft_vocab_size=len(tokens),
        hidden_size=sizes.hidden_size,
        intermediate_size=attached.intermediate_size
        or settings.get("intermediate_size", 4 * sizes.hidden_size),
        num_heads=num_heads,
        num_kv_heads=attached.num_kv_heads or (num_heads if own_heads else sizes.num_kv_heads),
        head_dim=sizes.head_dim,
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        max_positions=sizes.max_positions,
        rope=rope_of(settings),
        norm_before_residual=attached.norm_before_residual,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)  # noqa: TID251 (torch fills weights from it)
        head = Eagle3Head(config, tokens)
        head.fc.weight.normal_(0, 0.1 * config.target_hidden_size**-0.5)
        head.fc.weight[:, -config.target_hidden_size :] += torch.eye(config.hidden_size)
        head.lm_head.weight.copy_(target.head[tokens])
        head.norm.weight.copy_(target.norm)
    return head


def rope_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's rotary settings; defaults if none of them cover whole heads."""
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope and "partial_rotary_factor" not in rope:
        return dict(rope)
    return {"rope_type": "default", "rope_theta": 10000.0}


def _known_eagle3(folder: Path, target: TargetParts) -> Eagle3Head:
    """Read a trained EAGLE-3 head to continue training."""
    sizes = target.architecture
    head = read_eagle3_head(folder, num_target_layers=sizes.num_layers)
    found = head.config.target_hidden_size, head.config.target_vocab_size
    if found != (sizes.hidden_size, sizes.vocab_size):
        raise IncompatibleDraft(
            f"the head in {folder} is for a target {found[0]} wide with {found[1]} tokens; this "
            f"one is {sizes.hidden_size} wide with {sizes.vocab_size}: leave --draft out to make "
            "a head for it"
        )
    check_layers(head.config.feature_layers, sizes.num_layers)
    return head


def _with_vocabulary(
    head: Eagle3Head, target: TargetParts, samples: Sequence[Sample], size: int | None
) -> Eagle3Head:
    """Return a head with a new vocabulary; tokens new to it begin with the target's row."""
    tokens = drafted_tokens(samples, target.architecture.vocab_size, size)
    found = Eagle3Head(replace(head.config, draft_vocab_size=len(tokens)), tokens)
    rows = target.head.clone()
    rows[head.target_ids] = head.lm_head.weight.detach()
    maps = {"d2t": found.d2t, "t2d": found.t2d}
    found.load_state_dict({**head.state_dict(), "lm_head.weight": rows[tokens], **maps})
    return found


def _fresh_medusa(attached: AttachedConfig, target: TargetParts) -> MedusaOverTarget:
    """Create Medusa heads in fp32 over the target's output matrix."""
    config = MedusaConfig(
        hidden_size=target.architecture.hidden_size,
        vocab_size=target.architecture.vocab_size,
        num_heads=attached.num_passes,
        num_blocks=attached.num_blocks,
    )
    return MedusaOverTarget(MedusaHeads(config), target.head)


class MedusaOverTarget(nn.Module):
    """Medusa heads under training, with the target's frozen output matrix."""

    def __init__(self, head: MedusaHeads, output: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("output", output.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run all Medusa heads over the rows that have a loss; see `PassLoss`."""
        active = learning.any(0)
        hidden = rows.last.to(torch.float32)[active]
        states = self.head.states(hidden)
        assert isinstance(self.output, Tensor)
        return PassStates(
            hidden=[
                state[of_pass[active]] for state, of_pass in zip(states, learning, strict=True)
            ],
            head=DraftHead(weight=self.output),
        )
