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
from forerun.doctor.audit.readings import ExpectedRows, Rows
from forerun.doctor.audit.records import AuditAnswer, Question
from forerun.sampling.config import SamplingParams, draft_params

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.models.base import LanguageModel
    from forerun.models.tokenizers import Tokenizer

_OUTSIDE, _BELOW, _FAR_BELOW = 0.02, 0.75, 0.15
"""A token is excluded if it lies this mass beyond top_p, or below this share of the least likely
token that top_k or min_p keeps."""
_MOST_SUM = 1.001


@runtime_checkable
class Reference(Protocol):
    """Interface of a source of the distributions that the server's tokens should follow."""

    def can_judge(self, kind: Kind) -> bool:
        """Whether the expected distributions are known for most tokens of such requests."""
        ...

    def rows(self, question: Question, answer: AuditAnswer, kind: Kind) -> ExpectedRows | None:
        """Return the expected distribution of every token of an answer; None if it is not known."""
        ...

    def text_of(self, question: Question, answer: AuditAnswer) -> str | None:
        """Return the text that an answer's ids stand for; None if it is not known."""
        ...


class ReportedLogprobs:
    """Expected distributions from log-probabilities that a server reports.

    They are those of the most likely tokens before any parameter. Where what the parameters leave
    is among them, the distribution is known: top-k of fewer tokens, and min-p of peaked rows.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._ending: set[int] = set()

    def text_of(self, question: Question, answer: AuditAnswer) -> str | None:
        """Return None: there is no tokenizer."""
        return None

    def can_judge(self, kind: Kind) -> bool:
        """Whether the tokens that the parameters leave can all be among the reported ones."""
        if kind.has_grammar or kind.has_stop:
            return True  # their form is checked
        is_listed = kind.top_k > 0 or kind.min_p > 0.0 or kind.temperature in (0.0, 1.0)
        return is_listed and not kind.is_counted and kind.top_p == 1.0

    def rows(self, question: Question, answer: AuditAnswer, kind: Kind) -> ExpectedRows | None:
        """Return rows over the listed tokens and one for the rest, where the answer has a list."""
        ids = answer.token_ids
        if ids is None or not len(ids) == len(answer.top) == len(answer.logprobs):
            return None
        if kind.has_grammar or not self.can_judge(kind):
            return None
        places = np.array([i for i, row in enumerate(answer.top) if row], dtype=np.int64)
        tops = [answer.top[place] for place in places]
        width = min(map(len, tops), default=0)
        if width < 2 or not self._are_possible(answer, places.tolist()):
            return None
        ordered = [sorted(row, key=lambda item: -item[1])[:width] for row in tops]
        listed = np.array([[token for token, _ in row] for row in ordered], dtype=np.int64)
        if (listed > MAX_ID).any() and max(ids) <= MAX_ID:
            self.problems.append("alternatives come without ids: give a --reference model")
            return None
        logs = np.array([[value for _, value in row] for row in ordered])
        tokens = np.array(ids, dtype=np.int64)[places]
        matches = listed == tokens[:, None]
        columns = np.where(matches.any(-1), matches.argmax(-1), width)
        probs, is_known = _compute_listed_probs(logs, kind)
        if not is_known.any():
            return None
        margins = np.maximum(logs[:, 0] - np.array(answer.logprobs)[places], 0.0)[is_known]
        probs, columns, tokens, listed, places = (
            each[is_known] for each in (probs, columns, tokens, listed, places)
        )
        is_whole = len(places) == len(ids)
        return ExpectedRows(
            probs=probs,
            columns=columns,
            ids=listed,
            margins=margins,
            places=None if is_whole else places,
            ends=self._ends(answer, tokens, listed, probs) if is_whole else None,
        )

    def _ends(
        self, answer: AuditAnswer, tokens: ndarray, listed: ndarray, probs: Rows
    ) -> tuple[ndarray, ndarray] | None:
        """Compare how often the text ends, by the ids that have ended earlier answers."""
        known = [*self._ending]
        if answer.finish_reason == "stop":
            self._ending.add(int(tokens[-1]))
        if not known:
            return None
        matches = np.isin(listed, known)
        expected = (probs[:, : listed.shape[1]] * matches).sum(-1)
        is_listed = matches.any(-1)
        values = np.isin(tokens, known) * 1.0
        return np.where(is_listed, values, np.nan), np.where(is_listed, expected, np.nan)

    def _are_possible(self, answer: AuditAnswer, places: Sequence[int]) -> bool:
        for place in places:
            values, own = dict(answer.top[place]), answer.logprobs[place]
            token = (answer.token_ids or ())[place]
            total = float(np.exp(np.array([*values.values()])).sum())
            if total > _MOST_SUM or own > 1e-6 + max(values.values()):
                self.problems.append(f"the probabilities of one token sum to {total:.3f}")
                return False
            if token in values and abs(values[token] - own) > 1e-3:
                self.problems.append("a token has two log-probabilities")
                return False
        return True


def _compute_listed_probs(logs: ndarray, kind: Kind) -> tuple[Rows, ndarray]:
    """Return the distribution over listed tokens and the rest, and where the list is long enough.

    It is where the parameters exclude its least likely token. Temperature comes before min-p.
    """
    rest = np.maximum(1.0 - np.exp(logs).sum(-1), 0.0)[:, None]
    scaled, is_known = logs, np.ones(len(logs), dtype=bool)
    if kind.is_filtered:
        scaled = (logs - logs[:, :1]) / (kind.temperature or 1.0)
        least = np.full((len(logs), 1), np.log(kind.min_p) if kind.min_p else -np.inf)
        if 0 < kind.top_k < logs.shape[1]:
            least = np.maximum(least, scaled[:, [kind.top_k - 1]])
        scaled = np.where(scaled >= least, scaled, -np.inf)
        rest, is_known = np.zeros_like(rest), np.isneginf(scaled[:, -1])
    probs = np.concatenate([np.exp(scaled), rest], 1)
    found: Rows = probs / probs.sum(-1, keepdims=True)
    return found, is_known


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """A model loaded here, which reads every text with an empty cache.

    Attributes:
        eos_token_ids: tokens that end a text.
        draft: the draft that the server is said to use, over the same ids; None if unknown.
    """

    model: LanguageModel
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    draft: LanguageModel | None = None

    def can_judge(self, kind: Kind) -> bool:
        """Return True: the model's logits are known."""
        return True

    def rows(self, question: Question, answer: AuditAnswer, kind: Kind) -> ExpectedRows | None:
        """Return the rows of the text's tokens under the parameters of the request."""
        tokens, size = [*(answer.token_ids or ())], self.model.vocab_size
        prompt = () if isinstance(question.prompt, str) else question.prompt
        if not (tokens and prompt) or not all(0 <= token < size for token in (*prompt, *tokens)):
            return None
        end = next((i for i, token in enumerate(tokens) if token in self._ending), None)
        tokens = tokens if end is None else tokens[: end + 1]
        if end is None and answer.finish_reason == "stop" and self._ending:
            tokens.append(self._ending[0])  # some servers leave out the token that ends the text
        ids = [*prompt, *tokens][: self.model.max_context]
        tokens = ids[len(prompt) :]
        if not tokens:
            return None
        logits = _logits(self.model, ids, len(prompt) - 1)
        params = kind.params_for(question)
        at = np.array(tokens, dtype=np.int64)
        margins = (logits.amax(-1) - logits[range(len(at)), tokens]).double().numpy()
        if params.greedy:
            probs = self._probs(logits, replace(params, temperature=1.0), prompt, tokens)
            return ExpectedRows(probs=probs, columns=at, margins=margins)
        probs = self._probs(logits, params, prompt, tokens)
        further = {"row_before": np.concatenate([probs[:1], probs[:-1]])}
        plain = SamplingParams(temperature=params.temperature)
        unprocessed = excluded = far = None
        if params.has_processors:
            unprocessed = self._probs(logits, plain, prompt, tokens)
            further[_name_unprocessed(kind)] = unprocessed
        if unprocessed is not None and not params.needs_history:
            excluded, far = _find_excluded(unprocessed, probs, at, kind.top_p)
        draft = None if self.draft is None else self._draft_probs(ids, params, prompt, tokens)
        is_end = np.isin(at, self._ending) * 1.0
        return ExpectedRows(
            probs=probs,
            columns=at,
            draft=draft,
            unprocessed=unprocessed,
            further=further,
            excluded=excluded,
            excluded_by_far=far,
            margins=margins,
            ends=(is_end, probs[:, self._ending].sum(-1)) if self._ending else None,
        )

    def text_of(self, question: Question, answer: AuditAnswer) -> str | None:
        """Return the text that an answer's ids stand for; None if it is not known."""
        ids = answer.token_ids
        if self.tokenizer is None or not ids or isinstance(question.prompt, str):
            return None
        before = self.tokenizer.decode(question.prompt)
        found = self.tokenizer.decode([*question.prompt, *ids])
        return found[len(before) :] if found.startswith(before) else None

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


def _name_unprocessed(kind: Kind) -> str:
    if kind.counts_tokens:
        return "unpenalised"
    return "unbiased" if kind.prompt_bias else "unfiltered"


def _find_excluded(
    unfiltered: Rows, filtered: Rows, at: ndarray, top_p: float
) -> tuple[ndarray, ndarray]:
    """Return whether a token is excluded by more than rounding, and whether it is by far.

    Rounding moves the edge of a filter, and a pass of few bits moves it further.
    """
    own = unfiltered[np.arange(len(at)), at]
    least = np.where(filtered > 0, unfiltered, np.inf).min(-1)
    if top_p < 1.0:
        is_outside = (unfiltered * (unfiltered > own[:, None])).sum(-1) > top_p + _OUTSIDE
    else:
        is_outside = own < _BELOW * least
    return is_outside, is_outside & (own < _FAR_BELOW * least)
