"""Numbers per token that show whether a text follows the distributions it should.

A direction is a function of one token with values in [0, 1] whose expectation under the expected
distribution is known. A text that follows the distributions has values that scatter around it, and
a fault moves the values of some directions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy import ndarray

from forerun.doctor.audit import alternatives

Rows = alternatives.Rows
_RECENT = 64
_FAR = 64
_RARE = 0.02
_CHUNK = 64
"""Rows of which the alternatives are computed at once: a row of a large vocabulary takes 1 MB."""
_FLOOR = 1e-9
_MOST_RATIO = 50.0
"""Largest likelihood ratio of one token: a token at the edge of a filter must not decide."""


class Direction(NamedTuple):
    """What one number per token, or per answer, measures.

    Attributes:
        kind: of an answer, or of a token that a fault moves up, or either way.
        tolerance: what rounding moves it by, as a share of the audit's tolerance.
        untested: what is said of an audit that has no value of it; "" for nothing.
    """

    words: str
    kind: Literal["answer", "up", "either way"] = "either way"
    tolerance: float = 1.0
    untested: str = ""


DIRECTIONS: Mapping[str, Direction] = {
    "best": Direction("how often the most likely token is taken"),
    "likely": Direction("how likely the tokens taken are, by rank"),
    "rare": Direction(f"how often tokens below {_RARE:g} are taken"),
    "low_ids": Direction("position of the tokens in the order of their ids"),
    "repeats": Direction(f"how often one of the {_RECENT} tokens before is taken again", "up"),
    "copied": Direction("how often a second answer repeats the first", "answer"),
    "serial": Direction("dependence of neighbouring tokens on the same noise"),
    "excluded": Direction("tokens that the parameters exclude", "up", 0.05),
    "excluded_by_far": Direction("tokens far below those that the parameters leave", "up", 0.02),
    "unprocessed": Direction("how often tokens are taken that the parameters make less likely"),
    "ends": Direction("how often the text ends", untested="how often texts end"),
    "not_best": Direction(
        "at temperature 0, tokens that are not the most likely one, without near ties", "up"
    ),
    "grammar": Direction("texts outside the grammar", "answer", 0.005),
    "ending": Direction("texts that go on after their end or their limit", "answer"),
    "text": Direction(
        "texts that are not those of the token ids",
        "answer",
        5.0,
        "texts against their token ids (give a --reference model)",
    ),
    "draft": Direction(
        "how often tokens that the draft prefers are taken",
        "up",
        untested="small biases towards the draft (give --draft)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedRows:
    """Distributions that the tokens of a text should follow, one row per token.

    Attributes:
        probs: the last column is everything not listed if `ids` is given and has one fewer.
        ids: token ids of the columns in every row; None where column i is token i.
        draft: the draft's rows over the same columns, if it is known.
        unprocessed: rows without filters, penalties and biases, if there are any.
        excluded: whether the parameters exclude the token by more than rounding.
        excluded_by_far: whether it is less likely than a pass of few bits explains.
        margins: natural logarithm of the best probability over the token's, at temperature 1.
        places: of the tokens in the answer; None where all have a row, from the first on.
        ends: whether the token ends the text, and the probability that one does; NaN if unknown.
    """

    probs: Rows
    columns: Int64[ndarray, " n"]
    places: Int64[ndarray, " n"] | None = None
    ends: tuple[Float[ndarray, " n"], Float[ndarray, " n"]] | None = None
    ids: Int64[ndarray, "n listed"] | None = None
    draft: Rows | None = None
    unprocessed: Rows | None = None
    further: Mapping[str, Rows] = field(default_factory=dict)
    excluded: Bool[ndarray, " n"] | None = None
    excluded_by_far: Bool[ndarray, " n"] | None = None
    margins: Float[ndarray, " n"] | None = None

    @property
    def indices(self) -> Int64[ndarray, " n"]:
        """Place in the answer of every token that has a row."""
        return np.arange(len(self.columns)) if self.places is None else self.places

    def column_of(self, row: int, token: int) -> int | None:
        """Return the column of a token; None if it is not listed."""
        if self.ids is None:
            return token if 0 <= token < self.probs.shape[1] else None
        found = np.flatnonzero(self.ids[row] == token)
        return int(found[0]) if len(found) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenReading:
    """Statistics of the tokens of one answer.

    Attributes:
        values: by direction, one per token, with the expectations; NaN where it says nothing.
        ratios: likelihood of every token under an alternative over that under the reference.
        offsets: its place in what its step emitted, where the server shows its steps.
        groups: that all tokens are in.
        is_whole: whether the only value is one of the whole answer.
        deepest: most tokens of a step until now.
    """

    values: Mapping[str, tuple[Float[ndarray, " n"], Float[ndarray, " n"]]]
    ratios: Mapping[str, Float[ndarray, " n"]]
    indices: Int64[ndarray, " n"]
    offsets: Int64[ndarray, " n"]
    groups: tuple[str, ...] = ()
    is_whole: bool = False
    deepest: int = 0

    def members(self) -> Iterator[tuple[str, Bool[ndarray, " n"]]]:
        """Yield every group with its tokens; all groups are known before the token is drawn."""
        everyone = np.ones(len(self.indices), dtype=bool)
        yield from ((group, everyone) for group in self.groups)
        if not self.is_whole:
            yield "place beyond 64", self.indices >= _FAR
            yield "step first", (self.offsets == 0) & (self.indices > 0)
            yield "step later", self.offsets > 0
            yield "step full", (self.offsets > 0) & (self.offsets + 1 == self.deepest)


def read_sampled(
    rows: ExpectedRows, before: Sequence[int], tokens: Sequence[int], previous: Sequence[int]
) -> tuple[dict[str, tuple[ndarray, ndarray]], dict[str, ndarray]]:
    """Return the statistics and the likelihood ratios of all tokens of a sampled text.

    `before` is the prompt, `previous` the answer to the same request before, if there is one.
    """
    probs, at = rows.probs, rows.columns
    num, own = len(at), probs[np.arange(len(at)), at]
    likely = _middle(probs, _rank_order(rows), at)
    by_id = _middle(probs, _id_order(rows), at)
    half = np.full(num, 0.5)
    found = {
        "best": ((at == probs.argmax(-1)) * 1.0, probs.max(-1)),
        "likely": (1.0 - likely, half),
        "rare": ((own < _RARE) * 1.0, (probs * (probs < _RARE)).sum(-1)),
        "low_ids": (1.0 - by_id, half),
        "serial": (0.5 + 2.0 * (by_id - 0.5) * (np.append(0.5, by_id[:-1]) - 0.5), half),
        "repeats": _repeats(rows, before, tokens),
        "copied": _copied(rows, tokens, previous),
    }
    if rows.places is not None:  # the noise of tokens that are no neighbours
        del found["serial"], found["copied"]
    if rows.ends is not None:
        found["ends"] = rows.ends
    if rows.excluded is not None:
        found["excluded"] = (rows.excluded * 1.0, np.zeros(num))
    if rows.excluded_by_far is not None:
        found["excluded_by_far"] = (rows.excluded_by_far * 1.0, np.zeros(num))
    if rows.ids is not None:
        return found, {}
    for name, other in (("draft", rows.draft), ("unprocessed", rows.unprocessed)):
        if other is not None:
            liked = other > probs
            found[name] = (liked[np.arange(num), at] * 1.0, (probs * liked).sum(-1))
    parts: dict[str, list[ndarray]] = defaultdict(list)
    for start in range(0, num, _CHUNK):
        part = slice(start, start + _CHUNK)
        for name, other in _alternatives(rows, part):
            of_token = other[np.arange(len(other)), at[part]] / np.maximum(own[part], _FLOOR)
            parts[name].append(np.minimum(of_token, _MOST_RATIO))
    return found, {name: np.concatenate(several) for name, several in parts.items()}


def _alternatives(rows: ExpectedRows, part: slice) -> Iterator[tuple[str, Rows]]:
    """Yield the distributions of some rows under every fault that is known here."""
    probs = rows.probs[part]
    yield from alternatives.of_target(probs, {n: other[part] for n, other in rows.further.items()})
    if rows.draft is not None:
        plain = None if rows.unprocessed is None else rows.unprocessed[part]
        yield from alternatives.of_draft(probs, rows.draft[part], plain)


def _rank_order(rows: ExpectedRows) -> ndarray:
    """Order of the columns from the most likely down; what is not listed comes last."""
    keys = -rows.probs
    if rows.ids is not None and rows.probs.shape[1] > rows.ids.shape[1]:
        keys = keys.copy()
        keys[:, -1] = 1.0
    return keys


def _id_order(rows: ExpectedRows) -> ndarray:
    if rows.ids is None:
        return np.broadcast_to(np.arange(rows.probs.shape[1]), rows.probs.shape)
    rest = np.full((len(rows.ids), rows.probs.shape[1] - rows.ids.shape[1]), np.iinfo(np.int64).max)
    return np.concatenate([rows.ids, rest], axis=1)


def _middle(probs: Rows, keys: ndarray, at: ndarray) -> ndarray:
    """Return the mass of smaller keys and half of that of equal ones, whose expectation is 1/2."""
    own = keys[np.arange(len(at)), at][:, None]
    below, level = (probs * (keys < own)).sum(-1), (probs * (keys == own)).sum(-1)
    found: ndarray = (below + level / 2) / np.maximum(probs.sum(-1), _FLOOR)
    return found


def _repeats(
    rows: ExpectedRows, before: Sequence[int], tokens: Sequence[int]
) -> tuple[ndarray, ndarray]:
    history = [*before, *tokens]
    values, expected = np.zeros(len(rows.columns)), np.zeros(len(rows.columns))
    for row, index in enumerate(rows.indices.tolist()):
        place = len(before) + index
        recent = set(history[max(0, place - _RECENT) : place])
        if rows.ids is None:
            columns = [token for token in recent if 0 <= token < rows.probs.shape[1]]
        else:
            columns = [i for i, token in enumerate(rows.ids[row].tolist()) if token in recent]
        expected[row] = rows.probs[row, columns].sum()
        values[row] = rows.columns[row] in columns
    return values, np.minimum(expected, 1.0)


def _copied(
    rows: ExpectedRows, tokens: Sequence[int], previous: Sequence[int]
) -> tuple[ndarray, ndarray]:
    """Bet on the earlier answer as long as this one has repeated it."""
    num = len(rows.columns)
    values, expected = np.full(num, np.nan), np.full(num, np.nan)
    for row, (token, earlier) in enumerate(zip(tokens[:num], previous, strict=False)):
        column = rows.column_of(row, earlier)
        if column is None:
            break
        values[row], expected[row] = token == earlier, min(1.0, rows.probs[row, column])
        if token != earlier:
            break
    return values, expected
