"""A target that writes a given text at its own cost: every pass is real, the choice is not.

A model that cannot do an edit does not copy, and says nothing of what copying gains. Here the
logits of the real pass get the script's next token on top, whatever the rows before it were: text
and acceptance are those of a model that does the edit, times those of the model that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.models.base import LanguageModel, ModelOutput, RowBatch, WrappedModel, chain_by_forward
from forerun.sampling.config import SamplingParams

__all__ = ["ScriptReader", "ScriptedModel"]

CERTAIN = 1e4


class ScriptedModel(WrappedModel):
    """A LanguageModel whose most likely token is the script's; one sequence at a time."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.script = torch.zeros(1, dtype=torch.int64)

    def forward(self, batch: RowBatch) -> ModelOutput:
        scores = self.model.forward(batch)
        if len(batch.logit_rows):
            places = batch.positions.index_select(0, batch.logit_rows) + 1
            wanted = self.script.index_select(0, places.clamp_(max=len(self.script) - 1))
            scores.logits.scatter_(1, wanted[:, None], CERTAIN)
        return scores

    def greedy_chain(self, batch: RowBatch, num_tokens: int, vocab_size: int) -> Tensor:
        return chain_by_forward(self, batch, num_tokens, vocab_size)


@dataclass(frozen=True, kw_only=True)
class ScriptReader:
    """An engine over a scripted target that is handed the script of every prompt."""

    engine: Engine
    target: ScriptedModel
    scripts: Mapping[str, Sequence[int]]

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        (prompt,) = prompts
        ids = [*self.engine.tokenizer.encode(prompt), *self.scripts[prompt]]
        self.target.script = torch.tensor(ids)
        return self.engine.generate(prompts, params)
