"""State of logits processors beside a request's parameters: masks, histories and token counts.

A penalty changes the logits of tokens that occurred, so each row is given as the few places it
changes. Counts of the committed output grow by one entry per new token; a draft node adds its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from forerun.sampling.config import SamplingParams
from forerun.theory.tree import TokenTree


@runtime_checkable
class TokenMask(Protocol):
    """A constraint on the next token, such as a grammar, given the tokens so far.

    A sample owns one, which stands where its committed output ends. For every draft node it is
    forked from the node's parent and told the node's token, so each row of a pass is masked by what
    leads to it. A drafter sees the same masks; one that ignores them is only rejected more often.
    The mask itself decides where the text may end: by allowing the end-of-sequence token.
    """

    def fork(self) -> TokenMask:
        """Return an independent copy for a draft node; immutable parts should be shared."""

    def advance(self, token: int) -> None:
        """Advance by one allowed token, which is the end-of-sequence token at most once."""

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return True for every token that may come next, at least one.

        Asked once per state and never written to; best on the CPU.
        """


def problem_of_allowed(allowed: object, vocab_size: int) -> str | None:
    """Describe what is wrong with what `TokenMask.allowed` returned; None if it is valid."""
    if not isinstance(allowed, Tensor):
        return f"allowed {type(allowed).__name__}, not a boolean tensor"
    if allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
        return (
            f"allowed a tensor of shape {tuple(allowed.shape)} and dtype {allowed.dtype}; it must "
            f"be boolean, of shape ({vocab_size},), padding ids included"
        )
    return None


FIRST_ROOM = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occurrences:
    """Tokens that occurred before each of some rows, with one entry per row and distinct token.

    Attributes:
        counts: how often that occurred in the output before the row; 0 for one of the prompt alone.
    """

    rows: Int64[Tensor, " entries"]
    tokens: Int64[Tensor, " entries"]
    counts: Float32[Tensor, " entries"]

    @classmethod
    def join(cls, parts: Sequence[Occurrences]) -> Occurrences:
        """Join the occurrences of several requests."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            rows=torch.cat([part.rows for part in parts]),
            tokens=torch.cat([part.tokens for part in parts]),
            counts=torch.cat([part.counts for part in parts]),
        )


class TokenCounts:
    """Distinct tokens of one sample with their counts, in compact arrays."""

    def __init__(self, prompt_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._places = {token: i for i, token in enumerate(dict.fromkeys(prompt_ids))}
        self._tokens = torch.tensor([*self._places], dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(self._places), device=device)

    @property
    def tokens(self) -> Int64[Tensor, " distinct"]:
        """Distinct tokens of prompt and output, in order of their first occurrence."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> Float32[Tensor, " distinct"]:
        """Number of times that each of the tokens occurs in the output."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count one more output token in amortised constant time."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens, self._counts = with_room(self._tokens), with_room(self._counts)
            self._tokens[place] = token
        self._counts[place] += 1

    def before_rows(self, first_row: int, paths: Sequence[Sequence[int]]) -> Occurrences:
        """Return the tokens that occurred before each of some consecutive rows.

        Takes time and memory of rows x distinct tokens, 20 bytes each.
        """
        num_tokens, device = len(self._places), self._tokens.device
        found = Occurrences(
            rows=torch.arange(first_row, first_row + len(paths), device=device).repeat_interleave(
                num_tokens
            ),
            tokens=self.tokens.repeat(len(paths)),
            counts=self.counts.repeat(len(paths)),
        )
        known: list[tuple[int, int]] = []
        new: list[tuple[int, int, int]] = []
        for row, path in enumerate(paths):
            for token, times in Counter(path).items():
                if (place := self._places.get(token)) is not None:
                    known.append((row * num_tokens + place, times))
                else:
                    new.append((first_row + row, token, times))
        if known:
            more = torch.tensor(known, device=device)
            found.counts.index_add_(0, more[:, 0], more[:, 1].to(torch.float32))
        if not new:
            return found
        rows, tokens, fresh = torch.tensor(new, device=device).unbind(-1)
        drafted = Occurrences(rows=rows, tokens=tokens, counts=fresh.to(torch.float32))
        return Occurrences.join([found, drafted])


def with_room(values: Tensor) -> Tensor:
    """Return a tensor of twice the length that starts with the same values."""
    return torch.cat([values, values.new_zeros(max(FIRST_ROOM, len(values)))])


Path = tuple[int, ...]


class History:
    """Masks and token counts of one sample, updated when the engine commits tokens.

    Needed only where `params.needs_history` or a mask says so; for all other requests use None in
    its place.

    Attributes:
        bias: allowed tokens, logit bias and bad tokens in one row to add to the logits, or None.
        stop_ids: ids held back until min_tokens are out.
    """

    def __init__(
        self,
        *,
        bias: Float32[Tensor, " vocab"] | None,
        stop_ids: tuple[int, ...],
        min_tokens: int,
        counts: TokenCounts | None,
        mask: TokenMask | None,
    ) -> None:
        self.num_output = 0
        self.bias = bias
        self.stop_ids = stop_ids
        self.min_tokens = min_tokens
        self.counts = counts
        self.mask = mask
        self._masked: dict[Path, RowHistory] = {}
        self._failure: Exception | SystemExit | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        device: torch.device | str = "cpu",
        mask: TokenMask | None = None,
    ) -> History:
        """Create the history of a request without output tokens.

        Args:
            params: its token ids must lie inside the vocabulary.
            eos_token_ids: the model's own; they end the text, so min_tokens holds them back unless
                `ignore_eos` makes them harmless. Some tokenizers have ids the logits lack.
            mask: this sample's own, for it is advanced.
        """
        ending = params.ending_tokens(eos_token_ids)
        seen = prompt_ids if params.repetition_penalty != 1 else ()
        return cls(
            bias=_bias_row(params, vocab_size, device),
            stop_ids=tuple(sorted(token for token in ending if token < vocab_size)),
            min_tokens=params.min_tokens,
            counts=TokenCounts(seen, device) if params.has_penalties else None,
            mask=mask,
        )

    def append(self, token: int) -> None:
        """Count one more output token."""
        self.num_output += 1
        if self.counts is not None:
            self.counts.add(token)
        if self.mask is not None:
            self._advance(self.mask, token)

    def _advance(self, mask: TokenMask, token: int) -> None:
        """Advance the mask by a committed token; an exception is stored until the next step.

        Most tokens were draft nodes, whose masks are there.
        """
        row = self._masked.get((token,))
        self._masked = {}  # its paths begin one token too early now
        try:
            if row is not None and row.mask is not None:
                self.mask = row.mask
                self._masked[()] = RowHistory(base=self, mask=row.mask, allowed=row.allowed)
            else:
                mask.advance(token)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a mask is the caller's own code
            self._failure = error

    def at(self, path: Sequence[int] = ()) -> RowHistory:
        """Return the history at the row after `path`, the draft tokens from the root down.

        Raises whatever the mask raised, now or while the text was committed.
        """
        if self._failure is not None:
            raise self._failure
        row = self._root()
        for token in path:
            row = row.then(token)
        return row

    def _root(self) -> RowHistory:
        if self.mask is None:
            return RowHistory(base=self)
        root = self._masked.get(())
        if root is None:
            allowed = self.mask.allowed()
            root = self._masked[()] = RowHistory(base=self, mask=self.mask, allowed=allowed)
        return root

    def masked(self, parent: RowHistory, path: Path) -> RowHistory:
        """Return the history at `path`, a child of `parent`, and cache it with its mask."""
        row = self._masked.get(path)
        if row is None:
            row = self._masked[path] = parent.fork_to(path)
        return row

    def along(self, tree: TokenTree, tokens: Sequence[int]) -> list[RowHistory]:
        """Yield the histories of the root row and of the rows of all nodes."""
        rows = [self.at()]
        for parent, token in zip(tree.parents, tokens, strict=True):
            rows.append(rows[parent + 1].then(token))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowHistory:
    """History at one row of logits: committed tokens, extended by the draft tokens on its path.

    Attributes:
        mask: the token mask, advanced by these tokens; None without one, and after a token that it
            forbids: no token is accepted there, so it does not matter which could follow.
    """

    base: History
    path: Path = ()
    mask: TokenMask | None = None
    allowed: Bool[Tensor, " vocab"] | None = None

    def then(self, token: int) -> RowHistory:
        """Return the history of the row after one more draft token."""
        path = (*self.path, token)
        if self.mask is None:
            return RowHistory(base=self.base, path=path)
        return self.base.masked(self, path)

    def fork_to(self, path: Path) -> RowHistory:
        """Return the history of the child at `path`, with an advanced copy of the mask."""
        assert self.mask is not None
        assert self.allowed is not None
        token = path[-1]
        if not bool(self.allowed[token]):
            return RowHistory(base=self.base, path=path)
        mask = self.mask.fork()
        mask.advance(token)
        return RowHistory(base=self.base, path=path, mask=mask, allowed=mask.allowed())

    @property
    def held_back(self) -> tuple[int, ...]:
        """Return ids that would end the text and are forbidden until min_tokens are emitted."""
        too_short = self.base.num_output + len(self.path) < self.base.min_tokens
        return self.base.stop_ids if too_short else ()


def runs(
    histories: Sequence[RowHistory | None],
) -> Iterator[tuple[History, int, Sequence[RowHistory]]]:
    """Group consecutive rows of one request with its history and the index of its first row."""
    run: list[RowHistory] = []
    for row, history in enumerate([*histories, None]):
        if run and (history is None or history.base is not run[0].base):
            yield run[0].base, row - len(run), run
            run = []
        if history is not None:
            run.append(history)


def occurrences(histories: Sequence[RowHistory | None]) -> Occurrences | None:
    """Return tokens that occurred before each row with penalties; None without such rows."""
    found = [
        base.counts.before_rows(first, [row.path for row in rows])
        for base, first, rows in runs(histories)
        if base.counts is not None
    ]
    return Occurrences.join(found) if found else None


def _bias_row(
    params: SamplingParams, vocab_size: int, device: torch.device | str
) -> Float32[Tensor, " vocab"] | None:
    """Return allowed tokens, logit bias and bad tokens as one row that is added to logits."""
    if not params.logit_bias and params.allowed_token_ids is None and not params.bad_token_ids:
        return None
    row = torch.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        row.fill_(-torch.inf)
        row[list(params.allowed_token_ids)] = 0.0
    for token, value in (params.logit_bias or {}).items():
        row[token] += value
    row[list(params.bad_token_ids)] = -torch.inf
    return row.to(device)
