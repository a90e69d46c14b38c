"""An EAGLE-3 head as a LanguageModel in torch, with its own KV and the target's token ids."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.drafters.eagle3.head import Eagle3Head, over_target_vocabulary, rotary_sizes
from forerun.drafters.eagle3.states import RowStates, store_for
from forerun.models.attention import attend_blocks, plan_pass
from forerun.models.base import LanguageModel, ModelOutput, RowBatch
from forerun.models.kv_store import StoredModel, chain_by_forward

__all__ = ["Eagle3Model"]


class Eagle3Model(StoredModel):
    """A LanguageModel over an EAGLE-3 head; logits of tokens it cannot draft are -inf.

    Args:
        head: on the target's device, in the dtype to compute in.
        target: gives the embedding, where the head has none.
    """

    def __init__(self, head: Eagle3Head, target: LanguageModel) -> None:
        config, dtype = head.config, head.fc.weight.dtype
        super().__init__(rotary_sizes(config)[0], store_for(config, target, dtype))
        self.network = head
        self.target = target
        self.num_parameters = sum(parameter.numel() for parameter in head.parameters())
        self._target_ids = head.target_ids
        self._groups = config.num_heads // config.num_kv_heads
        self._scaling = config.head_dim**-0.5
        num_slots = self._store.geometry.num_slots
        self._states = RowStates(num_slots, config.hidden_size, dtype, self.device)

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which is the target's."""
        return self.network.config.target_vocab_size

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        """Return the input states of rows, computed from the target's features."""
        return self.network.fuse(features.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass, which stages the KV of every row; the caller commits the rows.

        Raises:
            NotEnoughMemory: rows do not fit into their slot.
            ValueError: a row continues from a row that was not computed.
        """
        states = self._states.of(batch)
        plan = plan_pass(batch.spans, self._store, self._groups)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            plan.write(0, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            attended = attend_blocks(
                0, queries.transpose(0, 1)[None], plan.blocks(None), self._scaling
            )
            return attended[0].flatten(1, 2)

        output = self.network(self.embed(batch.tokens), states, batch.positions, attend)
        wanted = output.index_select(0, batch.logit_rows)
        self._states.note(batch, states, self.network.fed_back(wanted))
        return ModelOutput(logits=self.head(self.final_norm(wanted)))

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Token embeddings: the head's own or the target's."""
        if self.network.embed_tokens is None:
            return self.target.embed(tokens).to(self.dtype)
        embedded: Tensor = self.network.embed_tokens(tokens)
        return embedded

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the norm before the head's output matrix."""
        normed: Tensor = self.network.norm(hidden)
        return normed

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Logits over the target's tokens of rows after the final norm."""
        return over_target_vocabulary(
            self.network.lm_head(hidden), self._target_ids, self.vocab_size
        )

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its `num_tokens` most likely tokens."""
        return chain_by_forward(self, batch, num_tokens, vocab_size)
