"""Requests and answers of an audit, and the file from which an interrupted audit is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forerun.client.client import MAX_ALTERNATIVES, Count, TokenId
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.record_file import RecordFile

Arm = Literal["served", "control"]
Setting = Literal["alone", "together", "again", "continued", "aborted", "long"]
"""How a request is sent: alone, with others, with a prompt that was sent before, with a prompt that
goes on with an answer, beside requests that are cut off, or for a long answer."""
FORMAT = 2
LOWEST, HIGHEST = -1e4, 100.0
"""Ends between which log-probabilities are kept; JSON has no infinity."""
_Logprob = Annotated[float, Meta(ge=LOWEST, le=HIGHEST)]
_Listed = tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], _Logprob]
"""A token's id, or the hash of its text, with its log-probability."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an audit.

    Attributes:
        arm: "served" as every client is served, "control" without speculation.
        prompt: token ids, or a text where there is no tokenizer.
        group: requests of the same group have the same prompt and kind.
        round: questions of one round are sent at once.
        message: sent as a conversation; `prompt` is how the chat template renders it.
        stop: string that ends the text.
        cut_at: tokens after which the client disconnects.
    """

    arm: Arm
    kind: str
    prompt: tuple[TokenId, ...] | str
    num_tokens: Count
    group: Count
    round: Count = 0
    setting: Setting = "together"
    message: str = ""
    stop: str = ""
    cut_at: Count | None = None
    is_streamed: bool = True


class AuditAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question.

    Attributes:
        token_ids: None if the server gives none.
        step_sizes: tokens of each event of the stream, which is what one step emitted on servers
            that stream every step.
        finish_reason: None if the answer was cut off.
        top: per token the most likely tokens with their log-probabilities, if the server gives it.
        num_charged: output tokens counted against the limit.
        num_prompt: tokens of the prompt, as the server counts them.
        num_drafted: draft tokens that were verified, as the server counts them; None where it does
            not.
        problem: why there is no answer, or not all of it.
        is_refused: the server will not answer such a request.
    """

    token_ids: tuple[TokenId, ...] | None = None
    step_sizes: tuple[Count, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    top: tuple[Annotated[tuple[_Listed, ...], Meta(max_length=MAX_ALTERNATIVES)], ...] = ()
    logprobs: tuple[_Logprob, ...] = ()
    num_charged: Count
    num_requests: Count = 1
    num_prompt: Count | None = None
    num_drafted: Count | None = None
    problem: str | None = None
    is_refused: bool = False


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    header: dict[str, str] | None = None
    number: Count | None = None
    question: Question | None = None
    answer: AuditAnswer | None = None


class StateFile:
    """Questions and answers of an audit in a file of JSON lines, one appended at a time.

    A question is written before it is sent, so that one whose answer was lost still counts.
    """

    def __init__(self, path: Path | None, header: Mapping[str, str]) -> None:
        self.path = path
        self.header = dict(header)
        self._file = None if path is None else RecordFile(path, _Line)
        self._num_questions = 0

    def load(self) -> list[tuple[Question, AuditAnswer]]:
        """Return what an earlier run recorded; begins the file if there is none.

        Raises InvalidRequest where the file is of another audit, or cannot be read.
        """
        if self._file is None:
            return []
        header, file = {**self.header, "format": str(FORMAT)}, self._file
        try:
            lines = file.read()
        except (OSError, UnreadableInput) as error:
            raise InvalidRequest(
                f"--state {self.path} cannot be read: {error}; name another file"
            ) from error
        if file.is_empty():
            file.append(_Line(header=header))
            return []
        if not lines or lines[0].header != header:
            raise InvalidRequest(f"{self.path} is the state of another audit; name another --state")
        questions = {line.number: line.question for line in lines if line.question is not None}
        answers = {line.number: line.answer for line in lines if line.answer is not None}
        self._num_questions = max((n for n in questions if n is not None), default=-1) + 1
        return [
            (question, answers.get(number) or _lost(question))
            for number, question in sorted(questions.items(), key=lambda item: item[0] or 0)
        ]

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
        if self._file is not None:
            self._file.append(line)


def _lost(question: Question) -> AuditAnswer:
    return AuditAnswer(
        num_charged=question.num_tokens, num_requests=3, problem="the audit was interrupted"
    )
