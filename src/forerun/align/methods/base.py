"""What a method of drafting must be able to do to be trained, and the loss of heads on a target.

A head reads the target's hidden states and drafts several tokens per row: pass i of row t learns
token t + i + 2. The target's distribution at a place is learned by up to one row per pass. It is
computed once: rows are sorted by that place, so that a chunk of them needs the distributions of few
places.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.config import AttachedConfig
from forerun.align.objectives import (
    DenseDistribution,
    DraftHead,
    LearnedRows,
    Objective,
    TeacherRows,
    chunked_loss,
)
from forerun.align.samples import PackedBatch, Sample
from forerun.align.teachers import StateRows
from forerun.atomic_write import atomic_folder, remove_unfinished
from forerun.models.checkpoint import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """What a draft is trained for and from.

    Attributes:
        target: its tokenizer and vocabulary are the draft's.
        draft: the draft or head to begin with; or see `init`.
        init: config.json of a draft to make from nothing.
        temperature: the one the draft is deployed at; decides which acceptance is reported.
        num_speculative_tokens: K of the deployment.
    """

    target: str | ModelFiles
    draft: str | None = None
    init: Path | None = None
    seed: int = 0
    temperature: float = 1.0
    num_speculative_tokens: int = 5
    attached: AttachedConfig = field(default_factory=AttachedConfig)


class Method(ABC):
    """A method of drafting, and what is trained by it: loaded, started, and saved in this order.

    Attributes:
        layers: layers of the target whose inputs the loss reads, beside its last hidden state; None
            for a draft that reads text alone.
    """

    layers: tuple[int, ...] | None = None

    def __init__(self, config: MethodConfig) -> None:
        self.config = config
        self.target = ModelFiles.find(config.target)

    @abstractmethod
    def load(self) -> None:
        """Load what training begins with, and refuse what does not fit the target.

        This comes before the target answers prompts, which may take hours.
        """

    @abstractmethod
    def start(self, samples: Sequence[Sample]) -> None:
        """Make what is still to be made before training, given the training texts."""

    @abstractmethod
    def loss(self, objective: Objective) -> nn.Module:
        """Return the loss of a batch with its teacher rows, as `methods.draft_model.DraftLoss`."""

    def muon_matrices(self) -> Sequence[nn.Parameter]:
        """Return the matrices that learn by Muon; all other parameters learn by AdamW."""
        return ()

    @abstractmethod
    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the files that the engine loads; `weights` are the loss's, by name."""

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the folder that the engine loads."""
        remove_unfinished(folder)  # only one process writes it, under the lock of the folder
        with atomic_folder(folder) as scratch:
            self.write(weights, scratch)


HeadT = TypeVar("HeadT", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassStates:
    """Hidden states of all training passes of a head, for the rows that have a loss.

    Attributes:
        head: what turns them into logits.
        target_ids: target token of every logit, ascending; None: one per token of the target.
    """

    hidden: Sequence[Float[Tensor, "_ hidden"]]
    head: DraftHead
    target_ids: Int64[Tensor, " draft_vocab"] | None = None


def learned_passes(batch: PackedBatch, num_passes: int) -> Bool[Tensor, "passes rows width"]:
    """Return which rows have a loss in each pass: in pass i, row t learns token t + i + 2."""
    found = torch.zeros((num_passes, *batch.ids.shape), dtype=torch.bool, device=batch.ids.device)
    for number in range(num_passes):
        shift = number + 1
        if shift >= batch.ids.shape[1]:
            break
        same = batch.samples[:, shift:] == batch.samples[:, :-shift]
        found[number, :, :-shift] = batch.predicts[:, shift:] & same
    return found


class PassLoss(nn.Module):
    """The loss of all passes of a head, summed over its rows and averaged over its passes.

    Args:
        model: the head: from a batch, the target's features and the rows that learn in each pass
            to `PassStates`.
        temperature: the one the head is deployed at; decides which acceptance is reported.
        decay: weight of a pass over that of the one before it.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        temperature: float,
        num_passes: int,
        decay: float,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.temperature = temperature
        self.num_passes = num_passes
        weights = [decay**number for number in range(num_passes)]
        self.weights = [weight / sum(weights) for weight in weights]
        # Accelerate reads here which layers to shard one by one: a head is sharded as a whole.
        self._no_split_modules: list[str] = []

    def forward(
        self, batch: PackedBatch, rows: StateRows
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        learning = learned_passes(batch, self.num_passes)
        found: PassStates = self.model(batch, rows, learning)
        learned = self._sort_by_place(batch, rows, learning, found)
        loss, alpha = chunked_loss(
            learned, found.head, self.objective, temperature=self.temperature
        )
        return loss.clone(), alpha / self.num_passes

    def _sort_by_place(
        self,
        batch: PackedBatch,
        rows: StateRows,
        learning: Bool[Tensor, "passes rows width"],
        found: PassStates,
    ) -> LearnedRows:
        ranks = batch.predicts.flatten().cumsum(0) - 1  # of the learned places
        places = [
            learning[number].flatten().nonzero()[:, 0] + number + 1
            for number in range(self.num_passes)
        ]
        counts = torch.tensor([len(of_pass) for of_pass in places], device=ranks.device)
        exact = torch.promote_types(found.hidden[0].dtype, torch.float32)  # that of the losses
        weights = torch.tensor(self.weights, dtype=exact, device=ranks.device)
        weights = weights.repeat_interleave(counts)
        all_places = torch.cat(places)
        order = torch.argsort(all_places, stable=True)
        all_places = all_places[order]
        ids = batch.ids.flatten()
        return LearnedRows(
            hidden=torch.cat(list(found.hidden))[order],
            labels=self._read_labels(ids, all_places, found.target_ids),
            teacher=TeacherRowsByPosition(
                # What cannot be drafted is left out, so that a row counts as much as its
                # distribution can be learned, and alpha is the one that the vocabulary allows.
                rows if found.target_ids is None else rows.over(found.target_ids),
                ranks[all_places],
            ),
            weights=weights[order],
        )

    def _read_labels(
        self, ids: Tensor, places: Tensor, target_ids: Tensor | None
    ) -> Int64[Tensor, " rows"]:
        """Return the draft-vocabulary id of the token after each position."""
        following = ids[(places + 1).clamp(max=len(ids) - 1)]
        if target_ids is None:
            return following
        return torch.searchsorted(target_ids, following).clamp(max=len(target_ids) - 1)


@dataclass(eq=False)
class TeacherRowsByPosition:
    """Target distributions for training rows, several of which may learn the same position.

    Args:
        ranks: index of every training row's position among the learned positions, ascending.
    """

    rows: TeacherRows
    ranks: Int64[Tensor, " rows"]

    def distribution(self, rows: slice) -> DenseDistribution:
        ranks = self.ranks[rows]
        first, end = (int(ranks[0]), int(ranks[-1]) + 1) if len(ranks) else (0, 0)
        found = self.rows.distribution(slice(first, end))
        assert isinstance(found, DenseDistribution)  # heads are trained at a temperature above 0
        return DenseDistribution(target_probs=found.target_probs[ranks - first])


class HeadMethod(Method):
    """A head on the target: what is common to methods whose loss is `PassLoss`.

    Attributes:
        model: the head under training with what it uses of the target; set by `start`.
    """

    model: nn.Module

    def loss(self, objective: Objective) -> PassLoss:
        attached = self.config.attached
        return PassLoss(
            self.model,
            objective,
            temperature=self.config.temperature,
            num_passes=attached.num_passes,
            decay=attached.pass_decay,
        )


def with_weights(head: HeadT, weights: Mapping[str, Tensor]) -> HeadT:
    """Return a copy of a head in bf16, on the CPU, with the weights of its loss."""
    whole = copy.deepcopy(head).cpu().float()
    parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name.removeprefix("model.head.")].copy_(tensor)
    return whole.to(torch.bfloat16)
