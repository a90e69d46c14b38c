"""Drafting with a DFlash network: one pass over a block per step, whatever K.

The keys and values of committed rows are computed from the target's features as these rows are
committed. The block always has as many rows as in training, because a row's prediction depends
on all mask rows; the first K of these are used.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class DFlashDrafter(MarginalDrafter):
    """Drafts chains and trees from the marginals of a DFlash network."""

    method = "dflash"

    def __init__(self, network: DFlashNetwork, target: LanguageModel) -> None:
        config = network.config
        self.network = network
        self.target = target
        self.num_positions = self.max_k = config.max_tokens
        self.required_features = tuple(sorted(set(config.feature_layers)))
        self._columns = [self.required_features.index(layer) for layer in config.feature_layers]
        if config.own_output:
            self.target_ids = network.target_ids
        self._rows: dict[str, ContextRows] = {}
        self._mask_row = self._embed([config.mask_token_id])[0]

    def _embed(self, tokens: Sequence[int]) -> Float[Tensor, "rows width"]:
        ids = torch.tensor(tokens, device=self.target.device)
        if self.network.embed_tokens is None:
            return self.target.embed(ids).to(self.network.fc.weight.dtype)
        embedded: Tensor = self.network.embed_tokens(ids)
        return embedded

    def is_ready(self, request: DraftRequest) -> bool:
        rows = self._rows.get(request.request_id)
        return rows is not None and rows.num_rows == len(request.ids) - 1

    def predict(
        self, requests: Sequence[DraftRequest], num_positions: int
    ) -> Float[Tensor, "positions requests vocab"]:
        config = self.network.config
        anchors = self._embed([request.ids[-1] for request in requests])
        shape = (len(requests), config.max_tokens, -1)
        embedded = torch.cat([anchors[:, None], self._mask_row.expand(shape)], dim=1)
        starts = torch.tensor([len(request.ids) - 1 for request in requests])
        positions = (starts[:, None] + torch.arange(config.block_size)).to(embedded.device)
        rows = [self._rows[request.request_id] for request in requests]
        attends: list[Attend] = [
            partial(self._attend, rows, layer) for layer in range(config.num_layers)
        ]
        states = self.network(embedded, positions, attends)[:, :num_positions]
        states = states.transpose(0, 1).flatten(0, 1)
        if self.network.lm_head is None:
            logits = self.target.head(states.to(self.target.dtype))
        else:
            logits = self.network.lm_head(states)
        return logits.view(num_positions, len(requests), -1)

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

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Compute keys and values of committed rows from the target's features."""
        given = []
        for outcome in outcomes:
            if outcome.first_row == 0:
                self._rows[outcome.request_id] = ContextRows(self.network)
            rows = self._rows.get(outcome.request_id)
            if outcome.features is None:
                self.warn_of_missing(outcome)
            elif rows is not None and rows.num_rows == outcome.first_row and outcome.num_rows:
                given.append((outcome, rows))
        if given:
            self._append(given)

    @torch.inference_mode()
    def _append(self, given: Sequence[tuple[StepOutcome, ContextRows]]) -> None:
        weight = self.network.fc.weight
        features = torch.cat([outcome.features for outcome, _ in given])  # type: ignore[misc]
        features = features[:, self._columns].to(weight.device, weight.dtype)
        places = [torch.arange(o.first_row, o.first_row + o.num_rows) for o, _ in given]
        layers = self.network.read_context(features, torch.cat(places).to(weight.device))
        sizes = [outcome.num_rows for outcome, _ in given]
        keys, values = (
            [part.split(sizes) for part in parts] for parts in zip(*layers, strict=True)
        )
        for at, (_, rows) in enumerate(given):
            rows.append([*zip((k[at] for k in keys), (v[at] for v in values), strict=True)])

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
