"""Steps of a trace as columns, in blocks of complete cycles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import Damage, Item

Ints: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]

CycleKind = Literal["plain", "no proposal", "drafting", "prefill"]
KINDS: tuple[CycleKind, ...] = ("plain", "no proposal", "drafting", "prefill")
"""Kinds of cycles: "prefill" if a prompt is read, else "drafting" if a request drafts, else "no
proposal" if a drafter was asked, and "plain" otherwise. The column `kind` holds the index."""
PLAIN, NO_PROPOSAL, DRAFTING, PREFILL = range(len(KINDS))
BLOCK_STEPS = 1 << 16
_INTS = (
    *("cycle_id", "step", "k_budget", "num_drafted", "depth_drafted", "num_accepted"),
    *("num_emitted", "batch_rows", "num_prefill_rows", "context_tokens"),
)
_REALS = ("t_s", "draft_s", "verify_s", "other_s", "expected_accepted")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBlock:
    """Consecutive steps of a trace.

    Attributes:
        records: the steps, one by one.
        names: ids of their requests.
        columns: numbers of the steps by field name; `request` is the index of a step's request in
            `names`; `kind`, `size`, `cycle_tokens` (emitted) and `plans` (whether a drafter was
            asked) are those of its cycle.
        first: index of the first step of every cycle.
    """

    records: Sequence[StepRecord]
    names: tuple[str, ...]
    columns: Columns
    first: Ints


def block_of(records: Sequence[StepRecord]) -> StepBlock:
    """Return consecutive steps of a trace, at least one, as a block of columns."""
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.array([getattr(record, name) for record in records], kind)
        for names, kind in ((_INTS, np.int64), (_REALS, np.float64))
        for name in names
    }
    codes: dict[str, int] = {}
    columns["request"] = np.array(
        [codes.setdefault(record.request_id, len(codes)) for record in records], np.int64
    )
    # Several engines use the same cycle ids; their cycles differ in time.
    begins = np.ones(len(records), np.bool_)
    begins[1:] = (np.diff(columns["cycle_id"]) != 0) | (np.diff(columns["t_s"]) != 0.0)
    first = np.flatnonzero(begins)
    sizes = np.diff(np.append(first, len(records)))
    reads, drafts, plans = (
        np.maximum.reduceat(columns[name], first) > 0
        for name in ("num_prefill_rows", "num_drafted", "k_budget")
    )
    kinds = np.select([reads, drafts, plans], [PREFILL, DRAFTING, NO_PROPOSAL], PLAIN)
    tokens = np.add.reduceat(columns["num_emitted"], first)
    for name, values in (
        ("kind", kinds),
        ("size", sizes),
        ("cycle_tokens", tokens),
        ("plans", plans),
    ):
        columns[name] = np.repeat(values, sizes)
    return StepBlock(records=records, names=tuple(codes), columns=columns, first=first)


def chosen(columns: Columns, rows: Mask | Ints | slice) -> Columns:
    """Return some rows of all columns."""
    return {name: values[rows] for name, values in columns.items()}


def sums_by(
    keys: Sequence[Ints], values: Sequence[npt.NDArray[Any]]
) -> Iterator[tuple[tuple[int, ...], int, list[float]]]:
    """Yield every combination of the keys with its number of rows and the sums of the values."""
    if not len(keys[0]):
        return
    places, index = np.unique(np.stack(keys), axis=1, return_inverse=True)
    index, size = index.ravel(), places.shape[1]
    sums = [np.bincount(index, value, size).tolist() for value in values]
    for place, number, *found in zip(places.T.tolist(), np.bincount(index), *sums, strict=True):
        yield tuple(place), int(number), found


Piece: TypeAlias = StepBlock | TraceHeader | RequestRecord | Damage


def pieces_of(items: Iterable[Item]) -> Iterator[Piece]:
    """Yield the steps of a trace in blocks, and all other items as they come.

    A block ends after a complete cycle, unless one cycle is as long as a block. It also ends before
    a request that reuses the id of a request that ended in it.
    """
    waiting: list[StepRecord] = []
    ended: set[str] = set()
    for item in items:
        if not isinstance(item, StepRecord):
            if isinstance(item, RequestRecord):
                ended.add(item.request_id)
            yield item
            continue
        if waiting and (len(waiting) >= BLOCK_STEPS or item.request_id in ended):
            last = waiting[-1]
            is_other = (item.cycle_id, item.t_s) != (last.cycle_id, last.t_s)
            if is_other or len(waiting) >= 2 * BLOCK_STEPS:
                yield block_of(waiting)
                waiting = []
                ended.clear()
        waiting.append(item)
    if waiting:
        yield block_of(waiting)
