"""Cost tables of a target with a drafter: measured, changed, or estimated by a roofline model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from forerun.errors import InvalidRequest, Range, check_ranges
from forerun.theory.cost import CostLine, CostTable, ReadingCost


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Cost tables of one target and drafter, for greedy and for sampled drafts."""

    greedy: CostTable
    sampled: CostTable
    reading: ReadingCost | None = None

    def at(self, temperature: float) -> CostTable:
        """Return the table that holds at a temperature."""
        return self.greedy if temperature == 0 else self.sampled


def with_draft_cost(table: CostTable, draft_s: float, overhead_s: float | None = None) -> CostTable:
    """Return the cost tables of the same target with another drafter.

    Args:
        draft_s: seconds of every drafted token, at every batch size.
        overhead_s: seconds of a cycle beyond drafting and the pass, for every K and batch; None
            leaves those of the table.
    """
    changes: dict[str, Any] = {"draft_s": draft_s, "draft_error_s": 0.0}
    if overhead_s is not None:
        changes |= {"overhead_ks": (1,), "overhead_s": (overhead_s,), "overhead_error_s": ()}
    return CostTable(lines=tuple(replace(line, **changes) for line in table.lines))


def with_batches(table: CostTable, batches: Iterable[int]) -> CostTable:
    """Return a cost table extended to batch sizes beyond the largest measured one.

    The time of a pass depends little on which sequence a row belongs to. So n times the sequences
    are taken to cost what n times the rows of the largest measured batch cost, and a draft's pass
    to grow as the target's does. The time to read the keys and values of more sequences is left
    out, so large batches look faster than a measurement would show.
    """
    largest = table.batches[-1]
    wanted = sorted({batch for batch in batches if batch > largest})
    measured = [line for line in table.lines if line.batch == largest]
    return CostTable(
        lines=(*table.lines, *(grown(line, batch) for batch in wanted for line in measured))
    )


def grown(line: CostLine, batch: int) -> CostLine:
    """Estimate a line of the cost table at a larger batch size from its times by rows."""
    times = batch / line.batch
    passes = [line.verify(math.ceil(rows * times)) for rows in line.rows]
    factor = passes[0].s / line.verify(1).s
    return replace(
        line,
        batch=batch,
        verify_s=tuple(reading.s for reading in passes),
        verify_error_s=tuple(reading.error_s for reading in passes),
        plain_s=line.plain_s + passes[0].s - line.verify(1).s,
        draft_s=line.draft_s * factor,
        draft_error_s=line.draft_error_s * factor,
    )


ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
RANGES = (
    Range("flops_per_s", 0, above_low=True),
    Range("bytes_per_s", 0, above_low=True),
    Range("launch_s", 0),
    Range("step_s", 0),
    Range("memory_bytes", 0, above_low=True, optional=True),
)
SIZE_RANGES = (
    Range("num_parameters", 0, above_low=True),
    Range("weight_bytes", 0, above_low=True),
    Range("kv_token_bytes", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a machine from which a roofline estimates times.

    Attributes:
        flops_per_s: dense arithmetic in the dtype of the passes.
        launch_s: seconds of every pass before it computes.
        step_s: seconds of every step outside the passes.
        memory_bytes: of the accelerator; None leaves it unchecked whether the models fit.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 1e-4
    step_s: float = 5e-4
    source: str = "given"
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, *RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Properties of a model from which a roofline estimates times.

    Attributes:
        num_parameters: parameters that every row is multiplied with.
        weight_bytes: bytes of weights, read once by every pass.
        kv_token_bytes: bytes of keys and values per committed token, read once by every pass.
    """

    num_parameters: float
    weight_bytes: float
    kv_token_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, *SIZE_RANGES)


def _data_sheet(name: str, tera_flops: float, giga_bytes: float, memory_gb: float) -> Machine:
    return Machine(
        name=name,
        flops_per_s=tera_flops * 1e12,
        bytes_per_s=giga_bytes * 1e9,
        memory_bytes=memory_gb * 1e9,
        source="data sheet: dense 16-bit arithmetic and memory rate; overheads are assumed",
    )


PRESETS: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            _data_sheet("a100-80gb", 312, 2039, 80),
            _data_sheet("b200", 2250, 8000, 180),
            _data_sheet("h100-sxm", 989, 3350, 80),
            _data_sheet("h200-sxm", 989, 4800, 141),
            _data_sheet("l4", 121, 300, 24),
            _data_sheet("l40s", 362, 864, 48),
            _data_sheet("mi300x", 1307, 5300, 192),
            _data_sheet("rtx-4090", 165, 1008, 24),
        )
    }
)
"""Peaks from the vendors' public data sheets, one accelerator each, without sparsity."""


def preset(name: str) -> Machine:
    """Return a machine by name."""
    if name not in PRESETS:
        raise InvalidRequest(
            f"machine {name!r} is unknown; there are {', '.join(PRESETS)}, or give --flops and "
            "--bandwidth"
        )
    return PRESETS[name]


def pass_s(machine: Machine, model: ModelSize, num_rows: int, batch: int, context: int) -> float:
    """Return the seconds of a pass over `num_rows` rows of each of `batch` sequences."""
    arithmetic_s = 2 * model.num_parameters * num_rows * batch / machine.flops_per_s
    read = model.weight_bytes + batch * context * model.kv_token_bytes
    return max(arithmetic_s, read / machine.bytes_per_s) + machine.launch_s


def cost_table(
    machine: Machine,
    target: ModelSize,
    draft: ModelSize | None,
    *,
    batches: Collection[int],
    contexts: Collection[int],
) -> CostTable:
    """Return the cost table of a roofline; without a draft model drafting costs nothing.

    A pass takes as long as its arithmetic or its memory reads, whichever is longer, plus a launch
    time: a lower bound. Real machines take longer by a factor, which mostly cancels in kappa; where
    a plan matters, profile the machine. Source: Williams, Waterman and Patterson 2009.
    """
    _check_memory(machine, target, draft, batch=min(batches), context=min(contexts))

    def line(batch: int, context: int) -> CostLine:
        verify_s = tuple(pass_s(machine, target, rows, batch, context) for rows in ROWS)
        return CostLine(
            batch=batch,
            context=context,
            rows=ROWS,
            verify_s=verify_s,
            plain_s=verify_s[0] + machine.step_s,
            draft_s=0.0 if draft is None else pass_s(machine, draft, 1, batch, context),
            overhead_s=(machine.step_s,),
        )

    try:
        return CostTable(lines=tuple(line(b, c) for b in sorted(batches) for c in sorted(contexts)))
    except (OverflowError, ValueError) as error:
        raise InvalidRequest(
            f"the figures of the machine and of the models give no times of passes: {error}"
        ) from error


def _check_memory(
    machine: Machine, target: ModelSize, draft: ModelSize | None, *, batch: int, context: int
) -> None:
    """Refuse models that do not fit with the KV of `batch` sequences of `context` tokens."""
    models = [target] if draft is None else [target, draft]
    weights = sum(model.weight_bytes for model in models)
    needed = weights + batch * context * sum(model.kv_token_bytes for model in models)
    if machine.memory_bytes is not None and needed > machine.memory_bytes:
        raise InvalidRequest(
            f"the models need {needed / 1e9:.0f} GB on {machine.name} ({weights / 1e9:.0f} GB of "
            f"weights, the rest keys and values at batch {batch} and context {context}), and it "
            f"has {machine.memory_bytes / 1e9:.0f} GB: take a larger machine, a smaller dtype or a "
            "smaller model; for several devices give --flops and --bandwidth of all together"
        )
