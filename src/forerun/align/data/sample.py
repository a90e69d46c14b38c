"""Training texts: single samples, packed rows of several samples, and counts of their tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from forerun.align.config import Source
from forerun.cache import hash_of
from forerun.errors import InvalidRequest

TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]
"""Per token: ids and natural-log probabilities of the most likely, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text of a data set.

    Attributes:
        prompt_hash: hash of the prompt's tokens: decides the split, names caches.
        spans: half-open ranges of indices into `token_ids` that are learned, ascending: responses,
            several in a conversation of several turns, single positions where rejections are
            replayed. Index 0 can never be predicted, so spans begin at 1 or later.
        tag: the prompt's own label, such as a domain; acceptance is reported by it.
        source: what wrote the response: the target, the draft or a data set.
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


def data_hash(samples: Iterable[Sample]) -> str:
    """Hash texts and their learned ranges, independent of their order."""
    each = sorted(
        hashlib.sha256(repr((sample.token_ids, sample.spans)).encode()).digest()
        for sample in samples
    )
    return hash_of(b"".join(each))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Token ids of several samples, packed into rows of equal width.

    A place sees the earlier places of its own sample only: `positions` start again at 0 with every
    sample, which is how transformers recognises packed rows (no mask is passed).

    Attributes:
        ids: tokens; padding holds any valid id.
        positions: of each token within its sample.
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
