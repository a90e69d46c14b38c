"""Grammars as token masks: JSON schemas, regular expressions, choices and Lark grammars.

llguidance parses the grammar and says which tokens may follow; a fork of its matcher stands at
every draft node, so drafts are checked along their paths.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as Backend
from torch import Tensor

from forerun.engine.grammar_process import NICENESS, GrammarProcess
from forerun.errors import InvalidRequest
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import StructuredOutputs


class GrammarMask:
    """The tokens that a grammar allows after a text; a `TokenMask`.

    Args:
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
        if token in self.ends and self.matcher.is_stopped():
            return
        if not self.matcher.consume_token(token):
            raise ValueError(f"the grammar does not allow token {token}: {self.problem}")

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return a mask of the tokens that may come next: end tokens once the text is complete.

        Raises ValueError where the grammar became too complex for the limits of the parser.
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
        """The error message of llguidance, without the state of its parser and the grammar."""
        return (self.matcher.get_error() or "its text has ended").partition("\n")[0]


class _PlainTexts:
    """The vocabulary in the form that llguidance reads; no text is encoded as an added token.

    llguidance encodes texts that a grammar leaves no choice about, and forces their first token. An
    added token there, such as an end mark written out in an enumeration, stands for no bytes of the
    text, and the matcher would fail at it.

    Attributes:
        bos_token_id: texts begin with no token of their own.
        greedy: encodes by the longest token that fits, where the tokenizer changes a text.
    """

    bos_token_id = None
    greedy: LLTokenizer | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(token for token in tokenizer.added if token < vocab_size)
        self.tokens = [
            tokenizer.added[token][0].encode()
            if token in tokenizer.added
            else tokenizer.token_bytes(token)
            for token in range(vocab_size)
        ]
        definition = json.loads(tokenizer.definition.content)
        self._encoder = Backend.from_str(json.dumps({**definition, "added_tokens": []}))
        self._added = frozenset(tokenizer.added)

    def __call__(self, text: bytes) -> list[int]:
        """Return token ids for a text: those of the tokenizer where their bytes are the text's."""
        ids = self._encoder.encode(text.decode(), add_special_tokens=False).ids
        if b"".join(self.tokens[token] for token in ids) == text and self._added.isdisjoint(ids):
            return list(ids)
        return [] if self.greedy is None else self.greedy.greedy_tokenize(text.decode())


MAX_CACHED = 16
"""Compiled grammars that are kept: clients send the same schema with every request."""


class Grammars:
    """Compiles structured outputs for one vocabulary; any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self.ends = tuple(sorted(token for token in eos_token_ids if token < vocab_size))
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        widest = max(vocab_size, 1 + max(tokenizer.vocabulary, default=0))
        self._trial = GrammarProcess(tokenizer.definition.content, widest, self.ends)
        self._compiled: OrderedDict[StructuredOutputs, GrammarMask] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "compiler", initializer=_give_way)
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        texts = _PlainTexts(self.tokenizer, self.vocab_size, self.ends[0])
        wrapped = TokenizerWrapper(texts)
        texts.greedy = LLTokenizer(wrapped, n_vocab=self.vocab_size, eos_token=list(self.ends))
        return texts.greedy

    def mask_of(self, asked: StructuredOutputs) -> GrammarMask:
        """Return the token mask of a form at the beginning of a text.

        Raises InvalidRequest where it is malformed, or too large or too deeply nested.
        """
        with self._lock:
            mask = self._compiled.pop(asked, None)
            if mask is None:
                mask = self._compile(asked)
            self._compiled[asked] = mask
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return mask.fork()

    def _compile(self, asked: StructuredOutputs) -> GrammarMask:
        if not self.ends:
            raise InvalidRequest(
                "a grammar needs a token that ends the text, and this model has none"
            )
        try:
            grammar = _grammar_of(asked)
        except ValueError as error:
            raise InvalidRequest(f"the grammar cannot be used: {error!s:.300}") from error
        self._trial.check(grammar)
        compiling = self._compiler.submit(LLMatcher, self._vocabulary, grammar, log_level=0)
        matcher = compiling.result()
        return GrammarMask(matcher, self.vocab_size, self.ends)


def _give_way() -> None:
    """Lower the priority of this thread, which only Linux allows for single threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""White space that a grammar allows; without a limit a greedy model may emit nothing else."""


def _grammar_of(asked: StructuredOutputs) -> str:
    """Return a form as a grammar for llguidance."""
    if isinstance(asked.json, str):
        return LLMatcher.grammar_from_json_schema(
            asked.json, defaults={"whitespace_pattern": WHITESPACE}
        )
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    # One terminal: as alternatives of a rule some thousand texts exceed the limits of the parser.
    choices = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, asked.choice or ()))
    return LLMatcher.grammar_from_lark(asked.grammar or choices)
