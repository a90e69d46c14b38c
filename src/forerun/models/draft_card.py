"""The card of a draft (forerun.json): the target and method of its alignment, and the results.

Torch-free. A card never decides whether a draft model may be used: the text is exact whatever the
draft, so a target that has changed since is a matter of speed, and of a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forerun.atomic_write import atomic_write
from forerun.errors import InvalidModel
from forerun.models.checkpoint import (
    ModelFiles,
    read_object,
)
from forerun.terminal_text import shell_command
from forerun.theory.intervals import Interval

CARD_FILE = "forerun.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """Hashes that identify the target of a draft, cheap to compute at any size."""

    weights: str
    tokenizer: str
    template: str

    def differences(self, other: TargetIdentity) -> tuple[str, ...]:
        """List the differences between two target identities in words."""
        names = {"weights": "weights", "tokenizer": "tokenizer", "template": "chat template"}
        return tuple(n for key, n in names.items() if getattr(self, key) != getattr(other, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFigures:
    """Acceptance measured by the verifier on held-out prompts at one temperature.

    Attributes:
        num_speculative_tokens: K.
        acceptance_length: tau; None where no step drafted.
        acceptance_probability: alpha, by the rule deployed; None where it was not measured.
        speedup: predicted from a cost table at the best K; None without one.
    """

    temperature: float
    num_speculative_tokens: int
    acceptance_length: Interval | None
    acceptance_probability: Interval | None = None
    speedup: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCard:
    """The origin of an aligned draft.

    Attributes:
        target: name of the target, as the user gave it.
        target_hash: of all its weight files, as in traces.
        temperature: the one it is to be deployed at.
        date: when, ISO 8601 with time zone.
        settings: of the alignment, JSON-ready: what a refresh repeats.
    """

    target: str
    target_hash: str
    made_for: TargetIdentity
    data_hash: str
    objective: str
    temperature: float
    before: tuple[CardFigures, ...] = ()
    after: tuple[CardFigures, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the version of the format."""
        return {"format": FORMAT, **asdict(self)}


def identify(model: str | Path | ModelFiles) -> TargetIdentity:
    """The identity of a model; raises InvalidModel where a file cannot be used."""
    files = ModelFiles.open(model)
    return TargetIdentity(
        weights=files.sample_hash, tokenizer=files.tokenizer_hash, template=files.template_hash
    )


def write_card(card: DraftCard, folder: Path) -> None:
    """Write a card into a draft's folder, replacing an earlier card."""
    with atomic_write(folder / CARD_FILE) as scratch:
        scratch.write_text(json.dumps(card.to_dict(), indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path) -> DraftCard | None:
    """Read the card in a draft's folder; None if there is none.

    Raises:
        InvalidModel: there is one, but it cannot be read.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    values = read_object(path)
    if not isinstance(values.get("format"), int) or values["format"] > FORMAT:
        raise InvalidModel(
            f"{path} is of format {values.get('format')}, this forerun reads up to {FORMAT}; "
            "upgrade forerun, or align again"
        )
    try:
        return msgspec.convert(values, DraftCard)  # ignores further fields, of later versions
    except msgspec.ValidationError as error:
        raise InvalidModel(f"{path} is damaged ({error}); align again") from error


def staleness(draft: Path, target: Path | ModelFiles) -> str | None:
    """Describe how a target differs from the one that a draft was aligned to.

    None where it does not, or where the draft has no card.

    Raises:
        InvalidModel: a card or a target that cannot be read.
    """
    card = read_card(draft)
    if card is None:
        return None
    files = ModelFiles.open(target)
    changed = card.made_for.differences(identify(files))
    if not changed:
        return None
    command = shell_command(
        "forerun align --refresh {draft} --target {target} --prompts PROMPTS.jsonl --out aligned",
        draft=draft,
        target=files.folder,
    )
    return (
        f"the draft {draft} was aligned to {card.target}; {files.folder} has other "
        f"{', '.join(changed)}: the text stays exact, but fewer tokens may be accepted; to "
        f"align the draft to this target: {command}"
    )
