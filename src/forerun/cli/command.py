"""What a subcommand consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Command"]

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Generic[OptionsT]):
    """One subcommand; its flags are the fields of its options.

    Attributes:
        options: frozen dataclass the flags are generated from.
        run: does the work and returns the exit code; heavy imports belong inside.
        description: what the command does, shown by `--help`.
        examples: command lines shown below the description.
    """

    options: type[OptionsT]
    run: Callable[[OptionsT], int]
    description: str
    examples: tuple[str, ...]

    @property
    def help(self) -> str:
        """Description and examples as `--help` shows them."""
        lines = [f"  {line}" for line in self.examples]
        return "\n".join([self.description, "", "examples:", *lines])
