"""Description of an attached drafter from its files, and its comparison with a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from forerun.cli.tables import SafeConsole
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.eagle3.load import examine
from forerun.drafters.medusa.drafter import load_medusa
from forerun.engine.draft_cards import check_head_card
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object, weights_hash
from forerun.models.draft_card import staleness
from forerun.models.load import load_model
from forerun.models.memory import readable

__all__ = ["HeadDescription", "describe_head", "print_head"]

MAX_CONTEXT = 64
"""Tokens of the sequence on which features are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """An attached drafter, the settings its files were read with, and whether it fits the target.

    Attributes:
        folder: where it is.
        method: "eagle3" or "medusa".
        sizes: and flags, as they are used; empty where the head cannot be read.
        num_parameters: elements of all weights.
        weights_hash: short content hash of its files.
        changes: readings that golden rows show and config.json states otherwise.
        is_checked: its golden rows were computed again.
        problems: what makes it impossible to use.
        warnings: what may make it slow.
    """

    folder: str
    method: str
    sizes: dict[str, Any]
    num_parameters: int
    weights_hash: str
    changes: tuple[str, ...] = ()
    is_checked: bool = False
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether an engine would accept the head."""
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        """Fields of the JSON output."""
        return {"fits": self.fits, **asdict(self)}


def describe_head(folder: Path, target_folder: Path) -> HeadDescription:
    """Describe a head and compare it with its target, which is loaded for it.

    Raises:
        InvalidModel: the target cannot be loaded.
        NotEnoughMemory: there is no room for the target.
    """
    target = load_model(target_folder, max_batch=1, max_context=MAX_CONTEXT)
    is_eagle = is_eagle3(read_object(folder / "config.json"))
    described: dict[str, Any] = {"sizes": {}, "num_parameters": 0}
    try:
        described |= of_eagle3(folder, target) if is_eagle else of_medusa(folder, target)
        check_head_card(folder, target_folder)
    except (InvalidModel, IncompatibleDraft) as error:
        described["problems"] = (str(error),)
    return HeadDescription(
        folder=str(folder),
        method="eagle3" if is_eagle else "medusa",
        weights_hash=weights_hash(folder.glob("*.safetensors")),
        warnings=tuple(warnings_of(folder, target_folder, is_eagle, described)),
        **described,
    )


def of_eagle3(folder: Path, target: LanguageModel) -> dict[str, Any]:
    """Return the fields that describe an EAGLE-3 head."""
    report = examine(folder, target)
    return {
        "sizes": asdict(report.head.config),
        "num_parameters": sum(p.numel() for p in report.head.parameters()),
        "changes": report.changes,
        "is_checked": report.is_checked,
    }


def of_medusa(folder: Path, target: LanguageModel) -> dict[str, Any]:
    """Return the fields that describe Medusa heads."""
    heads = load_medusa(folder, target).heads
    return {
        "sizes": asdict(heads.config),
        "num_parameters": sum(p.numel() for p in heads.parameters()),
    }


def warnings_of(
    folder: Path, target_folder: Path, is_eagle: bool, described: dict[str, Any]
) -> Iterator[str]:
    """Return warnings about a head that can be used."""
    if is_eagle and not described.get("is_checked") and "problems" not in described:
        yield "the head has no golden rows, so its flags and layers are taken as config.json says"
    for change in described.get("changes", ()):
        yield f"config.json is wrong: the golden rows show {change}, which is used"
    try:
        changed = staleness(folder, target_folder)
    except InvalidModel as error:
        changed = f"the card is of no use: {error}"
    if changed is not None:
        yield changed


def print_head(head: HeadDescription) -> None:
    """Print a table of a head's properties, and whether it fits, on stdout."""
    console = SafeConsole()
    table = Table(title=escape(head.folder), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("method", head.method)
    for name, value in head.sizes.items():
        table.add_row(name.replace("_", " "), escape(str(value)))
    table.add_row(
        "parameters", f"{head.num_parameters:,} ({readable(2 * head.num_parameters)} in bf16)"
    )
    table.add_row(
        "golden rows", "computed again, equal" if head.is_checked else "none or not equal"
    )
    table.add_row("hash", head.weights_hash)
    console.print(table)
    if head.fits:
        console.print("[bold green]the head fits[/]")
    else:
        console.print("[bold red]the head does not fit[/]")
    for problem in head.problems:
        console.print(f"  {problem}", markup=False)
    for warning in head.warnings:
        console.print(f"  [yellow]warning[/]: {escape(warning)}")
