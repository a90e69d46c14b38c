"""Loss of heads that predict several tokens from one row: pass i of row t learns token t + i + 2.

The target's distribution at a place is learned by up to one row per pass. It is computed once: rows
are sorted by that place, so that a chunk of them needs the distributions of few places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.data.sample import PackedBatch
from forerun.align.distribution import DenseDistribution
from forerun.align.objectives.chunked import DraftHead, LearnedRows, chunked_loss
from forerun.align.objectives.named import Objective
from forerun.align.teachers.base import TeacherRows
from forerun.align.teachers.features import FeatureTeacherRows

__all__ = ["PassLoss", "PassStates", "learned_passes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassStates:
    """Hidden states of all training passes of a head, for the rows that have a loss.

    Attributes:
        hidden: of every pass, the rows that have a loss in it, in row-major order.
        head: what turns them into logits.
        target_ids: target token of every logit, ascending; None: one per token of the target.
    """

    hidden: Sequence[Float[Tensor, "_ hidden"]]
    head: DraftHead
    target_ids: Int64[Tensor, " draft_vocab"] | None = None


def learned_passes(batch: PackedBatch, num_passes: int) -> Bool[Tensor, "passes rows width"]:
    """Return which rows have a loss in each pass: in pass i, row t learns token t + i + 2.

    Args:
        batch: of texts.
        num_passes: tokens that a row predicts.
    """
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
        objective: what is minimised.
        temperature: the one the head is deployed at; decides which acceptance is reported.
        num_passes: tokens that a row predicts.
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
        self, batch: PackedBatch, rows: FeatureTeacherRows
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return loss and acceptance probability, summed over the learned rows of a batch.

        Args:
            batch: on the device of the head.
            rows: the target's features and distributions.
        """
        learning = learned_passes(batch, self.num_passes)
        found: PassStates = self.model(batch, rows, learning)
        learned = self._sorted(batch, rows, learning, found)
        total = chunked_loss(
            learned,
            found.head,
            self.objective,
            temperature=self.temperature,
            with_acceptance=True,
        )
        assert total.acceptance is not None  # it was asked for
        return total.loss.clone(), total.acceptance / self.num_passes

    def _sorted(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
        found: PassStates,
    ) -> LearnedRows:
        """Return the rows of all passes, sorted by the position that they learn."""
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
            labels=self._labels(ids, all_places, found.target_ids),
            teacher=TeacherRowsByPosition(rows, ranks[all_places], found.target_ids),
            weights=weights[order],
        )

    def _labels(
        self, ids: Tensor, places: Tensor, target_ids: Tensor | None
    ) -> Int64[Tensor, " rows"]:
        """Return the draft-vocabulary id of the token after each position.

        Only objectives that read text alone use them, and heads have none of these.
        """
        following = ids[(places + 1).clamp(max=len(ids) - 1)]
        if target_ids is None:
            return following
        return torch.searchsorted(target_ids, following).clamp(max=len(target_ids) - 1)


class TeacherRowsByPosition:
    """Target distributions for training rows, several of which may learn the same position.

    Args:
        rows: target distributions at all learned positions.
        ranks: index of every training row's position among the learned positions, ascending.
        target_ids: tokens the head can draft; None: all. The rest of the probability is left out,
            so that a row counts as much as its distribution can be learned, and the acceptance
            probability is the one that the vocabulary allows.
    """

    def __init__(
        self, rows: TeacherRows, ranks: Int64[Tensor, " rows"], target_ids: Tensor | None
    ) -> None:
        self._rows = rows
        self._ranks = ranks
        self._target_ids = target_ids

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._ranks)

    def distribution(self, rows: slice) -> DenseDistribution:
        """Return the distribution of some rows over the vocabulary of the head."""
        ranks = self._ranks[rows]
        first, end = (int(ranks[0]), int(ranks[-1]) + 1) if len(ranks) else (0, 0)
        found = self._rows.distribution(slice(first, end))
        assert isinstance(found, DenseDistribution)  # heads are trained at a temperature above 0
        probs = found.target_probs
        if self._target_ids is not None:
            probs = probs[:, self._target_ids]
        return DenseDistribution(target_probs=probs[ranks - first])
