"""Prompts that the target writes itself, for users who have a model and no data.

A chat model that is given its own chat template up to where a user's words begin goes on with what
a user might ask (Magpie, Xu et al. 2024). A model without a template goes on from the beginning of
a text, and what it writes is a beginning to continue. Every text that the target writes is stored
with its number, from which its random seed follows, so that an interrupted run goes on and ends
with the same prompts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forerun.align.samples import PromptRecord
from forerun.align.texts import Response, ResponseOrigin, ResponseStore, write_responses
from forerun.atomic_write import atomic_write
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import ngrams

SENTINEL = "forerunuserwords"
"""Rendered as a user's message, it shows where the user's words go."""
SEEDS = (
    *("", "How", "", "What", "", "Why", "", "Write a", "", "If", "", "Can you", "", "I", ""),
    *("Explain", "", "Give me", "", "Is", "", "Compare", "", "List", "", "Solve", "", "Suggest"),
)
"""First words of the turns, used in turn, which widen what a model asks by itself. Without a space
at their end, since tokens begin with one."""
MAX_TURN_TOKENS, RAW_TOKENS = 256, 48
MIN_CHARACTERS, MAX_CHARACTERS = 10, 2000
MIN_PRINTABLE = 0.98
MIN_DISTINCT_4GRAMS = 0.75
"""Share of a text's 4-grams of tokens that differ; in a loop it is lower."""
GRAM = 5
FIRST_TEXTS = 256
"""Texts over which the share of prompts is judged, at least."""
MIN_YIELD = 0.02
"""Share of prompts among the texts below which no more are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Text before the words of a user, and how their end is recognised.

    Attributes:
        end_token: the token that ends a user's turn, if the template has one.
        end_text: the text that ends it otherwise.
        speakers: lines that name who speaks, in lower case; in a turn they begin the next one.
        is_chat: whether a turn has to end; without a template texts are cut.
    """

    text: str = ""
    end_token: int | None = None
    end_text: str = ""
    speakers: frozenset[str] = frozenset()
    is_chat: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0,
            top_p=0.95,
            max_tokens=MAX_TURN_TOKENS if self.is_chat else RAW_TOKENS,
            stop=(self.end_text,) if self.end_text else (),
            stop_token_ids=() if self.end_token is None else (self.end_token,),
            seed=0,
        )

    def prompt(self, number: int, tokenizer: Tokenizer) -> PromptRecord:
        """Return what the target continues to write the text of this number."""
        if self.is_chat:
            seed = SEEDS[number % len(SEEDS)]
            ids = tokenizer.encode(self.text + seed, add_special_tokens=False)
        else:
            ids, end = tokenizer.encode(""), tokenizer.eos_token_id
            if not ids and end is not None:
                ids = [end]  # which stands between texts in training
        if not ids:
            raise InvalidRequest(
                "the tokenizer has no token that begins a text, so the target cannot write prompts "
                "from nothing; give --prompts FILE"
            )
        return PromptRecord(
            prompt_ids=tuple(ids),
            prompt_hash=f"{number:016x}",
            tag="",
            where=f"text {number + 1} of the target",
        )


def find_opening(tokenizer: Tokenizer, *, raw: bool) -> Opening:
    """Return what stands before a user's words in the chat template, and what ends them."""
    if raw or not tokenizer.has_chat_template:
        return Opening()
    shown = tokenizer.render_chat([{"role": "user", "content": SENTINEL}])
    before, found, after = shown.partition(SENTINEL)
    if not found:
        raise InvalidRequest(
            "the chat template does not show a user's message as it is, so the target cannot write "
            "prompts; give --prompts FILE, or --raw"
        )
    ids = tokenizer.encode(after, add_special_tokens=False)
    end = next((token for token in ids if token in tokenizer.added), None)
    lines = [line.strip() for line in tokenizer.decode(ids).splitlines() if line.strip()]
    names = {_find_speaker(line) for line in lines} | {"user", "assistant"}
    return Opening(
        text=before,
        end_token=end,
        end_text=lines[0] if end is None and lines else "",
        speakers=frozenset(names),
        is_chat=True,
    )


def _find_speaker(line: str) -> str:
    return line.partition(":")[0].strip(" #*").lower()


def text_of(prompt: PromptRecord, response: Response, opening: Opening, tok: Tokenizer) -> str:
    """Return the words of a turn, its seed included."""
    opened = tok.encode(opening.text, add_special_tokens=False) if opening.is_chat else ()
    whole = tok.decode([*prompt.prompt_ids, *response.token_ids])
    text = whole.removeprefix(tok.decode(opened))
    return (text.partition(opening.end_text)[0] if opening.end_text else text).strip()


def find_objection(
    text: str, response: Response, opening: Opening, special: Iterable[int]
) -> str | None:
    """Say why a text is no prompt; None if it is one."""
    ids = response.token_ids
    grams = [*ngrams(ids, 4)]
    lines = text.splitlines()
    objections = {
        "did not end": opening.is_chat and response.finish_reason != "stop",
        "have special tokens": not set(special).isdisjoint(ids[:-1]),
        "have the next turn": opening.is_chat
        and any(_find_speaker(x) in opening.speakers for x in lines),
        "are too short": len(text) < MIN_CHARACTERS,
        "are too long": len(text) > MAX_CHARACTERS,
        "cannot be printed": _measure_printable(text) < MIN_PRINTABLE,
        "repeat themselves": len(set(grams)) < MIN_DISTINCT_4GRAMS * len(grams),
    }
    return next((reason for reason, applies in objections.items() if applies), None)


def _measure_printable(text: str) -> float:
    replaced = text.replace("\N{REPLACEMENT CHARACTER}", "\0")
    return sum(c.isprintable() or c in "\n\t" for c in replaced) / max(len(text), 1)


@dataclass(slots=True)
class Selection:
    """The prompts among the target's texts, each unlike those before it.

    Attributes:
        dropped: number of dropped texts by reason.
    """

    prompts: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    _grams: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, text: str, objection: str | None) -> None:
        """Take a text unless there is an objection, or most of its phrases occurred before."""
        words = tuple(re.findall(r"[\u3040-\u9fff]|\w+", text.lower()))
        grams = {words[i : i + GRAM] for i in range(max(1, len(words) - GRAM + 1))}
        if objection is None and 2 * len(grams & self._grams) > len(grams):
            objection = "are like an earlier one"
        if objection is not None:
            self.dropped[objection] += 1
            return
        self._grams |= grams
        self.prompts.append(text)

    @property
    def num_texts(self) -> int:
        return len(self.prompts) + self.dropped.total()

    def __str__(self) -> str:
        """Say how many texts were written, how many kept, and why the others were dropped."""
        reasons = [f"{number:,} {reason}" for reason, number in self.dropped.most_common()]
        kept = f"{self.num_texts:,} texts written, {len(self.prompts):,} kept as prompts"
        return "; ".join([kept, ", ".join(reasons)]) if reasons else kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptWriter:
    """Writes prompts with a target, and stores all texts in a folder."""

    engine: Engine
    opening: Opening
    target_hash: str
    tokenizer_hash: str
    folder: Path

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def write(self, path: Path, number: int, on_progress: Callable[[int, int], None]) -> Selection:
        """Write a file of this many prompts, and return what was selected from which texts.

        Raises:
            InvalidRequest: the target writes no prompts, or no more new ones.
            CacheTooLarge: the disk is full; finished texts are kept.
        """
        origin = ResponseOrigin(
            source="target",
            model=self.target_hash,
            tokenizer_hash=self.tokenizer_hash,
            params=self.opening.params,
        )
        store, selection = ResponseStore(self.folder, origin), Selection()
        num_texts = min(FIRST_TEXTS, 2 * number)
        judged = kept = 0  # texts, and prompts among them, when the yield was judged last
        with store.writing():
            while len(selection.prompts) < number:
                done = selection.num_texts
                asked = [self.opening.prompt(i, self.tokenizer) for i in range(num_texts)]
                write_responses(self.engine, asked, store, on_progress)
                self._select(selection, asked[done:], store, number)
                share = (len(selection.prompts) - kept) / (selection.num_texts - judged)
                if selection.num_texts - judged >= FIRST_TEXTS:
                    if share < MIN_YIELD:
                        raise _refuse_yield(selection, number)
                    judged, kept = selection.num_texts, len(selection.prompts)
                missing = number - len(selection.prompts)
                num_texts += min(num_texts, round(missing / max(share, MIN_YIELD) * 1.05) + 16)
        lines = [json.dumps({"prompt": text}) + "\n" for text in selection.prompts]
        with atomic_write(path) as scratch:
            scratch.write_text("".join(lines), encoding="utf-8")
        return selection

    def _select(
        self,
        selection: Selection,
        prompts: Sequence[PromptRecord],
        store: ResponseStore,
        number: int,
    ) -> None:
        special = [i for i, (_, is_special) in self.tokenizer.added.items() if is_special]
        for prompt in prompts:
            response = store.response(prompt.prompt_hash)
            if response is None or len(selection.prompts) == number:
                return
            text = text_of(prompt, response, self.opening, self.tokenizer)
            selection.add(text, find_objection(text, response, self.opening, special))


def _refuse_yield(selection: Selection, number: int) -> InvalidRequest:
    found = len(selection.prompts)
    advice = f"--num-self-prompts {found}, or --prompts FILE" if found else "--prompts FILE"
    return InvalidRequest(
        f"the target hardly writes new prompts any more, and {number:,} are wanted: {selection}; "
        f"give {advice}"
    )
