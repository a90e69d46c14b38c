"""`forerun profile`: measure what drafting and verifying cost on this machine."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.command import Command
from forerun.cli.flags import ModelFlags
from forerun.cli.paths import check_picture, check_writable
from forerun.cli.progress import progress_bar
from forerun.cli.threads import use_threads
from forerun.drafters.config import parse_drafter
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest
from forerun.probe.config import THOROUGH, ProbeConfig

if TYPE_CHECKING:
    from forerun.probe.profile import Profile

__all__ = ["COMMAND", "ProfileOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `forerun profile`."""

    models: ModelFlags = field(default_factory=ModelFlags)
    out: Path | None = None
    """Write the profile, samples included, to this JSON file."""
    plot: Path | None = None
    """Draw v(n) into this .png, .svg or .pdf file."""
    json: bool = False
    """Print the profile as one JSON object instead of tables."""
    thorough: bool = False
    """Every row count, more batches and contexts: minutes instead of seconds."""
    budget_s: float | None = None
    """Measure for at most so many seconds, as far as the least number of rounds allows."""
    rows: str | None = None
    """Rows per sequence of the measured passes, such as 1,2,4,8."""
    batches: str | None = None
    """Sequences at once, such as 1,8."""
    contexts: str | None = None
    """Committed tokens of every sequence, such as 64,512."""

    @property
    def config(self) -> ProbeConfig:
        """What is to be measured.

        Raises:
            InvalidRequest: a value cannot work.
        """
        config = THOROUGH if self.thorough else ProbeConfig()
        changes: dict[str, Any] = {
            name: numbers(name, text)
            for name in ("rows", "batches", "contexts")
            if (text := getattr(self, name)) is not None
        }
        if self.budget_s is not None:
            changes["budget_s"] = self.budget_s
        return replace(config, **changes)


def run(options: ProfileOptions) -> int:
    """Measure, show and write."""
    config = options.config
    draft = options.models.draft_name
    if draft is None:
        raise InvalidRequest(f"a profile is of a pair: name a --draft for {options.models.target}")
    if parse_drafter(draft) is not None:
        raise InvalidRequest(
            f"a profile is of two models, and {draft} is none; compare it: forerun bench --arms "
            f"{draft}@{EngineConfig().num_speculative_tokens}"
        )
    if options.out is not None:
        check_writable("--out", options.out)
    if options.plot is not None:
        check_picture("--plot", options.plot)
    show(measured(options.models, draft, config), options)
    return 0


def measured(models: ModelFlags, draft: str, config: ProbeConfig) -> Profile:
    """Load the pair and measure it, with a progress bar on stderr."""
    from rich.console import Console

    from forerun.probe.measurement import measure_pair
    from forerun.probe.pair import facts_of, load_pair

    engine = EngineConfig(runner=models.runner, num_threads=use_threads(models.threads))
    with Console(stderr=True).status("loading models"):
        pair, config = load_pair(
            models.target,
            draft,
            dtype=models.dtype,
            device=models.device,
            engine=engine,
            config=config,
        )
        facts = (
            facts_of(models.target, pair.target, models.dtype),
            facts_of(draft, pair.draft, models.dtype),
        )
    with progress(config) as tell:
        return measure_pair(pair, facts, config, clock=time.perf_counter, tell=tell)


@contextmanager
def progress(config: ProbeConfig) -> Iterator[Callable[[int, float], None]]:
    """A bar that fills with the time budget and says how steady the figures are."""
    with progress_bar("warming up", config.budget_s) as fill:
        started_s: list[float] = []

        def tell(num_rounds: int, error: float) -> None:
            started_s.append(time.monotonic())
            spent_s = started_s[-1] - started_s[0]
            within = f"within {error:.1%}" if math.isfinite(error) else "no intervals yet"
            text = f"round {num_rounds}, {within} (goal {config.target_error:.1%})"
            fill(text, min(spent_s, config.budget_s))

        yield tell


def show(profile: Profile, options: ProfileOptions) -> None:
    """Print, write and draw."""
    from forerun.cli.profile_tables import print_profile
    from forerun.probe.plot import plot
    from forerun.probe.profile_file import write_profile

    if options.json:
        print(json.dumps(profile.to_dict()))
    else:
        print_profile(profile)
    if options.out is not None:
        write_profile(profile, options.out)
    if options.plot is not None:
        plot([profile], [options.plot])


def numbers(name: str, text: str) -> Sequence[int]:
    """Whole numbers between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--{name} is {text!r}; it must be whole numbers between commas, such as 1,2,4"
        ) from None


COMMAND = Command(
    options=ProfileOptions,
    run=run,
    description="Measure what plain steps, target passes over n rows, drafting and the rest cost\n"
    "on this machine, beside what reading the weights alone would cost.",
    examples=(
        "forerun profile --target zoo:code-11m --draft zoo:code-2m --out profile.json",
        "forerun profile --thorough --threads 2 --out profile.json --plot profile.svg",
        "forerun profile --json | jq '.greedy.lines[0]'",
    ),
)
