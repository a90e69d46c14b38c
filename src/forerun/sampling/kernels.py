"""Operations on rows over the full vocabulary: chunks that bound temporary memory, and CPU kernels.

A torch operation over a few rows takes longer to start than to do, and verification is dozens of
them; each kernel does in one call what its caller's torch code defines. They run on the calling
thread: per row about a nanosecond for every two tokens of the vocabulary.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from forerun.errors import RunnerUnavailable
from forerun.native.library import ChainProbsStruct, open_library
from forerun.theory.tree import TokenTree, expanded

MAX_ELEMENTS = 1 << 22
"""Elements of one temporary: 32 MiB of int64 or fp64."""


def row_chunks(num_rows: int, width: int, max_elements: int = MAX_ELEMENTS) -> Iterator[slice]:
    """Yield consecutive slices of rows with at most `max_elements` elements each.

    A single row is never split: processors, races and residuals need it whole.
    """
    step = max(1, max_elements // max(width, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def on_host(*columns: Tensor) -> list[list[Any]]:
    """Copy tensors to lists on the host with a single synchronisation; token ids fit fp64."""
    if columns[0].is_cpu:
        return [column.tolist() for column in columns]
    together = torch.cat([column.flatten().to(torch.float64) for column in columns]).cpu()
    parts = together.split_with_sizes([column.numel() for column in columns])
    pairs = zip(parts, columns, strict=True)
    return [part.to(like.dtype).view(like.shape).tolist() for part, like in pairs]


BLOCK = 256


def largest(
    scores: Float[Tensor, "rows vocab"],
) -> tuple[Float[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """Return each row's largest score and lowest token id with it; NaN if the row contains NaN.

    A maximum without its place is many times cheaper on the CPU than one with it. So the row is
    halved, as it were: the first block that holds the maximum, then the first place in that block.
    """
    if kernels := kernels_for(scores):
        return kernels.largest(scores)
    num_rows, vocab_size = scores.shape
    width = math.gcd(vocab_size, BLOCK)
    blocks = scores.reshape(-1, width)
    maxima = blocks.amax(-1).view(num_rows, vocab_size // width)
    best, block = maxima.max(-1)
    first = torch.arange(0, len(blocks), maxima.shape[1], device=scores.device)
    token = blocks.index_select(0, first.add_(block)).argmax(-1).add_(block, alpha=width)
    return best, token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawLogprobs:
    """Natural-log probabilities of chosen tokens and of the most likely ones, best first."""

    token_logprobs: Float32[Tensor, " rows"]
    top_tokens: Int64[Tensor, "rows top"]
    top_logprobs: Float32[Tensor, "rows top"]


def raw_logprobs(
    logits: Float[Tensor, "rows vocab"], tokens: Int64[Tensor, " rows"], top_n: int
) -> RawLogprobs:
    """Return log-probabilities of `tokens` and of the `top_n` most likely ones, in fp32."""
    num_rows, vocab_size = logits.shape
    top_n = min(top_n, vocab_size)
    chosen = torch.empty(num_rows, device=logits.device)
    top_tokens = torch.empty(num_rows, top_n, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, top_n, device=logits.device)
    for rows in row_chunks(num_rows, vocab_size):
        logprobs = logits[rows].to(torch.float32).log_softmax(-1)
        chosen[rows] = logprobs.gather(-1, tokens[rows, None])[:, 0]
        top[rows], top_tokens[rows] = logprobs.topk(top_n, dim=-1)
    return RawLogprobs(token_logprobs=chosen, top_tokens=top_tokens, top_logprobs=top)


Rows = Float32[Tensor, "rows vocab"]
Tokens = Int64[Tensor, " rows"]

FP32_BYTES, ID_BYTES = 4, 8
VERDICT = struct.Struct("qqqd")
"""`ForerunVerdict`."""


def kernels_for(*rows: Tensor) -> SamplingKernels | None:
    """Return the kernels if the tensors are contiguous fp32 rows on the CPU; else None."""
    for tensor in rows:
        if not tensor.is_cpu or tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            return None
    return sampling_kernels()


@cache
def sampling_kernels() -> SamplingKernels | None:
    """Return the kernels; None if they cannot be compiled, which is logged at loading."""
    try:
        return SamplingKernels(open_library())
    except RunnerUnavailable:
        return None


class SamplingKernels:
    """CPU kernels of the sampling functions, which do not check shapes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def largest(self, scores: Rows) -> tuple[Float32[Tensor, " rows"], Tokens]:
        """Return the largest score of every row and its token; see `largest`."""
        num_rows, vocab_size = scores.shape
        best, tokens = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        self.library.forerun_largest(
            scores.data_ptr(), num_rows, vocab_size, best.data_ptr(), tokens.data_ptr()
        )
        return best, tokens

    def softmax(
        self,
        scores: Rows,
        temperatures: Float32[Tensor, " rows"],
        truncations: Float32[Tensor, "rows 3"] | None,
        out: Rows,
    ) -> None:
        """Compute `processors.target_probs` of rows that need no history; `out` may be `scores`.

        `truncations` holds min_p, top_k and 1 - top_p of every row.
        """
        num_rows, vocab_size = scores.shape
        is_done = self.library.forerun_softmax(
            scores.data_ptr(),
            num_rows,
            vocab_size,
            temperatures.data_ptr(),
            None if truncations is None else truncations.data_ptr(),
            out.data_ptr(),
        )
        if not is_done:
            raise MemoryError(f"there is no memory for the distributions of {num_rows} rows")

    def draw(self, weights: Rows, uniforms: Float64[Tensor, " rows"]) -> Tokens:
        """Draw from unnormalised weights; see `noise.draw`."""
        return self._tokens(self.library.forerun_draw, weights, uniforms)

    def draw_siblings(
        self, weights: Rows, uniforms: Float64[Tensor, "rows siblings"]
    ) -> tuple[Int64[Tensor, "rows siblings"], Float32[Tensor, "rows siblings"]]:
        """Draw from every row without replacement; returns tokens and their weights before.

        `weights` must not be read meanwhile.
        """
        tokens = torch.empty(uniforms.shape, dtype=torch.int64)
        chances, noise = torch.empty(uniforms.shape), uniforms.contiguous()
        sizes = (*weights.shape, uniforms.shape[1])
        ends = (noise.data_ptr(), tokens.data_ptr(), chances.data_ptr())
        self.library.forerun_draw_siblings(weights.data_ptr(), *sizes, *ends)
        return tokens, chances

    def race(self, probs: Rows, keys: Int64[Tensor, " rows"]) -> Tokens:
        """Draw by exponential race; see `walk.race`."""
        return self._tokens(self.library.forerun_race, probs, keys)

    def coupled_match(self, target: Rows, draft: Rows, tokens: Tokens) -> Float32[Tensor, " rows"]:
        """Return the match probabilities of coupled tokens; see `walk.coupled_match_probs`."""
        num_rows, vocab_size = target.shape
        probs, tokens = torch.empty(num_rows), tokens.contiguous()
        self.library.forerun_coupled_match(
            target.data_ptr(),
            draft.data_ptr(),
            num_rows,
            vocab_size,
            draft.stride(0),
            tokens.data_ptr(),
            probs.data_ptr(),
        )
        return probs

    def _tokens(self, function: Callable[..., None], rows: Tensor, noise: Tensor) -> Tokens:
        num_rows, vocab_size = rows.shape
        tokens = torch.empty(num_rows, dtype=torch.int64)
        noise = noise.contiguous()
        function(rows.data_ptr(), num_rows, vocab_size, noise.data_ptr(), tokens.data_ptr())
        return tokens

    def verify_chains(
        self,
        target_probs: Rows,
        tokens: Tokens,
        drafts: Sequence[Tensor | None],
        keys: Sequence[Sequence[int]],
        *,
        is_block: bool,
    ) -> list[tuple[int, int, int, float]]:
        """Verify sampled chains; see `chain.verify_chain_batch`."""
        vocab_size, row = target_probs.shape[1], 0
        first_row, first_token = target_probs.data_ptr(), tokens.data_ptr()
        noise = array("q", chain.from_iterable(keys))
        key = noise.buffer_info()[0]
        chains = array("q")
        for draft_probs, own in zip(drafts, keys, strict=True):
            num_drafted = len(own) - 2
            chains.extend(
                (
                    first_row + row * vocab_size * FP32_BYTES,
                    0 if draft_probs is None else draft_probs.data_ptr(),
                    first_token + (row + 1) * ID_BYTES,
                    key,
                    num_drafted,
                    0 if draft_probs is None else draft_probs.stride(0),
                )
            )
            row += num_drafted + 1
            key += len(own) * ID_BYTES
        verdicts = bytearray(VERDICT.size * len(drafts))
        self.library.forerun_verify_chains(
            chains.buffer_info()[0],
            len(drafts),
            vocab_size,
            is_block,
            (ctypes.c_char * len(verdicts)).from_buffer(verdicts),
        )
        return list(VERDICT.iter_unpack(verdicts))

    def verify_trees(
        self,
        target_probs: Rows,
        tokens: Tokens,
        trees: Sequence[TokenTree],
        drafts: Sequence[Float32[Tensor, "_ vocab"]],
        keys: Sequence[tuple[Sequence[int], Sequence[int]]],
    ) -> list[tuple[int, int, int, float]]:
        """Verify drawn trees by traversal; see `tree_rules.verify_trees`.

        Returns:
            Last accepted node, final token, whether all rows up to it are valid, and expected
            accepted of every tree.
        """
        vocab_size, row = target_probs.shape[1], 0
        first_row, first_token = target_probs.data_ptr(), tokens.data_ptr()
        noise = array("q", chain.from_iterable(key for own in keys for key in own))
        key = noise.buffer_info()[0]
        packed = array("q")
        for tree, draft_probs in zip(trees, drafts, strict=True):
            num_nodes = len(tree.parents)
            shape = tree_shape(tree).buffer_info()[0]
            packed.extend(
                (
                    first_row + row * vocab_size * FP32_BYTES,
                    draft_probs.data_ptr(),
                    first_token + (row + 1) * ID_BYTES,
                    key,
                    shape,
                    shape + num_nodes * ID_BYTES,
                    num_nodes,
                )
            )
            row += num_nodes + 1
            key += (2 * num_nodes + 1) * ID_BYTES
        verdicts = bytearray(VERDICT.size * len(drafts))
        self.library.forerun_verify_trees(
            packed.buffer_info()[0],
            len(drafts),
            vocab_size,
            (ctypes.c_char * len(verdicts)).from_buffer(verdicts),
        )
        return list(VERDICT.iter_unpack(verdicts))

    def tree_weights(
        self,
        tree: TokenTree,
        target_probs: Float64[Tensor, "batch rows vocab"],
        draft_probs: Float64[Tensor, "batch parents vocab"],
        tokens: Int64[Tensor, "batch nodes"],
    ) -> tuple[Float64[Tensor, "batch nodes"], Float64[Tensor, "batch rows vocab"]]:
        """Return acceptance probabilities and final weights of `verify_trees` in fp64."""
        target, draft, tokens = (part.contiguous() for part in (target_probs, draft_probs, tokens))
        accept, weights = torch.empty(tokens.shape, dtype=torch.float64), torch.empty_like(target)
        shape = tree_shape(tree).buffer_info()[0]
        given = array(
            "q",
            (
                *tokens.shape,
                *draft.shape[1:],
                *(part.data_ptr() for part in (target, draft, tokens)),
                shape,
                shape + len(tree.parents) * ID_BYTES,
            ),
        )
        self.library.forerun_tree_weights(
            given.buffer_info()[0], accept.data_ptr(), weights.data_ptr()
        )
        return accept, weights

    def chain_accept(
        self,
        target_probs: Float64[Tensor, "batch rows vocab"],
        draft_probs: Float64[Tensor, "batch nodes vocab"],
        tokens: Int64[Tensor, "batch nodes"],
        num_drafted: Int64[Tensor, " batch"],
        *,
        is_block: bool,
    ) -> Float64[Tensor, "batch nodes"]:
        """Return the acceptance probabilities of `verify_chains` in fp64, for the enumeration."""
        probs = torch.empty(tokens.shape, dtype=torch.float64)
        given = [part.contiguous() for part in (target_probs, draft_probs, tokens, num_drafted)]
        self.library.forerun_chain_accept(
            byref(_chain_probs_struct(given, is_block)), probs.data_ptr()
        )
        return probs

    def chain_weights(
        self,
        target_probs: Float64[Tensor, "batch rows vocab"],
        draft_probs: Float64[Tensor, "batch nodes vocab"],
        tokens: Int64[Tensor, "batch nodes"],
        num_drafted: Int64[Tensor, " batch"],
        num_accepted: Int64[Tensor, " batch"],
        *,
        is_block: bool,
    ) -> Float64[Tensor, "batch vocab"]:
        """Return the unnormalised distribution of the final token in fp64, for the enumeration."""
        weights = torch.empty(len(tokens), target_probs.shape[-1], dtype=torch.float64)
        given = [part.contiguous() for part in (target_probs, draft_probs, tokens, num_drafted)]
        accepted = num_accepted.contiguous()
        self.library.forerun_chain_weights(
            byref(_chain_probs_struct(given, is_block)), accepted.data_ptr(), weights.data_ptr()
        )
        return weights


@lru_cache(maxsize=1024)
def tree_shape(tree: TokenTree) -> array[int]:
    """Return the parent of every node, then the draft row of every target row (-1 for leaves)."""
    rows = {parent: row for row, parent in enumerate(expanded(tree))}
    draft_rows = (rows.get(node, -1) for node in range(-1, len(tree.parents)))
    return array("q", (*tree.parents, *draft_rows))


def _chain_probs_struct(given: Sequence[Tensor], is_block: bool) -> ChainProbsStruct:
    """Build the struct of pointers to target and draft distributions, which must stay alive."""
    target_probs, _, tokens, _ = given
    return ChainProbsStruct(
        *tokens.shape, target_probs.shape[-1], is_block, *(part.data_ptr() for part in given)
    )
