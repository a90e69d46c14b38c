"""A profile for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from forerun.cli.tables import table_of
from forerun.models.memory import readable
from forerun.probe.cells import ProfileCell, Quantity
from forerun.probe.profile import Profile
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine
from forerun.theory.intervals import Interval

__all__ = ["print_profile"]

SHOWN_K = (1, 2, 4, 8)


def print_profile(profile: Profile) -> None:
    """What a step consists of, v(n), kappa, where it was measured."""
    console = Console(highlight=False)
    console.print(parts(profile), "")
    console.print(verify_costs(profile.greedy), "")
    console.print(cycle_costs(profile), "")
    for sentence in remarks(profile):
        console.print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)


def parts(profile: Profile) -> Table:
    """One column per batch and context: where the milliseconds of a step go."""
    lines = profile.greedy.lines
    table = grid("milliseconds", lines)
    table.add_row("plain step", *(milliseconds(line.plain_s, line.plain_error_s) for line in lines))
    table.add_row("  of it the forward", *(forward(profile, line) for line in lines))
    limits = [profile.limit.pass_s(line.batch, line.context) for line in lines]
    table.add_row("  read limit", *(milliseconds(limit) for limit in limits))
    shares = [limit / line.plain_s for limit, line in zip(limits, lines, strict=True)]
    table.add_row("  share of its speed", *(f"{share:.0%}" for share in shares))
    table.add_row("  among other work", *(slower(profile, line) for line in lines))
    for quantity in (Quantity.DRAFT_PASS, Quantity.DRAFT_CHAIN):
        for size in sizes_of(profile, quantity):
            name = f"draft chain of {size}" if quantity is Quantity.DRAFT_CHAIN else "draft pass"
            table.add_row(name, *(cell(profile, quantity, line, size) for line in lines))
    if profile.reading is not None:
        for name, seconds in (("", profile.reading.target_s), (", draft", profile.reading.draft_s)):
            for size, time_s in zip(profile.reading.tokens[1:], seconds[1:], strict=True):
                table.add_row(f"reading {size}{name}", milliseconds(time_s))
    for quantity in (Quantity.GREEDY_OVERHEAD, Quantity.SAMPLED_OVERHEAD):
        temperature = "T=0" if quantity is Quantity.GREEDY_OVERHEAD else "T=1"
        for k in sizes_of(profile, quantity):
            name = f"outside, {temperature}, {f'K={k}' if k else 'plain'}"
            table.add_row(name, *(outside(profile, quantity, line, k) for line in lines))
    return table


def verify_costs(table: CostTable) -> Table:
    """v(n) with half of its 95% interval."""
    shown = grid("v(n), plain steps", table.lines)
    for rows in sorted({rows for line in table.lines for rows in line.rows}):
        values = [
            with_error(table.verify_cost_interval(rows, line.context, line.batch))
            if rows in line.rows
            else ""
            for line in table.lines
        ]
        shown.add_row(f"n = {rows}", *values)
    return shown


def cycle_costs(profile: Profile) -> Table:
    """kappa at some K, greedy and sampled."""
    shown = grid("kappa, plain steps", profile.greedy.lines)
    for name, table in (("T=0", profile.greedy), ("T=1", profile.sampled)):
        for k in SHOWN_K:
            found = [table.cycle_cost_interval(k, x.context, x.batch) for x in table.lines]
            shown.add_row(f"{name}, K = {k}", *map(with_error, found))
    return shown


def grid(heading: str, lines: Sequence[CostLine]) -> Table:
    """An empty table with one column per batch and context."""
    table = table_of(Column(heading, no_wrap=True))
    for line in lines:
        table.add_column(f"batch {line.batch}\ncontext {line.context}", justify="right")
    return table


def forward(profile: Profile, line: CostLine) -> str:
    """The pass of a plain step."""
    return cell(profile, Quantity.TARGET_PASS, line, 1)


def slower(profile: Profile, line: CostLine) -> str:
    """What the forward of a plain step takes beyond the same forward alone."""
    if line.context != profile.greedy.contexts[0]:
        return ""
    return f"{1e3 * profile.among_work_s(line.batch):+.3f}"


def outside(profile: Profile, quantity: Quantity, line: CostLine, k: int) -> str:
    """Engine time outside both models; measured at one context, so shown once per batch."""
    if line.context != profile.greedy.contexts[0]:
        return ""
    found = profile.seconds(quantity, line.batch, line.context, k)
    return milliseconds(found.estimate, (found.high - found.low) / 2)


def cell(profile: Profile, quantity: Quantity, line: CostLine, size: int) -> str:
    """One measured time."""
    found = profile.seconds(quantity, line.batch, line.context, size)
    return milliseconds(found.estimate, (found.high - found.low) / 2)


def sizes_of(profile: Profile, quantity: Quantity) -> list[int]:
    """Every measured size."""
    cells: list[ProfileCell] = [measured.cell for measured in profile.measured]
    return sorted({found.size for found in cells if found.quantity is quantity})


def milliseconds(s: float, error_s: float | None = None) -> str:
    """A time for people."""
    return f"{1e3 * s:.3f}" + ("" if error_s is None else f" ±{1e3 * error_s:.3f}")


def with_error(interval: Interval) -> str:
    """A cost in plain steps and how far it may be off."""
    return f"{interval.estimate:.2f} ±{interval.high - interval.estimate:.2f}"


def remarks(profile: Profile) -> list[str]:
    """How sure this is, what the limit rests on, where it comes from."""
    limit, setup, found = profile.limit, profile.setup, profile.provenance
    steady = "steady" if profile.stable else "time ran out before every figure was steady"
    lines = [
        f"{profile.num_rounds} rounds, {steady}; ± is half of a 95% interval",
        f"read limit: {limit.bytes_per_s / 1e9:.1f} GB/s over {readable(limit.buffer_bytes)}; "
        f"a target pass reads {readable(limit.target_bytes)}, a draft pass "
        f"{readable(limit.draft_bytes)}",
        f"{profile.target} ({setup.target_runner}, {setup.dtype}) with {profile.draft} "
        f"({setup.draft_runner}) on {setup.cpu} x{setup.num_cores}, {setup.num_threads} threads, "
        f"{setup.device}; {found['date']}",
    ]
    if profile.left_out:
        lines.append(f"{len(profile.left_out)} measurements did not fit into memory")
    return lines
