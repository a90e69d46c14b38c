"""Drafting with an EAGLE-3 head, which reads the target's hidden states.

The rows of committed tokens are always computed from the target's features, never from the head's
own states: what the head computed while it drafted is thrown away after every step. A step costs
one pass over the tokens committed since the last draft, then K - 1 passes of one row per sequence,
each through one decoder layer and an output matrix over the draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.draft_model import PREFILL_CHUNK, DraftModel
from forerun.drafters.draft_sequence import DraftSequence
from forerun.drafters.eagle3.states import HeadBatch
from forerun.errors import DrafterError
from forerun.models.base import LanguageModel, RowBatch, Span
from forerun.models.context import Context
from forerun.sampling.proposal import Proposal

__all__ = ["AttachedModel", "Eagle3Drafter"]

logger = logging.getLogger("forerun.drafting")


class AttachedModel(LanguageModel, Protocol):
    """A draft model whose rows read the target's hidden states; see `eagle3.model`."""

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        """Return the input states of rows, computed from the target's features."""


class ShiftedContext(Context):
    """Tokens of a sequence without the first: row t of an EAGLE-3 head reads token t + 1."""

    @property
    def num_pending(self) -> int:
        """Number of rows that are not cached yet although the target's features for them exist."""
        return len(self.ids) - 1 - self.num_cached

    def pending(self, limit: int | None = None) -> list[int]:
        """Return the tokens of the next uncached rows, at most `limit`."""
        start = self.num_cached + 1
        return self.ids[start : len(self.ids) if limit is None else start + limit]


@dataclass(slots=True, kw_only=True, eq=False)
class AttachedSequence(DraftSequence):
    """The state of one sequence in an EAGLE-3 head.

    Attributes:
        features: of the rows that are not cached yet, in order.
        lacks_features: some row's features were not handed over, so that nothing can be drafted.
    """

    features: list[Tensor] = field(default_factory=list)
    lacks_features: bool = False

    @property
    def num_features(self) -> int:
        """Number of rows whose features have not been fed to the head yet."""
        return sum(map(len, self.features))

    def next_features(self, num_rows: int) -> Float[Tensor, "rows layers width"]:
        """Return the features of the next `num_rows` uncached rows.

        Raises:
            DrafterError: there are fewer.
        """
        if num_rows > self.num_features:
            raise DrafterError(
                f"request {self.name} has features of {self.num_features} rows where {num_rows} "
                "are to be read"
            )
        if len(self.features) > 1:
            self.features = [torch.cat(self.features)]
        return self.features[0][:num_rows]

    def keep_rows(self, num_rows: int) -> None:
        """Commit the next `num_rows` rows, computed from features, and drop all rows after them."""
        if num_rows:
            self.context.commit(range(num_rows))
            self.features = [self.next_features(self.num_features)[num_rows:]]
        self.num_chain = 0


class Eagle3Drafter(DraftModel):
    """Drafts chains and trees with an EAGLE-3 head.

    Args:
        model: the head as a model over the target's token ids.
        feature_layers: layers of the target that it reads, in the order it concatenates them.
        vocab_size: number of token ids of the target.
    """

    method = "eagle3"

    def __init__(
        self, model: AttachedModel, feature_layers: tuple[int, ...], vocab_size: int
    ) -> None:
        super().__init__(model, vocab_size)
        self.attached = model
        self.feature_layers = feature_layers
        self.required_features = tuple(sorted(set(feature_layers)))
        columns = [self.required_features.index(layer) for layer in feature_layers]
        self._columns = None if columns == [*range(len(self.required_features))] else columns
        self._warned = False

    def through(self, model: LanguageModel) -> Eagle3Drafter:
        """Return a drafter with the same head whose passes go through a wrapper of its model.

        Args:
            model: the wrapper, which may time or change passes.
        """
        drafter = Eagle3Drafter(self.attached, self.feature_layers, self.vocab_size)
        drafter.use(model)
        return drafter

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft for requests whose rows have features; other requests are decoded plainly."""
        sequences = [self._sequence(request) for request in requests]
        able = [at for at, s in enumerate(sequences) if s.num_features and not s.lacks_features]
        drafted = super().propose([requests[at] for at in able], [plans[at] for at in able])
        proposals: list[Proposal | None] = [None] * len(requests)
        for at, proposal in zip(able, drafted, strict=True):
            proposals[at] = proposal
        return proposals

    def _sequence(self, request: DraftRequest) -> AttachedSequence:
        """Return the state of a request, created on first use."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = AttachedSequence.begin(request, self._open(request))
            self._sequences[request.request_id] = sequence
        assert isinstance(sequence, AttachedSequence)
        return sequence

    def _open(self, request: DraftRequest) -> Context:
        """Reserve a slot without a shared prefix, since rows also depend on features."""
        return ShiftedContext(self.model.store, request.ids)

    def _batch(self, spans: Sequence[Span], sequences: Sequence[DraftSequence]) -> RowBatch:
        """Return a pass over pending rows with input states computed from the target's features."""
        batch = super()._batch(spans, sequences)
        features: list[Tensor] = []
        for span, sequence in zip(spans, sequences, strict=True):
            assert isinstance(sequence, AttachedSequence)
            features.append(sequence.next_features(span.num_chain))
        together = features[0] if len(features) == 1 else torch.cat(features)
        return HeadBatch.of(batch, self.attached.fuse(together))

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Receive the features of committed rows; many are fed at once, few with the next draft.

        Rows of the last draft are kept only if they were computed from features.
        """
        for outcome in outcomes:
            sequence = self._sequence(outcome.request)
            sequence.keep_rows(sequence.num_chain)
            if outcome.features is None:
                self._warn(sequence)
            elif not sequence.lacks_features:
                features = outcome.features
                if self._columns is not None:
                    features = features[:, self._columns]
                sequence.features.append(features)
        with torch.inference_mode():
            self._prefill([self._sequence(outcome.request) for outcome in outcomes])

    def _prefill(self, sequences: Sequence[DraftSequence]) -> None:
        """Feed pending rows in chunks until at most one chunk of features is left per sequence."""
        waiting = [s for s in sequences if isinstance(s, AttachedSequence)]
        while waiting := [s for s in waiting if s.num_features > PREFILL_CHUNK]:
            batch = self._batch([s.context.span(PREFILL_CHUNK) for s in waiting], waiting)
            self.model.forward(replace(batch, logit_rows=batch.logit_rows[:0]))
            for sequence in waiting:
                sequence.keep_rows(PREFILL_CHUNK)

    def _warn(self, sequence: AttachedSequence) -> None:
        """Stop drafting for a sequence, and log a warning the first time."""
        sequence.lacks_features, sequence.features = True, []
        if not self._warned:
            self._warned = True
            logger.warning(
                "request %s decodes plainly: the target gave no features of layers %s, which the "
                "EAGLE-3 head reads; later requests without features are not reported",
                sequence.name,
                self.required_features,
            )
