"""Passes of few rows padded to fixed shapes, so that a recorded pass can be played again.

A rectangle has so many sequences and so many rows for each. A sequence with fewer rows repeats its
last, missing sequences repeat the last one: padding computes and stores what is there already, and
needs no place of its own. Everything that differs between two passes of one shape is one small
table of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from forerun.models.base import Span

__all__ = ["MAX_ROWS", "NUM_FIELDS", "Bucket", "RectangleLimits", "bucket_of", "table_of"]

# What a row sees of its own pass is one bit per row of its sequence, in 64 bits.
MAX_ROWS = 64
# Numbers of rows per sequence that have a bucket; others are padded to the next.
ROW_STEPS = (*range(1, 9), *range(12, 33, 4), 40, 48, 56, MAX_ROWS)
# Fewest keys of a bucket, and how many times more the next has: a growing context is recorded anew
# only now and then.
MIN_KEYS, KEY_GROWTH = 512, 4

# Columns of the table with one entry per row, then those with one entry per sequence.
ROW_FIELDS = ("place", "source", "index", "visible")
SEQUENCE_FIELDS = ("slot", "start", "end", "twin")
NUM_FIELDS = (len(ROW_FIELDS), len(SEQUENCE_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RectangleLimits:
    """What a rectangle may be at most.

    Attributes:
        num_sequences: sequences at once.
        num_keys: width of the KV store.
        num_rows: rows of all sequences, padding included.
        num_free_rows: up to so many, padding costs less than launching; beyond, matrices are bound
            by arithmetic, and at most half of the rows may be padding.
    """

    num_sequences: int
    num_keys: int
    num_rows: int = 1024
    num_free_rows: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A shape of passes.

    Attributes:
        num_sequences: padded.
        num_rows: per sequence, padded.
        num_wanted: rows whose logits are computed: one per sequence, or all.
        num_keys: no row sees an index beyond.
        feature_layers: layers whose input is wanted for every row.
    """

    num_sequences: int
    num_rows: int
    num_wanted: int
    num_keys: int
    feature_layers: tuple[int, ...] = ()


def bucket_of(
    spans: Sequence[Span], num_wanted: int, limits: RectangleLimits, num_later: int = 0
) -> Bucket | None:
    """The smallest bucket that holds a pass; None if none does.

    Args:
        spans: of the pass.
        num_wanted: rows whose logits are wanted.
        limits: of buckets.
        num_later: further rows per sequence that will follow in the same recording.
    """
    longest = max(span.num_rows for span in spans)
    if longest > MAX_ROWS:
        return None
    num_sequences = padded_sequences(len(spans), limits.num_sequences)
    num_rows = next(step for step in ROW_STEPS if step >= longest)
    num_padded = num_sequences * num_rows
    num_free = max(limits.num_free_rows, 2 * sum(span.num_rows for span in spans))
    if num_padded > min(limits.num_rows, num_free):
        return None
    furthest = max(span.start + span.num_rows for span in spans) + num_later
    return Bucket(
        num_sequences=num_sequences,
        num_rows=num_rows,
        num_wanted=num_sequences if num_wanted <= len(spans) else num_sequences * num_rows,
        num_keys=padded_keys(furthest, limits.num_keys),
    )


def padded_sequences(count: int, most: int) -> int:
    """1, 2, 3, 4, then multiples of a quarter of the next power of two."""
    step = max(1, (1 << (count - 1).bit_length()) // 4)
    return min(most, -(-count // step) * step)


def padded_keys(count: int, most: int) -> int:
    """The next of a geometric row of sizes."""
    size = MIN_KEYS
    while size < count:
        size *= KEY_GROWTH
    return min(size, most)


def table_of(spans: Sequence[Span], bucket: Bucket) -> list[int]:
    """What a pass differs by from others of its bucket, column after column.

    Columns with an entry per row of the rectangle: `place`, the rectangle's row of each packed row;
    `source`, the packed row of each of the rectangle's; `index`, where in its slot it is written;
    `visible`, bit j set if it sees the row written at its sequence's start + j. Columns with an
    entry per sequence: `slot`; `start`, the first index written; `end`, the index after the last;
    `twin`, the sequence of which this one is a copy (itself unless it is padding).
    """
    firsts = [0, *accumulate(span.num_rows for span in spans)]
    num_rows = bucket.num_rows
    place = [
        sequence * num_rows + row
        for sequence, span in enumerate(spans)
        for row in range(span.num_rows)
    ]
    place += [0] * (bucket.num_sequences * num_rows - len(place))
    source: list[int] = []
    index: list[int] = []
    visible: list[int] = []
    twins = [min(sequence, len(spans) - 1) for sequence in range(bucket.num_sequences)]
    for twin in twins:
        span = spans[twin]
        rows = [min(row, span.num_rows - 1) for row in range(num_rows)]
        seen = visible_bits(span)
        source += [firsts[twin] + row for row in rows]
        index += [span.start + row for row in rows]
        visible += [seen[row] for row in rows]
    slots = [spans[twin].slot for twin in twins]
    starts = [spans[twin].start for twin in twins]
    ends = [spans[twin].start + spans[twin].num_rows for twin in twins]
    return [*place, *source, *index, *visible, *slots, *starts, *ends, *twins]


def visible_bits(span: Span) -> list[int]:
    """Per row of a span, which of its rows it sees: bit j for row j, as a signed 64-bit integer."""
    chain = [
        (1 << (row + 1 if span.causal else span.num_chain)) - 1 for row in range(span.num_chain)
    ]
    bits = list(chain)
    for node, parent in enumerate(span.tree.parents):
        above = chain[-1] if parent < 0 else bits[span.num_chain + parent]
        bits.append(above | 1 << (span.num_chain + node))
    return [value - (1 << 64) if value >= 1 << 63 else value for value in bits]
