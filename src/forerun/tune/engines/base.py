"""What reads and writes the command lines of one engine."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from forerun.bounded_read import read_text
from forerun.errors import InvalidRequest
from forerun.models.catalog import LOOKUP_NAMES
from forerun.tune.arms import NONE, ServerCommand, Speculation

SOME_DRAFT = "draft"
"""Word for a draft model of whatever kind, in `drafts` and where the engine finds its kind."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag or another word of a command line.

    Attributes:
        name: with "-" in place of "_", and without the value.
        value: "" if there is none.
        words: as they were typed.
    """

    name: str
    value: str
    words: tuple[str, ...]

    def count(self) -> int:
        """Return the value as a number of tokens (InvalidRequest)."""
        if not re.fullmatch(r"[0-9]{1,6}", self.value):
            raise InvalidRequest(f"{self.name} is {self.value!r:.80}; it must be a whole number")
        return int(self.value)


class EngineDialect(ABC):
    """Reads and writes the command lines that start the servers of one engine.

    Attributes:
        name: of the engine.
        programs: words that start a server; of the first, a path in front is ignored.
        model_flags: name the target.
        model_first: whether a word right after the program names the target.
        default_model: target of a command that names none; None refuses such a command.
        address_flags: host, port and API key of the server, which tune replaces.
        pattern: matches the names of the flags of speculation.
        switches: those of them that take no value.
        lists: flags that tune knows and that take several words.
        metrics_flag: makes the server count its drafts.
        methods: the engine's words for a method, by words that users may write in `drafts`.
        weightless: methods that need no draft's weights.
        usual: methods that are tried though no one names them.
        synthetic: options that make the server accept drafts by chance, with "{}" for the mean
            acceptance length; empty where the engine cannot.
    """

    name: str
    programs: tuple[tuple[str, ...], ...]
    model_flags: frozenset[str] = frozenset({"--model"})
    model_first: bool = False
    default_model: str | None = None
    address_flags: frozenset[str] = frozenset({"--host", "--port", "--api-key"})
    pattern: re.Pattern[str]
    switches: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    metrics_flag: str | None = None
    methods: Mapping[str, str]
    weightless: frozenset[str]
    usual: tuple[Speculation, ...] = ()
    synthetic: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        """Return the speculation that flags ask for; those it does not know are options.

        Raises:
            InvalidRequest: the value of a flag cannot be read.
        """

    @abstractmethod
    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        """Return the words that ask for a speculation."""

    @abstractmethod
    def choose_ks(self, speculation: Speculation) -> tuple[int | None, ...]:
        """Return the K that are usually tried; (None,) where K is the engine's business."""

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
        rest = words[place:]
        model = rest[0] if self.model_first and rest and not rest[0].startswith("-") else ""
        arguments, address, drafting = list[str](), list[str](), list[Flag]()
        for flag in self._split(rest):
            if self.pattern.fullmatch(flag.name):
                drafting.append(flag)
            elif flag.name in self.address_flags:
                address += flag.words
            else:
                arguments += flag.words
                model = flag.value if flag.name in self.model_flags else model
        if file := next((f.value for f in self._split(rest) if f.name == "--config"), ""):
            _check_settings(Path(file))
        elif not model and self.default_model is None:
            flags = " or ".join(sorted(self.model_flags))
            raise InvalidRequest(f"the {self.name} command names no model: give one with {flags}")
        return ServerCommand(
            engine=self.name,
            program=tuple(words[:place]),
            arguments=tuple(arguments),
            model=model or self.default_model,
            speculation=self.read_flags(drafting),
            typed=tuple(word for flag in drafting for word in flag.words),
            address=tuple(address),
        )

    def write(
        self, command: ServerCommand, speculation: Speculation, port: int | None
    ) -> tuple[str, ...]:
        """Return the words that start the server with a speculation.

        Args:
            port: on this machine's own address, without an API key; None writes the user's host,
                port and key.
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
        usual = (
            one
            for one in self.list_usual(command, drafts)
            if (one.method, one.draft) != (own.method, own.draft)
        )
        every = [Speculation(), Speculation() if own.method == NONE else own]
        for seed in (own, *usual, *map(self.parse_draft, drafts)):
            if seed.method != NONE:
                known = self.choose_ks(seed)
                chosen = ks if ks and known != (None,) else known
                every += [seed if k is None else self.set_k(seed, k) for k in chosen]
        return list(dict.fromkeys(every))

    def list_usual(self, command: ServerCommand, drafts: Sequence[str]) -> Sequence[Speculation]:
        """Return what is tried without being named."""
        return self.usual

    def set_k(self, speculation: Speculation, k: int) -> Speculation:
        """Return the speculation with K drafted tokens in every step."""
        return replace(speculation, k=k)

    def accept_by_chance(
        self, speculations: Sequence[Speculation], acceptance_length: float
    ) -> list[Speculation]:
        """Return the draft models among speculations, whose drafts are accepted by chance.

        Their texts are wrong; what a step costs is right.

        Args:
            acceptance_length: tokens per step; a K that does not allow so many is left out.

        Raises:
            InvalidRequest: the engine cannot, or there is no draft model with a K.
        """
        if not self.synthetic:
            raise InvalidRequest(f"{self.name} has no flag for synthetic acceptance")
        added = tuple((name, text.format(acceptance_length)) for name, text in self.synthetic)
        every = [
            replace(one, options=(*one.options, *added))
            for one in speculations
            if one.draft is not None and (one.k or 0) + 1 >= acceptance_length
        ]
        if not every:
            raise InvalidRequest(
                f"an acceptance length of {acceptance_length:g} needs a draft model, named with "
                "--draft, and a K of at least one less"
            )
        return [Speculation(), *every]

    def parse_draft(self, text: str) -> Speculation:
        """Read PATH, METHOD:PATH or METHOD (InvalidRequest)."""
        head, _, tail = text.partition(":")
        if not text.strip() or text.endswith(":"):
            raise InvalidRequest(f"--draft {text!r} names no draft: write PATH or METHOD:PATH")
        word = "ngram" if text.lower() in LOOKUP_NAMES else text.lower()
        if text == NONE:
            return Speculation()
        if word in self.methods:
            method = self.methods[word]
            if method not in self.weightless:
                raise InvalidRequest(f"{text} needs weights: write {text}:PATH")
            return next((u for u in self.usual if u.method == method), Speculation(method=method))
        if head.lower() in self.methods and tail:
            return Speculation(method=self.methods[head.lower()], draft=tail)
        kind = self.methods.get(find_kind(text), self.methods[SOME_DRAFT])
        return Speculation(method=kind, draft=text)

    def _find_program(self, words: Sequence[str]) -> int | None:
        """Return the number of words up to the end of the program; wrappers may come before it."""
        for start, word in enumerate(words):
            for program in self.programs:
                end = start + len(program)
                if (PurePath(word).name, *words[start + 1 : end]) == program:
                    return end
        return None

    def _split(self, words: Sequence[str]) -> Iterator[Flag]:
        """Yield flags that tune knows with their values, and all other words one by one."""
        left = deque(words)
        while left:
            word = left.popleft()
            name, has_value, value = word.partition("=")
            if name.startswith("--"):
                head, dot, key = name.partition(".")
                name = head.replace("_", "-") + dot + key
            known = self.address_flags | self.model_flags | {"--config"}
            if not name.startswith("-") or not (name in known or self.pattern.fullmatch(name)):
                yield Flag(word, "", (word,))
            elif has_value or name in self.switches or not left or _is_flag(left[0]):
                yield Flag(name, value, (word,))
            else:
                values = [left.popleft()]
                while name in self.lists and left and not _is_flag(left[0]):
                    values.append(left.popleft())
                yield Flag(name, values[0], (word, *values))


def write_options(options: Sequence[tuple[str, str]]) -> list[str]:
    """Return flags with their values as words; "" is no value."""
    return [word for name, value in options for word in ((name, value) if value else (name,))]


def find_kind(draft: str) -> str:
    """Return "eagle3", "eagle", "dflash" or "draft" by the name and config.json of a draft."""
    config = Path(draft) / "config.json"
    text = Path(draft).name + (read_text(config) if config.is_file() else "")
    text = text.lower().replace("-", "")
    return next((kind for kind in ("eagle3", "eagle", "dflash") if kind in text), SOME_DRAFT)


def _is_flag(word: str) -> bool:
    return re.match(r"-[^\d.]", word) is not None


def _check_settings(path: Path) -> None:
    """Refuse a file of settings that asks for speculation, which tune could not change."""
    if path.is_file() and re.search("speculative|spec-", read_text(path)):
        raise InvalidRequest(
            f"--config {path} sets speculation: move these settings to the command line"
        )
