"""Drafting with a model whose tokenizer is not the target's: TLI and SLEM (arXiv:2502.05202).

Either way the draft reads the request's text in its own tokens, so what it says of the next token
is as good as its training, and what it proposes are ids of the target. Proposals are verified like
any others: the output has the target's distribution.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.vocabulary_map import ReencodedText, VocabularyMap, map_vocabularies
from forerun.models.base import (
    Context,
    LanguageModel,
    ModelOutput,
    RowBatch,
    WrappedModel,
    chain_by_forward,
)
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import Choice, SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree

GREEDY = SamplingParams(temperature=0)
logger = logging.getLogger("forerun.loading")


def foreign_drafter(
    model: LanguageModel, draft: Tokenizer, target: Tokenizer, vocab_size: int
) -> Drafter:
    """Return the drafter for a model with another tokenizer than the target's."""
    vocabulary = map_vocabularies(target, draft)
    logger.info("the draft has another tokenizer: %s", vocabulary.reason)
    if vocabulary.way == "tli":
        shared = SharedTokenModel(model, vocabulary, vocab_size)
        return SharedTokenDraft(shared, vocabulary, vocab_size)
    return TextDraft(model, vocabulary)


class OwnTokenDraft(DraftModel):
    """A draft model that reads the text of a request in its own tokens."""

    def __init__(
        self, model: LanguageModel, vocabulary: VocabularyMap, vocab_size: int, offset: int
    ) -> None:
        super().__init__(model, vocab_size)
        self.vocabulary = vocabulary
        self._offset = offset
        self._texts: dict[str, ReencodedText] = {}

    def read(self, request: DraftRequest) -> bool:
        """Read what is new of a request's text; returns whether the draft can continue it."""
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = ReencodedText(self.vocabulary, self._offset)
        text.read(request.ids)
        if text.is_usable:
            self._sequence(request).context.replace_ids(text.ids)
        return text.is_usable

    def _open(self, request: DraftRequest) -> Context:
        ids = [*self._texts[request.request_id].ids]
        return Context(self.model.store, ids, request.scope)

    def num_read(self, request_id: str) -> int:
        return len(self._texts[request_id].ids)

    def keep_rows(self, request_id: str, drafted: Sequence[int]) -> None:
        """Commit the rows of drafted tokens; `read` drops those that the text turns out to lack."""
        self._sequences[request_id].commit(drafted)
        self._note_committed(request_id, drafted)

    def _note_committed(self, request_id: str, drafted: Sequence[int]) -> None:
        """Append drafted tokens whose rows were committed, as ids that the model reads."""
        context = self._sequences[request_id].context
        context.ids += drafted[: max(0, context.num_cached - len(context.ids))]

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._texts.pop(request_id, None)


def restricted(
    logits: Float[Tensor, "*rows draft_vocab"],
    columns: Int64[Tensor, " target_vocab"],
    is_missing: Bool[Tensor, " target_vocab"],
) -> Float[Tensor, "*rows target_vocab"]:
    """Return draft logits over the target's ids; ids that the draft lacks become impossible."""
    return logits.index_select(-1, columns).masked_fill_(is_missing, -math.inf)


class SharedTokenModel(WrappedModel):
    """A draft model that scores the target's ids, as far as it shares their tokens.

    It reads ids of the target, and its own ids counted from `vocab_size` on.
    """

    def __init__(self, model: LanguageModel, vocabulary: VocabularyMap, vocab_size: int) -> None:
        super().__init__(model)
        self.vocab_size = vocab_size
        shared = {
            token: own
            for token, own in vocabulary.shared.items()
            if token < vocab_size and own < model.vocab_size
        }
        own_ids = torch.full((vocab_size,), -1, dtype=torch.int64)
        own_ids[[*shared]] = torch.tensor([*shared.values()], dtype=torch.int64)
        self._is_missing = (own_ids < 0).to(model.device)
        self._columns = own_ids.clamp(min=0).to(model.device)
        self._read = torch.cat([self._columns, torch.arange(model.vocab_size).to(model.device)])

    def forward(self, batch: RowBatch) -> ModelOutput:
        output = self.model.forward(replace(batch, tokens=self._read[batch.tokens]))
        return replace(output, logits=restricted(output.logits, self._columns, self._is_missing))

    @torch.inference_mode()
    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        return chain_by_forward(self, batch, num_tokens, vocab_size)


class SharedTokenDraft(OwnTokenDraft):
    """Token-level intersection (TLI): drafts the tokens that both vocabularies have.

    The draft's logits of these tokens are shaped by the request's own parameters and normalised,
    and tokens are drawn from that very distribution.
    """

    method = "tli"

    def __init__(self, model: LanguageModel, vocabulary: VocabularyMap, vocab_size: int) -> None:
        super().__init__(model, vocabulary, vocab_size, offset=vocab_size)

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft chains or trees; None for a text that the draft's tokens cannot spell."""
        places = [place for place, request in enumerate(requests) if self.read(request)]
        found = super().propose([requests[p] for p in places], [plans[p] for p in places])
        proposals = dict(zip(places, found, strict=True))
        return [proposals.get(place) for place in range(len(requests))]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Commit the rows of accepted tokens, which are the draft's own from then on."""
        super().observe(outcomes)
        for outcome in outcomes:
            verdict, name = outcome.verdict, outcome.request_id
            if name in self._sequences and verdict is not None and outcome.proposal is not None:
                accepted = verdict.tokens[: verdict.num_accepted]
                shared = self.vocabulary.shared
                own = [self.vocab_size + shared.get(token, 0) for token in accepted]
                self._note_committed(name, own)


class TextDraft(Drafter):
    """String-level exact match (SLEM): the draft's text, encoded again, as a deterministic chain.

    The draft continues the text greedily in its own tokens: as many as it has for the planned
    number of the target's tokens in the text so far, and one more. Chains are drafted for plans of
    trees too.
    """

    method = "slem"
    reads_text = True

    def __init__(self, model: LanguageModel, vocabulary: VocabularyMap) -> None:
        self.vocabulary = vocabulary
        self.draft = OwnTokenDraft(model, vocabulary, model.vocab_size, offset=0)

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft text and encode it; None where it cannot be continued or encoded."""
        greedy = [replace(r, params=GREEDY, history=None, coupled=False) for r in requests]
        places = [place for place, request in enumerate(greedy) if self.draft.read(request)]
        found = self.draft.propose(
            [greedy[place] for place in places],
            [self._plan(requests[place], plans[place]) for place in places],
        )
        proposals: list[Proposal | None] = [None] * len(requests)
        for place, own in zip(places, found, strict=True):
            if own is not None:
                proposals[place] = self._encoded(requests[place], plans[place], own)
        return proposals

    def _plan(self, request: DraftRequest, plan: Plan) -> Plan:
        own_per_token = self.draft.num_read(request.request_id) / len(request.ids)
        return Plan.chain(plan.method, 1 + math.ceil(_length(plan) * own_per_token))

    def _encoded(self, request: DraftRequest, plan: Plan, own: Proposal) -> Proposal | None:
        """Return the target's tokens of a drafted text, and keep what the draft has computed."""
        drafted: list[int] = own.tokens.tolist()
        ids = self.vocabulary.continuation(request.ids, drafted)[: _length(plan)]
        self.draft.keep_rows(request.request_id, drafted)
        if not ids:
            return None
        tokens = torch.tensor(ids, dtype=torch.int64)
        return Proposal(
            tokens=tokens,
            tree=TokenTree.chain(len(ids)),
            choice=Choice.DETERMINISTIC,
            stop_reason=own.stop_reason,
        )

    def forget(self, request_id: str) -> None:
        self.draft.forget(request_id)


def _length(plan: Plan) -> int:
    return min(plan.shape.num_nodes, plan.shape.depth)
