"""Training texts: samples, packed rows of samples, and prompts with the answers they bring."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from forerun.align.config import Source
from forerun.cache import hash_of
from forerun.errors import InvalidRequest
from forerun.measure.prompt_files import Message, PromptEntry, read_entries
from forerun.models.tokenizers import Tokenizer

TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]
"""Per token: ids and natural-log probabilities of the most likely, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text of a data set.

    Attributes:
        spans: half-open ranges of indices into `token_ids` that are learned, ascending: responses,
            several in a conversation of several turns, single positions where rejections are
            replayed. Index 0 can never be predicted, so spans begin at 1 or later.
        top_logprobs: of every learned token, as the server that wrote them gave them; None where
            nothing did.
    """

    prompt_hash: str
    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    tag: str = ""
    source: Source = "target"
    top_logprobs: TopLogprobs | None = None

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
        """Copy the batch to another device."""
        return PackedBatch(
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            samples=self.samples.to(device),
            predicts=self.predicts.to(device),
        )


BLIND_TO_POSITIONS = frozenset({"opt"})
"""Model types whose decoders do not recognise packed samples by positions that restart at 0."""


def packed_inputs(batch: PackedBatch, model_type: str) -> dict[str, Any]:
    """Return the arguments of a decoder's forward pass over a batch."""
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    if model_type in BLIND_TO_POSITIONS:
        inputs["attention_mask"] = seen(batch)
    return inputs


def seen(batch: PackedBatch) -> Bool[Tensor, "rows 1 width width"]:
    """Return the attention mask: causal, and limited to the tokens of the same sample."""
    texts = (batch.positions == 0).cumsum(-1)
    alike = texts[:, :, None] == texts[:, None, :]
    return alike.tril()[:, None]


COVERED = 0.995
"""Share of the learned tokens that a vocabulary covers if no size is given."""
MULTIPLE = 128
"""A size that is chosen here is a multiple of it, which products of matrices take well."""
MOST = 32_000


def drafted_tokens(
    samples: Sequence[Sample], vocab_size: int, size: int | None = None
) -> Int64[Tensor, " draft_vocab"]:
    if size is not None and size > vocab_size:
        raise InvalidRequest(
            f"draft_vocab_size is {size}, but the target has {vocab_size} tokens; give at most that"
        )
    learned, read = _token_counts(samples, vocab_size)
    order = sorted(range(vocab_size), key=lambda token: (-learned[token], -read[token], token))
    if size is None:
        covered = torch.tensor([learned[token] for token in order]).cumsum(0)
        enough = int((covered < COVERED * covered[-1]).sum()) + 1
        size = min(-(-enough // MULTIPLE) * MULTIPLE, MOST, vocab_size)
    return torch.tensor(sorted(order[:size]))


def _token_counts(samples: Sequence[Sample], vocab_size: int) -> tuple[list[int], list[int]]:
    """Return how often every token is learned, and how often it occurs in total."""
    learned = torch.zeros(vocab_size, dtype=torch.int64)
    read = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        read += torch.bincount(ids, minlength=vocab_size)
        for start, end in sample.spans:
            learned += torch.bincount(ids[start:end], minlength=vocab_size)
    return learned.tolist(), read.tolist()


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
    messages: tuple[Message, ...] = ()
    brought: tuple[Sample, ...] = ()


def read_prompts(path: Path, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[PromptRecord]:
    """Read the prompts of a file or folder without duplicates, in the order of the file.

    Texts are continued as they are. Conversations go through the tokenizer's chat template and are
    continued with the assistant's last answer, which the record may have.
    """
    found: dict[str, PromptRecord] = {}
    brought: dict[str, list[Sample]] = {}
    seen: set[str] = set()
    for entry in read_entries(path):
        key = hash_of(repr((entry.text, entry.messages, entry.response)).encode())
        if key in seen:  # a table may repeat one row millions of times
            continue
        seen.add(key)
        try:
            record = record_of(entry, tokenizer, max_prompt_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(f"{entry.where}: {error}") from error
        found.setdefault(record.prompt_hash, record)
        brought.setdefault(record.prompt_hash, []).extend(record.brought)
    if not found:
        raise InvalidRequest(f"{path} has no prompts")
    return [replace(record, brought=tuple(brought[key])) for key, record in found.items()]


def record_of(entry: PromptEntry, tokenizer: Tokenizer, max_prompt_tokens: int) -> PromptRecord:
    messages = _messages_of(entry)
    if messages:
        has_answer = messages[-1]["role"] == "assistant"
        asked = messages[:-1] if has_answer else messages
        prompt_ids = tokenizer.encode(tokenizer.render_chat(asked), add_special_tokens=False)
        text = _learned_text(messages, tokenizer) if has_answer else None
    else:
        asked = ()
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
        messages=asked,
        brought=() if text is None else (sample_of(text, own_hash, entry.tag),),
    )


def _messages_of(entry: PromptEntry) -> tuple[Message, ...]:
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


def sample_of(text: Text, own_hash: str, tag: str) -> Sample:
    """Make a training sample of a prompt record that contains its response."""
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


def _learned_text(
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
