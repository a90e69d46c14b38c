"""Distributions that a text should follow: from a model loaded here, or as the server reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy import ndarray

from forerun.client.client import MAX_ID
from forerun.doctor.audit.config import Kind
from forerun.doctor.audit.readings import ExpectedRows
from forerun.doctor.audit.records import AuditAnswer
from forerun.sampling.config import SamplingParams, draft_params

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.models.base import LanguageModel
    from forerun.models.tokenizers import Tokenizer

_OUTSIDE = 0.02
"""Mass by which a token must lie beyond top_p to count as excluded; rounding moves the edge."""
_MOST_SUM = 1.001


@runtime_checkable
class Reference(Protocol):
    """Interface of a source of the distributions that the server's tokens should follow."""

    def rows(self, prompt: Sequence[int], answer: AuditAnswer, kind: Kind) -> ExpectedRows | None:
        """Return the expected distribution of every token of an answer; None if it is not known."""
        ...


class ReportedLogprobs:
    """Expected distributions from the server's own log-probabilities, for unfiltered requests."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def rows(self, prompt: Sequence[int], answer: AuditAnswer, kind: Kind) -> ExpectedRows | None:
        """Return the reported tokens and the rest as one column; None without a full report."""
        ids = answer.token_ids
        is_plain = kind.top_p == 1.0 and not kind.frequency_penalty and not kind.has_grammar
        tops = [row for row in answer.top if row]
        if ids is None or not is_plain or not len(ids) == len(tops) == len(answer.logprobs):
            return None
        width = min(map(len, tops), default=0)
        if width < 2 or not self._are_possible(answer, tops):
            return None
        ordered = [sorted(row, key=lambda item: -item[1])[:width] for row in tops]
        listed = np.array([[token for token, _ in row] for row in ordered], dtype=np.int64)
        if (listed > MAX_ID).any() and max(ids) <= MAX_ID:
            self.problems.append("alternatives come without ids: give a --reference model")
            return None
        logs = np.array([[value for _, value in row] for row in ordered])
        probs = np.exp(logs)
        probs = np.concatenate([probs, np.maximum(1.0 - probs.sum(-1, keepdims=True), 0.0)], 1)
        tokens = np.array(ids, dtype=np.int64)
        matches = listed == tokens[:, None]
        columns = np.where(matches.any(-1), matches.argmax(-1), width)
        margins = np.maximum(logs[:, 0] - np.array(answer.logprobs), 0.0)
        return ExpectedRows(
            probs=probs / probs.sum(-1, keepdims=True), columns=columns, ids=listed, margins=margins
        )

    def _are_possible(
        self, answer: AuditAnswer, tops: Sequence[Sequence[tuple[int, float]]]
    ) -> bool:
        for row, own, token in zip(tops, answer.logprobs, answer.token_ids or (), strict=True):
            values = dict(row)
            total = float(np.exp(np.array([*values.values()])).sum())
            if total > _MOST_SUM or own > 1e-6 + max(values.values()):
                self.problems.append(f"the probabilities of one token sum to {total:.3f}")
                return False
            if token in values and abs(values[token] - own) > 1e-3:
                self.problems.append("a token has two log-probabilities")
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """A model loaded here, which reads every text with an empty cache.

    Attributes:
        eos_token_ids: the distributions are those of the tokens that do not end the text.
        draft: the draft that the server is said to use, over the same ids; None if unknown.
    """

    model: LanguageModel
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    draft: LanguageModel | None = None

    def rows(self, prompt: Sequence[int], answer: AuditAnswer, kind: Kind) -> ExpectedRows | None:
        """Return the rows of the text's tokens under the parameters of the request."""
        tokens = list(answer.token_ids or ())
        size = self.model.vocab_size
        if not (tokens and prompt) or not all(0 <= token < size for token in (*prompt, *tokens)):
            return None
        end = next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)
        ids = [*prompt, *tokens[:end]][: self.model.max_context]
        tokens = ids[len(prompt) :]
        if not tokens:
            return None
        logits = _logits(self.model, ids, len(prompt) - 1)
        params = _params_of(kind)
        sampled = replace(params, temperature=1.0) if params.greedy else params
        at = np.array(tokens, dtype=np.int64)
        margins = (logits.amax(-1) - logits[range(len(at)), tokens]).double().numpy()
        probs = self._probs(logits, sampled, prompt, tokens)
        if params.greedy:
            return ExpectedRows(probs=probs, columns=at, margins=margins)
        further = {"row_before": np.concatenate([probs[:1], probs[:-1]])}
        excluded = None
        if kind.top_p < 1.0:
            further["unfiltered"] = self._probs(logits, replace(params, top_p=1.0), prompt, tokens)
            excluded = _is_excluded(further["unfiltered"], at, kind.top_p)
        if kind.frequency_penalty:
            further["unpenalised"] = self._probs(
                logits, replace(params, frequency_penalty=0.0), prompt, tokens
            )
        draft = None if self.draft is None else self._draft_probs(ids, params, prompt, tokens)
        return ExpectedRows(
            probs=probs,
            columns=at,
            draft=draft,
            further=further,
            excluded=excluded,
            margins=margins,
        )

    @property
    def ids_by_text(self) -> dict[str, int]:
        """Token id by text, for texts that only one token has."""
        if self.tokenizer is None:
            return {}
        found: dict[str, list[int]] = {}
        for token in range(self.model.vocab_size):
            piece = self.tokenizer.token_bytes(token)
            try:
                found.setdefault(piece.decode("utf-8"), []).append(token)
            except UnicodeDecodeError:
                continue
        return {text: ids[0] for text, ids in found.items() if text and len(ids) == 1}

    @cached_property
    def _ending(self) -> list[int]:
        return [token for token in self.eos_token_ids if token < self.model.vocab_size]

    def _draft_probs(
        self, ids: Sequence[int], params: SamplingParams, prompt: Sequence[int], tokens: list[int]
    ) -> ndarray:
        from forerun.drafters.draft_sequence import fit_vocabulary

        assert self.draft is not None
        logits = fit_vocabulary(_logits(self.draft, ids, len(prompt) - 1), self.model.vocab_size)
        return self._probs(logits, draft_params(params), prompt, tokens)

    def _probs(
        self, logits: Tensor, params: SamplingParams, prompt: Sequence[int], tokens: list[int]
    ) -> ndarray:
        from forerun.measure.judge import histories_before, probs_of_rows
        from forerun.sampling.history import History

        histories = []
        if params.needs_history:
            history = History.of(params, prompt, vocab_size=self.model.vocab_size)
            histories = histories_before(history, tokens)
        probs: ndarray = probs_of_rows(logits, params, histories).double().numpy()
        probs[:, self._ending] = 0.0
        probs /= np.maximum(probs.sum(-1, keepdims=True), 1e-30)
        return probs


def load_reference(name: str, draft: str | None, *, max_context: int) -> ReferenceModel:
    """Load the reference, and the draft if it is known, by name or folder."""
    from forerun.engine.config import EngineConfig
    from forerun.engine.loading import load_pair_member
    from forerun.models.checkpoint import ModelFiles

    config = EngineConfig(max_batch=1, max_context=max_context)
    files = ModelFiles.open(name)
    model, tokenizer = load_pair_member(files, dtype="auto", device="auto", config=config)
    drafting = None
    if draft is not None:
        drafting = load_pair_member(draft, dtype="auto", device="auto", config=config)[0]
    return ReferenceModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=files.eos_token_ids(tokenizer),
        draft=drafting,
    )


def _logits(model: LanguageModel, ids: Sequence[int], first: int) -> Tensor:
    import torch

    from forerun.measure.judge import logits_of

    with torch.inference_mode():
        return torch.cat([*logits_of(model, ids, first)]).float().cpu()


def _params_of(kind: Kind) -> SamplingParams:
    return SamplingParams(
        temperature=kind.temperature, top_p=kind.top_p, frequency_penalty=kind.frequency_penalty
    )


def _is_excluded(unfiltered: ndarray, at: ndarray, top_p: float) -> ndarray:
    own = unfiltered[np.arange(len(at)), at][:, None]
    before = (unfiltered * (unfiltered > own)).sum(-1)
    found: ndarray = before > top_p + _OUTSIDE
    return found
