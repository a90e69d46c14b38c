"""The training text: token ids, the ranges that are learned, and the source of the response."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.cache import hash_of

__all__ = ["Sample", "Source", "TopLogprobs", "data_hash", "prompt_hash"]

Source = Literal["target", "draft", "fixed", "replay"]
TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]
"""Per token: ids and natural-log probabilities of the most likely, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text of a data set.

    Attributes:
        prompt_hash: hash of the prompt's tokens: decides the split, names caches.
        token_ids: prompt and response.
        spans: half-open ranges of indices into `token_ids` that are learned, ascending: responses,
            several in a conversation of several turns, single positions where rejections are
            replayed. Index 0 can never be predicted, so spans begin at 1 or later.
        tag: the prompt's own label, such as a domain; acceptance is reported by it.
        source: who wrote the response.
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
        """Number of learned tokens."""
        return sum(end - start for start, end in self.spans)


def prompt_hash(token_ids: Sequence[int]) -> str:
    """Hash of a prompt's tokens: the first 16 hexadecimal digits of a SHA-256."""
    return hash_of(array("q", token_ids).tobytes())


def data_hash(samples: Iterable[Sample]) -> str:
    """Hash texts and their learned ranges, independent of their order.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.
    """
    each = sorted(
        hashlib.sha256(repr((sample.token_ids, sample.spans)).encode()).digest()
        for sample in samples
    )
    return hash_of(b"".join(each))
