"""Training of DFlash networks: every learned position is the anchor of a block.

All blocks of a window are learned in one pass, as they are drafted: block rows see the context rows
before their anchor and their own block, nothing else. In terms of `PassLoss`, the anchor of row t
is token t + 1, and pass i is row i + 1 of the block, which learns token t + i + 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from forerun.align.config import BLOCK_LAYERS
from forerun.align.methods.base import HeadMethod, PassStates, with_weights
from forerun.align.methods.eagle3 import (
    TargetParts,
    check_head_fits,
    choose_sizes,
    drafted_tokens,
    find_inner_matrices,
    read_parts,
)
from forerun.align.objectives import DraftHead
from forerun.align.samples import PackedBatch, Sample, seen
from forerun.align.teachers import StateRows
from forerun.drafters.dflash.load import read_dflash, write_dflash
from forerun.drafters.dflash.network import DFlashConfig, DFlashNetwork, mask_block
from forerun.drafters.heads import Attend
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import ModelFiles

CHUNK_BLOCKS = 128
"""Blocks of a window whose attention scores are computed together."""


class DFlashMethod(HeadMethod):
    """Decoder layers over a block of mask rows, with the target's embedding."""

    model: BlocksOverTarget
    _known: DFlashNetwork | None = None

    def load(self) -> None:
        """Read the network to begin with, if one is named, and refuse that of another target."""
        attached, sizes = self.config.attached, self.target.sizes
        if (draft := self.config.draft) is None:
            choose_sizes(attached, sizes, self.target.settings)  # refuses layers it does not have
            return
        folder = ModelFiles.find(draft).folder
        self._known = read_dflash(folder)
        known = self._known.config
        check_head_fits(folder, known, sizes)
        for name, wanted, found in (
            ("num_passes", attached.num_passes, known.max_tokens),
            ("draft_vocab_size", attached.draft_vocab_size, known.draft_vocab_size),
        ):
            if wanted not in (None, found):
                raise InvalidRequest(
                    f"{name} is {wanted}, but the network in {folder} has {found}: give that, or "
                    "leave --draft out to make another network"
                )

    def start(self, samples: Sequence[Sample]) -> None:
        """Take the network that was loaded, or create one, in the vocabulary of the texts."""
        target = read_parts(self.target)
        network = self._known or self._create(target, samples)
        self.layers = network.config.feature_layers
        self.model = BlocksOverTarget(network, target)

    def _create(self, target: TargetParts, samples: Sequence[Sample]) -> DFlashNetwork:
        attached, vocab_size = self.config.attached, target.architecture.vocab_size
        tokens = drafted_tokens(samples, vocab_size, attached.draft_vocab_size)
        own_output = len(tokens) < vocab_size
        config = DFlashConfig(
            **choose_sizes(attached, target.architecture, target.settings),
            draft_vocab_size=len(tokens),
            num_layers=BLOCK_LAYERS,
            block_size=attached.num_passes + 1,
            mask_token_id=choose_mask(target.embedding),
            own_output=own_output,
            windows=(None,) * BLOCK_LAYERS,
            causal=(False,) * BLOCK_LAYERS,
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.config.seed)  # noqa: TID251 (torch fills weights from it)
            network = DFlashNetwork(config, tokens)
            if network.lm_head is not None:
                network.lm_head.weight.copy_(target.head[tokens])
            network.norm.weight.copy_(target.norm)
        return network

    def muon_matrices(self) -> Sequence[nn.Parameter]:
        return find_inner_matrices(self.model.head)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the network in bf16, in speculators' form."""
        write_dflash(
            with_weights(self.model.head, weights),
            folder,
            target=self.target.name,
            target_architecture=self.target.architecture,
        )


def choose_mask(embedding: Float[Tensor, "vocab hidden"]) -> int:
    """Return the last token whose embedding is not much shorter than most.

    Vocabularies end with tokens that are hardly used, or with padding.
    """
    lengths = embedding.norm(dim=1)
    return int((lengths >= lengths.median() / 2).nonzero()[-1])


class BlocksOverTarget(nn.Module):
    """A DFlash network in training, with the target's frozen embedding and output matrix."""

    def __init__(self, head: DFlashNetwork, target: TargetParts) -> None:
        super().__init__()
        self.head = head
        embedding = target.embedding if head.embed_tokens is None else head.embed_tokens.weight
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)
        output = None if head.config.own_output else target.head.detach().float()
        self.register_buffer("output", output, persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: StateRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run the blocks of all rows that have a loss; see `PassLoss`."""
        assert isinstance(self.embedding, Tensor)
        active = learning.any(0)
        states = compute_blocks(self.head, self.embedding, batch, rows.features, active)
        output = self.output if self.head.lm_head is None else self.head.lm_head.weight
        assert isinstance(output, Tensor)
        return PassStates(
            hidden=[states[:, number][of_pass[active]] for number, of_pass in enumerate(learning)],
            head=DraftHead(weight=output),
            target_ids=self.head.target_ids if self.head.config.own_output else None,
        )


def compute_blocks(
    head: DFlashNetwork,
    embedding: Float[Tensor, "vocab hidden"],
    batch: PackedBatch,
    features: Float[Tensor, "rows width layers hidden"],
    active: Bool[Tensor, "rows width"],
) -> Float[Tensor, "active tokens hidden"]:
    """Return the states of the blocks whose anchors follow the active rows, in row-major order."""
    config = head.config
    context = head.read_context(features.to(head.fc.weight.dtype), batch.positions)
    anchors = F.pad(batch.ids, (0, 1))[:, 1:][active]
    shape = (len(anchors), config.max_tokens, -1)
    masks = embedding[config.mask_token_id].expand(shape)
    embedded = torch.cat([embedding[anchors][:, None], masks], dim=1)
    steps = torch.arange(1, config.block_size + 1, device=anchors.device)
    attends: list[Attend] = [
        partial(_attend_layer, head, layer, batch, active, parts)
        for layer, parts in enumerate(context)
    ]
    found: Tensor = head(embedded, batch.positions[active][:, None] + steps, attends)
    return found


def _attend_layer(  # noqa: PLR0913 (bound for a layer, then called as `Attend`)
    head: DFlashNetwork,
    layer: int,
    batch: PackedBatch,
    active: Bool[Tensor, "rows width"],
    context: tuple[Tensor, Tensor],
    queries: Float[Tensor, "active block heads dim"],
    keys: Float[Tensor, "active block kv_heads dim"],
    values: Float[Tensor, "active block kv_heads dim"],
) -> Float[Tensor, "active block heads dim"]:
    """Attend from all blocks to the context before their anchors and to their own rows."""
    visible = seen(batch)[:, 0]
    if (window := head.config.windows[layer]) is not None:
        rows = torch.arange(visible.shape[-1], device=visible.device)
        visible = visible & (rows[:, None] + 1 - rows < window)
    own = mask_block(head.config, layer)
    found, first = [], 0
    for row, of_row in enumerate(active):
        for places in of_row.nonzero()[:, 0].split(CHUNK_BLOCKS):
            blocks = slice(first, first + len(places))
            first += len(places)
            # Blocks of a chunk see nothing after the last place, or before the text of the first.
            low = int((places - batch.positions[row, places]).min()) if len(places) else 0
            seen_rows = slice(low, int(places[-1]) + 1 if len(places) else 0)
            parts = [part[row, seen_rows] for part in context]
            masks = visible[row, places, seen_rows], own
            found.append(_attend(queries[blocks], parts, (keys[blocks], values[blocks]), masks))
    return torch.cat(found)


def _attend(
    queries: Float[Tensor, "blocks block heads dim"],
    context: Sequence[Float[Tensor, "width kv_heads dim"]],
    own: tuple[Tensor, Tensor],
    masks: tuple[Bool[Tensor, "blocks width"], Bool[Tensor, "block block"] | None],
) -> Float[Tensor, "blocks block heads dim"]:
    """Attend from some blocks, as two products per head group with one softmax over both."""
    num_blocks, size, num_heads, dim = queries.shape
    kv_heads, width = own[0].shape[2], len(context[0])
    grouped = queries.view(num_blocks, size, kv_heads, -1, dim).permute(2, 0, 1, 3, 4)
    flat = grouped.reshape(kv_heads, -1, dim) * dim**-0.5
    blocks = flat.view(kv_heads, num_blocks, -1, dim)
    to_context = (flat @ context[0].permute(1, 2, 0)).view(kv_heads, num_blocks, -1, width)
    to_block = blocks @ own[0].permute(2, 0, 3, 1)
    to_context = to_context.masked_fill(~masks[0][None, :, None], -torch.inf)
    if masks[1] is not None:
        allowed = masks[1].repeat_interleave(num_heads // kv_heads, 0)
        to_block = to_block.masked_fill(~allowed.to(to_block.device), -torch.inf)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.cat([to_context, to_block], dim=-1)
    shares = scores.softmax(-1, dtype=dtype).to(queries.dtype)
    from_context = shares[..., :width].reshape(kv_heads, -1, width) @ context[1].transpose(0, 1)
    from_block = shares[..., width:] @ own[1].permute(2, 0, 1, 3)
    attended = (from_context.view_as(from_block) + from_block).view(grouped.shape)
    return attended.permute(1, 2, 0, 3, 4).reshape(queries.shape)
