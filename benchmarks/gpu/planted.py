"""Synthetic acceptance: a random target agrees with no draft, so its agreement is planted.

After the target's pass, the logits that judge a drafted token are set so that greedy verification
accepts it with the probability asked for, by coins tossed in advance. The passes and their time are
real, as is the time of planting, which is charged to speculation; the acceptance is not real.
"""

from __future__ import annotations

import torch

from forerun.models.base import LanguageModel, ModelOutput, RowBatch, WrappedModel

__all__ = ["PlantedTarget"]

# Larger than any logit of a random model, and exact in every dtype.
BEYOND_ALL = 1024.0


class PlantedTarget(WrappedModel):
    """A LanguageModel whose greedy choices follow drafted chains with a planted probability.

    Args:
        model: does the work.
        acceptance: probability that a drafted token is the target's choice, each on its own.
        seed: of the coins.
    """

    def __init__(self, model: LanguageModel, acceptance: float, seed: int) -> None:
        super().__init__(model)
        self.acceptance = acceptance
        self.coins = torch.Generator().manual_seed(seed)

    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass of the model, its verdict on every drafted token of a chain planted.

        The last chain row of every sequence and all its nodes must be what is wanted, in order: so
        prompts must fit one prefill chunk.
        """
        scores = self.model.forward(batch)
        wanted, drafted, row, position = [], [], 0, 0
        for span in batch.spans:
            num_nodes = len(span.tree.parents)
            wanted += range(position, position + num_nodes)
            drafted += range(row + span.num_chain, row + span.num_rows)
            row += span.num_rows
            position += num_nodes + 1
        if wanted:
            accepted = torch.empty(len(wanted)).uniform_(generator=self.coins) < self.acceptance
            numbers = torch.stack((torch.tensor(wanted), torch.tensor(drafted), accepted.long()))
            rows, nodes, verdicts = numbers.to(self.device, non_blocking=True)
            tokens = batch.tokens.index_select(0, nodes)
            scores.logits[rows, tokens] = (verdicts * 2 - 1).to(scores.logits.dtype) * BEYOND_ALL
        return scores
