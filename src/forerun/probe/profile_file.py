"""Profiles on disk: reading, and the check that one belongs to this machine and pair.

Torch-free: planning with a profile needs neither the machine nor the models it was made on.
"""

from __future__ import annotations

import json
from pathlib import Path

from forerun.atomic_write import atomic_write
from forerun.errors import InvalidProfile
from forerun.probe.profile import FORMAT, Profile, ProfileSetup

__all__ = ["check_setup", "load_profile", "write_profile"]


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(profile.to_dict()) + "\n", encoding="utf-8")


def load_profile(path: Path, *, expect: ProfileSetup | None = None) -> Profile:
    """Read a profile.

    Args:
        path: what `write_profile` wrote.
        expect: the set-up it is to be used in; None where it only has to be readable.

    Raises:
        InvalidProfile: the file cannot be read, is of a newer format, or is of another set-up.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidProfile(f"the profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidProfile(f"the profile {path} is no JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise InvalidProfile(f"{path} is no profile: it names no format")
    if values["format"] > FORMAT:
        raise InvalidProfile(
            f"the profile {path} has format {values['format']}, this forerun reads up to {FORMAT}; "
            "upgrade forerun, or profile again"
        )
    try:
        profile = Profile.from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidProfile(
            f"the profile {path} is damaged ({type(error).__name__}: {error}); profile again"
        ) from error
    if expect is not None:
        check_setup(profile, expect)
    return profile


def check_setup(profile: Profile, expect: ProfileSetup) -> None:
    """Refuse a profile of another machine, pair or set-up.

    Raises:
        InvalidProfile: they differ; the message names every difference.
    """
    if differences := profile.setup.differences(expect):
        raise InvalidProfile(
            f"the profile of {profile.target} and {profile.draft} was made with "
            f"{', '.join(differences)}; profile this set-up with `forerun profile`"
        )
