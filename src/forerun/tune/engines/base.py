"""What reads and writes the command lines of one engine."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from forerun.bounded_read import read_text
from forerun.errors import InvalidRequest
from forerun.models.catalog import LOOKUP_NAMES
from forerun.tune.arms import NONE, ServerCommand, Speculation

NUMBER = re.compile(r"-\.?\d")
SOME_DRAFT = "draft"
"""Word for a draft model of whatever kind, in `drafts` and where the engine finds its kind."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command line.

    Attributes:
        name: with "-" in place of "_", and without the value.
        value: None if there is none.
        words: as they were typed.
    """

    name: str
    value: str | None
    words: tuple[str, ...]

    def count(self) -> int:
        """Return the value as a count (InvalidRequest)."""
        text = self.value or ""
        if not re.fullmatch(r"\d{1,6}", text):
            raise InvalidRequest(f"{self.name} is {text!r}; it must be a whole number")
        return int(text)


class EngineDialect(ABC):
    """Reads and writes the command lines that start the servers of one engine.

    Attributes:
        name: of the engine.
        programs: words that start a server; of the first, a path in front is ignored.
        model_flags: name the target.
        address_flags: host, port and key of the server, which tune chooses itself.
        pattern: matches the names of the flags of speculation.
        switches: those of them that take no value.
        metrics_flag: makes the server count its drafts.
        methods: the engine's words for a method, by words that users may write in `drafts`.
        weightless: methods that need no draft's weights.
        usual: methods that are tried though nobody names them.
        usual_ks: K that are tried unless the user says otherwise, by method; (None,) for methods
            whose K is the engine's business.
    """

    name: str
    programs: tuple[tuple[str, ...], ...]
    model_flags: frozenset[str] = frozenset({"--model"})
    address_flags: frozenset[str] = frozenset({"--host", "--port", "--api-key"})
    pattern: re.Pattern[str]
    switches: frozenset[str] = frozenset()
    metrics_flag: str | None = None
    methods: Mapping[str, str]
    weightless: frozenset[str]
    usual: tuple[Speculation, ...] = ()
    usual_ks: Mapping[str, tuple[int | None, ...]]

    @abstractmethod
    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        """Return the speculation that flags ask for; those it does not know are options.

        Raises:
            InvalidRequest: the value of a flag cannot be read.
        """

    @abstractmethod
    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        """Return the words that ask for a speculation."""

    def read(self, words: Sequence[str]) -> ServerCommand | None:
        """Read a command without its environment variables.

        Returns:
            None if the command starts no server of this engine.

        Raises:
            InvalidRequest: it does, and a value cannot be read or the model is missing.
        """
        place = self._find_program(words)
        if place is None:
            return None
        program, rest = tuple(words[:place]), words[place:]
        arguments: list[str] = []
        address: list[str] = []
        drafting: list[Flag] = []
        model = rest[0] if rest and not rest[0].startswith("-") and self.takes_model_first else None
        for flag in self._split(rest):
            if flag.name in self.address_flags:
                address += flag.words
            elif self.pattern.fullmatch(flag.name):
                drafting.append(flag)
            else:
                arguments += flag.words
                if flag.name in self.model_flags:
                    model = flag.value
                elif flag.name == "--config" and flag.value:
                    _check_file(flag.value)
        speculation = self.read_flags(drafting)
        typed = tuple(word for flag in drafting for word in flag.words)
        command = ServerCommand(
            engine=self.name,
            program=program,
            arguments=tuple(arguments),
            model=model or self.find_default_model(arguments),
            speculation=speculation,
            typed=typed,
            address=tuple(address),
        )
        return replace(command, typed=self.modernise(command))

    takes_model_first = True
    """Whether the word after the program names the target."""

    def find_default_model(self, arguments: Sequence[str]) -> str | None:
        """Return the target of a command that names none (InvalidRequest if it must)."""
        flags = " or ".join(sorted(self.model_flags))
        raise InvalidRequest(f"the {self.name} command names no model; give one with {flags}")

    def modernise(self, command: ServerCommand) -> tuple[str, ...]:
        """Return the user's words of speculation, or others where the engine has dropped them."""
        return command.typed

    def write(
        self, command: ServerCommand, speculation: Speculation, port: int | None
    ) -> tuple[str, ...]:
        """Return the words that start the server with a speculation.

        Args:
            port: on this machine's own address, without a key; None keeps the user's host, port
                and key.
        """
        is_own = speculation == command.speculation and speculation.method != NONE
        drafting = command.typed if is_own else self.write_flags(speculation, command)
        address, counting = command.address, tuple[str, ...]()
        if port is not None:
            address = ("--host", "127.0.0.1", "--port", str(port))
            if self.metrics_flag is not None and self.metrics_flag not in command.arguments:
                counting = (self.metrics_flag,)
        return (*command.program, *command.arguments, *drafting, *address, *counting)

    def list_speculations(
        self, command: ServerCommand, drafts: Sequence[str], ks: Sequence[int]
    ) -> list[Speculation]:
        """Return the speculations to compare: none, the user's, those without weights, `drafts`.

        Args:
            drafts: each is PATH, METHOD:PATH, or the name of a method that needs no weights.
            ks: K of every method that has one; empty takes a few that are usual.

        Raises:
            InvalidRequest: a draft is a method that needs weights.
        """
        own = command.speculation
        usual = (one for one in self.list_usual(command, drafts) if one.method != own.method)
        seeds = [own, *usual, *map(self.parse_draft, drafts)]
        every = [Speculation(), own]
        for seed in seeds:
            if seed.method != NONE:
                known = self.usual_ks.get(self.find_kind(seed), (2, 4, 7))
                every += [self.set_k(seed, k) for k in (ks if ks and known != (None,) else known)]
        return list(dict.fromkeys(every))

    def list_usual(self, command: ServerCommand, drafts: Sequence[str]) -> Sequence[Speculation]:
        """Return what is tried without being named."""
        return self.usual

    def find_kind(self, speculation: Speculation) -> str:
        """Return the key of `usual_ks`."""
        return "mtp" if speculation.method.endswith("_mtp") else speculation.method

    def set_k(self, speculation: Speculation, k: int | None) -> Speculation:
        """Return the speculation with another K; None leaves it."""
        return speculation if k is None else replace(speculation, k=k)

    def parse_draft(self, text: str) -> Speculation:
        """Read PATH, METHOD:PATH or METHOD (InvalidRequest)."""
        head, _, tail = text.partition(":")
        word = "ngram" if text.lower() in LOOKUP_NAMES else text.lower()
        if text == NONE:
            return Speculation()
        if word in self.methods:
            method = self.methods[word]
            if method not in self.weightless:
                raise InvalidRequest(f"{text} needs weights; write {text}:PATH")
            return next((u for u in self.usual if u.method == method), Speculation(method=method))
        if head.lower() in self.methods and tail:
            return Speculation(method=self.methods[head.lower()], draft=tail)
        return Speculation(method=self.methods[guess_kind(text)], draft=text)

    def _find_program(self, words: Sequence[str]) -> int | None:
        """Return the number of words up to the end of the program; wrappers may come before it."""
        for start in range(len(words)):
            first = PurePath(words[start]).name
            for program in self.programs:
                end = start + len(program)
                if (first, *words[start + 1 : end]) == program:
                    return end
        return None

    def _split(self, words: Sequence[str]) -> Iterator[Flag]:
        """Yield flags that tune knows with their values, and all other words one by one."""
        left = list(words)
        while left:
            word = left.pop(0)
            name, has_value, value = word.partition("=")
            if name.startswith("--"):
                head, dot, key = name.partition(".")
                name = head.replace("_", "-") + dot + key
            known = name in self.address_flags | self.model_flags | {"--config"}
            if not word.startswith("-") or not (known or self.pattern.fullmatch(name)):
                yield Flag(word, None, (word,))
            elif has_value:
                yield Flag(name, value, (word,))
            elif name in self.switches or not left or _is_flag(left[0]):
                yield Flag(name, None, (word,))
            else:
                value = left.pop(0)
                yield Flag(name, value, (word, value))


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not NUMBER.match(word)


def _check_file(name: str) -> None:
    """Refuse a file of settings that holds speculation, which tune could not change."""
    path = Path(name)
    if path.is_file() and re.search("speculative|spec-", read_text(path)):
        raise InvalidRequest(
            f"--config {name} sets speculation; write its flags in the command in place of the file"
        )


def guess_kind(draft: str) -> str:
    """Return "eagle3", "eagle", "dflash" or "draft" by the name and config.json of a draft."""
    config = Path(draft) / "config.json"
    text = Path(draft).name + (read_text(config) if config.is_file() else "")
    text = text.lower().replace("-", "")
    return next((kind for kind in ("eagle3", "eagle", "dflash") if kind in text), SOME_DRAFT)
