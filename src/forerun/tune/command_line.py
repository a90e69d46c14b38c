"""Reads the command line of a server, and writes those of its arms."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType

from forerun.client.urls import hide_keys
from forerun.errors import InvalidRequest, Range
from forerun.tune.arms import Arm, ServerCommand, Speculation
from forerun.tune.engines.base import EngineDialect
from forerun.tune.engines.forerun import ForerunDialect
from forerun.tune.engines.llamacpp import LlamaCppDialect
from forerun.tune.engines.sglang import SglangDialect
from forerun.tune.engines.vllm import VllmDialect

DIALECTS: Mapping[str, EngineDialect] = {
    dialect.name: dialect
    for dialect in (VllmDialect(), LlamaCppDialect(), SglangDialect(), ForerunDialect())
}
ELSEWHERE = frozenset("docker podman nerdctl kubectl ssh".split())
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
CONTINUED = re.compile(r"\\\s*$|\\[ \t]*\r?\n|\\\s+(?=-)")
"""A line that goes on; a blank after the backslash comes from copying."""
SPECULATIVE_VARIABLE = re.compile("LLAMA_ARG_(SPEC|DRAFT|.*_DRAFT).*")


def parse_command(text: str) -> ServerCommand:
    """Read a command line that starts a server.

    Line breaks count as blanks, and variables are replaced by their values; nothing else of a
    shell is known.

    Raises:
        InvalidRequest: the command cannot be read, starts no known server, or names no model.
    """
    environment, words = split_command(text)
    for dialect in DIALECTS.values():
        if command := dialect.read(words):
            return replace(command, environment=MappingProxyType(environment))
    raise InvalidRequest(
        f"{hide_keys(shlex.join(words))!r:.80} starts no server that tune knows (vllm serve, "
        "llama-server, sglang.launch_server, forerun serve): give the command of each setting with "
        "--arm NAME=COMMAND"
    )


def split_command(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and its words.

    Raises:
        InvalidRequest: the command cannot be read.
    """
    words = _split_words(text)
    environment: dict[str, str] = {}
    while words and (words[0] == "export" or ASSIGNMENT.fullmatch(words[0])):
        if found := ASSIGNMENT.fullmatch(words.pop(0)):
            environment[found[1]] = _expand(found[2], environment)
    _check_words(words, environment)
    return environment, [_expand(word, environment) for word in words]


def plan_arms(
    command: ServerCommand,
    drafts: Sequence[str],
    ks: Sequence[int],
    ports: Iterator[int],
    *,
    acceptance_length: float | None = None,
) -> list[Arm]:
    """Return the arms to compare, "none" first and the user's own setting second.

    Args:
        drafts: each is PATH, METHOD:PATH, or the name of a method that needs no weights.
        ks: K of every method that has one; empty takes a few that are usual.
        ports: free ports of this machine.
        acceptance_length: accept the drafts of draft models by chance, so many tokens a step; None
            accepts them as the engine does.

    Raises:
        InvalidRequest: a draft is a method that needs weights, or the engine cannot accept by
            chance.
    """
    for k in ks:
        Range("--k", 1, 256, integer=True).check(k)
    dialect = DIALECTS[command.engine]
    arms: dict[str, Arm] = {}
    speculations = dialect.list_speculations(command, drafts, ks)
    if acceptance_length is not None:
        speculations = dialect.accept_by_chance(speculations, acceptance_length)
    for speculation in speculations:
        name, port = speculation.label, next(ports)
        if name in arms:  # other options, or weights of the same name in another folder
            name = f"{name} ({len(arms)})"
        arms[name] = Arm(
            name=name,
            url=f"http://127.0.0.1:{port}/v1",
            command=dialect.write(command, speculation, port),
            speculation=speculation,
            environment=command.environment,
            typed=show_command(command, speculation),
        )
    return list(arms.values())


def show_command(command: ServerCommand, speculation: Speculation) -> str:
    """Return the command with a speculation as the user would type it, host and port included."""
    words = DIALECTS[command.engine].write(command, speculation, None)
    return shlex.join([*(f"{name}={value}" for name, value in command.environment.items()), *words])


def _split_words(text: str) -> list[str]:
    """Return the words of a command; operators of a shell are words of their own."""
    text = CONTINUED.sub(" ", text).strip().removeprefix("$ ")
    try:
        reader = shlex.shlex(text, posix=True, punctuation_chars=True)
        reader.whitespace_split, reader.commenters = True, ""
        return list(reader)
    except ValueError as error:
        raise InvalidRequest(f"the command cannot be read: {error}") from error


def _check_words(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse commands whose server tune could not start as it is meant (InvalidRequest)."""
    if not words:
        raise InvalidRequest("the command is empty: write one such as 'vllm serve MODEL'")
    if elsewhere := next((w for w in words[:2] if PurePath(w).name in ELSEWHERE), None):
        raise InvalidRequest(
            f"{elsewhere} starts the server where tune reaches neither its process nor its port: "
            "give the command that runs there, or start one server per setting by hand and give "
            "each with --arm NAME=URL"
        )
    for word in words:
        if word == "..." or (word and set(word) <= set("();<>|&")):
            raise InvalidRequest(f"tune starts no shell, which {word!r} is for: leave it out")
    for name in filter(SPECULATIVE_VARIABLE.fullmatch, environment):
        raise InvalidRequest(f"{name} sets speculation: write its flag in place of the variable")


def _expand(word: str, environment: Mapping[str, str]) -> str:
    """Return a word with its variables and home folder replaced (InvalidRequest)."""

    def replace_variable(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        value = environment.get(name, os.environ.get(name))
        if value is None:
            raise InvalidRequest(f"the variable {name} has no value here: write the value")
        return value

    return os.path.expanduser(VARIABLE.sub(replace_variable, word))
