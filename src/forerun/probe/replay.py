"""Replays requests with new caches, and tests whether tokens follow their distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.drafters.draft_sequence import fit_vocabulary
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.load import examine
from forerun.drafters.medusa import MedusaHeads, read_medusa
from forerun.measure.judge import (
    head_logits,
    histories_before,
    logits_of,
    num_known,
    probs_of_rows,
    read_text,
)
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.probe.tape import TapedRequest
from forerun.sampling.config import draft_params
from forerun.sampling.history import History, RowHistory
from forerun.sampling.noise import position_key, request_key, uniform


class ReferenceHead:
    """A head with its target, evaluated over whole texts without caches."""

    def __init__(self, head: Eagle3Head | MedusaHeads, target: LanguageModel) -> None:
        self.head = head
        self.target = target

    def logits(self, ids: Sequence[int], first: int) -> Float[Tensor, "read vocab"]:
        """Logits of the first drafted token after each row from `first` to the last but one."""
        ids = ids[: self.target.max_context]
        if first < 1 or len(ids) < first + 2:
            return torch.empty(0, self.target.vocab_size)
        if isinstance(self.head, Eagle3Head):
            _, features = read_text(self.target, ids, self.head.config.feature_layers)
            drafted = head_logits(self.target, self.head, ids, features)
        else:
            _, features = read_text(self.target, ids, (self.target.num_layers,))
            hidden = self.target.final_norm(features[:, 0]).float()
            drafted = self.head(hidden, self.target.head, 1)[0]
        return drafted[first - 1 : -1].float()


def reference_head(folder: Path, target: LanguageModel) -> ReferenceHead:
    """Load the head in a folder in fp32 for evaluation without caches."""
    if is_eagle3(read_object(folder / "config.json")):
        head = examine(folder, target).head
        return ReferenceHead(head.to(target.device).requires_grad_(False), target)
    heads = read_medusa(folder, vocab_size=target.vocab_size)
    return ReferenceHead(heads.to(target.device).requires_grad_(False), target)


class Transform:
    """Converts tokens to numbers that are uniform if the tokens follow their distributions.

    Tokens may come in any order that was fixed before the token was drawn; the order decides which
    errors of a distribution show.
    """

    def __init__(self, seed: int) -> None:
        self._key = request_key(~seed, 0)
        self._num_drawn = 0

    def values(
        self,
        probs: Float[Tensor, "rows vocab"],
        tokens: Int64[Tensor, " rows"],
        order: Float[Tensor, "rows vocab"],
    ) -> list[float]:
        keys = [position_key(self._key, self._num_drawn + row) for row in range(len(tokens))]
        self._num_drawn += len(tokens)
        shares = uniform(torch.tensor(keys, dtype=torch.int64, device=probs.device))
        probs = probs.double()
        own = order.gather(-1, tokens[:, None])
        before = (probs * (order < own)).sum(-1)
        level = (probs * (order == own)).sum(-1)
        numbers = (before + shares * level) / probs.sum(-1)
        return [min(1.0, max(0.0, value)) for value in numbers.tolist() if value == value]


NEAR = 64
"""Prompt tokens left to a draft that is to do without the rest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Logits of a replayed request; row i predicts output token i.

    Attributes:
        draft_logits: the draft's, over the target's ids; of as many rows as the draft can read.
        draft_probs: the draft's distribution under the parameters it drafts with; as many rows.
        near_probs: the same where the draft sees the output and the last `NEAR` tokens of the
            prompt; None where the prompt is not at least twice as long.
    """

    target_logits: Float[Tensor, "tokens vocab"]
    target_probs: Float[Tensor, "tokens vocab"]
    draft_logits: Float[Tensor, "read vocab"]
    draft_probs: Float[Tensor, "read vocab"]
    near_probs: Float[Tensor, "read vocab"] | None

    @property
    def num_read(self) -> int:
        return len(self.draft_probs)


@torch.inference_mode()
def replay(
    request: TapedRequest,
    target: LanguageModel,
    draft: LanguageModel | ReferenceHead | None,
    eos_token_ids: frozenset[int],
) -> Replay:
    """Feed prompt and output to new caches, in passes without drafts."""
    ids, num_prompt = request.ids, request.num_prompt
    if target.store.feature_layers:
        target.store.keep_features(())  # an engine over this target asks for them again
    rows = _histories_of(request, target.vocab_size, eos_token_ids)
    target_logits = torch.cat([*logits_of(target, ids, num_prompt - 1)]).float()
    target_probs = probs_of_rows(target_logits, request.params, rows)
    draft_logits, draft_probs, near_probs = target_logits[:0], target_probs[:0], None
    if draft is not None:
        asked, width = draft_params(request.params), target.vocab_size

        def read(cut: int) -> Tensor:
            first = num_prompt - 1 - cut
            if isinstance(draft, ReferenceHead):
                logits = draft.logits(ids[cut:], first)
            else:
                logits = readable(draft, ids[cut:], first)
            return fit_vocabulary(logits.to(target_logits.device), width)

        draft_logits = read(0)
        if len(draft_logits):
            draft_probs = probs_of_rows(draft_logits, asked, rows[: len(draft_logits)])
        if len(draft_logits) and num_prompt >= 2 * NEAR:
            near_probs = probs_of_rows(read(num_prompt - NEAR)[: len(draft_logits)], asked, rows)
    return Replay(
        target_logits=target_logits,
        target_probs=target_probs,
        draft_logits=draft_logits,
        draft_probs=draft_probs,
        near_probs=near_probs,
    )


def readable(model: LanguageModel, ids: Sequence[int], first: int) -> Float[Tensor, "read vocab"]:
    """Return the logits of rows `first` to the last but one, within the model's context."""
    read = ids[: min(num_known(model, ids) + 1, model.max_context)]
    found = [*logits_of(model, read, first)] if len(read) > first + 1 else []
    return torch.cat(found).float() if found else torch.empty(0, model.vocab_size)


def _histories_of(
    request: TapedRequest, vocab_size: int, eos_token_ids: frozenset[int]
) -> list[RowHistory]:
    """Return the state of the logits processors before each output token; empty if unused."""
    params = request.params
    if not params.needs_history:
        return []
    history = History.of(
        params, request.prompt_ids, vocab_size=vocab_size, eos_token_ids=eos_token_ids
    )
    return histories_before(history, request.token_ids)
