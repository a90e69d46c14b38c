"""A session runs one request on an engine and computes its figures."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

from forerun.cli.flags import OutputFlags, PairFlags, use_threads
from forerun.cli.tables import SafeConsole, rates
from forerun.control.base import MethodChoice, described
from forerun.control.costs import CostSource
from forerun.drafters.base import Drafter
from forerun.drafters.config import NONE
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords, ObservedStep, StepObserver
from forerun.engine.results import RequestOutput, StreamChunk, request_records
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.verification import drafted_probs
from forerun.errors import InvalidRequest
from forerun.measure.profile import profiles_of_drafts
from forerun.measure.rigs import draft_of, facts_of, setup_of
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import SamplingParams, TokenSource
from forerun.terminal_text import printable
from forerun.theory.figures import Figures, Grouping, compare_with_plain, summarise_groups
from forerun.theory.record import Json, StepRecord
from forerun.trace.cycles import NUM_PARTS
from forerun.trace.files import TraceWriter

MIN_COMPARED_STEPS = 8
"""Steps with a draft without which a request is not compared with plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures(Figures):
    """Figures and times of one request, all its samples together.

    Attributes:
        num_prompt_tokens: of the prompt.
        ttft_s: from the request to the first token; None where there was none.
        methods: drafters that proposed a token, the most used first.
        choices: of a controller that has several drafters.
    """

    num_prompt_tokens: int
    total_s: float
    ttft_s: float | None
    methods: Sequence[str] = ()
    choices: Sequence[MethodChoice] = ()

    @classmethod
    def of(
        cls,
        records: Sequence[StepRecord],
        *,
        num_prompt_tokens: int,
        total_s: float,
        ttft_s: float | None,
    ) -> RequestFigures:
        """Compute the figures of all steps until now, even if the request was interrupted."""
        first = records[0].cycle_id if records else 0
        cycles_per_part = (records[-1].cycle_id - first) // NUM_PARTS + 1 if records else 1
        cycles = Grouping(lambda record: (record.cycle_id - first) // cycles_per_part)
        cycles.add(records)
        groups = [group for _, group in cycles.groups]
        figures = summarise_groups(groups)
        methods = Counter(record.method for record in records if record.num_drafted)
        enough = figures.num_steps >= MIN_COMPARED_STEPS
        return cls(
            **figures.fields | {"speedup": compare_with_plain(groups).speedup if enough else None},
            num_prompt_tokens=num_prompt_tokens,
            total_s=total_s,
            ttft_s=ttft_s,
            methods=tuple(method for method, _ in methods.most_common()),
        )

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s if self.total_s > 0 else 0.0

    @property
    def sentence(self) -> str:
        """Say how fast the text was, with which drafts, and how much faster than plain steps."""
        text = f"{self.num_tokens} tokens in {self.total_s:.1f} s, {self.tokens_per_s:.0f} a second"
        if not self.methods:
            return f"{text}, by plain decoding"
        text += f", drafted by {' and '.join(self.methods)}"
        if self.speedup is None:  # too few plain steps
            return text
        ratio, ends = self.speedup, self.speedup.show_ends()
        if ratio.is_above(1.0) or ratio.is_below(1.0):
            return f"{text}: {ratio.estimate:.2f} times as fast as plain decoding (95%: {ends})"
        return f"{text}: about as fast as plain decoding (95%: {ends} times)"

    @property
    def details(self) -> str:
        parts = [f"{self.num_tokens} tokens in {self.total_s:.2f} s ({self.tokens_per_s:.1f}/s)"]
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s:.2f} s")
        if self.acceptance_length is not None:
            tau = self.acceptance_length.estimate
            parts.append(f"{tau:.2f} tokens per step with a draft")
            accepted = rates([rate.estimate for rate in self.acceptance_rate_per_position[:4]])
            steps = " ".join(map(str, self.drafted_per_position[:4]))
            parts.append(f"accepted per position {accepted} where drafted in {steps} steps")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, object]:
        values = super(RequestFigures, self).to_dict() | {"tokens_per_s": self.tokens_per_s}
        del values["choices"]
        choices = [choice.to_dict() for choice in self.choices]
        return values | ({"choices": choices} if choices else {})


def drafters_of(engine: Engine) -> Mapping[str, Drafter]:
    """Return the drafters by the method names in plans, in the order of the flags."""
    drafter = engine.drafter
    if drafter is None:
        return {}
    return drafter.by_method()


def costs_of(engine: Engine, pair: PairFlags) -> dict[str, CostSource]:
    """Read costs by drafter from profiles of these models on this machine."""
    drafters = drafters_of(engine)
    if len(drafters) != len(pair.draft_names):
        raise InvalidRequest("a draft could not be loaded; with a --profile name the drafts")
    setups, target = {}, facts_of(pair.target, engine.target)
    for (method, drafter), name in zip(drafters.items(), pair.draft_names, strict=True):
        facts = target, facts_of(name, draft_of(drafter))
        setups[method] = setup_of(engine.target, drafter, engine.config, facts)
    found = profiles_of_drafts(pair.profile, setups)
    return {method: profile.costs for method, profile in found.items()}


NOTHING: Mapping[str, Json] = {}
logger = logging.getLogger("forerun.cli")


def load_engine(
    pair: PairFlags,
    *,
    max_batch: int,
    max_tokens: int | None = None,
    max_waiting: int = EngineConfig().max_waiting,
) -> Engine:
    """Load the target and the drafts of the flags.

    Args:
        max_tokens: `max_tokens` of the request, if there is only one.
    """
    num_threads = use_threads(pair.threads)  # refused before drafts are looked for
    drafts_chains = bool(pair.draft_names) and pair.tree is None
    is_chosen = pair.controller == "fixed" or pair.k != EngineConfig().num_speculative_tokens
    if pair.profile and (pair.weights, pair.draft_weights) != ("auto", "auto"):
        raise InvalidRequest(
            "a --profile is of weights as they are stored, which --weights and --draft-weights "
            "change: leave one out; without a profile the costs are learned from the steps"
        )
    tree = pair.shape
    most = pair.k if tree is None else tree.num_nodes
    config = EngineConfig(
        num_speculative_tokens=pair.k,
        tree=tree,
        controller=pair.controller,
        max_batch=max_batch,
        max_waiting=max_waiting,
        max_context=pair.max_context,
        max_step_rows=max(EngineConfig().max_step_rows, max_batch * (most + 1)),
        runner=pair.runner,
        num_threads=num_threads,
        weights=pair.weights,
        draft_weights=pair.draft_weights,
    )
    with SafeConsole(stderr=True).status(f"Loading {pair.target}"):
        engine = Engine.load(
            pair.target, pair.sources or NONE, dtype=pair.dtype, device=pair.device, config=config
        )
    if is_chosen and drafts_chains and max_tokens is not None and pair.k >= max_tokens > 1:
        logger.warning(
            "K=%d: a step drafts at most %d tokens, because --max-tokens is %d",
            *(pair.k, max_tokens - 1, max_tokens),
        )
    if pair.profile:
        if engine.drafter is None:
            raise InvalidRequest("--controller and --profile need a draft: plain decoding has no K")
        return engine.with_draft(engine.drafter, costs=costs_of(engine, pair))
    return engine


class StepTrace:
    """An observer that writes the records of steps into a trace, with what they are to hold.

    Args:
        with_tokens: keep the emitted ids.
        with_probabilities: keep rule and probabilities of every sequence that drafted.
        drafter_hashes: of the drafters, by method.
    """

    is_required = True

    def __init__(
        self,
        trace: TraceWriter,
        *,
        with_tokens: bool,
        with_probabilities: bool,
        drafter_hashes: Mapping[str, str | None],
    ) -> None:
        self.trace = trace
        self.with_tokens = with_tokens
        self.wants_logits = with_probabilities
        self.drafter_hashes = drafter_hashes

    def observe(self, step: ObservedStep) -> None:
        """Write one record per sequence that emitted tokens."""
        for record, entry in zip(step.records, step.emitting, strict=True):
            changes = dict(_find_probabilities(entry)) if self.wants_logits else {}
            if record.num_drafted:
                changes["drafter_hash"] = self.drafter_hashes.get(record.method)
            if self.with_tokens and entry.verdict is not None:
                changes["token_ids"] = entry.verdict.tokens[: entry.num_emitted]
            self.trace.add(record, changes)


def _find_probabilities(entry: ScheduledSequence) -> Mapping[str, Json]:
    if not entry.num_drafted:
        return NOTHING
    targets, drafts = drafted_probs(entry)
    return {
        "rule": entry.rule,
        "target_probs": None if targets is None else tuple(targets),
        "draft_probs": None if drafts is None else tuple(drafts),
    }


class Session:
    """Runs one request and records its steps, so that an interrupted request has figures too."""

    def __init__(
        self,
        engine: Engine,
        *,
        trace: TraceWriter | None,
        trace_tokens: bool,
        trace_probabilities: bool = False,
        drafter_hashes: Mapping[str, str | None] | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.engine = engine
        self.trace = trace
        self.trace_tokens = trace_tokens
        self.records: list[StepRecord] = []
        self.observers: list[StepObserver] = [EmittedRecords(self.records.append), *observers]
        if trace is not None:
            step_trace = StepTrace(
                trace,
                with_tokens=trace_tokens,
                with_probabilities=trace_probabilities,
                drafter_hashes=drafter_hashes or {},
            )
            self.observers.append(step_trace)
        self.num_prompt_tokens = 0
        self.started_s = self.ended_s = time.perf_counter()
        self.first_s: float | None = None
        self._output: RequestOutput | None = None

    def run(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[StreamChunk]:
        """Yield chunks of all samples as they are emitted; then `result` is set."""
        self.num_prompt_tokens = len(prompt)
        self.started_s = self.ended_s = time.perf_counter()
        self.engine.observers[:] = self.observers
        request_id = self.engine.add_request(prompt, params)
        try:
            while self.engine.has_unfinished:
                chunks = self.engine.step()
                self.ended_s = time.perf_counter()
                if chunks and self.first_s is None:
                    self.first_s = self.ended_s
                yield from chunks
            self._output = self.engine.take_output(request_id)
            self._trace_request(self._output, params)
        finally:
            self.engine.abort(request_id)

    @property
    def result(self) -> RequestOutput:
        """The finished request; only after `run` has ended."""
        assert self._output is not None
        return self._output

    @property
    def figures(self) -> RequestFigures:
        """Counts and times of the steps until now."""
        figures = RequestFigures.of(
            self.records,
            num_prompt_tokens=self.num_prompt_tokens,
            total_s=self.ended_s - self.started_s,
            ttft_s=None if self.first_s is None else self.first_s - self.started_s,
        )
        several = len(drafters_of(self.engine)) > 1
        return replace(figures, choices=self.engine.choices()) if several else figures

    def _trace_request(self, output: RequestOutput, params: SamplingParams) -> None:
        if self.trace is None:
            return
        for record in request_records(output, params, with_tokens=self.trace_tokens):
            self.trace.add(record)


STYLES = MappingProxyType(
    {
        TokenSource.ACCEPTED: "green",
        TokenSource.RECOVERED: "bold red",
        TokenSource.BONUS: "bold cyan",
        TokenSource.PLAIN: "",
    }
)
MEANINGS = MappingProxyType(
    {
        TokenSource.ACCEPTED: "drafted and accepted",
        TokenSource.RECOVERED: "the target's own, where a drafted token was rejected",
        TokenSource.BONUS: "the target's own, after every drafted token was accepted",
        TokenSource.PLAIN: "the target's own, in a step without a draft",
    }
)


class ColouredText:
    """Assigns the characters of a streamed text to the tokens that produced them.

    A character spread over several tokens has the colour of the one that completed it. Text that
    a stop string cuts, or may yet cut, never appears: `take` returns no more than the engine has
    emitted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._pending: list[tuple[str, TokenSource]] = []

    def take(self, text: str, token_ids: Sequence[int], sources: Sequence[TokenSource]) -> Text:
        for token, source in zip(token_ids, sources, strict=True):
            self._pending.append((self._detokenizer.append(token), source))
        shown = Text()
        while text and self._pending:
            piece, source = self._pending.pop(0)
            size = min(len(piece), len(text))
            shown.append(printable(text[:size], keep="\n\t\r"), style=STYLES[source])
            text = text[size:]
            if size < len(piece):
                self._pending.insert(0, (piece[size:], source))
        return shown.append(printable(text, keep="\n\t\r"))


def legend() -> Text:
    lines = [
        Text.assemble((f"{source:<10}", STYLES[source]), MEANINGS[source]) for source in TokenSource
    ]
    return Text("\n").join(lines)


class PlainWriter:
    """Prints text as it arrives; on a terminal, control characters are escaped."""

    def write(self, chunk: StreamChunk) -> None:
        """Show the text that a step added."""
        text = chunk.text
        shown = printable(text, keep="\n\t\r") if sys.stdout.isatty() else text
        print(shown, end="", flush=True)

    def finish(self, output: RequestOutput, figures: RequestFigures) -> None:
        """End the last line."""
        if not output.completions[0].text.endswith("\n"):
            print()


class ColourWriter(PlainWriter):
    """Prints text in colour, even if the output is not a terminal."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.coloured = ColouredText(tokenizer)
        self.console = Console(force_terminal=True, soft_wrap=True, highlight=False)

    def write(self, chunk: StreamChunk) -> None:
        shown = self.coloured.take(chunk.text, chunk.token_ids, chunk.sources)
        self.console.print(shown, end="")
        sys.stdout.flush()

    def finish(self, output: RequestOutput, figures: RequestFigures) -> None:
        super().finish(output, figures)
        Console(stderr=True, force_terminal=True, soft_wrap=True).print(legend())


class JsonWriter:
    """Prints one JSON object at the end."""

    def write(self, chunk: StreamChunk) -> None:
        """Print nothing: the JSON object is printed at the end."""

    def finish(self, output: RequestOutput, figures: RequestFigures) -> None:
        """Print text, tokens, finish reason and figures."""
        completion = output.completions[0]
        content = {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "sources": [str(source) for source in completion.sources],
            "figures": figures.to_dict(),
        }
        print(json.dumps(content, ensure_ascii=False))


def choose_writer(tokenizer: Tokenizer, flags: OutputFlags) -> PlainWriter | JsonWriter:
    if flags.json:
        return JsonWriter()
    return ColourWriter(tokenizer) if flags.color else PlainWriter()


def print_figures(figures: RequestFigures, *, is_verbose: bool) -> None:
    """Print how fast a text was on stderr, and what its drafts did if `is_verbose`."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    details = (figures.details, *described(figures.choices)) if is_verbose else ()
    for line in (figures.sentence, *details):
        console.print(Text(line, style="dim"))
