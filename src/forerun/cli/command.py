"""What a subcommand consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Command"]

OptionsT = TypeVar("OptionsT")


def no_defaults(arguments: Sequence[str]) -> None:
    """Nothing but what the class of the options says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Generic[OptionsT]):
    """One subcommand; its flags are the fields of its options.

    Attributes:
        options: frozen dataclass the flags are generated from.
        run: does the work and returns the exit code; heavy imports belong inside.
        description: what the command does, shown by `--help`.
        examples: command lines shown below the description.
        defaults: options to start from, given the arguments; None for those of the class. For a
            command that goes on from what an earlier one left.
    """

    options: type[OptionsT]
    run: Callable[[OptionsT], int]
    description: str
    examples: tuple[str, ...]
    defaults: Callable[[Sequence[str]], OptionsT | None] = no_defaults

    @property
    def help(self) -> str:
        """Description and examples as `--help` shows them."""
        lines = [f"  {line}" for line in self.examples]
        return "\n".join([self.description, "", "examples:", *lines])
