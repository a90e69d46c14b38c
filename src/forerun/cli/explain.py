"""`forerun explain`: the figures of a trace, and what happened in the steps of a request."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from tyro.conf import Positional, arg

from forerun.cli.command import Command
from forerun.cli.tables import SafeConsole, table_of
from forerun.errors import InvalidRequest
from forerun.terminal_text import write_count

if TYPE_CHECKING:
    from forerun.doctor.evidence import Evidence
    from forerun.doctor.explain import Decode, QuizQuestion
    from forerun.doctor.readers.trace_totals import TraceTotals
    from forerun.theory.record import TraceHeader

_MOST_STEPS = 3
"""Steps shown in detail where none is named."""
_WIDTH = 88


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of `forerun explain`."""

    file: Annotated[Positional[Path], arg(metavar="TRACE")]
    """What --trace wrote: a .jsonl file."""
    request: str | None = None
    """Id of a request, to explain it. Default: the whole trace."""
    step: int | None = None
    """Show this step of the request, or of the first one of the trace. Default: the first three
    that drafted."""
    quiz: bool = False
    """Ask a question on each section before it is shown, mark the answer and explain it."""


def run(options: ExplainOptions) -> int:
    """Print what a trace teaches, or the explanation of one request."""
    if options.quiz and options.step is not None:
        raise InvalidRequest("--quiz is on a trace or a request, not on one --step")
    if (options.request is not None or options.step is not None) and not options.quiz:
        return _explain(options)

    from forerun.doctor.readers.trace_totals import collect_totals
    from forerun.trace.files import read_trace

    totals = collect_totals(read_trace(options.file), options.request)
    if not options.quiz:
        _print_summary(totals, options.file.name)
    _teach(totals, options)
    return 0


def _teach(totals: TraceTotals, options: ExplainOptions) -> None:
    """Print the sections of a trace, each after its question where a quiz is asked for."""
    from forerun.doctor.explain import write_lessons

    console = SafeConsole(soft_wrap=True)
    num_asked = num_right = 0
    for number, section in enumerate(write_lessons(totals), start=1):
        if options.quiz and section.question is not None:
            answer = _ask(section.question, num_asked + 1)
            if answer is None:
                break
            num_asked += 1
            num_right += answer == section.question.answer
            mark = "Right" if answer == section.question.answer else "No"
            console.print(f"{mark}: {section.question.right}.", markup=False)
        console.print(f"\n{number}. {section.heading}", style="bold", markup=False)
        for line in section.lines:
            wide = len(line) <= _WIDTH or line.startswith(" ")
            for part in [line] if wide else textwrap.wrap(line, _WIDTH):
                console.print(f"   {part}", markup=False, highlight=False)
    if options.quiz:
        console.print(f"\n{num_right} of {num_asked} answers were right.", markup=False)


def _ask(question: QuizQuestion, number: int) -> int | None:
    """Ask until one of the letters is given; None at the end of the input."""
    print(f"\nQuestion {number}. {question.text}")
    letters = "abcdefgh"[: len(question.options)]
    for letter, option in zip(letters, question.options, strict=True):
        print(f"   {letter}) {option}")
    while True:
        try:
            given = input(f"   {', '.join(letters)}? ").strip().lower()
        except EOFError:
            print()  # ends the line of the prompt
            return None
        if len(given) == 1 and given in letters:
            return letters.index(given)
        print(f"   answer with one of {', '.join(letters)}")


def _explain(options: ExplainOptions) -> int:
    from forerun.doctor.explain import explain_request, in_words
    from forerun.trace.files import read_trace

    found = explain_request(read_trace(options.file), options.request)
    steps = (found.drafting or found.steps)[:_MOST_STEPS]
    if options.step is not None:
        steps = tuple(step for step in found.steps if step.step == options.step)
        if not steps:
            last = found.steps[-1].step
            raise InvalidRequest(f"--step is {options.step}; the request has steps 0 to {last}")
    decode = _load_decoder(found.header) if any(step.token_ids for step in steps) else None
    console = SafeConsole(soft_wrap=True)
    for line in in_words(found, steps, decode):
        console.print(line, markup=False)
    return 0


def _load_decoder(header: TraceHeader | None) -> Decode | None:
    """Return what makes text of the target's tokens, where its tokenizer is on this machine."""
    from forerun.errors import ForerunError
    from forerun.models.checkpoint import ModelFiles

    if header is None:
        return None
    try:
        files = ModelFiles.find(header.target)
        return files.tokenizer.decode if files.tokenizer_hash == header.tokenizer_hash else None
    except (ForerunError, OSError):
        return None


def _print_summary(totals: TraceTotals, name: str) -> None:
    from forerun.doctor.diagnosis import derive
    from forerun.doctor.readers.trace import evidence_of

    evidence = derive(evidence_of(totals, name))
    console = SafeConsole()
    for header in totals.headers:
        draft = f", draft {header.draft}" if header.draft else ""
        line = f"target {header.target}{draft}, {header.device}"
        console.print(line, style="bold", markup=False, soft_wrap=True)
    for line in _figures(totals, evidence):
        console.print(line, markup=False, soft_wrap=True)
    if tags := evidence.series.get("tag"):
        table = table_of(Column("tag", overflow="fold"), "drafting steps", "beta 1")
        for tag, rate, num_steps in tags:
            table.add_row(str(tag), f"{num_steps:.0f}", f"{rate:.2f}")
        console.print("", table)
    if totals.num_damaged:
        console.print(f"\n[bold red]not read[/] ({write_count(totals.num_damaged, 'place')})")
        for place in totals.damage:
            console.print(f"  {place}", markup=False, soft_wrap=True)


def _figures(totals: TraceTotals, evidence: Evidence) -> Iterator[str]:
    from forerun.doctor.explain import fit_costs

    known, counts, costs = evidence.number, totals.acceptance, fit_costs(totals)
    yield (
        f"{write_count(len(totals.requests), 'finished request')}, "
        f"{write_count(totals.num_steps, 'step')}, {write_count(totals.num_tokens, 'token')}"
    )
    if (ttft_s := known("ttft_s")) is not None:
        yield f"first token after {1000 * ttft_s:.1f} ms (median)"
    tau, kappa = counts.acceptance_length, costs.kappa if costs else known("cycle_cost")
    if tau is None or not counts.num_drafted:
        yield "nothing was drafted"
    else:
        cost = "unknown: too few plain steps to compare with"
        if kappa:
            where = f" with {costs.batch} requests at once" if costs and costs.batch > 1 else ""
            cost = f"{kappa:.3f}{where}, so {tau / kappa:.2f}x in these steps"
        yield f"tau {tau:.3f} over {write_count(counts.num_steps, 'drafting step')}, kappa {cost}"
        if (speedup := known("speedup")) is not None:
            yield f"decoding {speedup:.2f}x plain, steps without a draft included"
        wasted = 1.0 - counts.num_accepted / counts.num_drafted
        depth = sum(depth * num for (depth, _), num in counts.steps.items())
        trees = (
            " (nodes of trees, of which one a level is kept)" if counts.num_drafted > depth else ""
        )
        yield (
            f"{counts.num_drafted} drafted, {counts.num_accepted} accepted "
            f"({totals.expected_accepted:.1f} expected), {wasted:.1%} wasted{trees}"
        )
    times = totals.cycles.total
    shares = (
        f"{name} {seconds / (times.total_s or 1.0):.1%}"
        for name, seconds in (
            ("draft", times.draft_s),
            ("verify", times.verify_s),
            ("other", times.other_s),
        )
    )
    yield f"{times.total_s:.3f} s in {write_count(times.num_cycles, 'cycle')}: {', '.join(shares)}"


COMMAND = Command(
    options=ExplainOptions,
    run=run,
    has_positional=True,
    description="Teach speculative decoding from a trace of your own: why a pass checks several\n"
    "tokens, how far drafts are kept, what a rejected draft costs, what another K, batch or draft\n"
    "would have given, and whether the text is still the target's. Of one request: its steps in\n"
    "order, what became of every drafted token, and where the last token comes from.",
    examples=(
        "forerun explain trace.jsonl",
        "forerun explain trace.jsonl --quiz",
        "forerun explain trace.jsonl --request request-3 --step 7",
        'forerun generate "def f(" --temperature 1 --trace t.jsonl --trace-probabilities && '
        "forerun explain t.jsonl --step 2",
    ),
)
