"""What a profile measures: one quantity at one batch size, context and size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from forerun.probe.config import ProbeConfig

__all__ = [
    "OVERHEAD_OF",
    "ProfileCell",
    "Quantity",
    "chain_cells",
    "pass_cells",
    "read_cells",
    "sizes",
    "step_cells",
    "without",
]


class Quantity(StrEnum):
    """What a number of seconds is of."""

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
"""What of a step is outside both models; the same steps tell both."""
SHORTENED = frozenset({Quantity.TARGET_PASS, Quantity.TARGET_READ, Quantity.DRAFT_READ})
"""What is measured up to the size that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCell:
    """One thing to measure.

    Attributes:
        quantity: what.
        batch: sequences.
        context: committed tokens of each when the measurement begins.
        size: see Quantity.
    """

    quantity: Quantity
    batch: int
    context: int
    size: int

    def __str__(self) -> str:
        """For messages."""
        name = self.quantity.replace("_", " ")
        return f"{name} of size {self.size} at batch {self.batch}, context {self.context}"


def pass_cells(config: ProbeConfig, context: int) -> Iterator[ProfileCell]:
    """Target passes at one context."""
    for batch in config.batches:
        for rows in config.rows:
            if batch * rows <= config.max_pass_rows:
                yield ProfileCell(
                    quantity=Quantity.TARGET_PASS, batch=batch, context=context, size=rows
                )


def chain_cells(config: ProbeConfig, context: int) -> Iterator[ProfileCell]:
    """Draft chains at one context, and the single pass that sampled drafting repeats."""
    for batch in config.batches:
        yield ProfileCell(quantity=Quantity.DRAFT_PASS, batch=batch, context=context, size=1)
        for length in config.drafted:
            yield ProfileCell(
                quantity=Quantity.DRAFT_CHAIN, batch=batch, context=context, size=length
            )


def read_cells(config: ProbeConfig, quantity: Quantity) -> Iterator[ProfileCell]:
    """Passes of one model that read, at the shortest context."""
    for size in config.read:
        yield ProfileCell(quantity=quantity, batch=1, context=config.contexts[0], size=size)


def step_cells(config: ProbeConfig) -> Iterator[ProfileCell]:
    """Engine steps, plain and speculative, and their overhead, at the shortest context."""
    for quantity in OVERHEAD_OF:
        for batch in config.batches:
            for k in (0, *config.drafted):
                step = ProfileCell(
                    quantity=quantity, batch=batch, context=config.contexts[0], size=k
                )
                yield step
                yield replace(step, quantity=OVERHEAD_OF[quantity])


def without(cells: Collection[ProfileCell], failed: ProfileCell) -> list[ProfileCell]:
    """The cells that remain when one does not fit into memory.

    Larger sizes of the same kind go with it. Where the batch cannot even do its smallest size it
    goes altogether, and larger batches with it, so that what remains is still a grid.
    """
    smallest = min(c.size for c in cells if alike(c, failed))
    if failed.size > smallest and failed.quantity in SHORTENED:
        return [c for c in cells if not (alike(c, failed) and c.size >= failed.size)]
    return [c for c in cells if c.batch < failed.batch]


def alike(one: ProfileCell, other: ProfileCell) -> bool:
    """Whether two cells differ in nothing but size."""
    return (one.quantity, one.batch, one.context) == (other.quantity, other.batch, other.context)


def sizes(cells: Iterable[ProfileCell], quantity: Quantity, batch: int, context: int) -> list[int]:
    """Measured sizes of one kind, ascending."""
    wanted = ProfileCell(quantity=quantity, batch=batch, context=context, size=0)
    return sorted(c.size for c in cells if alike(c, wanted))
