"""`forerun generate`: continue one prompt, streaming."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from forerun.cli.command import Command, Exit
from forerun.cli.flags import OutputFlags, PairFlags, SamplingFlags, TraceFlags
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.models.tokenizers import Tokenizer
    from forerun.trace.files import TraceWriter

__all__ = ["COMMAND", "GenerateOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of `forerun generate`."""

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")]
    """Text to continue; "-" reads it from standard input."""
    chat: bool = False
    """Wrap the prompt in the model's chat template, as a user's message."""
    system: str | None = None
    """System message that precedes the user's; needs --chat."""
    show_tree: bool = False
    """Print the draft of one step to stderr, as a tree with probabilities and the accepted path:
    the step that accepted most. Needs a draft."""
    pair: PairFlags = field(default_factory=PairFlags)
    sampling: SamplingFlags = field(default_factory=lambda: SamplingFlags(max_tokens=256))
    output: OutputFlags = field(default_factory=OutputFlags)
    tracing: TraceFlags = field(default_factory=TraceFlags)

    def check(self) -> None:
        """Refuse options that would have no effect.

        Raises:
            InvalidRequest: two options exclude or miss each other.
        """
        if self.system is not None and not self.chat:
            raise InvalidRequest("--system needs --chat: a plain prompt has no system message")
        self.tracing.check()
        if self.show_tree and not self.pair.draft_names:
            raise InvalidRequest("--show-tree needs a draft: plain decoding drafts nothing")
        if self.pair.shape is not None and not self.sampling.params.allows_trees:
            raise InvalidRequest(
                f"--tree and --verification {self.sampling.verification} exclude each other: that "
                "verification takes chains only"
            )
        if self.output.json and self.output.color:
            raise InvalidRequest("--json and --color exclude each other")


def run(options: GenerateOptions) -> int:
    """Generate text for one prompt; returns the exit code."""
    options.check()
    prompt = read_prompt(options.prompt)

    from forerun.cli.main import notices_held
    from forerun.cli.session import Session, load_engine
    from forerun.cli.tables import SafeConsole
    from forerun.cli.tree_view import TreeView
    from forerun.cli.writers import choose_writer, print_figures

    pair, output, params = options.pair, options.output, options.sampling.params
    max_batch = min(params.n, EngineConfig().max_batch)
    engine = load_engine(pair, max_batch=max_batch, max_tokens=params.max_tokens)
    ids = encode(engine.tokenizer, prompt, chat=options.chat, system=options.system)
    with options.tracing.opened() as trace:  # only now: a trace that is there is replaced
        hashes: dict[str, str | None] = {}
        if trace is not None:
            hashes = add_headers(trace, pair, engine)
        writer = choose_writer(engine.tokenizer, num_samples=params.n, flags=output)
        view = TreeView()
        session = Session(
            engine,
            trace=trace,
            trace_tokens=options.tracing.trace_tokens,
            drafter_hashes=hashes,
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
                SafeConsole(stderr=True).print(view.rendered(engine.tokenizer))
            if not output.quiet and session.records:
                print_figures(session.figures)
    return Exit.FAILED if trace is not None and trace.failed else Exit.GOOD


def add_headers(trace: TraceWriter, pair: PairFlags, engine: Engine) -> dict[str, str | None]:
    """Write one header per draft, or one for plain decoding; returns draft hashes by method."""
    from forerun.cli.session import drafters_of
    from forerun.provenance import trace_header

    device, controller = str(engine.target.device), engine.config.controller
    headers = [
        trace_header(pair.target, name, device, controller) for name in pair.draft_names or (None,)
    ]
    for header in headers:
        trace.add(header)
    return dict(zip(drafters_of(engine), (header.draft_hash for header in headers), strict=False))


def read_prompt(prompt: str) -> str:
    """Return the prompt itself, or standard input for "-".

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # bytes of another encoding arrive as lone surrogates
    except UnicodeError as error:
        raise InvalidRequest(f"the prompt is not UTF-8 text: {error}") from error
    return text


def encode(tokenizer: Tokenizer, prompt: str, *, chat: bool, system: str | None) -> list[int]:
    """Return the ids of the prompt, wrapped in the chat template with --chat."""
    if not chat:
        return tokenizer.encode(prompt)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


COMMAND = Command(
    options=GenerateOptions,
    run=run,
    description="Continue a prompt, streaming. A draft changes the speed and not the distribution\n"
    "of the text, which stays that of the target.",
    lists={"--draft": ",", "--profile": ","},
    has_positional=True,
    examples=(
        'forerun generate "def quicksort(items):" --temperature 0 --color',
        "forerun generate - --temperature 0.7 --top-p 0.9 --seed 1 < prompt.txt",
        'forerun generate "Why?" --model DIR --draft DIR --chat --system "Be brief."',
        "forerun generate 'import' --num-speculative-tokens 8 --profile profile.json",
        "forerun generate 'import' --tree 7,3,4 --show-tree",
        "forerun generate 'import' --draft zoo:code-2m --draft suffix --profile profile.json",
        'forerun generate "import" --json --trace trace.jsonl | jq .figures',
    ),
)
