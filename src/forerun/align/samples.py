"""Training texts: prompts with the answers they bring, samples, and a stream of packed samples."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from forerun.align.config import Source
from forerun.cache import hash_of
from forerun.errors import InvalidRequest
from forerun.measure.prompt_files import Message, PromptEntry, read_entries
from forerun.models.tokenizers import Tokenizer
from forerun.theory.splitmix import INCREMENT, finalise


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text of a data set.

    Attributes:
        spans: half-open ranges of indices into `token_ids` that are learned, ascending: responses,
            several in a conversation of several turns. Index 0 can never be predicted, so spans
            begin at 1 or later.
    """

    prompt_hash: str
    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    tag: str = ""
    source: Source = "target"

    @property
    def num_learned(self) -> int:
        return sum(end - start for start, end in self.spans)


def prompt_hash(token_ids: Sequence[int]) -> str:
    return hash_of(array("q", token_ids).tobytes())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Token ids of several samples, packed into rows of equal width.

    A place sees the earlier places of its own sample only: `positions` start again at 0 with every
    sample, which is how transformers recognises packed rows (no mask is passed).

    Attributes:
        samples: index of the sample in the data set, -1 at padding.
        predicts: whether the token AFTER a place is learned: these places have a loss, and "learned
            rows" everywhere are these places in row-major order.
    """

    ids: Int64[Tensor, "rows width"]
    positions: Int64[Tensor, "rows width"]
    samples: Int64[Tensor, "rows width"]
    predicts: Bool[Tensor, "rows width"]

    @property
    def labels(self) -> Int64[Tensor, " learned"]:
        """Token ids that follow the learned positions, which are the training labels."""
        following = torch.roll(self.ids, -1, dims=1)
        return following[self.predicts]

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            samples=self.samples.to(device),
            predicts=self.predicts.to(device),
        )


def seen(batch: PackedBatch) -> Bool[Tensor, "rows 1 width width"]:
    """Return the attention mask: causal, and limited to the tokens of the same sample."""
    texts = (batch.positions == 0).cumsum(-1)
    alike = texts[:, :, None] == texts[:, None, :]
    return alike.tril()[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt of a data set, as token ids.

    Attributes:
        brought: texts with the response, or all answers of a conversation, that records of this
            prompt have; their prompt is not cut.
    """

    prompt_ids: tuple[int, ...]
    prompt_hash: str
    tag: str
    where: str
    brought: tuple[Sample, ...] = ()


def read_prompts(
    path: Path, tokenizer: Tokenizer, max_prompt_tokens: int, *, raw: bool = False
) -> list[PromptRecord]:
    """Read the prompts of a file or folder without duplicates, in the order of the file.

    Conversations go through the tokenizer's chat template and are continued with the assistant's
    last answer, which the record may have. Texts are a user's messages where there is a template,
    unless `raw`, and otherwise continued as they are.
    """
    found: dict[str, PromptRecord] = {}
    brought: dict[str, list[Sample]] = {}
    seen: set[str] = set()
    for entry in read_entries(path):
        key = hash_of(repr(replace(entry, where="", tag="")).encode())
        if key in seen:  # a table may repeat one row millions of times
            continue
        seen.add(key)
        try:
            record = build_record(entry, tokenizer, max_prompt_tokens, raw=raw)
        except InvalidRequest as error:
            raise InvalidRequest(f"{entry.where}: {error}") from error
        found.setdefault(record.prompt_hash, record)
        brought.setdefault(record.prompt_hash, []).extend(record.brought)
    if not found:
        raise InvalidRequest(f"{path} has no prompts; give a file with at least one")
    return [replace(record, brought=tuple(brought[key])) for key, record in found.items()]


def build_record(
    entry: PromptEntry, tokenizer: Tokenizer, max_prompt_tokens: int, *, raw: bool = False
) -> PromptRecord:
    messages = _append_response(entry)
    if messages:
        has_answer = messages[-1]["role"] == "assistant"
        asked = messages[:-1] if has_answer else messages
    else:
        has_answer, asked = entry.response is not None, ()
    if not raw and not messages and tokenizer.has_chat_template:
        asked = ({"role": "user", "content": entry.text or ""},)
        answer = {"role": "assistant", "content": entry.response or ""}
        messages = (*asked, answer) if has_answer else asked
    text = None
    if entry.prompt_ids:
        prompt_ids = list(entry.prompt_ids)
        text = _join_ids(entry, messages, tokenizer)
    elif messages:
        prompt_ids = tokenizer.encode(tokenizer.render_chat(asked), add_special_tokens=False)
        text = _render_learned(messages, tokenizer) if has_answer else None
    else:
        prompt_ids = tokenizer.encode(entry.text or "")
        text = continued(prompt_ids, entry.response, tokenizer)
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty: the tokenizer makes no token of it")
    kept = shortened(prompt_ids, tokenizer.encode(""), max_prompt_tokens)
    own_hash = prompt_hash(kept)
    return PromptRecord(
        prompt_ids=kept,
        prompt_hash=own_hash,
        tag=entry.tag,
        where=entry.where,
        brought=() if text is None else (build_fixed_sample(text, own_hash, entry.tag),),
    )


def _join_ids(entry: PromptEntry, messages: Sequence[Message], tokenizer: Tokenizer) -> Text | None:
    """Return the tokens that a record has, after comparing them with its text."""
    ids, answer = [*entry.prompt_ids, *entry.token_ids], entry.response
    if messages and messages[-1]["role"] == "assistant":
        answer = messages[-1]["content"]
    if outside := [token for token in ids if token not in tokenizer.vocabulary]:
        raise InvalidRequest(
            f"it has the token {outside[0]}, which is not in this model's vocabulary: its ids are "
            "of another model; leave prompt_ids and token_ids out"
        )
    if not entry.token_ids:
        return None
    decoded = remove_spaces(tokenizer.decode(entry.token_ids))
    if answer is not None and not decoded.startswith(remove_spaces(answer)):
        raise InvalidRequest(
            f"its token_ids are not this tokenizer's way to write its answer {answer!r:.40}: they "
            "are of another model; leave prompt_ids and token_ids out"
        )
    return ids, [(len(entry.prompt_ids), len(ids))]


def remove_spaces(text: str) -> str:
    """Return a text without spaces and without characters that are cut off."""
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


def _append_response(entry: PromptEntry) -> tuple[Message, ...]:
    """Return an entry's conversation with its response appended; empty for plain text."""
    if not entry.messages or entry.response is None:
        return entry.messages
    if entry.messages[-1]["role"] == "assistant":
        raise InvalidRequest('it has a "response", but its messages end with an answer already')
    return (*entry.messages, {"role": "assistant", "content": entry.response})


Text = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the ranges of them that are learned."""


def continued(prompt_ids: Sequence[int], response: str | None, tokenizer: Tokenizer) -> Text | None:
    """Append the record's response to a plain prompt, without an end token."""
    if response is None:
        return None
    ids = [*prompt_ids, *tokenizer.encode(response, add_special_tokens=False)]
    return ids, [(max(len(prompt_ids), 1), len(ids))]


def build_fixed_sample(text: Text, own_hash: str, tag: str) -> Sample:
    token_ids, spans = text
    return Sample(
        prompt_hash=own_hash,
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        tag=tag,
        source="fixed",
    )


def shortened(ids: Sequence[int], start: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the last `most` tokens of a prompt, after the special tokens at its start if any."""
    if len(ids) <= most:
        return tuple(ids)
    kept = tuple(start) if len(start) < most and list(ids[: len(start)]) == list(start) else ()
    return (*kept, *ids[len(ids) - (most - len(kept)) :])


def _render_learned(
    messages: Sequence[Message], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    """Render a conversation as token ids and find the ranges of the assistant's messages.

    What is asked and what is answered are made into tokens one by one, so that tokens end where a
    prompt ends, as they do when the draft is used. An answer includes the token that ends it. A
    template may render an early answer otherwise once others follow (without its thoughts, say):
    such answers are context and not learned.
    """
    whole = tokenizer.render_chat(messages, with_answer_begun=False)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.render_chat(messages[:index])
        answered = tokenizer.render_chat(messages[: index + 1], with_answer_begun=False)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            continue
        ids += tokenizer.encode(whole[done : len(asked)], add_special_tokens=False)
        answer = tokenizer.encode(whole[len(asked) : len(answered)], add_special_tokens=False)
        eos = tokenizer.eos_token_id  # a line end may follow it
        length = answer.index(eos) + 1 if eos in answer else len(answer)
        spans.append((len(ids), len(ids) + length))
        ids += answer
        done = len(answered)
    if done < len(whole):
        raise InvalidRequest(
            "the chat template does not render the answer after its prompt, so that the answer's "
            "tokens cannot be found; give prompts without answers"
        )
    return ids, spans


HASH_BITS = 64


def is_held_out(prompt_hash: str, held_out_share: float) -> bool:
    return int(prompt_hash, 16) < held_out_share * 2.0**HASH_BITS


def split(
    prompts: Iterable[PromptRecord], held_out_share: float
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Split prompts into training and held-out prompts, without changing their order."""
    if not 0.0 <= held_out_share < 1.0:
        raise InvalidRequest(f"held_out_share is {held_out_share}; it must be from 0 to below 1")
    sides: tuple[list[PromptRecord], list[PromptRecord]] = ([], [])
    for prompt in prompts:
        sides[is_held_out(prompt.prompt_hash, held_out_share)].append(prompt)
    train, held_out = sides
    if not train:
        raise InvalidRequest(
            f"all {len(held_out)} prompts are held out: give more prompts, or lower the held-out "
            "share (--held-out-share)"
        )
    if held_out_share and not held_out:
        raise InvalidRequest(
            f"none of {len(train)} prompts is held out: give more prompts, raise the held-out "
            "share (--held-out-share), or name a file of prompts to judge with (--held-out)"
        )
    return train, held_out


def mix(samples: Sequence[Sample], shares: Mapping[Source, float], *, seed: int) -> list[Sample]:
    """Select as many samples as the shares allow, without using a sample twice.

    The source that runs out first decides how many. Of the others a shuffled selection is taken up
    to its share, so that every share is met to within the length of a sample. Sources without a
    share are left out.
    """
    groups = {source: [s for s in samples if s.source == source] for source in shares}
    learned = {source: sum(s.num_learned for s in group) for source, group in groups.items()}
    for source, num_learned in learned.items():
        if num_learned == 0:
            raise InvalidRequest(
                f"{shares[source]:.0%} of the tokens are to come from source {source!r}, which has "
                "none: set its share to 0, or give more prompts, for 'fixed' with responses"
            )
    num_all = min(learned[source] / share for source, share in shares.items())
    return [
        sample
        for source, share in shares.items()
        for sample in _select(groups[source], share * num_all, seed)
    ]


def _select(samples: Sequence[Sample], num_learned: float, seed: int) -> Iterator[Sample]:
    """Yield shuffled samples until they contain at least the given number of learned tokens."""
    num_taken = 0
    for index in shuffle(len(samples), seed):
        # Half a token of slack, so that the rounding of shares does not add one more sample.
        if num_taken + 0.5 > num_learned:
            return
        num_taken += samples[index].num_learned
        yield samples[index]


@lru_cache(maxsize=4)
def shuffle(size: int, key: int) -> tuple[int, ...]:
    """Return the numbers below `size` in the order of their hashes, a permutation for every key."""
    return tuple(sorted(range(size), key=lambda index: finalise(key + index * INCREMENT)))


class Packing:
    """Endless stream of packed rows, with the samples shuffled again in every epoch.

    A row of the stream is a pure function of the samples, the window, the seed and the row's
    number: ranks and resumed runs need no state to agree.
    """

    def __init__(self, samples: Sequence[Sample], *, window: int, seed: int) -> None:
        if window < 2:
            raise InvalidRequest(f"window is {window}; a row needs at least 2 tokens")
        self.samples = tuple(cut(sample, window) for sample in samples if sample.num_learned)
        if not self.samples:
            raise InvalidRequest(
                "there is nothing to learn: every response is empty or cut off; give other prompts "
                "or a larger window"
            )
        self.window = window
        self.seed = seed
        self._rows = fill_rows([len(sample.token_ids) for sample in self.samples], window)

    @property
    def rows_per_epoch(self) -> int:
        return len(self._rows)

    @property
    def num_learned(self) -> int:
        return sum(sample.num_learned for sample in self.samples)

    def batch(self, first_row: int, num_rows: int) -> PackedBatch:
        """Return rows `first_row` to `first_row + num_rows - 1` of the stream."""
        shape = (num_rows, self.window)
        ids = torch.zeros(shape, dtype=torch.int64)
        # Padding counts its positions like one more sample.
        positions = torch.arange(self.window).repeat(num_rows, 1)
        samples = torch.full(shape, -1)
        predicts = torch.zeros(shape, dtype=torch.bool)
        for row in range(num_rows):
            start = 0
            for index in self._list_samples(first_row + row):
                sample = self.samples[index]
                end = start + len(sample.token_ids)
                ids[row, start:end] = torch.tensor(sample.token_ids)
                positions[row, start:] = torch.arange(self.window - start)
                samples[row, start:end] = index
                for learned, stop in sample.spans:
                    predicts[row, start + learned - 1 : start + stop - 1] = True
                start = end
            positions[row, start:] = torch.arange(self.window - start)
        return PackedBatch(ids=ids, positions=positions, samples=samples, predicts=predicts)

    def _list_samples(self, stream_row: int) -> list[int]:
        epoch, row = divmod(stream_row, self.rows_per_epoch)
        key = finalise(finalise(self.seed) + epoch * INCREMENT)
        return self._rows[shuffle(self.rows_per_epoch, key)[row]]


def fill_rows(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Assign samples to rows: the longest first, each to the fullest row that has room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left and row, ascending
    for sample in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(room, (lengths[sample], 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = window, len(rows)
            rows.append([])
        rows[row].append(sample)
        insort(room, (left - lengths[sample], row))
    return rows


def cut(sample: Sample, window: int) -> Sample:
    """Cut a sample to `window` tokens at most, so that it keeps as many learned tokens as possible.

    What follows the last learned token teaches nothing and goes first. Then the beginning goes, as
    far as it has to for all learned tokens to stay, but never so far that fewer than half a window
    of tokens stand before the first of them (or all there are). Then the end goes.
    """
    first, last = sample.spans[0][0], sample.spans[-1][1]
    start = max(min(last - window, first - window // 2), 0)
    end = min(last, start + window)
    if start == 0 and end == len(sample.token_ids):
        return sample
    kept = [(max(a, start), min(b, end)) for a, b in sample.spans]
    return replace(
        sample,
        token_ids=sample.token_ids[start:end],
        spans=tuple((a - start, b - start) for a, b in kept if a < b),
    )


def data_hash(samples: Iterable[Sample]) -> str:
    """Hash texts and their learned ranges, independent of their order."""
    each = sorted(
        hashlib.sha256(repr((sample.token_ids, sample.spans)).encode()).digest()
        for sample in samples
    )
    return hash_of(b"".join(each))
