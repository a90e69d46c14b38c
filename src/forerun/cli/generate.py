"""`forerun generate`: continue one prompt, streaming."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from rich.tree import Tree as RichTree
from tyro.conf import Positional, arg

from forerun.cli.command import Command, Exit
from forerun.cli.flags import OutputFlags, PairFlags, SamplingFlags, TraceFlags, read_template
from forerun.errors import InvalidRequest
from forerun.measure.prompt_files import PromptEntry, prompt_ids
from forerun.terminal_text import printable

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.engine.observing import ObservedStep
    from forerun.engine.scheduler import ScheduledSequence
    from forerun.models.tokenizers import Tokenizer
    from forerun.trace.files import TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of `forerun generate`."""

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")]
    """What a user says to a model with a chat template, else a text to continue; "-" reads it from
    standard input."""
    raw: bool = False
    """Continue the prompt as it is, even if the model has a chat template."""
    system: str | None = None
    """System message that precedes the user's; needs a chat template."""
    chat_template: Path | None = None
    """A file with a Jinja template for conversations, in place of the target's own."""
    show_tree: bool = False
    """Print the draft of one step to stderr, as a tree with probabilities and the accepted path:
    the step that accepted most. Needs a draft."""
    pair: PairFlags = field(default_factory=PairFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    output: OutputFlags = field(default_factory=OutputFlags)
    tracing: TraceFlags = field(default_factory=TraceFlags)
    trace_tokens: bool = False
    """Put token ids into the trace; without it a trace holds no text."""
    trace_probabilities: bool = False
    """Put the probabilities of every drafted token into the trace, for `forerun explain`. Steps
    take longer."""

    def check(self) -> None:
        if self.raw and (self.system is not None or self.chat_template is not None):
            raise InvalidRequest(
                "--raw continues the prompt as it is, without a template: leave out --raw, or "
                "--system and --chat-template"
            )
        self.tracing.check()
        for name in ("trace_tokens", "trace_probabilities"):
            if getattr(self, name) and self.tracing.trace is None:
                raise InvalidRequest(f"--{name.replace('_', '-')} needs --trace FILE")
        if self.show_tree and not self.pair.draft_names:
            raise InvalidRequest("--show-tree needs a draft: plain decoding drafts nothing")
        if self.pair.shape is not None and not self.sampling.params_for({}).allows_trees:
            raise InvalidRequest(
                f"--tree and --verification {self.sampling.verification} exclude each other: that "
                "verification takes chains only"
            )
        if self.output.json and self.output.color:
            raise InvalidRequest("--json and --color exclude each other")


def run(options: GenerateOptions) -> int:
    """Generate text for one prompt; returns the exit code."""
    options.check()
    prompt, template = _read_prompt(options.prompt), read_template(options.chat_template)

    from forerun.cli.main import hide_notices

    with hide_notices() if options.output.quiet else nullcontext():
        return _generate(options, prompt, template)


def _generate(options: GenerateOptions, prompt: str, template: str | None) -> int:
    from forerun.cli.main import notices_held
    from forerun.cli.session import Session, choose_writer, load_engine, print_figures
    from forerun.cli.tables import SafeConsole

    pair, output, flags = options.pair, options.output, options.sampling
    engine = load_engine(pair, max_batch=1, max_tokens=flags.max_tokens)
    if template:
        engine.tokenizer.use_chat_template(template)
    params = flags.params_for(engine.intake.defaults)
    ids = encode(engine.tokenizer, prompt, raw=options.raw, system=options.system)
    with options.tracing.opened() as trace:  # only now: a trace that is there is replaced
        hashes: dict[str, str | None] = {}
        if trace is not None:
            hashes = _add_headers(trace, pair, engine)
        writer = choose_writer(engine.tokenizer, output)
        view = TreeView(engine.tokenizer)
        session = Session(
            engine,
            trace=trace,
            trace_tokens=options.trace_tokens,
            drafter_hashes=hashes,
            trace_probabilities=options.trace_probabilities,
            observers=(view,) if options.show_tree else (),
        )
        try:
            with notices_held():
                for chunk in session.run(ids, params):
                    writer.write(chunk)
                writer.finish(session.result, session.figures)
        except KeyboardInterrupt:
            print(file=sys.stderr)  # what was streamed ends in the middle of a line
            raise
        finally:
            if options.show_tree:
                SafeConsole(stderr=True).print(view.kept)
            if not output.quiet and session.records:
                print_figures(session.figures, is_verbose=output.verbose)
    return Exit.FAILED if trace is not None and trace.failed else Exit.GOOD


def _add_headers(trace: TraceWriter, pair: PairFlags, engine: Engine) -> dict[str, str | None]:
    """Write one header per draft, or one for plain decoding; returns draft hashes by method."""
    from forerun.cli.session import drafters_of
    from forerun.provenance import trace_header

    device, config = str(engine.target.device), engine.config
    controller: str | None = config.controller
    if engine.drafter is None:
        controller = None
    elif config.tree is not None or config.max_nodes == 0:
        controller = "fixed"  # see `default_controller`
    headers = [
        trace_header(pair.target, name, device, controller) for name in pair.draft_names or (None,)
    ]
    for header in headers:
        trace.add(header)
    methods = drafters_of(engine)
    if len(methods) != len(headers):  # plain decoding, or a draft that was found and left out
        return {}
    return dict(zip(methods, (header.draft_hash for header in headers), strict=True))


MAX_PROMPT = 1 << 24
"""Characters that are read of standard input, which may never end."""


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.read(MAX_PROMPT + 1) if prompt == "-" else prompt
        text.encode()  # bytes of another encoding arrive as lone surrogates
    except UnicodeError as error:
        raise InvalidRequest(f"the prompt is not UTF-8 text: {error}") from error
    if prompt == "-" and not text.strip():
        raise InvalidRequest("standard input is empty; write the prompt to it")
    if len(text) > MAX_PROMPT:
        raise InvalidRequest(
            f"standard input has more than {MAX_PROMPT} characters; give less of it"
        )
    return text


def encode(tokenizer: Tokenizer, prompt: str, *, raw: bool, system: str | None) -> list[int]:
    """Return the ids of a prompt: a user's message where there is a chat template, unless `raw`."""
    turns = {} if system is None else {"system": system, "user": prompt}
    messages = tuple({"role": role, "content": content} for role, content in turns.items())
    entry = PromptEntry(where="--system", text=None if messages else prompt, messages=messages)
    return prompt_ids(entry, tokenizer, raw=raw)


COMMAND = Command(
    options=GenerateOptions,
    run=run,
    description="Continue a prompt, streaming. A draft changes the speed and not the distribution\n"
    "of the text, which stays that of the target.",
    lists={"--draft": ",", "--profile": ","},
    has_positional=True,
    usual="prompt target draft k temperature top_p seed max_tokens system weights threads color "
    "json verbose trace",
    examples=(
        'forerun generate "def quicksort(items):" --temperature 0 --color',
        "forerun generate - --temperature 0.7 --top-p 0.9 --seed 1 < prompt.txt",
        'forerun generate "Why?" --model zoo:smollm2-135m --system "Be brief."',
        'forerun generate "Once upon a time" --model zoo:smollm2-135m --raw',
        "forerun generate 'import' --num-speculative-tokens 8 --profile profile.json",
        "forerun generate 'import' --tree 7,3,4 --show-tree",
        "forerun generate 'import' --model zoo:code-40m --draft zoo:code-2m-for-40m --draft suffix",
        'forerun generate "import" --json --trace trace.jsonl | jq .figures',
    ),
)


ACCEPTED_STYLE = "bold green"
EMITTED_STYLE = "bold cyan"


class TreeView:
    """An observer that keeps the draft with the longest accepted path; of equals, the largest.

    Attributes:
        kept: that draft as a tree for the terminal, or a sentence while no step has drafted.
    """

    is_required = True
    wants_logits = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.kept: RichTree | Text = Text("no step drafted a token, so there is no tree to show")
        self._rank = (-1, 0)

    def observe(self, step: ObservedStep) -> None:
        """Keep a draft of this step if its accepted path is longer than that of the kept draft."""
        for entry, record in zip(step.emitting, step.records, strict=True):
            rank = record.num_accepted, record.num_drafted
            if record.num_drafted and rank > self._rank:
                self._rank = rank
                self.kept = self._draw(entry, record.step)

    def _draw(self, entry: ScheduledSequence, number: int) -> RichTree:
        """Return a draft with its outcome; the step must have kept its logits.

        Probabilities of the target are those before the request's sampling parameters.
        """
        from forerun.engine.verification import drafted_probs

        proposal, verdict = entry.proposal, entry.verdict
        target_probs, draft_probs = drafted_probs(entry, is_raw=True)
        assert proposal is not None and verdict is not None and target_probs is not None
        tree = proposal.tree
        title = (
            f"step {number}: {len(tree.parents)} nodes, depth {max(tree.depths)}, "
            f"{verdict.num_accepted} accepted, after "
            + self._show(entry.sequence.ids[-1 - entry.num_emitted])
        )
        branches = {-1: RichTree(Text(title))}
        tokens = proposal.tokens.tolist()
        for node, parent in enumerate(tree.parents):
            label = Text(self._show(tokens[node]))
            label.append(f"  target {target_probs[node]:.2f}", style="dim")
            if draft_probs is not None:
                label.append(f"  draft {draft_probs[node]:.2f}", style="dim")
            if node in verdict.path:
                label.stylize(ACCEPTED_STYLE)
                label.append("  accepted", style=ACCEPTED_STYLE)
            branches[node] = branches[parent].add(label)
        last = f"{self._show(verdict.tokens[-1])}  {verdict.sources[-1]}"
        end = verdict.path[-1] if verdict.path else -1
        branches[end].add(Text(last, style=EMITTED_STYLE))
        return branches[-1]

    def _show(self, token: int) -> str:
        return printable(repr(self.tokenizer.decode([token])))
