"""Requests and answers of an audit, and the file from which an interrupted audit is resumed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from forerun.bounded_read import read_text
from forerun.errors import InvalidRequest, UnreadableInput

Arm = Literal["served", "control"]
FORMAT = 1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an audit.

    Attributes:
        arm: "served" as every client is served, "control" without speculation.
        prompt: token ids, or a text where there is no tokenizer.
        group: requests of the same group have the same prompt and kind.
    """

    arm: Arm
    kind: str
    prompt: tuple[int, ...] | str
    num_tokens: int
    group: int


class AuditAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question.

    Attributes:
        token_ids: None if the server gives none.
        step_sizes: tokens of each event of the stream, which is what one step emitted on servers
            that stream every step.
        finish_reason: None if the answer was cut off.
        top: per token the most likely tokens with their log-probabilities, if the server gives it.
        num_charged: output tokens counted against the limit.
        problem: why there is no answer, or not all of it.
        is_refused: the server will not answer such a request.
    """

    token_ids: tuple[int, ...] | None = None
    step_sizes: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    logprobs: tuple[float, ...] = ()
    num_charged: int
    num_requests: int = 1
    problem: str | None = None
    is_refused: bool = False


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    header: dict[str, str] | None = None
    number: int | None = None
    question: Question | None = None
    answer: AuditAnswer | None = None


class StateFile:
    """Questions and answers of an audit in a file of JSON lines, one appended at a time.

    A question is written before it is sent, so that one whose answer was lost still counts.
    """

    def __init__(self, path: Path | None, header: Mapping[str, str]) -> None:
        self.path = path
        self.header = dict(header)
        self._num_questions = 0

    def load(self) -> list[tuple[Question, AuditAnswer]]:
        """Return what an earlier run recorded; begins the file if there is none.

        Raises InvalidRequest where the file is of another audit, or cannot be read.
        """
        if self.path is None:
            return []
        if not self.path.exists() or not self.path.stat().st_size:
            self._append(_Line(header={**self.header, "format": str(FORMAT)}))
            return []
        lines = self._lines()
        if not lines or lines[0].header != {**self.header, "format": str(FORMAT)}:
            found = lines[0].header if lines else None
            raise InvalidRequest(
                f"{self.path} is the state of another audit ({found}); name another --state"
            )
        questions = {line.number: line.question for line in lines if line.question is not None}
        answers = {line.number: line.answer for line in lines if line.answer is not None}
        self._num_questions = max((n for n in questions if n is not None), default=-1) + 1
        return [
            (question, answers.get(number) or _lost(question))
            for number, question in sorted(questions.items(), key=lambda item: item[0] or 0)
        ]

    def _lines(self) -> list[_Line]:
        assert self.path is not None
        try:
            text = read_text(self.path)
        except (OSError, UnreadableInput) as error:
            raise InvalidRequest(f"--state {self.path} cannot be read: {error}") from error
        found = []
        whole = text.split("\n")
        for place, line in enumerate(whole):
            try:
                if line:
                    found.append(msgspec.json.decode(line, type=_Line))
            except msgspec.DecodeError as error:
                if place == len(whole) - 1:  # torn by an interruption
                    self.path.write_text("\n".join(whole[:-1]) + "\n", encoding="utf-8")
                    break
                raise InvalidRequest(f"--state {self.path}:{place + 1}: {error}") from error
        return found

    def ask(self, questions: Sequence[Question]) -> list[int]:
        """Record questions before they are sent; returns their numbers."""
        numbers = []
        for question in questions:
            numbers.append(self._num_questions)
            self._append(_Line(number=self._num_questions, question=question))
            self._num_questions += 1
        return numbers

    def answer(self, number: int, answer: AuditAnswer) -> None:
        """Record the answer to a question."""
        self._append(_Line(number=number, answer=answer))

    def _append(self, line: _Line) -> None:
        if self.path is None:
            return
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _lost(question: Question) -> AuditAnswer:
    return AuditAnswer(
        num_charged=question.num_tokens, num_requests=3, problem="the audit was interrupted"
    )
