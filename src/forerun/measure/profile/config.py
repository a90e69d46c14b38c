"""Settings of a profile, and the list of its measurements; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from forerun.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which times a profile holds, and for how long they are measured.

    Attributes:
        rows: rows per sequence of a target pass; a verify pass at K has K + 1.
        drafted: K of the greedy chains and of the engine steps; a straight line through them gives
            what a drafted token adds, and what is left what else a cycle takes at each.
        read: tokens of one sequence in a pass that reads them; fewer than two sizes: reading is not
            measured.
        max_pass_rows: passes of more rows, over all sequences, are left out.
        target_error: done when half of every 95% interval is below this share of its estimate,
            which takes at least six samples of each.
        budget_s: no new round is begun after so many seconds of measuring.
    """

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (64, 512)
    drafted: tuple[int, ...] = (1, 4)
    read: tuple[int, ...] = (1, 64, 256)
    max_pass_rows: int = 128
    target_error: float = 0.02
    min_rounds: int = 3
    budget_s: float = 12.0

    def __post_init__(self) -> None:
        for name in ("rows", "batches", "contexts", "drafted"):
            values = getattr(self, name)
            if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
                raise InvalidRequest(f"{name} is {list(values)}; it must ascend from 1 or more")
        if any(b <= a for a, b in pairwise((0, *self.read))) or self.read[:1] not in ((), (1,)):
            raise InvalidRequest(f"read is {list(self.read)}; it must ascend from 1, or be empty")
        if self.rows[0] != 1:
            raise InvalidRequest(f"rows is {list(self.rows)}; it must begin at 1, a plain pass")
        if self.max_pass_rows < self.batches[-1] * (self.drafted[-1] + 1):
            raise InvalidRequest(
                f"max_pass_rows is {self.max_pass_rows}, below {self.batches[-1]} sequences of "
                f"{self.drafted[-1] + 1} rows; raise it, or lower batches or drafted"
            )
        if self.min_rounds < 1:
            raise InvalidRequest(f"min_rounds is {self.min_rounds}; it must be at least 1")
        for name in ("target_error", "budget_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0")


class Quantity(StrEnum):
    """Kind of time that a profile measures."""

    TARGET_PASS = "target_pass"
    """A forward of the target; size: rows per sequence."""
    DRAFT_PASS = "draft_pass"
    """A forward of the draft; size: rows per sequence."""
    DRAFT_CHAIN = "draft_chain"
    """One greedy chain of the draft; size: its tokens."""
    TARGET_READ = "target_read"
    """A forward of the target over tokens of one sequence, as in prefill; size: tokens."""
    DRAFT_READ = "draft_read"
    """The same of the draft."""
    GREEDY_STEP = "greedy_step"
    """A whole engine step at T=0; size: K, 0 for a plain step."""
    SAMPLED_STEP = "sampled_step"
    """The same at T=1."""
    GREEDY_OVERHEAD = "greedy_overhead"
    """The part of a greedy step outside both models."""
    SAMPLED_OVERHEAD = "sampled_overhead"
    """The part of a sampled step outside both models."""


OVERHEAD_OF: Mapping[Quantity, Quantity] = MappingProxyType(
    {
        Quantity.GREEDY_STEP: Quantity.GREEDY_OVERHEAD,
        Quantity.SAMPLED_STEP: Quantity.SAMPLED_OVERHEAD,
    }
)
"""The part of a step outside both models; the same steps yield both."""
SHORTENED = frozenset({Quantity.TARGET_PASS, Quantity.TARGET_READ, Quantity.DRAFT_READ})
"""What is measured up to the size that fits."""


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """One time to measure: quantity, batch size, context and size.

    Attributes:
        context: committed tokens of each when the measurement begins.
    """

    quantity: Quantity
    batch: int
    context: int
    size: int

    def __str__(self) -> str:
        name = self.quantity.replace("_", " ")
        return f"{name} of size {self.size} at batch {self.batch}, context {self.context}"


def pass_cells(config: ProfileConfig, context: int) -> Iterator[ProfileCell]:
    """Yield the target passes to time at one context, by batch size and rows per sequence."""
    for batch in config.batches:
        for rows in config.rows:
            if batch * rows <= config.max_pass_rows:
                yield ProfileCell(Quantity.TARGET_PASS, batch, context, rows)


def chain_cells(
    config: ProfileConfig, context: int, *, catches_up: bool = False
) -> Iterator[ProfileCell]:
    """Yield draft chains at one context, and the single pass that sampled drafting repeats."""
    rows = (1, 1 + config.drafted[-1]) if catches_up else (1,)
    for batch in config.batches:
        for size in rows:
            yield ProfileCell(Quantity.DRAFT_PASS, batch, context, size)
        for length in config.drafted:
            yield ProfileCell(Quantity.DRAFT_CHAIN, batch, context, length)


def read_cells(config: ProfileConfig, quantity: Quantity) -> Iterator[ProfileCell]:
    for size in config.read:
        yield ProfileCell(quantity, 1, config.contexts[0], size)


def step_cells(config: ProfileConfig) -> Iterator[ProfileCell]:
    """Yield plain and speculative engine steps and their overhead, at the shortest context."""
    for quantity in OVERHEAD_OF:
        for batch in config.batches:
            for k in (0, *config.drafted):
                step = ProfileCell(quantity, batch, config.contexts[0], k)
                yield step
                yield replace(step, quantity=OVERHEAD_OF[quantity])


def without(cells: Collection[ProfileCell], failed: ProfileCell) -> list[ProfileCell]:
    """Return the cells that remain after one has run out of memory.

    Larger sizes of the same kind go with it. Where the batch cannot even do its smallest size it
    goes altogether, and larger batches with it, so that what remains is still a grid.
    """
    smallest = min(c.size for c in cells if alike(c, failed))
    if failed.size > smallest and failed.quantity in SHORTENED:
        return [c for c in cells if not (alike(c, failed) and c.size >= failed.size)]
    return [c for c in cells if c.batch < failed.batch]


def alike(one: ProfileCell, other: ProfileCell) -> bool:
    return (one.quantity, one.batch, one.context) == (other.quantity, other.batch, other.context)


def sizes(cells: Iterable[ProfileCell], quantity: Quantity, batch: int, context: int) -> list[int]:
    wanted = ProfileCell(quantity, batch, context, 0)
    return sorted(c.size for c in cells if alike(c, wanted))
