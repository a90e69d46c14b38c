"""`forerun diagnose`: find why speculation is slow or wrong, and suggest changes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command, Exit
from forerun.cli.flags import check_writable
from forerun.cli.probe import ProbeFlags, probe_pair
from forerun.cli.tables import SafeConsole
from forerun.cli.watch import Watch, WatchFlags, watch
from forerun.errors import InvalidRequest
from forerun.terminal_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.doctor.asking import Answer, Item
    from forerun.doctor.diagnosis import Diagnosis, ScoredCause
    from forerun.doctor.evidence import Evidence
    from forerun.theory.cost import CostTable

EXIT_CODES = {
    "healthy": Exit.GOOD,
    "problem": Exit.PROBLEM,
    "inconclusive": Exit.INSUFFICIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """Options of `forerun diagnose`."""

    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCE")] = ()
    """Traces, logs, metrics, stats or facts files of any engine, or a complaint in words.
    "-" is stdin; a /metrics URL is read twice."""
    before: UseAppendAction[tuple[str, ...]] = ()
    """The same from before the problem began, to compare with."""
    k: Annotated[float | None, arg(name="num-speculative-tokens", aliases=("--k",))] = None
    """K: most tokens drafted per step."""
    tokens_per_s: float | None = None
    """Decode rate with speculation."""
    tokens_per_s_plain: float | None = None
    """Decode rate without it, all else the same."""
    temperature: float | None = None
    """Of sampling; 0 is greedy."""
    batch: float | None = None
    """Sequences that decode together."""
    changed: UseAppendAction[tuple[str, ...]] = ()
    """What was changed when the problem began.
    target, adapter, draft, engine, driver, hardware, traffic, template, precision or config."""
    observed: UseAppendAction[tuple[str, ...]] = ()
    """An observation that holds; docs/facts.md lists the names, for example output_differs."""
    fact: UseAppendAction[tuple[str, ...]] = ()
    """Any other fact as NAME=VALUE, such as acceptance_length=2.1 or output_differs=no; see
    docs/facts.md."""
    profile: Path | None = None
    """Cost profile of `forerun profile`, for predictions at other K."""
    interval_s: float = 10.0
    """Between the two samples of a URL, or two readings of a watch."""
    api_key_env: str | None = None
    """Environment variable with the API key of a URL. Default: OPENAI_API_KEY, if it is set."""
    json: bool = False
    """Print one JSON object."""
    html: Path | None = None
    """Write a self-contained page."""
    ask: bool = False
    """Ask what would tell the most about the cause, at most eight questions, until answers would
    hardly change the advice. With --json: print the next question or the verdict, and end."""
    answers: Path | None = None
    """With --ask: a JSON object of answers so far, such as
    {"output_differs": "no", "tokens_per_s": 61, "slower_with_batch": "unknown"}."""

    probing: ProbeFlags = field(default_factory=ProbeFlags)
    watching: WatchFlags = field(default_factory=WatchFlags)

    def check(self) -> None:
        """Refuse unusable options before any slow work begins."""
        if self.watching.watch:
            self._check_watch()
        elif self.watching != WatchFlags():
            raise InvalidRequest("the flags of a watch, such as --hook, need --watch")
        if not self.probing.probe and self.probing != ProbeFlags():
            raise InvalidRequest("the flags of a pair of models, such as --draft, need --probe")
        if self.answers is not None and not self.ask:
            raise InvalidRequest("--answers needs --ask")
        if not (self.sources or self.given() or self.ask or self.probing.probe):
            raise InvalidRequest(
                "no evidence: name a trace, log, metrics or facts file, or give a fact, for "
                "example --tokens-per-s 80 --tokens-per-s-plain 90"
            )
        check_writable("--html", self.html)

    def _check_watch(self) -> None:
        usable = {"sources", "watching", "interval_s", "api_key_env", "json"}
        usual = DiagnoseOptions()
        for name in [each.name for each in fields(self) if each.name not in usable]:
            if getattr(self, name) != getattr(usual, name):
                flag = f"--{name.replace('_', '-')} is"
                flag = "--probe and its flags are" if name == "probing" else flag
                raise InvalidRequest(f"{flag} not used with --watch: leave one of them out")
        if len(self.sources) != 1:
            raise InvalidRequest("--watch takes one SOURCE: the address of a server, or a file")

    def given(self) -> dict[str, object]:
        """Return the facts that the user gave by flags, by name."""
        named = ("k", "tokens_per_s", "tokens_per_s_plain", "temperature", "batch")
        found = {name: value for name in named if (value := getattr(self, name)) is not None}
        if self.changed:
            found["changed"] = self.changed
        found |= dict.fromkeys(self.observed, True)
        for text in self.fact:
            name, equals, value = text.partition("=")
            if not equals:
                raise InvalidRequest(f"--fact {text!r} must be NAME=VALUE")
            found[name] = value.split(",") if "," in value else value
        return found


def run(options: DiagnoseOptions) -> int:
    """Read the sources, diagnose and report; the exit code follows from the verdict."""
    options.check()
    if options.watching.watch:
        return watch(
            Watch(
                **asdict(options.watching),
                source=options.sources[0],
                interval_s=options.interval_s,
                key_variable=options.api_key_env,
                json=options.json,
            )
        )

    from forerun.doctor.asking import likeliest_causes, with_answers
    from forerun.doctor.diagnosis import diagnose

    evidence = gathered(options)
    further: dict[str, object] = {}
    if options.ask:
        answers = _read_answers(options.answers)
        number, question = _ask(evidence, answers, is_interactive=not options.json)
        further["num_asked"] = number
        if question and options.json:
            print(json.dumps({"question": [item.to_dict() for item in question]} | further))
            return Exit.INSUFFICIENT
        evidence = with_answers(evidence, answers)
    diagnosis = diagnose(evidence, costs_of(options))
    likeliest = likeliest_causes(diagnosis.evidence) if options.ask else ()
    if likeliest:
        further["likeliest"] = [
            {"label": item.cause.label, "score": item.score} for item in likeliest
        ]
    if options.html is not None:
        from forerun.doctor.words import page_of

        with atomic_write(options.html) as scratch:
            scratch.write_text(page_of(diagnosis), encoding="utf-8")
    if options.json:
        print(json.dumps(diagnosis.to_dict() | further))
    else:
        show(diagnosis, likeliest)
    return EXIT_CODES[diagnosis.verdict]


def gathered(options: DiagnoseOptions) -> Evidence:
    """Collect evidence from the flags, the sources, and the earlier run before the problem."""
    from forerun.doctor.diagnosis import compare_runs
    from forerun.doctor.evidence import Evidence, merge
    from forerun.doctor.readers.sources import read_source

    read = partial(read_source, interval_s=options.interval_s, key_variable=options.api_key_env)
    evidence = Evidence()
    for name, value in options.given().items():
        try:
            evidence.add(name, value, "given on the command line")
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
    sources = [read(source) for source in options.sources]
    # What was measured or noted goes before what was read from a complaint.
    sources.sort(key=lambda source: "words" in source.readings[0].kinds)
    if options.probing.probe:
        sources.append(probe_pair(options.probing, options.k, options.batch, options.temperature))
    evidence = merge(evidence, *sources)
    unknown = [reading.source for reading in evidence.readings if reading.num_unknown]
    known = evidence.facts or any(reading.kinds for reading in evidence.readings)
    if unknown and not known and not options.ask:
        raise InvalidRequest(
            f"no line of {', '.join(unknown)} is understood; diagnose reads traces and facts files "
            "of forerun, and logs, metrics and benchmark results of vLLM, SGLang, TensorRT-LLM, "
            "llama.cpp and LMDeploy"
        )
    evidence.check_counts()
    for source in options.before:
        evidence = compare_runs(evidence, read(source))
    return evidence


def _ask(
    known: Evidence, answers: dict[str, Answer], *, is_interactive: bool
) -> tuple[int, tuple[Item, ...]]:
    """Ask in the terminal and add to the answers; returns how many were asked, and what is open."""
    from forerun.doctor.asking import MAX_QUESTIONS, next_question

    while True:
        number, question = next_question(known, answers)
        if not question or not is_interactive:
            return number, question
        print(f"\nQuestion {number + 1} of at most {MAX_QUESTIONS}")
        for item in question:
            try:
                answers[item.fact] = _prompt(item)
            except EOFError:
                print()  # ends the line of the prompt
                return number, question


def _prompt(item: Item) -> Answer:
    """Ask about one fact until the answer is one."""
    from forerun.doctor.asking import read_answer

    how = f" To find out ({item.minutes:g} min): {item.how}." if item.how else ""
    print(printable(f"  {item.text}{how}"))
    answers = ", ".join(map(str, item.answers)) or "a number"
    while True:
        try:
            return read_answer(item.fact, input(f"  {answers}, or Enter if you do not know: "))
        except InvalidRequest as error:
            print(f"  {error}")


def _read_answers(path: Path | None) -> dict[str, Answer]:
    from forerun.bounded_read import read_json
    from forerun.doctor.asking import read_answer

    if path is None:
        return {}
    found = read_json(path)
    if not isinstance(found, dict):
        raise InvalidRequest(f"--answers {path} must hold a JSON object of names and answers")
    return {name: read_answer(name, word) for name, word in found.items()}


def costs_of(options: DiagnoseOptions) -> CostTable | None:
    if options.profile is None:
        return None
    from forerun.measure.profile import load_profile

    profile = load_profile(options.profile)
    return profile.sampled if options.temperature else profile.greedy


def show(diagnosis: Diagnosis, likeliest: Sequence[ScoredCause] = ()) -> None:
    from rich.markup import escape

    from forerun.doctor.words import headline, sections

    console = SafeConsole()
    console.print(f"[bold]{escape(headline(diagnosis))}[/]")
    if likeliest and diagnosis.verdict == "inconclusive":
        names = ", ".join(item.cause.label for item in likeliest)
        console.print(f"Most likely, but not shown: {names}.")
    for section in sections(diagnosis):
        console.print(f"\n[bold]{escape(section.heading)}[/]")
        for line in section.lines:
            console.print(f"  {escape(line)}", soft_wrap=True)


COMMAND = Command(
    options=DiagnoseOptions,
    run=run,
    has_positional=True,
    usual="sources before tokens_per_s tokens_per_s_plain changed observed fact json html ask "
    "probe target draft watch",
    lists={flag: "," for flag in ("--before", "--changed", "--observed")},
    description="Report where the time per token goes, which cause fits the evidence, what to\n"
    "test next and what changes would gain. Reads traces of forerun and logs, metrics and stats\n"
    "of vLLM, SGLang, TensorRT-LLM, llama.cpp and LMDeploy. Exit code 0: healthy, 3: a\n"
    "problem was found, 4: inconclusive.",
    examples=(
        "forerun diagnose trace.jsonl --before healthy.jsonl --html report.html",
        "forerun diagnose vllm.log --tokens-per-s 61 --tokens-per-s-plain 70 --changed target",
        "forerun diagnose http://localhost:8000/metrics --observed slower_with_batch",
        'forerun diagnose serve.log "acceptance falls as prompts get longer"',
        "llama-server ... 2>&1 | forerun diagnose - --json",
        'forerun diagnose --ask "slower than without speculation since the update"',
        "forerun diagnose serve.log --ask --answers answers.json --json",
        "forerun diagnose trace.jsonl --probe --model zoo:code-40m --draft zoo:code-2m-for-40m",
        "forerun diagnose http://localhost:8000/metrics --watch --hook http://pager/alarm",
    ),
)
