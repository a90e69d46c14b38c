"""Profiles: measured times, cost tables, machine and models, and their file format."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from forerun.atomic_write import atomic_write
from forerun.bounded_read import read_json
from forerun.errors import InvalidProfile, InvalidRequest, UnreadableInput
from forerun.theory.cost import CostLine, CostTable, DraftCosts, ReadingCost
from forerun.theory.intervals import Interval


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
    """The part of a greedy step beyond drafting and the target's pass."""
    SAMPLED_OVERHEAD = "sampled_overhead"
    """The part of a sampled step beyond drafting and the target's pass."""


OVERHEAD_OF: Mapping[Quantity, Quantity] = MappingProxyType(
    {
        Quantity.GREEDY_STEP: Quantity.GREEDY_OVERHEAD,
        Quantity.SAMPLED_STEP: Quantity.SAMPLED_OVERHEAD,
    }
)
"""Quantity of the overhead of a step, by quantity of the step; the same steps yield both."""
SHORTENED = frozenset({Quantity.TARGET_PASS, Quantity.TARGET_READ, Quantity.DRAFT_READ})
"""Quantities whose largest sizes are left out if they do not fit into memory."""


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


def step_cells(config: ProfileConfig, drafted: Sequence[int]) -> Iterator[ProfileCell]:
    """Yield plain and speculative engine steps and their overhead, at the shortest context."""
    for quantity in OVERHEAD_OF:
        for batch in config.batches:
            for k in (0, *drafted):
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


FORMAT = 3
"""Raised whenever an older program could misread a file."""
DIGITS = 5
COST_FIELDS = {item.name for item in fields(CostLine)}
MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSetup:
    """Machine, models and settings that must match for a profile to be valid."""

    cpu: str
    num_cores: int
    num_threads: int
    device: str
    dtype: str
    target_runner: str
    draft_runner: str
    target_hash: str
    draft_hash: str

    def differences(self, other: ProfileSetup) -> list[str]:
        """Return every field in which two set-ups differ, with both values."""
        return [
            f"{item.name} {getattr(self, item.name)!r} instead of {getattr(other, item.name)!r}"
            for item in fields(self)
            if getattr(self, item.name) != getattr(other, item.name)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimit:
    """Lower bounds of pass times from reading weights and KV at the memory read rate.

    Attributes:
        bytes_per_s: read rate of the device over a buffer of `buffer_bytes`.
        buffer_bytes: size of that buffer, the target's weights if they fit in twice.
        target_bytes: weights a pass of the target reads, however many rows it has.
        kv_token_bytes: what each committed token of each sequence adds to a target pass.
    """

    bytes_per_s: float
    buffer_bytes: int
    target_bytes: int
    draft_bytes: int
    kv_token_bytes: int

    def pass_s(self, batch: int, context: int) -> float:
        """Return the least seconds of a target pass: read all weights and every sequence's KV."""
        return (self.target_bytes + batch * context * self.kv_token_bytes) / self.bytes_per_s

    def draft_s(self) -> float:
        """Return the least seconds of a draft pass: read all weights."""
        return self.draft_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """Median, 95% interval and samples of one cell, corrected for drift.

    Attributes:
        samples_s: as read off the clock, per round and visit.
    """

    cell: ProfileCell
    seconds: Interval
    samples_s: tuple[tuple[float, ...], ...]

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values, with samples rounded to five digits."""
        return asdict(self.cell) | {
            "seconds": asdict(self.seconds),
            "samples_s": [[float(f"{s:.{DIGITS}g}") for s in visit] for visit in self.samples_s],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Results of `forerun profile`.

    Attributes:
        left_out: cells that did not fit into memory.
        reading: of prompts; None where it was not measured.
    """

    target: str
    draft: str
    setup: ProfileSetup
    provenance: Mapping[str, Any]
    limit: ReadLimit
    measured: tuple[MeasuredCell, ...]
    left_out: tuple[ProfileCell, ...]
    stable: bool
    greedy: CostTable
    sampled: CostTable
    reading: ReadingCost | None

    @property
    def costs(self) -> DraftCosts:
        """Return the cost tables for plans, controllers and the simulator."""
        return DraftCosts(greedy=self.greedy, sampled=self.sampled, reading=self.reading)

    @property
    def num_rounds(self) -> int:
        """Number of rounds over all cells."""
        return min(len(measured.samples_s) for measured in self.measured)

    def seconds(self, quantity: Quantity, batch: int, context: int, size: int) -> Interval:
        """Return the estimate of one cell; raises KeyError if it was not measured."""
        wanted = ProfileCell(quantity, batch, context, size)
        return {measured.cell: measured.seconds for measured in self.measured}[wanted]

    def among_work_s(self, batch: int) -> float:
        """Return how much slower the pass in a plain step is than the same pass measured alone."""
        at = (batch, self.greedy.contexts[0])
        step = self.seconds(Quantity.GREEDY_STEP, *at, 0).estimate
        outside = self.seconds(Quantity.GREEDY_OVERHEAD, *at, 0).estimate
        return step - outside - self.seconds(Quantity.TARGET_PASS, *at, 1).estimate

    def to_dict(self) -> dict[str, object]:
        measured = [measured.to_dict() for measured in self.measured]
        return {"format": FORMAT, **msgspec.to_builtins(self), "measured": measured}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Build a profile from the values that `to_dict` returned."""
        for line in (line for name in ("greedy", "sampled") for line in values[name]["lines"]):
            if lacking := COST_FIELDS - line.keys():
                raise ValueError(f"a cost line lacks {', '.join(sorted(lacking))}")
        measured = [{"cell": entry, **entry} for entry in values["measured"]]
        return msgspec.convert({**values, "measured": measured}, cls)


def convert_profiles(profiles: Sequence[Profile]) -> dict[str, object]:
    """Return the content of a profile file: that of one profile, or a list of several."""
    if len(profiles) == 1:
        return profiles[0].to_dict()
    return {"format": FORMAT, "profiles": [profile.to_dict() for profile in profiles]}


def write_profiles(profiles: Sequence[Profile], path: Path) -> None:
    """Write the profiles of one target as JSON."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(convert_profiles(profiles)) + "\n", encoding="utf-8")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    write_profiles([profile], path)


def load_profiles(path: Path) -> tuple[Profile, ...]:
    """Read what `write_profiles` wrote.

    Raises:
        InvalidProfile: the file cannot be read, or is of a newer format.
    """
    try:
        values = read_json(path)
    except OSError as error:
        raise InvalidProfile(f"the profile {path} cannot be read: {error.strerror}") from error
    except UnreadableInput as error:
        raise InvalidProfile(f"the profile cannot be read: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise InvalidProfile(f"{path} is no profile: it names no format")
    if values["format"] != FORMAT:
        raise InvalidProfile(
            f"the profile {path} has format {values['format']}, this forerun reads {FORMAT}; "
            "profile again with it"
        )
    try:
        found = tuple(Profile.from_dict(each) for each in values.get("profiles", [values]))
        if not found:
            raise ValueError("profiles is empty")
    except (*MALFORMED, msgspec.ValidationError) as error:
        raise InvalidProfile(
            f"the profile {path} is damaged ({type(error).__name__}: {error}); profile again"
        ) from error
    return found


def load_profile(path: Path) -> Profile:
    """Read the only profile of a file.

    Raises:
        InvalidProfile: as for `load_profiles`, or the file has several.
    """
    found = load_profiles(path)
    if len(found) > 1:
        names = ", ".join(profile.draft for profile in found)
        raise InvalidProfile(f"{path} has profiles of {names}, and one is needed: profile it alone")
    return found[0]


def profiles_of_drafts(
    paths: Sequence[Path], setups: Mapping[str, ProfileSetup]
) -> dict[str, Profile]:
    """Return the profile of every draft that the files have one of, by the names of the set-ups.

    Raises:
        InvalidProfile: a profile of one of the drafts was made with other models or settings.
        InvalidRequest: a file has none of these drafts, or a draft has two profiles.
    """
    found: dict[str, Profile] = {}
    for path in paths:
        profiles = load_profiles(path)
        pairs = [
            (name, profile)
            for profile in profiles
            for name, setup in setups.items()
            if setup.draft_hash == profile.setup.draft_hash
        ]
        if not pairs and len(profiles) == len(setups) == 1:
            pairs = [(name, profiles[0]) for name in setups]  # so that the difference is named
        if not pairs:
            known = ", ".join(profile.draft for profile in profiles)
            raise InvalidRequest(
                f"{path} has costs of {known}, and none of {', '.join(setups) or 'any draft'}: "
                "name a draft of the file, or leave --profile out"
            )
        for name, profile in pairs:
            check_setup(profile, setups[name])
            if name in found:
                raise InvalidRequest(f"{path} is a second profile of {name}")
            found[name] = profile
    return found


def check_setup(profile: Profile, expect: ProfileSetup) -> None:
    """Refuse a profile of another machine, other models or other settings (InvalidProfile)."""
    if differences := profile.setup.differences(expect):
        raise InvalidProfile(
            f"the profile of {profile.target} and {profile.draft} was made with "
            f"{', '.join(differences)}; profile this set-up with `forerun profile`"
        )
