"""Write the figures of benchmarks/profiles/README.md from the profiles beside it.

`python recipes/docs/performance.py` rewrites them, `--check` only says whether the figures are
those of the profiles. `make profile` measures the shipped pair first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from forerun.measure.profile import Profile, Quantity, load_profile
from forerun.theory.cost import CostLine
from forerun.theory.intervals import Interval

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "benchmarks" / "profiles"
PAGE = PROFILES / "README.md"
BEGIN, END = "<!-- figures: make profile -->\n", "<!-- end of figures -->\n"
SHOWN_ROWS = (2, 3, 5, 8, 9, 16, 32, 64)
SHOWN_K = (1, 2, 4, 8)


def profiles() -> list[Profile]:
    """Committed profiles, in the order of their names."""
    return [load_profile(path) for path in sorted(PROFILES.glob("*.json"))]


def figures(profile: Profile) -> Iterator[str]:
    """Lines about one profile."""
    setup, limit, origin = profile.setup, profile.limit, profile.provenance
    lines = profile.greedy.lines
    packages = ", ".join(f"{name} {version}" for name, version in origin["packages"].items())
    yield f"### {Path(profile.target).name} with {Path(profile.draft).name}\n\n"
    yield (
        f"{setup.cpu}, {setup.num_threads} of {setup.num_cores} cores, {setup.device}, "
        f"{setup.dtype}, {setup.target_runner}; forerun {origin['version']} at "
        f"{str(origin['commit'])[:12]}, {packages}; {origin['date']}; {profile.num_rounds} rounds"
        f"{'' if profile.stable else ', not all figures steady'}. Read limit "
        f"{limit.bytes_per_s / 1e9:.1f} GB/s over {limit.buffer_bytes / 1e6:.1f} MB; a target pass "
        f"reads {limit.target_bytes / 1e6:.1f} MB, a draft pass {limit.draft_bytes / 1e6:.1f} MB. "
        "± is half of a 95% interval.\n\n"
    )
    heads = [f"batch {line.batch}, {line.context} tokens" for line in lines]
    yield row("", *heads)
    yield row(*["---"] * (1 + len(heads)))
    yield row("plain step, ms", *(times(line.plain_s, line.plain_error_s) for line in lines))
    yield row("its forward alone, ms", *(forward(profile, line) for line in lines))
    yield row("forward among other work, ms", *(among_work(profile, line) for line in lines))
    yield row("outside both models, ms", *(outside(profile, line) for line in lines))
    yield row("reading alone, ms", *(f"{1e3 * at_limit(profile, line):.3f}" for line in lines))
    shares = (at_limit(profile, line) / line.plain_s for line in lines)
    yield row("speed of the plain step, of the read limit's", *(f"{s:.0%}" for s in shares))
    yield row("one drafted token (c)", *(f"{line.draft_s / line.plain_s:.3f}" for line in lines))
    for k in sorted({k for line in lines for k in line.overhead_ks}):
        rests = (line.overhead(k).s / line.plain_s for line in lines)
        yield row(f"the rest of a cycle (o), K = {k}", *(f"{rest:.3f}" for rest in rests))
    for rows in SHOWN_ROWS:
        found = [
            profile.greedy.verify_cost_interval(rows, line.context, line.batch)
            if rows in line.rows
            else None
            for line in lines
        ]
        if any(found):
            yield row(f"v({rows})", *map(cost, found))
    for name, table in (("T=0", profile.greedy), ("T=1", profile.sampled)):
        for k in SHOWN_K:
            kappas = (table.cycle_cost_interval(k, x.context, x.batch) for x in table.lines)
            yield row(f"kappa at K = {k}, {name}", *map(cost, kappas))
    yield "\n"


def row(*cells: str) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |\n"


def at_limit(profile: Profile, line: CostLine) -> float:
    """Seconds of reading what a plain step reads."""
    return profile.limit.pass_s(line.batch, line.context)


def forward(profile: Profile, line: CostLine) -> str:
    """The target pass of a plain step."""
    found = profile.seconds(Quantity.TARGET_PASS, line.batch, line.context, 1)
    return times(found.estimate, (found.high - found.low) / 2)


def among_work(profile: Profile, line: CostLine) -> str:
    """What that pass takes beyond it within a step; whole steps are run at one context."""
    if line.context != profile.greedy.contexts[0]:
        return ""
    return f"{1e3 * profile.among_work_s(line.batch):+.3f}"


def outside(profile: Profile, line: CostLine) -> str:
    """Engine time of a plain greedy step."""
    if line.context != profile.greedy.contexts[0]:
        return ""
    found = profile.seconds(Quantity.GREEDY_OVERHEAD, line.batch, line.context, 0)
    return times(found.estimate, (found.high - found.low) / 2)


def times(s: float, error_s: float) -> str:
    """Milliseconds."""
    return f"{1e3 * s:.3f} ±{1e3 * error_s:.3f}"


def cost(interval: Interval | None) -> str:
    """Plain steps."""
    if interval is None:
        return ""
    return f"{interval.estimate:.2f} ±{interval.high - interval.estimate:.2f}"


def main() -> int:
    """Rewrite or compare; 1 if a comparison failed."""
    found = profiles()
    text = "".join(line for profile in found for line in figures(profile))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    current, _, after = rest.partition(END)
    if "--check" in sys.argv[1:]:
        if current == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} does not show the profiles as they are: run `{__file__}`")
        return 1
    PAGE.write_text(before + BEGIN + text + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
