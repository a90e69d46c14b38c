"""The result of parsing tool calls does not depend on how the text is divided."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forerun.server.tool_calls import TOOL_FORMATS, ToolCallParser

PARTS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '{"name": "look", "arguments": {"q": "}]\\"<"}}',
    '[{"name": "look"}, {"name": "look", "parameters": {}}]',
    '{"name": "other"}',
    '{"name": ',
    "}",
    "]",
    '"',
    "\\",
    ";",
    " ",
    "\n",
    "text",
    "<",
    "[",
    "{",
)
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12).map("".join)


@given(TEXTS, st.lists(st.integers(0, 400), max_size=8), st.sampled_from(sorted(TOOL_FORMATS)))
def test_any_division_of_the_text_gives_the_same_result(text, cuts, name):
    def result(pieces):
        parser = ToolCallParser(TOOL_FORMATS[name], ["look"])
        plain, calls = "", []
        for number, piece in enumerate(pieces, start=1):
            more, found = parser.feed(piece, is_last=number == len(pieces))
            plain, calls = plain + more, calls + found
        return plain, calls

    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    plain, calls = result([text])
    assert result(pieces) == (plain, calls)
    assert result([*text, ""]) == (plain, calls)
    if not calls:
        assert plain == text
