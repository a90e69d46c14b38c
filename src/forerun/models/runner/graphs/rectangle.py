"""Padding of small passes to fixed shapes, their attention, and input buffers of recorded passes.

A rectangle has so many sequences and so many rows for each. A sequence with fewer rows repeats its
last, missing sequences repeat the last one: padding computes and stores what is there already, and
needs no place of its own. Everything that differs between two passes of one shape is one small
table of integers, which is copied to the buffers before every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.models.attention import attend
from forerun.models.base import RowBatch, Span
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.layers import Rotation, compute_rotation, split_heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of one padded rectangle, in the form that its attention reads.

    Attributes:
        visible: per row, bit j set if it sees the row at its sequence's start + j.
        start: first index written, per sequence; all before is seen by all its rows.
        end: index after the last one written, per sequence.
    """

    bucket: PassShape
    positions: Int64[Tensor, "sequences rows"]
    index: Int64[Tensor, "sequences rows"]
    visible: Int64[Tensor, "sequences rows"]
    slot: Int64[Tensor, " sequences"]
    start: Int64[Tensor, " sequences"]
    end: Int64[Tensor, " sequences"]


class Inputs:
    """Input buffers of passes of one shape."""

    def __init__(
        self, bucket: PassShape, device: torch.device, features: Tensor | None = None
    ) -> None:
        self.bucket = bucket
        self.features = features
        num_sequences, num_rows = bucket.num_sequences, bucket.num_rows
        per_row, per_sequence = NUM_FIELDS
        num_padded = num_sequences * num_rows
        size = per_row * num_padded + per_sequence * num_sequences
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        rows, sequences = self._table.tensor_split((per_row * num_padded,))
        self._place, self._source, index, visible = rows.view(per_row, num_padded)
        slot, start, end = sequences.view(per_sequence, num_sequences)
        self.tokens = torch.zeros(num_padded, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self.tokens)
        self.wanted = torch.zeros(bucket.num_wanted, dtype=torch.int64, device=device)
        shape = (num_sequences, num_rows)
        self.rows = Rows(
            bucket=bucket,
            positions=self._positions.view(shape),
            index=index.view(shape),
            visible=visible.view(shape),
            slot=slot,
            start=start,
            end=end,
        )

    def pack_features(self, batch: RowBatch) -> Float[Tensor, "rows layers hidden"] | None:
        if self.features is None:
            return None
        return self.features.index_select(0, self._place[: len(batch.tokens)])

    def fill(self, batch: RowBatch) -> None:
        """Fill the buffers with `batch` by one copy from the host, without waiting for the device.

        Entries of `wanted` past those of the batch keep an older row of the rectangle.
        """
        # Memory the host may page is staged by the driver before the call returns, so it can go.
        self._table.copy_(torch.tensor(table_of(batch.spans, self.bucket)), non_blocking=True)
        torch.index_select(batch.tokens, 0, self._source, out=self.tokens)
        torch.index_select(batch.positions, 0, self._source, out=self._positions)
        num_wanted = len(batch.logit_rows)
        if num_wanted:
            wanted = self.wanted[:num_wanted]
            torch.index_select(self._place, 0, batch.logit_rows, out=wanted)


# What a row sees of its own pass is one bit per row of its sequence, in 64 bits.
MAX_ROWS = 64
# Numbers of rows per sequence that have a bucket; others are padded to the next.
ROW_STEPS = (*range(1, 9), *range(12, 33, 4), 40, 48, 56, MAX_ROWS)
# Fewest keys of a bucket, and how many times more the next has: a growing context is recorded anew
# only now and then.
MIN_KEYS, KEY_GROWTH = 512, 4
# Most rows of a bucket, padding included. Up to so many free rows padding costs less than a launch;
# beyond, matrices are bound by arithmetic, and at most half of the rows may be padding.
MAX_PADDED_ROWS, FREE_ROWS = 1024, 256

# Columns of the table with one entry per row, then those with one entry per sequence.
ROW_FIELDS = ("place", "source", "index", "visible")
SEQUENCE_FIELDS = ("slot", "start", "end")
NUM_FIELDS = (len(ROW_FIELDS), len(SEQUENCE_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLimits:
    """Limits on the shapes of passes that are recorded."""

    num_sequences: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """A shape of passes.

    Attributes:
        num_wanted: rows whose logits are computed: one per sequence, or all.
        num_keys: no row sees an index beyond.
    """

    num_sequences: int
    num_rows: int
    num_wanted: int
    num_keys: int
    feature_layers: tuple[int, ...] = ()


def shape_of(spans: Sequence[Span], num_wanted: int, limits: ShapeLimits) -> PassShape | None:
    """Return the smallest shape that holds a pass, or None if none does."""
    longest = max(span.num_rows for span in spans)
    if longest > MAX_ROWS:
        return None
    step = max(1, (1 << (len(spans) - 1).bit_length()) // 4)
    num_sequences = min(limits.num_sequences, -(-len(spans) // step) * step)
    num_rows = next(step for step in ROW_STEPS if step >= longest)
    num_padded = num_sequences * num_rows
    num_free = max(FREE_ROWS, 2 * sum(span.num_rows for span in spans))
    if num_padded > min(MAX_PADDED_ROWS, num_free):
        return None
    furthest = max(span.start + span.num_rows for span in spans)
    return PassShape(
        num_sequences=num_sequences,
        num_rows=num_rows,
        num_wanted=num_sequences if num_wanted <= len(spans) else num_sequences * num_rows,
        num_keys=pad_keys(furthest, limits.num_keys),
    )


def pad_keys(count: int, most: int) -> int:
    """Round up to the next of a geometric series of sizes."""
    size = MIN_KEYS
    while size < count:
        size *= KEY_GROWTH
    return min(size, most)


def table_of(spans: Sequence[Span], bucket: PassShape) -> list[int]:
    """Return the indices of a pass as one list, in which only values differ for equal shapes.

    Columns with an entry per row of the rectangle: `place`, the rectangle's row of each packed row;
    `source`, the packed row of each of the rectangle's; `index`, where in its slot it is written;
    `visible`, bit j set if it sees the row written at its sequence's start + j. Columns with an
    entry per sequence: `slot`; `start`, the first index written; `end`, the index after the last.
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
    originals = [min(sequence, len(spans) - 1) for sequence in range(bucket.num_sequences)]
    for original in originals:
        span = spans[original]
        rows = [min(row, span.num_rows - 1) for row in range(num_rows)]
        seen = pack_visible(span)
        source += [firsts[original] + row for row in rows]
        index += [span.start + row for row in rows]
        visible += [seen[row] for row in rows]
    slots = [spans[original].slot for original in originals]
    starts = [spans[original].start for original in originals]
    ends = [spans[original].start + spans[original].num_rows for original in originals]
    return [*place, *source, *index, *visible, *slots, *starts, *ends]


def pack_visible(span: Span) -> list[int]:
    """Return, per row of a span, a 64-bit integer whose bit j is set if the row sees row j."""
    chain = [(1 << (row + 1)) - 1 for row in range(span.num_chain)]
    bits = list(chain)
    for node, parent in enumerate(span.tree.parents):
        above = chain[-1] if parent < 0 else bits[span.num_chain + parent]
        bits.append(above | 1 << (span.num_chain + node))
    return [value - (1 << 64) if value >= 1 << 63 else value for value in bits]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RectangleAttention:
    """An `Attend` over a padded rectangle of rows.

    Attributes:
        places: where each row's heads lie in a layer of the store, counted in heads.
        unwritten: keys past each sequence's own.
        bias: 0 where a row, heads of a group folded in, sees a key, -inf where not.
    """

    decoder: Decoder
    store: ContiguousKVStore
    rows: Rows
    rotation: Rotation
    places: Int64[Tensor, " written_heads"]
    unwritten: Bool[Tensor, "sequences 1 keys 1"]
    bias: Float[Tensor, "sequences 1 folded keys"]

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        query, key, value = split_heads(self.decoder, layer, qkv, self.rotation)
        keys, values = self.store.layer(index)
        for stored, new in ((keys, key), (values, value)):
            stored.view(-1, new.shape[-1]).index_copy_(0, self.places, new.flatten(0, 1))
        bucket = self.rows.bucket
        queries = query.view(bucket.num_sequences, bucket.num_rows, *query.shape[1:])
        scaling = self.decoder.architecture.head_dim**-0.5
        own = (self.own(keys), self.own(values))
        return attend(queries.transpose(1, 2), *own, self.bias, scaling).reshape(len(qkv), -1)

    def own(
        self, stored: Float[Tensor, "slots kv_heads width head_dim"]
    ) -> Float[Tensor, "sequences kv_heads keys head_dim"]:
        """Copy the sequences' keys or values, with 0 at positions not written yet."""
        cut = stored.narrow(2, 0, self.rows.bucket.num_keys)
        return cut.index_select(0, self.rows.slot).masked_fill_(self.unwritten, 0)


def attend_rectangle(decoder: Decoder, store: ContiguousKVStore, rows: Rows) -> RectangleAttention:
    """Compute the inputs of attention that are the same in all layers of a pass."""
    sizes = decoder.architecture
    keys = torch.arange(rows.bucket.num_keys, device=rows.slot.device)
    seen = _mask_visible(rows, keys).repeat(1, sizes.num_heads // sizes.num_kv_heads, 1)
    bias = torch.zeros_like(seen, dtype=store.geometry.dtype).masked_fill_(~seen, float("-inf"))
    return RectangleAttention(
        decoder=decoder,
        store=store,
        rows=rows,
        rotation=compute_rotation(decoder, rows.positions.flatten()),
        places=_list_places(store, rows),
        unwritten=(keys >= rows.end[:, None])[:, None, :, None],
        bias=bias[:, None],
    )


def _mask_visible(rows: Rows, keys: Int64[Tensor, " keys"]) -> Bool[Tensor, "sequences rows keys"]:
    """Mask of visible keys per row: all before the span, and within it those set in `visible`."""
    offsets = keys - rows.start[:, None]
    bits = rows.visible[:, :, None] >> offsets.clamp(0, 63)[:, None]
    own = (offsets >= 0) & (keys < rows.end[:, None])
    return torch.where(own[:, None], bits & 1 != 0, (offsets < 0)[:, None])


def _list_places(store: ContiguousKVStore, rows: Rows) -> Int64[Tensor, " written_heads"]:
    """Return the flat index at which each head of each row is stored in a layer."""
    _, _, num_kv_heads, width, _ = store.geometry.shape
    heads = torch.arange(num_kv_heads, device=rows.slot.device)
    first = rows.slot[:, None, None] * num_kv_heads + heads
    return (first * width + rows.index[:, :, None]).flatten()
