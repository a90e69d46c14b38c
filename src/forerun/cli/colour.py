"""Text whose every token is coloured by where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from rich.text import Text

from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.choice import TokenSource

__all__ = ["ColouredText", "legend"]

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
    """Assigns the characters of a growing text to the tokens they came from.

    A character spread over several tokens has the colour of the one that completed it. Text a stop
    string cuts, or may yet cut, never appears: `take` shows no more than the engine has shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._pending: list[tuple[str, TokenSource]] = []

    def take(self, text: str, token_ids: Sequence[int], sources: Sequence[TokenSource]) -> Text:
        """Colour what is new.

        Args:
            text: characters to show now; may lag behind the tokens.
            token_ids: tokens emitted since the last call.
            sources: their provenance.
        """
        for token, source in zip(token_ids, sources, strict=True):
            self._pending.append((self._detokenizer.append(token), source))
        shown = Text()
        while text and self._pending:
            piece, source = self._pending.pop(0)
            size = min(len(piece), len(text))
            shown.append(text[:size], style=STYLES[source])
            text = text[size:]
            if size < len(piece):
                self._pending.insert(0, (piece[size:], source))
        return shown.append(text)


def legend() -> Text:
    """What the colours mean."""
    lines = [
        Text.assemble((f"{source:<10}", STYLES[source]), MEANINGS[source]) for source in TokenSource
    ]
    return Text("\n").join(lines)
