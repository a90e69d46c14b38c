"""Code blocks of the documentation pages, and a runner that executes them in order.

A block is indented by four spaces or fenced. Python and shell blocks run, all of one page in one
folder and one Python namespace, so that a block finds what the blocks before it made. A comment
before a block changes that:

    <!-- not run: REASON -->    sample output, or a command that takes too long
    <!-- file: NAME -->         the block is the content of a file that later blocks use
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.profiles import exact_times

COMMENT = re.compile(r"<!--\s*(not run|file):\s*(.*?)\s*-->")
LIST_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s")
FENCE = re.compile(r"\s*(```+|~~~+)\s*(\w*)")
PROGRAMS = (
    *("forerun", "python", "cat", "printf", "echo", "cp", "mkdir", "ls", "head", "export", "make"),
    *("pip", "git", "curl", "accelerate", "torchrun", "vllm", "llama-server", "docker", "cd", "jq"),
)
"""First words of shell lines."""
LANGUAGES = {"python": "python", "sh": "shell", "bash": "shell", "console": "shell", "text": "text"}
ALLOWED_CODES = {"audit": (0, 3, 4), "diagnose": (0, 3, 4)}


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        line: number of its first line.
        text: content without its indentation.
        language: of the fence; "" for none and for indented blocks.
        not_run: the reason in the comment before it, or None.
        file: the file name in the comment before it, or None.
    """

    line: int
    text: str
    language: str = ""
    not_run: str | None = None
    file: str | None = None

    @property
    def kind(self) -> str:
        """file, not run, python, shell, text (formulas, shapes), or unknown."""
        if self.file is not None or self.not_run is not None:
            return "not run" if self.file is None else "file"
        if self.language:
            return LANGUAGES.get(self.language, "unknown")
        first = next((line for line in self.text.splitlines() if line.strip()), "")
        if first.removeprefix("$ ").split(" ")[0] in PROGRAMS:
            return "shell"
        return "python" if is_python(self.text) else "text"


def is_python(text: str) -> bool:
    """Whether the text is a program that does something."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in body)


def blocks_of(page: str) -> list[Block]:
    """All code blocks of a Markdown page, in order."""
    lines = page.splitlines()
    found: list[Block] = []
    marks: dict[str, str] = {}
    previous, index = "", 0  # the last line of the paragraph before
    while index < len(lines):
        line = lines[index]
        if mark := COMMENT.match(line.strip()):
            marks[mark[1]] = mark[2]
        elif fence := FENCE.match(line):
            end = index + 1
            while end < len(lines) and not lines[end].strip().startswith(fence[1]):
                end += 1
            text = "\n".join(lines[index + 1 : end])
            found.append(made(index + 2, text, fence[2], marks))
            marks, index, previous = {}, end, ""
        elif is_indented(line) and not lines[index - 1].strip() and not LIST_ITEM.match(previous):
            end = index
            while end < len(lines) and (is_indented(lines[end]) or not lines[end].strip()):
                end += 1
            text = "\n".join(item[4:] for item in lines[index:end]).rstrip()
            found.append(made(index + 1, text, "", marks))
            marks, index, previous = {}, end - 1, ""
        elif line.strip():
            if not lines[index - 1].strip() or LIST_ITEM.match(line):
                previous = line
            marks = {}
        index += 1
    return found


def is_indented(line: str) -> bool:
    """Whether a line belongs to an indented block."""
    return line.startswith("    ") and bool(line.strip())


def made(line: int, text: str, language: str, marks: dict[str, str]) -> Block:
    """A block with the comments before it."""
    return Block(
        line=line,
        text=text,
        language=language,
        not_run=marks.get("not run"),
        file=marks.get("file"),
    )


@dataclass
class PageRunner:
    """Runs the blocks of one page in the current folder.

    Attributes:
        page: name of the page, for messages.
        namespace: of its Python blocks.
    """

    page: str
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def run(self, block: Block) -> None:
        """Run one block.

        Raises:
            AssertionError: it fails, or is neither Python nor shell and not marked.
        """
        if block.kind == "file":
            Path(str(block.file)).write_text(block.text + "\n", encoding="utf-8")
        elif block.kind == "python":
            self._python(block)
        elif block.kind == "shell":
            for line in commands(block.text):
                self._command(block, line)
        elif block.kind == "unknown":
            raise AssertionError(
                f"{self.page}:{block.line}: neither Python nor shell: mark it with "
                f"<!-- not run: reason --> or <!-- file: NAME -->\n{block.text}"
            )

    def _python(self, block: Block) -> None:
        program = compile("\n" * (block.line - 1) + block.text, self.page, "exec")
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                exec(program, self.namespace)
        except BaseException as error:
            raise AssertionError(
                f"{self.page}:{block.line}: {''.join(traceback.format_exception(error))}"
            ) from error

    def _command(self, block: Block, line: str) -> None:
        words = shlex.split(line, comments=True)
        if not words:
            return
        allowed = ALLOWED_CODES.get(words[1] if len(words) > 1 else "", (0,))
        is_plain = words[0] == "forerun" and not re.search(r"[|<>;&$*?`]", line)
        if is_plain and words[1] == "profile" and "--out" in words:
            code, output = brief_profile(words[1:])
        else:
            code, output = in_process(words[1:]) if is_plain else in_shell(line)
        assert code in allowed, f"{self.page}:{block.line}: {line}\nexit code {code}\n{output}"


def commands(text: str) -> list[str]:
    """Command lines, with continued lines joined and prompts removed."""
    joined = text.replace("\\\n", " ")
    return [line.strip().removeprefix("$ ") for line in joined.splitlines() if line.strip()]


def in_process(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of a forerun command, without a process of its own."""
    from forerun.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, output.getvalue()


def brief_profile(arguments: list[str]) -> tuple[int, str]:
    """A profile in a short time, whose errors are set to 0 for the commands that read it.

    How steady the times of this machine are is not what a page states.
    """
    arguments = [*arguments, "--budget-s", "0.5"]  # the last value counts
    code, output = in_process(arguments)
    if code == 0:
        exact_times(Path(arguments[arguments.index("--out") + 1]))
    return code, output


def in_shell(line: str) -> tuple[int, str]:
    """Exit code and output of a shell line; `forerun` is the one under test."""
    folder = Path(sys.executable).parent
    program = f'forerun() {{ "{sys.executable}" -m forerun "$@"; }}\n{line}'
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr
