"""Drafting with a DFlash network: one pass over a block per step, whatever K.

The keys and values of committed rows are computed from the target's features as these rows are
committed. The block always has as many rows as in training, because a row's prediction depends
on all mask rows; the first K of these are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.dflash.network import DFlashNetwork, mask_block, mask_context
from forerun.drafters.heads import Attend
from forerun.drafters.marginals import MarginalDrafter
from forerun.models.base import LanguageModel


class BlockRunner(ABC):
    """Runs the blocks of requests after the rows of their contexts, which it keeps."""

    @abstractmethod
    def begin(self, request_id: str) -> None:
        """Begin a request without rows, in place of what there is of it."""

    @abstractmethod
    def count_rows(self, request_id: str) -> int | None:
        """Return the number of context rows of a request; None where it was not begun."""

    @abstractmethod
    def append(self, features: Mapping[str, Float[Tensor, "rows layers width"]]) -> None:
        """Add the rows that these features of the target belong to, by request."""

    @abstractmethod
    def predict(
        self,
        request_ids: Sequence[str],
        embedded: Float[Tensor, "requests block width"],
        num_positions: int,
    ) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the first rows after the anchors, row by row of the block."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop the rows of a request; unknown ids are ignored."""


class ContextRows:
    """Keys and values of the committed rows of a request, with room for a block after them."""

    def __init__(self, network: DFlashNetwork) -> None:
        config, weight = network.config, network.fc.weight
        self.num_rows = 0
        self._block_size = config.block_size
        shape = (2, config.num_layers, 0, config.num_kv_heads, config.head_dim)
        self._stored = torch.empty(shape, dtype=weight.dtype, device=weight.device)

    def append(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add committed rows, [rows, kv_heads, dim] for every layer."""
        end = self.num_rows + len(layers[0][0])
        self._reserve(end + self._block_size)
        for layer, parts in enumerate(layers):
            for stored, part in zip(self._stored, parts, strict=True):
                stored[layer, self.num_rows : end] = part
        self.num_rows = end

    def extend(
        self, layer: int, keys: Tensor, values: Tensor
    ) -> Float[Tensor, "parts 1 kv_heads keys dim"]:
        """Return a layer's keys and values of all rows and of a block, which is not committed."""
        rows = self._stored[:, layer, : self.num_rows + len(keys)]
        rows[:, self.num_rows :] = torch.stack([keys, values])
        return rows.transpose(1, 2)[:, None]

    def _reserve(self, num_rows: int) -> None:
        if num_rows > self._stored.shape[2]:
            shape = [*self._stored.shape]
            shape[2] = 2 * num_rows
            grown = self._stored.new_empty(shape)
            grown[:, :, : self.num_rows] = self._stored[:, :, : self.num_rows]
            self._stored = grown


class TorchBlocks(BlockRunner):
    """Runs blocks in torch, on any device."""

    def __init__(self, network: DFlashNetwork, target: LanguageModel) -> None:
        self.network, self.target = network, target
        self._rows: dict[str, ContextRows] = {}

    def begin(self, request_id: str) -> None:
        self._rows[request_id] = ContextRows(self.network)

    def count_rows(self, request_id: str) -> int | None:
        rows = self._rows.get(request_id)
        return None if rows is None else rows.num_rows

    def append(self, features: Mapping[str, Float[Tensor, "rows layers width"]]) -> None:
        weight = self.network.fc.weight
        together = torch.cat([*features.values()]).to(weight.device, weight.dtype)
        rows, sizes = [self._rows[name] for name in features], [*map(len, features.values())]
        places = [
            torch.arange(of.num_rows, of.num_rows + size)
            for of, size in zip(rows, sizes, strict=True)
        ]
        layers = self.network.read_context(together, torch.cat(places).to(weight.device))
        keys, values = (
            [part.split(sizes) for part in parts] for parts in zip(*layers, strict=True)
        )
        for at, of_request in enumerate(rows):
            own = ([part[at] for part in parts] for parts in (keys, values))
            of_request.append([*zip(*own, strict=True)])

    def predict(
        self,
        request_ids: Sequence[str],
        embedded: Float[Tensor, "requests block width"],
        num_positions: int,
    ) -> Float[Tensor, "rows vocab"]:
        config = self.network.config
        rows = [self._rows[name] for name in request_ids]
        starts = torch.tensor([of_request.num_rows for of_request in rows])
        positions = (starts[:, None] + torch.arange(config.block_size)).to(embedded.device)
        attends: list[Attend] = [
            partial(self._attend, rows, layer) for layer in range(config.num_layers)
        ]
        embedded = embedded.to(self.network.fc.weight.dtype)
        states = self.network(embedded, positions, attends)[:, :num_positions]
        states = states.transpose(0, 1).flatten(0, 1)
        if self.network.lm_head is None:
            return self.target.head(states.to(self.target.dtype))
        logits: Tensor = self.network.lm_head(states)
        return logits

    def _attend(
        self,
        rows: Sequence[ContextRows],
        layer: int,
        queries: Float[Tensor, "requests block heads dim"],
        keys: Float[Tensor, "requests block kv_heads dim"],
        values: Float[Tensor, "requests block kv_heads dim"],
    ) -> Float[Tensor, "requests block heads dim"]:
        attended = torch.empty_like(queries)
        for at, of_request in enumerate(rows):
            query = queries[at].transpose(0, 1)[None]
            key, value = of_request.extend(layer, keys[at], values[at])
            mask = self._mask(layer, of_request.num_rows)
            output = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
            attended[at] = output[0].transpose(0, 1)
        return attended

    def _mask(self, layer: int, start: int) -> Bool[Tensor, "block keys"] | None:
        config, device = self.network.config, self.network.fc.weight.device
        context, block = mask_context(config, layer, start), mask_block(config, layer)
        if context is None and block is None:
            return None
        mask = torch.ones(config.block_size, start + config.block_size, dtype=torch.bool)
        if context is not None:
            mask[:, :start] = context
        if block is not None:
            mask[:, start:] = block
        return mask.to(device)

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)


class DFlashDrafter(MarginalDrafter):
    """Drafts chains and trees from the marginals of a DFlash network.

    Args:
        blocks: what runs the network; None: torch.
    """

    method = "dflash"

    def __init__(
        self, network: DFlashNetwork, target: LanguageModel, blocks: BlockRunner | None = None
    ) -> None:
        config = self.config = network.config
        self.blocks = TorchBlocks(network, target) if blocks is None else blocks
        self.target = target
        self.num_positions = self.max_k = config.max_tokens
        self.required_features = tuple(sorted(set(config.feature_layers)))
        columns = [self.required_features.index(layer) for layer in config.feature_layers]
        self._columns = None if columns == [*range(len(self.required_features))] else columns
        if config.own_output:
            self.target_ids = network.target_ids
        self._embedding = network.embed_tokens
        # Per request; the first row is that of the anchor.
        self._embedded = self._embed([config.mask_token_id] * config.block_size)[None]

    def _embed(self, tokens: Sequence[int]) -> Float[Tensor, "rows width"]:
        ids = torch.tensor(tokens, device=self.target.device)
        if self._embedding is None:
            return self.target.embed(ids).float()
        embedded: Tensor = self._embedding(ids).float()
        return embedded

    def is_ready(self, request: DraftRequest) -> bool:
        return self.blocks.count_rows(request.request_id) == len(request.ids) - 1

    def predict(
        self, requests: Sequence[DraftRequest], num_positions: int
    ) -> Float[Tensor, "positions requests vocab"]:
        if len(requests) > len(self._embedded):
            self._embedded = self._embedded[:1].repeat(len(requests), 1, 1)
        embedded = self._embedded[: len(requests)]
        embedded[:, 0] = self._embed([request.ids[-1] for request in requests])
        names = [request.request_id for request in requests]
        logits = self.blocks.predict(names, embedded, num_positions)
        return logits.view(num_positions, len(requests), -1)

    @torch.inference_mode()
    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Compute keys and values of committed rows from the target's features."""
        features: dict[str, Tensor] = {}
        for outcome in outcomes:
            name = outcome.request_id
            if outcome.first_row == 0:
                self.blocks.begin(name)
            if outcome.features is None:
                self.warn_of_missing(outcome)
            elif outcome.num_rows and self.blocks.count_rows(name) == outcome.first_row:
                own = outcome.features
                features[name] = own if self._columns is None else own[:, self._columns]
        if features:
            self.blocks.append(features)

    def forget(self, request_id: str) -> None:
        self.blocks.forget(request_id)
