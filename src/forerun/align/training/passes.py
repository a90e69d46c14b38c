"""Loss of heads that predict several tokens from one row, and the unroll of an EAGLE-3 head.

Pass i of row t learns token t + i + 2. The target's distribution at a place is learned by up to one
row per pass. It is computed once: rows are sorted by that place, so that a chunk of them needs the
distributions of few places.

An EAGLE-3 head is unrolled over a whole text in parallel. Pass 0 reads the target's features. Pass
i reads the output of pass i - 1 in the same row together with the embedding of token t + i + 1, at
position t + i: what the head does when it drafts the (i + 1)-th token from row t. A row therefore
sees the rows of pass 0 up to its own, and of the later passes its own column alone, for in drafting
all other rows have been computed again from the target's features. Source: EAGLE-3 (arXiv
2503.01840), training-time test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.data.sample import PackedBatch, seen
from forerun.align.objectives import DenseDistribution, Objective
from forerun.align.teachers.base import TeacherRows
from forerun.align.teachers.hidden import FeatureTeacherRows
from forerun.align.training.chunked import DraftHead, LearnedRows, chunked_loss
from forerun.drafters.eagle3.head import Eagle3Head


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
        """Return loss and acceptance probability, summed over the learned rows of a batch."""
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


@dataclass(eq=False)
class TeacherRowsByPosition:
    """Target distributions for training rows, several of which may learn the same position.

    Args:
        ranks: index of every training row's position among the learned positions, ascending.
        target_ids: tokens the head can draft; None: all. The rest of the probability is left out,
            so that a row counts as much as its distribution can be learned, and the acceptance
            probability is the one that the vocabulary allows.
    """

    rows: TeacherRows
    ranks: Int64[Tensor, " rows"]
    target_ids: Tensor | None

    def __len__(self) -> int:
        return len(self.ranks)

    def distribution(self, rows: slice) -> DenseDistribution:
        ranks = self.ranks[rows]
        first, end = (int(ranks[0]), int(ranks[-1]) + 1) if len(ranks) else (0, 0)
        found = self.rows.distribution(slice(first, end))
        assert isinstance(found, DenseDistribution)  # heads are trained at a temperature above 0
        probs = found.target_probs
        if self.target_ids is not None:
            probs = probs[:, self.target_ids]
        return DenseDistribution(target_probs=probs[ranks - first])


class UnrolledEagle3(nn.Module):
    """An EAGLE-3 head under training with the target's frozen embedding; see `PassLoss`."""

    def __init__(self, head: Eagle3Head, embedding: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run all passes; see `PassLoss`."""
        outputs = unroll(self.head, self.embed, batch, rows.features, learning)
        hidden = [self.head.norm(output) for output in outputs]
        return PassStates(
            hidden=hidden,
            head=DraftHead(weight=self.head.lm_head.weight),
            target_ids=self.head.target_ids,
        )

    def embed(self, tokens: Int64[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        if self.head.embed_tokens is not None:
            embedded: Tensor = self.head.embed_tokens(tokens)
            return embedded
        assert isinstance(self.embedding, Tensor)
        return self.embedding[tokens]


def unroll(
    head: Eagle3Head,
    embed: Callable[[Tensor], Tensor],
    batch: PackedBatch,
    features: Float[Tensor, "rows width layers hidden"],
    learning: Bool[Tensor, "passes rows width"],
) -> list[Float[Tensor, "_ hidden"]]:
    """Return the head's hidden states in every pass, at the rows that have a loss in it."""
    num_passes = len(learning)
    active = learning.any(0)  # the rows that draft; the others are only seen
    attention = ColumnAttention(mask=seen(batch), active=active)
    following = F.pad(batch.ids, (0, num_passes))
    width = batch.ids.shape[1]
    dtype = head.fc.weight.dtype
    state = head.fuse(features.to(dtype)).to(dtype)  # the residual stream stays whole in autocast
    tokens = following[:, 1 : width + 1]
    output = head(embed(tokens), state, batch.positions, attention)[active]
    outputs = [output[learning[0][active]]]
    positions = batch.positions[active]
    for number in range(1, num_passes):
        tokens = following[:, number + 1 : width + number + 1][active]
        output = head(embed(tokens), head.fed_back(output), positions + number, attention)
        outputs.append(output[learning[number][active]])
    return outputs


@dataclass(slots=True, kw_only=True, eq=False)
class ColumnAttention:
    """Attention of the unroll: causal over pass 0, then over the same row in later passes.

    The first call is pass 0, with all rows of a batch [rows, width, heads, dim]; later calls have
    the drafting rows alone [active, heads, dim].

    Attributes:
        mask: what a row sees of pass 0.
    """

    mask: Bool[Tensor, "rows 1 width width"]
    active: Bool[Tensor, "rows width"]
    context: tuple[Tensor, Tensor] | None = None
    columns: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output; see `forerun.drafters.eagle3.head.Attend`."""
        if self.context is None:
            self.context = keys, values
            return F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                self._spread(keys, queries).transpose(1, 2),
                self._spread(values, queries).transpose(1, 2),
                attn_mask=self.mask,
            ).transpose(1, 2)
        self.columns.append((self._spread(keys, queries), self._spread(values, queries)))
        return self._later(queries)

    def _later(
        self, queries: Float[Tensor, "active heads dim"]
    ) -> Float[Tensor, "active heads dim"]:
        assert self.context is not None
        keys, values = (self._spread(part, queries).transpose(1, 2) for part in self.context)
        scale = queries.shape[-1] ** -0.5
        # The rows of a batch side by side again, for one product with the keys of their texts.
        laid_out = queries.new_zeros(*self.active.shape, *queries.shape[1:])
        laid_out[self.active] = queries
        scores = laid_out.transpose(1, 2) @ keys.transpose(2, 3) * scale
        scores = scores.masked_fill(~self.mask, -torch.inf).transpose(1, 2)[self.active]
        own = [(queries * key).sum(-1, keepdim=True) * scale for key, _ in self.columns]
        exact = torch.promote_types(queries.dtype, torch.float32)
        shares = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=exact).to(queries.dtype)
        width = keys.shape[2]
        placed = queries.new_zeros(*self.active.shape, queries.shape[1], width)
        placed[self.active] = shares[..., :width]
        attended = (placed.transpose(1, 2) @ values).transpose(1, 2)[self.active]
        for number, (_, value) in enumerate(self.columns):
            attended = attended + shares[..., width + number, None] * value
        return attended

    @staticmethod
    def _spread(part: Tensor, queries: Tensor) -> Tensor:
        return part.repeat_interleave(queries.shape[-2] // part.shape[-2], dim=-2)
