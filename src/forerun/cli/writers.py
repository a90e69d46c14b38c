"""Ways to show a generation: plain text, coloured text, one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from forerun.cli.flags import OutputFlags
from forerun.cli.session import Figures
from forerun.cli.tables import SafeConsole, table_of
from forerun.control.base import described
from forerun.engine.results import Completion, RequestOutput, StreamChunk, TokenLogprobs
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import TokenSource
from forerun.terminal_text import printable

STYLES = MappingProxyType(
    {
        TokenSource.ACCEPTED: "green",
        TokenSource.RECOVERED: "bold red",
        TokenSource.BONUS: "bold cyan",
    }
)
MEANINGS = MappingProxyType(
    {
        TokenSource.ACCEPTED: "drafted and accepted",
        TokenSource.RECOVERED: "the target's own, where a drafted token was rejected",
        TokenSource.BONUS: "the target's own, after every drafted token was accepted",
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


@runtime_checkable
class Writer(Protocol):
    """Shows chunks as they arrive, and the remaining text at the end."""

    def write(self, chunk: StreamChunk) -> None:
        """Show the text that a step added."""

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """Show the remaining text after all samples have ended."""


class PlainWriter:
    """Prints text as it arrives; several samples are printed at the end, one after another."""

    def __init__(self, num_samples: int, tokenizer: Tokenizer) -> None:
        self.is_streaming = num_samples == 1
        self.tokenizer = tokenizer

    def write(self, chunk: StreamChunk) -> None:
        if self.is_streaming:
            self.show(chunk.text, chunk.token_ids, chunk.sources)

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """End the last line, print samples that were not streamed, and logprobs."""
        for completion in output.completions:
            if not self.is_streaming:
                print(f"--- sample {completion.index + 1} of {len(output.completions)}")
                self.show(completion.text, completion.token_ids, completion.sources)
            if not completion.text.endswith("\n"):
                print()
            if completion.logprobs is not None:
                SafeConsole().print(_logprobs_table(completion.logprobs, self.tokenizer))

    def show(self, text: str, token_ids: Sequence[int], sources: Sequence[TokenSource]) -> None:
        """Print the text of these tokens; on a terminal, control characters are escaped."""
        shown = printable(text, keep="\n\t\r") if sys.stdout.isatty() else text
        print(shown, end="", flush=True)


def _logprobs_table(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Table:
    """Return a table with one line per token: text, log probability, likeliest tokens."""
    table = table_of(Column("token"), "logprob")
    table.add_column("likeliest")
    for item in logprobs:
        top = ", ".join(f"{tokenizer.decode([token])!r} {value:.3f}" for token, value in item.top)
        token = Text(repr(tokenizer.decode([item.token_id])))
        table.add_row(token, f"{item.logprob:.3f}", Text(top))
    return table


class ColourWriter(PlainWriter):
    """Prints text in colour, even if the output is not a terminal."""

    def __init__(self, num_samples: int, tokenizer: Tokenizer) -> None:
        super().__init__(num_samples, tokenizer)
        self.coloured = ColouredText(tokenizer)
        self.console = Console(force_terminal=True, soft_wrap=True, highlight=False)

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        super().finish(output, figures)
        Console(stderr=True, force_terminal=True, soft_wrap=True).print(legend())

    def show(self, text: str, token_ids: Sequence[int], sources: Sequence[TokenSource]) -> None:
        if not self.is_streaming:
            self.coloured = ColouredText(self.tokenizer)
        self.console.print(self.coloured.take(text, token_ids, sources), end="")
        sys.stdout.flush()


class JsonWriter:
    """Prints one JSON object at the end."""

    def write(self, chunk: StreamChunk) -> None:
        """Print nothing: the JSON object is printed at the end."""

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """Print the JSON object; with several samples it also holds a list of all of them."""
        samples = [as_json(completion) for completion in output.completions]
        content = {**samples[0], "figures": figures.to_dict()}
        if len(samples) > 1:
            content["samples"] = samples
        print(json.dumps(content, ensure_ascii=False))


def choose_writer(tokenizer: Tokenizer, *, num_samples: int, flags: OutputFlags) -> Writer:
    if flags.json:
        return JsonWriter()
    kind = ColourWriter if flags.color else PlainWriter
    return kind(num_samples, tokenizer)


def as_json(completion: Completion) -> dict[str, object]:
    """Return text, tokens, and the finish reason as JSON values."""
    content: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "sources": [str(source) for source in completion.sources],
    }
    if completion.logprobs is not None:
        content["logprobs"] = [
            {
                "token_id": item.token_id,
                "logprob": item.logprob,
                "top": [{"token_id": token, "logprob": value} for token, value in item.top],
            }
            for item in completion.logprobs
        ]
    return content


def print_figures(figures: Figures) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in (figures.line, *described(figures.choices)):
        console.print(Text(line, style="dim"))
