"""Ways to show a generation: plain text, coloured text, one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.text import Text

from forerun.cli.colour import ColouredText, legend
from forerun.cli.figures import Figures
from forerun.cli.flags import OutputFlags
from forerun.engine.results import Completion, RequestOutput, StreamChunk
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.choice import TokenSource

__all__ = ["Writer", "choose_writer", "say_figures"]


@runtime_checkable
class Writer(Protocol):
    """Shows chunks as they come and the rest at the end."""

    def write(self, chunk: StreamChunk) -> None:
        """Show what a step added."""

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """Show what is left once all samples have ended."""


class PlainWriter:
    """Text as it comes. Of several samples none is streamed: their lines would interleave."""

    def __init__(self, num_samples: int) -> None:
        self.is_streaming = num_samples == 1

    def write(self, chunk: StreamChunk) -> None:
        """Pass text on at once."""
        if self.is_streaming:
            self.show(chunk.text, chunk.token_ids, chunk.sources)

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """End the last line; print samples that were not streamed one after another."""
        for completion in output.completions:
            if not self.is_streaming:
                print(f"--- sample {completion.index + 1} of {len(output.completions)}")
                self.show(completion.text, completion.token_ids, completion.sources)
            if not completion.text.endswith("\n"):
                print()

    def show(self, text: str, token_ids: Sequence[int], sources: Sequence[TokenSource]) -> None:
        """Print text of these tokens."""
        print(text, end="", flush=True)


class ColourWriter(PlainWriter):
    """The same in colour, on terminals and elsewhere: who asks for colour gets it."""

    def __init__(self, num_samples: int, tokenizer: Tokenizer) -> None:
        super().__init__(num_samples)
        self.tokenizer = tokenizer
        self.coloured = ColouredText(tokenizer)
        self.console = Console(force_terminal=True, soft_wrap=True, highlight=False)

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """Explain the colours below the text."""
        super().finish(output, figures)
        Console(stderr=True, force_terminal=True, soft_wrap=True).print(legend())

    def show(self, text: str, token_ids: Sequence[int], sources: Sequence[TokenSource]) -> None:
        """Print text of these tokens, coloured by source."""
        if not self.is_streaming:
            self.coloured = ColouredText(self.tokenizer)
        self.console.print(self.coloured.take(text, token_ids, sources), end="")
        sys.stdout.flush()


class JsonWriter:
    """One object at the end."""

    def write(self, chunk: StreamChunk) -> None:
        """Nothing yet."""

    def finish(self, output: RequestOutput, figures: Figures) -> None:
        """The first sample's fields at the top level; all samples where there are several."""
        samples = [as_json(completion) for completion in output.completions]
        content = {**samples[0], "figures": figures.to_dict()}
        if len(samples) > 1:
            content["samples"] = samples
        print(json.dumps(content, ensure_ascii=False))


def choose_writer(tokenizer: Tokenizer, *, num_samples: int, flags: OutputFlags) -> Writer:
    """The writer the flags ask for."""
    if flags.json:
        return JsonWriter()
    return ColourWriter(num_samples, tokenizer) if flags.color else PlainWriter(num_samples)


def as_json(completion: Completion) -> dict[str, object]:
    """Text, tokens and why they ended."""
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


def say_figures(figures: Figures) -> None:
    """One dim line on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(figures.line, style="dim"))
