"""Grammars as token masks: JSON schemas, regular expressions, choices and Lark grammars.

llguidance parses the grammar and says which tokens may follow; a fork of its matcher stands at
every draft node, so drafts are checked along their paths.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Bool
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from forerun.errors import InvalidRequest
from forerun.models.tokenizers import Tokenizer
from forerun.server.grammar_process import GrammarProcess
from forerun.server.protocol import ChatRequest, GenerationRequest, StructuredOutputs
from forerun.server.tool_calls import ToolFormat, forced


class GrammarMask:
    """The tokens that a grammar allows after a text; a `TokenMask`.

    Args:
        matcher: of llguidance, at the end of the text.
        vocab_size: width of the logits.
        ends: tokens that end a text; one is allowed where the grammar may end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.ends = ends

    def fork(self) -> GrammarMask:
        """Return an independent copy; the compiled grammar is shared."""
        return GrammarMask(self.matcher.deep_copy(), self.vocab_size, self.ends)

    def advance(self, token: int) -> None:
        """Advance by one allowed token.

        Raises:
            ValueError: the grammar does not allow it.
        """
        if token in self.ends and self.matcher.is_stopped():
            return
        if not self.matcher.consume_token(token):
            raise ValueError(f"the grammar does not allow token {token}: {self.problem}")

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return a mask of the tokens that may come next: end tokens once the text is complete.

        Raises:
            ValueError: the grammar became too complex for the limits of the parser.
        """
        if self.matcher.is_error():
            raise ValueError(self.problem)
        if self.matcher.is_stopped():
            allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
            allowed[list(self.ends)] = True
            return allowed
        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, count=self.vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    @property
    def problem(self) -> str:
        """The error message of llguidance."""
        return self.matcher.get_error() or "its text has ended"


class Grammars:
    """Compiles the grammars of requests for one vocabulary.

    Args:
        tokenizer: of the target.
        vocab_size: width of its logits.
        eos_token_ids: tokens that end a text.
        tool_format: of the tool calls that a request may demand; None where it is not known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.tool_format = tool_format
        self._added = {text: token for token, (text, _) in tokenizer.added.items()}
        self.ends = tuple(sorted(token for token in eos_token_ids if token < vocab_size))
        self.vocab_size = vocab_size
        self._content = tokenizer.definition.content
        self._tokenizer: LLTokenizer | None = None
        # Slow grammars wait for each other, and not the threads that render and tokenise.
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._trial = GrammarProcess(tokenizer.definition.content, vocab_size, self.ends)

    def mask_of(self, body: GenerationRequest) -> GrammarMask | None:
        """Return the token mask of a request; None if it has no grammar."""
        calls: list[str] = []
        if isinstance(body, ChatRequest) and (tools := body.forced_tools):
            lark = forced(tools, self.tool_format, self._added)
            calls.append(LLMatcher.grammar_from_lark(lark))
        grammar = _grammar_of(body, calls)
        if grammar is None:
            return None
        if not self.ends:
            raise InvalidRequest(
                "a grammar needs a token that ends the text, and this model has none"
            )
        if body.min_tokens or body.ignore_eos:
            raise InvalidRequest(
                "a grammar decides where the text ends, so min_tokens and ignore_eos cannot be "
                "used with one"
            )
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._content, n_vocab=self.vocab_size, eos_token=list(self.ends)
            )
        self._trial.check(grammar)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        return GrammarMask(matcher, self.vocab_size, self.ends)


def _grammar_of(body: GenerationRequest, calls: Sequence[str] = ()) -> str | None:
    """Return the grammar of a request in llguidance's form; None if it has none."""
    form, outputs = body.response_format, body.structured_outputs
    asked = list(calls)
    _check_lengths(outputs)
    try:
        if form is not None and form.type != "text":
            schema = form.json_schema
            if (schema is None) != (form.type == "json_object"):
                raise InvalidRequest("response_format needs json_schema with type json_schema only")
            found = {"type": "object"} if schema is None else schema.schema_
            asked.append(_of_schema(json.dumps(found)))
        if outputs is not None:
            if outputs.json_ is not None:
                given = outputs.json_
                text = given if isinstance(given, str) else json.dumps(given)
                asked.append(_of_schema(text))
            if outputs.regex is not None:
                asked.append(LLMatcher.grammar_from_regex(outputs.regex))
            if outputs.choice is not None:
                asked.append(LLMatcher.grammar_from_lark(choices(outputs.choice)))
            if outputs.grammar is not None:
                asked.append(LLMatcher.grammar_from_lark(outputs.grammar))
    except ValueError as error:
        raise InvalidRequest(f"the grammar cannot be used: {error!s:.300}") from error
    if len(asked) > 1:
        raise InvalidRequest(
            "the text can follow one grammar; the request gives several (a tool_choice other than "
            "auto and none is one)"
        )
    return asked[0] if asked else None


MAX_GRAMMAR_CHARACTERS = {"regex": 8192, "grammar": 65536, "choice": 1 << 20}
"""A regular expression of 40,000 characters took 11 s and 1.5 GiB."""


WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Without a limit a greedy model may fill its tokens with white space between two values."""


def _check_lengths(outputs: StructuredOutputs | None) -> None:
    """Refuse texts whose compilation would take too long."""
    for name, most in MAX_GRAMMAR_CHARACTERS.items():
        text = "".join(getattr(outputs, name, None) or "")
        if len(text) > most:
            raise InvalidRequest(
                f"structured_outputs.{name} has {len(text)} characters; at most {most} are compiled"
            )


def _of_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def choices(texts: list[str]) -> str:
    """Return the Lark grammar that matches one of several texts.

    They are one terminal: as alternatives of a rule some thousand exceed the limits of the parser.
    """
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts)
