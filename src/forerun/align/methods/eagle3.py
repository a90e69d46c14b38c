"""EAGLE-3 heads under training: created, unrolled over texts, loaded and saved.

A fresh head begins close to the target: the state entering the last of its layers passes through,
and the output matrix has the target's rows. Heads share the target's embedding.

A head is unrolled over a whole text in parallel. Pass 0 reads the target's features. Pass
i reads the output of pass i - 1 in the same row together with the embedding of token t + i + 1, at
position t + i: what the head does when it drafts the (i + 1)-th token from row t. A row therefore
sees the rows of pass 0 up to its own, and of the later passes its own column alone, for in drafting
all other rows have been computed again from the target's features. Source: EAGLE-3 (arXiv
2503.01840), training-time test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.config import AttachedConfig
from forerun.align.methods.base import HeadMethod, PassStates, with_weights
from forerun.align.objectives import DraftHead
from forerun.align.samples import PackedBatch, Sample, is_held_out, seen
from forerun.align.target import TargetModel, adopt_target, check_layers, embedding_table
from forerun.align.teachers import StateRows
from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head, default_feature_layers
from forerun.drafters.eagle3.load import read_eagle3_head, write_eagle3_head
from forerun.drafters.heads import HeadConfig
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import ModelFiles
from forerun.models.huggingface import NORMS, find_part, read_weights


class Eagle3Method(HeadMethod):
    """One decoder layer over features of the target, with its embedding."""

    model: UnrolledEagle3
    _known: Eagle3Head | None = None

    def load(self) -> None:
        """Read the head to begin with, if one is named, and refuse that of another target."""
        if (draft := self.config.draft) is not None:
            self._known = _read_known(ModelFiles.find(draft).folder, self.target.sizes)
        else:
            choose_layers(self.config.attached, self.target.sizes.num_layers)

    def start(self, samples: Sequence[Sample]) -> None:
        """Take the head that was loaded, or create one, in the vocabulary of the texts."""
        attached, head = self.config.attached, self._known
        target = read_parts(self.target)
        if head is None:
            head = _create_head(attached, target, samples, self.config.seed)
        elif attached.draft_vocab_size not in (None, head.config.draft_vocab_size):
            head = _replace_vocabulary(head, target, samples, attached.draft_vocab_size)
        self.layers = head.config.feature_layers
        self.model = UnrolledEagle3(head, target.embedding)

    def muon_matrices(self) -> Sequence[nn.Parameter]:
        return find_inner_matrices(self.model.head)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the head in bf16, in the form that engines with native support for it read."""
        head = with_weights(self.model.head, weights)
        write_eagle3_head(
            head,
            folder,
            target=self.target.name,
            target_architecture=self.target.architecture,
            num_speculative_tokens=self.config.num_speculative_tokens,
        )


def find_inner_matrices(head: nn.Module) -> list[nn.Parameter]:
    """Return the matrices between a head's embedding and its output matrix."""
    outer = ("lm_head.", "embed_tokens.")
    named = head.named_parameters()
    return [p for name, p in named if p.ndim > 1 and not name.startswith(outer)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetParts:
    """Parts of the target that heads use unchanged, in fp32."""

    settings: Mapping[str, Any]
    architecture: Architecture
    model: TargetModel
    embedding: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, " hidden"]
    head: Float[Tensor, "vocab hidden"]


def read_parts(files: ModelFiles) -> TargetParts:
    settings, architecture = files.settings, files.sizes
    network = read_weights(files, torch.float32)
    model = adopt_target(network)
    norm = find_part(network, *NORMS)
    return TargetParts(
        settings=settings,
        architecture=architecture,
        model=model,
        embedding=embedding_table(network).clone(),
        norm=norm.weight.detach().clone(),
        head=network.get_output_embeddings().weight.detach().clone(),
    )


def choose_layers(attached: AttachedConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input a fresh head reads; raises for those a target does not have."""
    layers = attached.feature_layers or default_feature_layers(num_layers)
    check_layers(layers, num_layers)
    return layers


def _create_head(
    attached: AttachedConfig, target: TargetParts, samples: Sequence[Sample], seed: int
) -> Eagle3Head:
    tokens = drafted_tokens(samples, target.architecture.vocab_size, attached.draft_vocab_size)
    config = Eagle3Config(
        **choose_sizes(attached, target.architecture, target.settings),
        draft_vocab_size=len(tokens),
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


def choose_sizes(
    attached: AttachedConfig, sizes: Architecture, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sizes of a fresh head except that of its vocabulary."""
    num_heads = attached.num_heads or sizes.num_heads
    own_heads = attached.num_heads is not None
    return {
        "target_hidden_size": sizes.hidden_size,
        "target_vocab_size": sizes.vocab_size,
        "feature_layers": choose_layers(attached, sizes.num_layers),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": attached.intermediate_size
        or settings.get("intermediate_size", 4 * sizes.hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": attached.num_kv_heads or (num_heads if own_heads else sizes.num_kv_heads),
        "head_dim": sizes.head_dim,
        "norm_eps": settings.get("rms_norm_eps", 1e-6),
        "max_positions": sizes.max_positions,
        "rope": read_rope(settings),
    }


def read_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's rotary settings; defaults if none of them cover whole heads."""
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope and "partial_rotary_factor" not in rope:
        return dict(rope)
    return {"rope_type": "default", "rope_theta": 10000.0}


def _read_known(folder: Path, sizes: Architecture) -> Eagle3Head:
    head = read_eagle3_head(folder, num_target_layers=sizes.num_layers)
    check_head_fits(folder, head.config, sizes)
    return head


def check_head_fits(folder: Path, config: HeadConfig, sizes: Architecture) -> None:
    """Refuse a head to begin with that was made for another target."""
    found = config.target_hidden_size, config.target_vocab_size
    if found != (sizes.hidden_size, sizes.vocab_size):
        raise IncompatibleDraft(
            f"the head in {folder} is for a target {found[0]} wide with {found[1]} tokens; this "
            f"one is {sizes.hidden_size} wide with {sizes.vocab_size}: leave --draft out to make "
            "a head for it"
        )
    check_layers(config.feature_layers, sizes.num_layers)


def _replace_vocabulary(
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


class UnrolledEagle3(nn.Module):
    """An EAGLE-3 head under training with the target's frozen embedding; see `PassLoss`."""

    def __init__(self, head: Eagle3Head, embedding: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: StateRows,
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
        return self._attend_later(queries)

    def _attend_later(
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


COVERED = 0.995
"""Share of unseen answers that a vocabulary covers if no size is given and as far as it can."""


MULTIPLE = 128
"""Chosen vocabulary sizes are multiples of this, for which matrix products are fast."""


MOST = 32_000


def drafted_tokens(
    samples: Sequence[Sample], vocab_size: int, size: int | None = None
) -> Int64[Tensor, " draft_vocab"]:
    """Return the most frequent tokens of the answers, ascending.

    Without a size there are as many as cover answers to other prompts: the tokens of one half of
    the prompts are counted on the answers to the other half. Where even all tokens of a half cover
    too little, which is so for few texts, every token that was seen is taken.
    """
    if size is not None and size > vocab_size:
        raise InvalidRequest(
            f"draft_vocab_size is {size}, but the target has {vocab_size} tokens; give at most that"
        )
    halves: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in samples:
        halves[is_held_out(sample.prompt_hash, 0.5)].append(sample)
    counts = [_count_tokens(half, vocab_size) for half in halves]
    learned, read = (one + other for one, other in zip(*counts, strict=True))
    if size is None:
        enough = _count_enough(counts[0][0], counts[1][0])
        size = min(-(-enough // MULTIPLE) * MULTIPLE, MOST, vocab_size)
    return _rank_tokens(learned, read)[:size].sort().values


def _rank_tokens(learned: Tensor, read: Tensor) -> Int64[Tensor, " vocab"]:
    """Return all tokens, those learned most often first, then those read most often."""
    by_read = read.argsort(descending=True, stable=True)
    return by_read[learned[by_read].argsort(descending=True, stable=True)]


def _count_enough(one: Int64[Tensor, " vocab"], other: Int64[Tensor, " vocab"]) -> int:
    """Return how many tokens of each half cover `COVERED` of the other; all seen ones at most."""
    pairs = ((one, other), (other, one))
    covered = sum(tested[_rank_tokens(own, own)].cumsum(0) for own, tested in pairs)
    assert isinstance(covered, Tensor)
    enough = int((covered < COVERED * covered[-1]).sum()) + 1
    known = int(torch.minimum((one > 0).sum(), (other > 0).sum()))
    return enough if enough <= known else int((one + other > 0).sum())


def _count_tokens(samples: Sequence[Sample], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return how often every token is learned, and how often it occurs in total."""
    learned = torch.zeros(vocab_size, dtype=torch.int64)
    read = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        read += torch.bincount(ids, minlength=vocab_size)
        for start, end in sample.spans:
            learned += torch.bincount(ids[start:end], minlength=vocab_size)
    return learned, read
