"""`forerun explain`: what happened in the steps of a request, from a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from forerun.cli.command import Command
from forerun.cli.tables import SafeConsole
from forerun.errors import InvalidRequest

_MOST_STEPS = 3
"""Steps shown in detail where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of `forerun explain`."""

    file: Annotated[Positional[Path], arg(metavar="TRACE")]
    """What --trace wrote: a .jsonl file."""
    request: str | None = None
    """Id of the request. Default: the first one of the trace."""
    step: int | None = None
    """Show this step of the request. Default: the first three that drafted."""
    quiz: bool = False
    """Ask questions about the request instead; the answers are below."""


def run(options: ExplainOptions) -> int:
    """Print the explanation of one request."""
    from forerun.doctor.explain import explain_request, in_words, quiz_of
    from forerun.trace.files import read_trace

    found = explain_request(read_trace(options.file), options.request)
    console = SafeConsole(soft_wrap=True)
    if options.quiz:
        exercises = quiz_of(found)
        if not exercises:
            raise InvalidRequest(f"request {found.request_id!r} drafted nothing to ask about")
        for number, (question, _) in enumerate(exercises, start=1):
            console.print(f"{number}. {question}", markup=False)
        console.print("\nAnswers")
        for number, (_, answer) in enumerate(exercises, start=1):
            console.print(f"{number}. {answer}", markup=False)
        return 0
    steps = (found.drafting or found.steps)[:_MOST_STEPS]
    if options.step is not None:
        steps = tuple(step for step in found.steps if step.step == options.step)
        if not steps:
            last = found.steps[-1].step
            raise InvalidRequest(f"--step is {options.step}; the request has steps 0 to {last}")
    for line in in_words(found, steps):
        console.print(line, markup=False)
    return 0


COMMAND = Command(
    options=ExplainOptions,
    run=run,
    has_positional=True,
    description="Explain a request of a trace: its cycles in order with their times, what became\n"
    "of every drafted token, where the last token comes from, and which K would have been best.",
    examples=(
        "forerun explain trace.jsonl",
        "forerun explain trace.jsonl --request request-3 --step 7",
        "forerun explain trace.jsonl --quiz",
        'forerun generate "def f(" --temperature 1 --trace t.jsonl --trace-probabilities && '
        "forerun explain t.jsonl",
    ),
)
