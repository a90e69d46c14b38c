"""A subcommand with its options, help and exit codes, and the parser of list-valued flags."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from forerun.errors import InvalidRequest

OptionsT = TypeVar("OptionsT")


class Exit(IntEnum):
    """Exit codes of every command; the table is part of `forerun --help`."""

    GOOD = 0
    """The work is done; of `diagnose`: healthy; of `audit`: no deviation."""
    FAILED = 1
    """A check did not pass, or the work could not be finished: memory, disk, a broken model."""
    BAD_INPUT = 2
    """A flag, a value, a file or a model cannot be used."""
    PROBLEM = 3
    """`diagnose` or `audit` found a problem."""
    INSUFFICIENT = 4
    """`diagnose` or `audit` needs more evidence."""
    DEFECT = 70
    """An error that forerun did not foresee."""
    INTERRUPTED = 130
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of the output ended early."""


def _skip_defaults(arguments: Sequence[str]) -> None:
    """Return None, which means that the defaults of the options' class apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Generic[OptionsT]):
    """One subcommand; its flags are the fields of its options.

    Attributes:
        run: does the work and returns the exit code; heavy imports belong inside.
        lists: flags that take several values, each with the separator that is allowed within one
            word ("" for none). `--rows 1,2`, `--rows 1 2` and `--rows 1 --rows 2` are the same.
        has_positional: whether a word without a flag has a meaning of its own; where it does not
            come first, a list takes one word after each flag.
        usual: names of the fields that --help shows, at most 15; --help-all shows the others too.
            Empty: there are no others.
        defaults: options to start from, given the arguments; None for those of the class.
        rewrite: translates arguments of earlier releases that an alias cannot.
    """

    options: type[OptionsT]
    run: Callable[[OptionsT], int]
    description: str
    examples: tuple[str, ...]
    lists: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    has_positional: bool = False
    usual: str = ""
    defaults: Callable[[Sequence[str]], Any] = _skip_defaults
    rewrite: Callable[[Sequence[str]], Sequence[str]] = list

    def parse(self, name: str, arguments: Sequence[str]) -> OptionsT:
        import tyro

        given = list(self.split_lists(self.rewrite(arguments)))
        flags = _find_flags(given)
        for one, other in SAME_FLAGS:
            if one in flags and other in flags:
                raise InvalidRequest(f"{one} and {other} are the same flag; give one of them")
        options: type[Any] = self.options
        lines = [self.description, "", "examples:", *(f"  {line}" for line in self.examples)]
        if "--help-all" in flags:
            given = ["--help"]
        elif self.usual and not flags.isdisjoint(("--help", "-h")):
            given, hidden = ["--help"], list[str]()
            options = hide_flags(options, self.usual.split(), hidden)
            lines += [f"--help-all shows {len(hidden)} more flags"]
        parse: Any = tyro.cli
        parsed: OptionsT
        rest: list[str]
        parsed, rest = parse(
            options,
            prog=f"forerun {name}",
            description="\n".join(lines),
            args=given,
            default=self.defaults(given) if options is self.options else None,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            return_unknown_args=True,
        )
        if rest and not is_flag(rest[0]):
            raise InvalidRequest(
                f"{rest[0]!r:.200} is one word too many for forerun {name}; name its flag, or put "
                "quotes around a text of several words"
            )
        if rest:
            flag = rest[0].partition("=")[0]
            near = difflib.get_close_matches(flag, list(list_flags(options)), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint += f"forerun {name} --help{'-all' if self.usual else ''} shows all options"
            raise InvalidRequest(f"{name} has no option {flag!r:.200}; {hint}")
        return parsed

    def split_lists(self, arguments: Sequence[str]) -> Iterator[str]:
        """Rewrite the arguments so that every list consists of repeated flags of one value."""
        rest = list(arguments)
        one_each = self.has_positional and (not rest or is_flag(rest[0]))
        while rest:
            word = rest.pop(0)
            if word == "--":
                yield from (word, *rest)
                return
            flag, equals, value = word.partition("=")
            separator = self.lists.get(flag)
            if separator is None:
                yield word
                continue
            values = [value] if equals else take_words(rest, 1 if one_each else len(rest))
            if not values:
                yield flag  # the parser says that a value is missing
            for found in values:
                yield from (f"{flag}={part}" for part in split_list(found, separator))


def list_flags(options: type[Any]) -> Iterator[str]:
    """Yield every spelling of the flags that the fields of some options become."""
    import tyro

    hints, conf = get_type_hints(options, include_extras=True), dict[str, Any](vars(tyro.conf))
    others = {get_args(conf[name][int])[1] for name in ("Positional", "Suppress")}
    for item in fields(options):
        hint: Any = hints[item.name]
        found: Any = get_args(hint)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from list_flags(hint)
        elif others.isdisjoint(found):
            named = [extra for extra in found if isinstance(extra, type(conf["arg"]()))]
            for extra in named:
                yield from extra.aliases or ()
            names = [extra.name for extra in named if isinstance(extra.name, str)]
            yield f"--{(*names, item.name)[0].replace('_', '-')}"


def hide_flags(options: type[Any], usual: Sequence[str], hidden: list[str]) -> type[Any]:
    """Return a subclass whose help shows the usual fields alone; adds the others to `hidden`."""
    import tyro

    suppress: Any = tyro.conf.Suppress
    hints, changed = get_type_hints(options, include_extras=True), []
    _, marker = get_args(suppress[int])
    for item in fields(options):
        hint: Any = hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            hint = hide_flags(hint, usual, hidden)
            changed.append((item.name, hint, field(default_factory=hint)))
        elif item.name not in usual and marker not in get_args(hint):
            hidden.append(item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            changed.append((item.name, suppress[hint], field(default=default)))
    return make_dataclass(options.__name__, changed, bases=(options,), frozen=True, kw_only=True)


SAME_FLAGS = (("--model", "--target"), ("--num-speculative-tokens", "--k"))
"""Names of one flag, of which the parser would take the last without a word."""


def _find_flags(arguments: Sequence[str]) -> set[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return {word.partition("=")[0] for word in arguments[:end] if is_flag(word)}


def take_words(rest: list[str], most: int) -> list[str]:
    """Remove the words of `rest` before the next flag and return them."""
    values: list[str] = []
    while rest and len(values) < most and not is_flag(rest[0]):
        values.append(rest.pop(0))
    return values


def is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")


def split_list(value: str, separator: str) -> list[str]:
    """Split the value of a list flag; the name of an existing file is not split."""
    if not separator or separator not in value or Path(value).exists():
        return [value]
    return value.split(separator)
