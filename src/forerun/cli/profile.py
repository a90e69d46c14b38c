"""`forerun profile`: measure the costs of drafting and verification on this machine."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import UseAppendAction, arg

from forerun.cli.command import Command
from forerun.cli.flags import TargetFlags, check_threads, check_writable, use_threads
from forerun.cli.tables import SafeConsole, milliseconds, progress_bar, table_of
from forerun.drafters.config import NONE
from forerun.engine.config import EngineConfig
from forerun.errors import ForerunError, InvalidRequest
from forerun.measure.profile import ProfileConfig, Quantity

if TYPE_CHECKING:
    from forerun.measure.profile import Profile
    from forerun.theory.cost import CostLine, CostTable
    from forerun.theory.intervals import Interval

logger = logging.getLogger("forerun.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `forerun profile`."""

    models: TargetFlags = field(default_factory=TargetFlags)
    draft: UseAppendAction[tuple[str, ...]] = ()
    """Drafts, as for `forerun generate`; "auto" profiles all that it would try, "none" the target
    alone. Default: auto."""
    out: Path | None = None
    """Write the profile, or that of every draft, samples included, to this JSON file."""
    json: bool = False
    """Print the profile as one JSON object instead of tables."""
    budget_s: float | None = None
    """Seconds of measuring; a minimum of rounds is measured whatever the time."""
    rows: UseAppendAction[tuple[int, ...]] = ()
    """Rows per sequence of the measured passes, such as 1,2,4,8."""
    batches: Annotated[
        UseAppendAction[tuple[int, ...]], arg(name="batch", aliases=("--batches",))
    ] = ()
    """Sequences at once, such as 1,8."""
    contexts: Annotated[
        UseAppendAction[tuple[int, ...]], arg(name="context", aliases=("--contexts",))
    ] = ()
    """Committed tokens of every sequence, such as 64,512."""

    @property
    def config(self) -> ProfileConfig:
        changes: dict[str, Any] = {
            name: found
            for name in ("rows", "batches", "contexts")
            if (found := getattr(self, name))
        }
        if self.budget_s is not None:
            changes["budget_s"] = self.budget_s
        return ProfileConfig(**changes)


def run(options: ProfileOptions) -> int:
    """Measure the target with every draft in turn, show the profiles and write them."""
    config = options.config
    check_writable("--out", options.out)
    check_threads(options.models.threads)
    drafts = options.models.resolve_drafts(options.draft) or (None,)
    profiles = []
    for draft in drafts:
        try:
            profiles.append(measure_draft(options.models, draft, config))
        except ForerunError as error:
            if len(drafts) == 1:
                raise
            logger.warning("%s is left out: %s", draft, error)
    if not profiles:
        raise InvalidRequest(f"none of the drafts could be measured: {', '.join(map(str, drafts))}")
    show(profiles, options)
    return 0


def measure_draft(models: TargetFlags, draft: str | None, config: ProfileConfig) -> Profile:
    """Load the pair and measure it, with a progress bar on stderr."""
    from forerun.measure.rigs import draft_of, facts_of, load_pair, measure_pair

    engine = EngineConfig(runner=models.runner, num_threads=use_threads(models.threads))
    with SafeConsole(stderr=True).status("loading models"):
        loaded, config = load_pair(
            models.target,
            draft,
            dtype=models.dtype,
            device=models.device,
            engine=engine,
            config=config,
        )
        draft_facts = facts_of(draft, draft_of(loaded.drafter))
        facts = facts_of(models.target, loaded.target), draft_facts
    with progress(config) as notify:
        return measure_pair(loaded, facts, config, clock=time.perf_counter, notify=notify)


@contextmanager
def progress(config: ProfileConfig) -> Iterator[Callable[[int, float], None]]:
    """Show a bar for the time budget used, with the current width of the intervals."""
    with progress_bar("warming up", config.budget_s) as fill:
        started_s: list[float] = []

        def notify(num_rounds: int, error: float) -> None:
            started_s.append(time.monotonic())
            spent_s = started_s[-1] - started_s[0]
            within = f"within {error:.1%}" if math.isfinite(error) else "no intervals yet"
            text = f"round {num_rounds}, {within} (goal {config.target_error:.1%})"
            fill(text, min(spent_s, config.budget_s))

        yield notify


def show(profiles: Sequence[Profile], options: ProfileOptions) -> None:
    from forerun.measure.profile import convert_profiles, write_profiles

    if options.json:
        print(json.dumps(convert_profiles(profiles)))
    else:
        for profile in profiles:
            _print_profile(profile)
    if options.out is not None:
        write_profiles(profiles, options.out)


LIST_FLAGS = ("--draft", "--rows", "--batch", "--batches", "--context", "--contexts")
SHOWN_K = (1, 2, 4, 8)


def _print_profile(profile: Profile) -> None:
    """Print the parts of a step, v(n), kappa, and the machine of the measurement."""
    console = SafeConsole()
    console.print(parts(profile), "")
    console.print(verify_costs(profile.greedy), "")
    if profile.draft != NONE:
        console.print(_cycle_costs(profile), "")
    for sentence in remarks(profile):
        console.print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)


def parts(profile: Profile) -> Table:
    """Print a table with the milliseconds of each part of a step."""
    lines = profile.greedy.lines
    table = grid("milliseconds", lines)
    table.add_row("plain step", *(milliseconds(line.plain_s, line.plain_error_s) for line in lines))
    passes = (cell(profile, Quantity.TARGET_PASS, line, 1) for line in lines)
    table.add_row("  of it the forward", *passes)
    limits = [profile.limit.pass_s(line.batch, line.context) for line in lines]
    table.add_row("  read limit", *(milliseconds(limit) for limit in limits))
    shares = [limit / line.plain_s for limit, line in zip(limits, lines, strict=True)]
    table.add_row("  share of its speed", *(f"{share:.0%}" for share in shares))
    table.add_row("  among other work", *(slower(profile, line) for line in lines))
    for quantity in (Quantity.DRAFT_PASS, Quantity.DRAFT_CHAIN):
        for size in _sizes_of(profile, quantity):
            name = "draft pass" if size == 1 else f"draft pass over {size} tokens"
            if quantity is Quantity.DRAFT_CHAIN:
                name = f"draft chain of {size}"
            table.add_row(name, *(cell(profile, quantity, line, size) for line in lines))
    if profile.reading is not None:
        for name, seconds in (("", profile.reading.target_s), (", draft", profile.reading.draft_s)):
            for size, time_s in zip(profile.reading.tokens[1:], seconds[1:], strict=True):
                table.add_row(f"reading {size}{name}", milliseconds(time_s))
    for quantity in (Quantity.GREEDY_OVERHEAD, Quantity.SAMPLED_OVERHEAD):
        temperature = "T=0" if quantity is Quantity.GREEDY_OVERHEAD else "T=1"
        for k in _sizes_of(profile, quantity):
            name = f"outside, {temperature}, {f'K={k}' if k else 'plain'}"
            table.add_row(name, *(outside(profile, quantity, line, k) for line in lines))
    return table


def verify_costs(table: CostTable) -> Table:
    """Print v(n) with half of its 95% interval."""
    shown = grid("v(n), plain steps", table.lines)
    for rows in sorted({rows for line in table.lines for rows in line.rows}):
        values = [
            _with_error(table.verify_cost_interval(rows, line.context, line.batch))
            if rows in line.rows
            else ""
            for line in table.lines
        ]
        shown.add_row(f"n = {rows}", *values)
    return shown


def _cycle_costs(profile: Profile) -> Table:
    """Print kappa at some K, greedy and sampled."""
    shown = grid("kappa, plain steps", profile.greedy.lines)
    for name, table in (("T=0", profile.greedy), ("T=1", profile.sampled)):
        for k in SHOWN_K:
            found = [table.cycle_cost_interval(k, x.context, x.batch) for x in table.lines]
            shown.add_row(f"{name}, K = {k}", *map(_with_error, found))
    return shown


def grid(heading: str, lines: Sequence[CostLine]) -> Table:
    table = table_of(Column(heading, no_wrap=True))
    for line in lines:
        table.add_column(f"batch {line.batch}\ncontext {line.context}", justify="right")
    return table


def slower(profile: Profile, line: CostLine) -> str:
    """Return how much longer a plain step's pass takes within decoding than when run alone."""
    if line.context != profile.greedy.contexts[0]:
        return ""
    return f"{1e3 * profile.among_work_s(line.batch):+.3f}"


def outside(profile: Profile, quantity: Quantity, line: CostLine, k: int) -> str:
    """Return the engine's time outside both models; it is shown for one context per batch size."""
    return cell(profile, quantity, line, k) if line.context == profile.greedy.contexts[0] else ""


def cell(profile: Profile, quantity: Quantity, line: CostLine, size: int) -> str:
    found = profile.seconds(quantity, line.batch, line.context, size)
    return milliseconds(found.estimate, (found.high - found.low) / 2)


def _sizes_of(profile: Profile, quantity: Quantity) -> list[int]:
    cells = [measured.cell for measured in profile.measured]
    return sorted({found.size for found in cells if found.quantity is quantity})


def _with_error(interval: Interval) -> str:
    return f"{interval.estimate:.2f} ±{interval.high - interval.estimate:.2f}"


def remarks(profile: Profile) -> list[str]:
    """Return remarks on the precision, the memory read limit and the machine."""
    from forerun.models.memory import readable

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


COMMAND = Command(
    options=ProfileOptions,
    run=run,
    lists={flag: "," for flag in LIST_FLAGS},
    description="Measure what plain steps, target passes over n rows, drafting and the rest cost\n"
    "on this machine, beside the cost of reading the weights alone.",
    examples=(
        "forerun profile --model zoo:code-40m --draft zoo:code-2m-for-40m --out profile.json",
        "forerun profile --model zoo:code-40m --draft self:int4 suffix --batch 1 --out drafts.json",
        "forerun profile --batch 1,8 --threads 2 --out profile.json",
        "forerun profile --json | jq '.greedy.lines[0]'",
    ),
)
