"""Profiles: measured times, cost tables, machine and models, and their file format.

Torch-free: planning with a profile needs neither the machine nor the models of the profile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.atomic_write import atomic_write
from forerun.bounded_documents import read_json
from forerun.errors import InvalidProfile, UnreadableInput
from forerun.plan.costs import DraftCosts
from forerun.probe.config import ProfileCell, Quantity
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval
from forerun.theory.reading_cost import ReadingCost

__all__ = [
    "FORMAT",
    "MeasuredCell",
    "Profile",
    "ProfileSetup",
    "ReadLimit",
    "check_setup",
    "load_profile",
    "write_profile",
]

FORMAT = 3
"""Raised whenever an older program could misread a file."""
DIGITS = 5


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
        draft_bytes: the same of the draft.
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MeasuredCell:
        """Build a cell from the values that `to_dict` returned."""
        return cls(
            cell=cell_from(values),
            seconds=Interval(**values["seconds"]),
            samples_s=tuple(tuple(map(float, visit)) for visit in values["samples_s"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Results of `forerun profile`.

    Attributes:
        setup: what must be the same for this to hold.
        left_out: cells that did not fit into memory.
        stable: whether every interval is as narrow as asked.
        reading: of prompts; None where it was not measured, as in profiles of format 1.
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
    reading: ReadingCost | None = None

    @property
    def costs(self) -> DraftCosts:
        """Return the cost tables for plans, controllers and the simulator."""
        return DraftCosts(greedy=self.greedy, sampled=self.sampled, reading=self.reading)

    @property
    def num_rounds(self) -> int:
        """Number of rounds over all cells."""
        return min(len(measured.samples_s) for measured in self.measured)

    def seconds(self, quantity: Quantity, batch: int, context: int, size: int) -> Interval:
        """Return the estimate of one cell.

        Raises:
            KeyError: it was not measured.
        """
        wanted = ProfileCell(quantity=quantity, batch=batch, context=context, size=size)
        return {measured.cell: measured.seconds for measured in self.measured}[wanted]

    def among_work_s(self, batch: int) -> float:
        """Return how much slower the pass in a plain step is than the same pass measured alone."""
        at = (batch, self.greedy.contexts[0])
        step = self.seconds(Quantity.GREEDY_STEP, *at, 0).estimate
        outside = self.seconds(Quantity.GREEDY_OVERHEAD, *at, 0).estimate
        return step - outside - self.seconds(Quantity.TARGET_PASS, *at, 1).estimate

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values by name."""
        return {
            "format": FORMAT,
            "target": self.target,
            "draft": self.draft,
            "setup": asdict(self.setup),
            "provenance": dict(self.provenance),
            "limit": asdict(self.limit),
            "stable": self.stable,
            "greedy": self.greedy.to_dict(),
            "sampled": self.sampled.to_dict(),
            "reading": None if self.reading is None else self.reading.to_dict(),
            "left_out": [asdict(cell) for cell in self.left_out],
            "measured": [measured.to_dict() for measured in self.measured],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Build a profile from the values that `to_dict` returned.

        Raises:
            KeyError: a part is missing.
            TypeError: a part is of another kind.
            ValueError: a part is malformed.
        """
        reading = values["reading"] if values["format"] > 1 else None
        return cls(
            target=str(values["target"]),
            draft=str(values["draft"]),
            setup=ProfileSetup(**values["setup"]),
            provenance=dict(values["provenance"]),
            limit=ReadLimit(**values["limit"]),
            measured=tuple(map(MeasuredCell.from_dict, objects(values["measured"]))),
            left_out=tuple(map(cell_from, objects(values["left_out"]))),
            stable=bool(values["stable"]),
            greedy=table_from(values["greedy"], values["format"]),
            sampled=table_from(values["sampled"], values["format"]),
            reading=None if reading is None else ReadingCost.from_dict(reading),
        )


def table_from(values: Mapping[str, Any], version: int) -> CostTable:
    """Build a cost table from JSON; before format 3, overhead did not depend on K."""
    if version >= 3:
        return CostTable.from_dict(values)
    names = "overhead_s", "overhead_error_s"
    lines = [
        {**line, "overhead_ks": [1], **{name: [line[name]] for name in names}}
        for line in objects(values["lines"])
    ]
    return CostTable.from_dict({**values, "lines": lines})


def cell_from(values: Mapping[str, Any]) -> ProfileCell:
    """Build a cell from JSON."""
    return ProfileCell(
        quantity=Quantity(values["quantity"]),
        batch=int(values["batch"]),
        context=int(values["context"]),
        size=int(values["size"]),
    )


def objects(values: Any) -> Sequence[Mapping[str, Any]]:
    """Check that a value is a list of JSON objects."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise TypeError("expected a list of objects")
    return values


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(profile.to_dict()) + "\n", encoding="utf-8")


def load_profile(path: Path, *, expect: ProfileSetup | None = None) -> Profile:
    """Read a profile.

    Args:
        path: what `write_profile` wrote.
        expect: the set-up it is to be used in; None if it only has to be readable.

    Raises:
        InvalidProfile: the file cannot be read, is of a newer format, or is of another set-up.
    """
    try:
        values = read_json(path)
    except OSError as error:
        raise InvalidProfile(f"the profile {path} cannot be read: {error.strerror}") from error
    except UnreadableInput as error:
        raise InvalidProfile(f"the profile cannot be read: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise InvalidProfile(f"{path} is no profile: it names no format")
    if values["format"] > FORMAT:
        raise InvalidProfile(
            f"the profile {path} has format {values['format']}, this forerun reads up to {FORMAT}; "
            "upgrade forerun, or profile again"
        )
    try:
        profile = Profile.from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidProfile(
            f"the profile {path} is damaged ({type(error).__name__}: {error}); profile again"
        ) from error
    if expect is not None:
        check_setup(profile, expect)
    return profile


def check_setup(profile: Profile, expect: ProfileSetup) -> None:
    """Refuse a profile of another machine, other models or other settings (InvalidProfile)."""
    if differences := profile.setup.differences(expect):
        raise InvalidProfile(
            f"the profile of {profile.target} and {profile.draft} was made with "
            f"{', '.join(differences)}; profile this set-up with `forerun profile`"
        )
