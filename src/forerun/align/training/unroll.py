"""Trains an EAGLE-3 head by unrolling its draft passes over a whole text in parallel.

Pass 0 reads the target's features. Pass i reads the output of pass i - 1 in the same row together
with the embedding of token t + i + 1, at position t + i: what the head does when it drafts the
(i + 1)-th token from row t. A row therefore sees the rows of pass 0 up to its own, and of the later
passes its own column alone, for in drafting all other rows have been computed again from the
target's features. Source: EAGLE-3 (arXiv 2503.01840), training-time test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.data.sample import PackedBatch, seen
from forerun.align.objectives.chunked import DraftHead
from forerun.align.teachers.features import FeatureTeacherRows
from forerun.align.training.passes import PassStates
from forerun.drafters.eagle3.head import Eagle3Head

__all__ = ["UnrolledEagle3", "unroll"]


class UnrolledEagle3(nn.Module):
    """An EAGLE-3 head under training with the target's frozen embedding; see `PassLoss`.

    Args:
        head: in fp32.
        embedding: of the target, as it enters the residual stream; unused where the head has one.
    """

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
        """Return the embeddings of tokens."""
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
    """Return the head's hidden states in every pass, at the rows that have a loss in it.

    Args:
        head: the head.
        embed: token ids to embeddings.
        batch: of texts.
        features: of the target, at all rows.
        learning: rows that learn in each pass.
    """
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
        active: the drafting rows.
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
        """Repeat key and value heads for grouped-query attention."""
        return part.repeat_interleave(queries.shape[-2] // part.shape[-2], dim=-2)
