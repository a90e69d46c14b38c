"""Converts logits to probabilities, each row with the parameters of its request.

Order: allowed tokens, logit bias, bad tokens, min_tokens, token masks; repetition, frequency and
presence penalty; temperature; min_p, top_k, top_p. The warpers keep what transformers' warpers keep
(of exactly equal logits at the edge of top_p the higher ids, always: a plain pass and a verify pass
must agree); repetition is transformers' too, frequency and presence are OpenAI's and vLLM's. What
no row asks for costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import RowHistory, occurrences, runs
from forerun.sampling.kernels import kernels_for, largest, row_chunks

Logits = Float[Tensor, "rows vocab"]

FIRST_LOOK = 64
"""Number of most likely tokens that top_p sorts first; the nucleus is seldom larger."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowParams:
    """Sampling parameters of logits rows as columns; None for parameters that no row uses.

    In a column 0 is off, but 1 for `repetition_penalty`. `excluded_mass` is 1 - top_p;
    `temperature` holds 1 for greedy rows, `temperatures` 0. The latter and `truncations` (min_p,
    top_k and 1 - top_p) are there only where rows are on the CPU, for its kernels. `max_top_k` is
    on the host: a device need not be asked for it.
    """

    greedy: Bool[Tensor, "rows 1"] | None
    all_greedy: bool
    temperature: Float32[Tensor, "rows 1"] | None
    min_p: Float32[Tensor, "rows 1"] | None
    top_k: Int64[Tensor, "rows 1"] | None
    max_top_k: int
    excluded_mass: Float32[Tensor, "rows 1"] | None
    repetition_penalty: Float32[Tensor, "rows 1"] | None
    frequency_penalty: Float32[Tensor, "rows 1"] | None
    presence_penalty: Float32[Tensor, "rows 1"] | None
    temperatures: Float32[Tensor, " rows"] | None
    truncations: Float32[Tensor, "rows 3"] | None

    def rows(self, chosen: slice) -> RowParams:
        """Return the parameters of a subset of the rows."""
        columns: dict[str, Any] = {
            field.name: value[chosen]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **columns)


def pack_params(
    params: Sequence[SamplingParams],
    device: torch.device | str = "cpu",
    rows: Sequence[int] | None = None,
) -> RowParams:
    """Pack the sampling parameters of all rows into columns, once per step.

    `rows` names the request of every logits row; None: one row per request.
    """
    index = range(len(params)) if rows is None else rows
    if any(p.needs_history for p in params):
        return _pack(params, torch.device(device), index)
    shapes = [(p.temperature, p.min_p, p.top_k, p.top_p) for p in params]
    return _without_history(tuple(shapes[i] for i in index), torch.device(device))


@lru_cache(maxsize=1024)
def _without_history(
    shapes: tuple[tuple[float, float, int, float], ...], device: torch.device
) -> RowParams:
    params = [
        SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        for temperature, min_p, top_k, top_p in shapes
    ]
    return _pack(params, device, range(len(params)))


def _pack(
    params: Sequence[SamplingParams], device: torch.device, index: Sequence[int]
) -> RowParams:
    def column(
        values: list[float], off: float, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        if all(value == off for value in values):
            return None
        packed = torch.tensor([[values[i]] for i in index], dtype=dtype)
        return packed.to(device, non_blocking=True)

    shaping = [p for p in params if p.has_processors] and [*params]
    temperatures = truncations = None
    top_k = [max(p.top_k, 0) for p in shaping]
    if device.type == "cpu":
        temperatures = torch.tensor([params[i].temperature for i in index], dtype=torch.float32)
        if any(p.min_p > 0 or p.top_k > 0 or p.top_p < 1 for p in shaping):
            dropped = [(p.min_p, k, 1 - p.top_p) for p, k in zip(params, top_k, strict=True)]
            truncations = torch.tensor([dropped[i] for i in index], dtype=torch.float32)
    return RowParams(
        greedy=column([p.greedy for p in params], False, torch.bool),
        all_greedy=all(p.greedy for p in params),
        temperature=column([p.temperature or 1.0 for p in params], 1.0),
        min_p=column([p.min_p for p in shaping], 0.0),
        top_k=column([*top_k], 0, torch.int64),
        max_top_k=max(top_k, default=0),
        excluded_mass=column([1 - p.top_p for p in shaping], 0.0),
        repetition_penalty=column([p.repetition_penalty for p in shaping], 1.0),
        frequency_penalty=column([p.frequency_penalty for p in shaping], 0.0),
        presence_penalty=column([p.presence_penalty for p in shaping], 0.0),
        temperatures=temperatures,
        truncations=truncations,
    )


def target_probs(
    logits: Float[Tensor, "rows vocab"],
    row_params: RowParams,
    histories: Sequence[RowHistory | None] = (),
    *,
    out: Float[Tensor, "rows vocab"] | None = None,
) -> Float[Tensor, "rows vocab"]:
    """Return the distribution that every row is sampled from, without changing `logits`.

    It is worked out in fp32; in fp64 where the logits are, as when distributions are enumerated. A
    greedy row is one-hot at its most likely token, the lowest id on ties. A row whose logits are
    NaN or +inf, or leave no token possible, is NaN throughout: see `failed_rows`. `histories` has
    one entry per row, None for requests that need none; it is empty if none of them does.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        out = torch.empty(num_rows, vocab_size, device=logits.device, dtype=dtype)
    chunks = list(row_chunks(num_rows, vocab_size))
    if len(chunks) == 1:
        _write_probs(logits, row_params, histories, out)
        return out
    for rows in chunks:
        _write_probs(logits[rows], row_params.rows(rows), histories[rows], out[rows])
    return out


def failed_rows(probs: Float[Tensor, "*rows vocab"]) -> Bool[Tensor, "*rows"]:
    """Return which rows of `target_probs` are NaN, because they could not be computed."""
    return probs[..., 0].isnan()


def _write_probs(
    logits: Tensor, row_params: RowParams, histories: Sequence[RowHistory | None], out: Tensor
) -> None:
    scores = logits
    if any(history is not None for history in histories):
        scores = logits.to(out.dtype, copy=True)  # masks and penalties write in place
        _mask_and_bias(scores, histories)
        _penalise(scores, row_params, histories)
    temperatures = row_params.temperatures
    if temperatures is not None and (kernels := kernels_for(out)):
        # All rows of the CPU go through the kernels, whose rounding does not depend on the batch.
        scores = scores.to(out.dtype).contiguous()
        kernels.softmax(scores, temperatures, row_params.truncations, out)
        return
    if row_params.all_greedy:
        _write_one_hot(scores, out)
        return
    # From here on in place: the plain case needs no more memory than its result.
    if row_params.temperature is not None:
        scores = torch.div(scores, row_params.temperature, out=out)
    elif scores.dtype != out.dtype:
        scores = out.copy_(scores)
    one_hot = None if row_params.greedy is None else _one_hot(scores)
    torch.softmax(_warp(scores, row_params), -1, out=out)
    if row_params.greedy is not None and one_hot is not None:
        out.copy_(torch.where(row_params.greedy, one_hot, out))


def _one_hot(scores: Tensor) -> Logits:
    one_hot = torch.empty_like(scores)
    _write_one_hot(scores, one_hot)
    return one_hot


def _write_one_hot(scores: Tensor, out: Logits) -> None:
    best, token = largest(scores)
    out.zero_().scatter_(-1, token[:, None], 1.0)
    out.masked_fill_(~best.isfinite()[:, None], torch.nan)


def _mask_and_bias(scores: Logits, histories: Sequence[RowHistory | None]) -> None:
    """Apply allowed tokens, logit bias, bad tokens, min_tokens and masks in place."""
    for base, first, rows in runs(histories):
        if base.bias is not None:
            scores[first : first + len(rows)] += base.bias.to(scores.device)
        held = [row for row, history in enumerate(rows, first) if history.held_back]
        if held:
            places = torch.tensor(held, device=scores.device)[:, None]
            scores[places, torch.tensor(base.stop_ids, device=scores.device)] = -torch.inf
        for row, history in enumerate(rows, first):
            if history.allowed is not None:
                scores[row].masked_fill_(~history.allowed.to(scores.device), -torch.inf)


def _penalise(
    scores: Logits, row_params: RowParams, histories: Sequence[RowHistory | None]
) -> None:
    """Apply repetition, frequency and presence penalties in place to tokens that occurred."""
    found = occurrences(histories)
    if found is None:
        return
    rows, tokens, counts = found.rows, found.tokens, found.counts
    if scores.device != rows.device:  # a draft elsewhere than the target
        rows, tokens, counts = (part.to(scores.device) for part in (rows, tokens, counts))
    values = scores[rows, tokens]
    if row_params.repetition_penalty is not None:
        penalty = row_params.repetition_penalty[rows, 0]
        values = torch.where(values < 0, values * penalty, values / penalty)
    if row_params.frequency_penalty is not None:
        values = values - row_params.frequency_penalty[rows, 0] * counts
    if row_params.presence_penalty is not None:
        values = values - row_params.presence_penalty[rows, 0] * (counts > 0)
    scores[rows, tokens] = values


def _warp(scores: Logits, row_params: RowParams) -> Logits:
    """Apply min_p, top_k and top_p truncation."""
    if row_params.min_p is not None:
        probs = scores.softmax(-1)
        unlikely = probs < row_params.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(unlikely, -torch.inf)
    if row_params.top_k is not None:
        scores = _top_k(scores, row_params.top_k, row_params.max_top_k)
    if row_params.excluded_mass is not None:
        scores = _top_p(scores, row_params.excluded_mass)
    return scores


def _top_k(scores: Logits, top_k: Int64[Tensor, "rows 1"], max_top_k: int) -> Logits:
    """Drop tokens below the k-th largest score, but keep ties with it."""
    most = min(max_top_k, scores.shape[-1])
    largest = scores.topk(most, dim=-1).values
    lowest = largest.gather(-1, (top_k - 1).clamp(min=0, max=most - 1))
    return scores.masked_fill((scores < lowest) & (top_k > 0), -torch.inf)


def _top_p(scores: Logits, excluded_mass: Float32[Tensor, "rows 1"]) -> Logits:
    """Keep the fewest most likely tokens with mass 1 - excluded_mass; at least one.

    A row's result depends neither on the other rows nor on how far they made us look: sums run from
    the most likely token down. Of equal scores at the edge the higher ids stay.
    """
    wanted = torch.where(excluded_mass > 0, 1 - excluded_mass.to(torch.float64), -1.0)
    top_scores, before = _most_likely(scores, wanted)
    num_kept = (before < wanted).sum(-1, keepdim=True).clamp_(min=1)
    edge = top_scores.gather(-1, num_kept - 1)
    dropped = scores < edge
    equal = scores == edge
    num_equal = num_kept - (top_scores > edge).sum(-1, keepdim=True)
    if not scores.is_cpu or bool((equal.sum(-1, keepdim=True) > num_equal).any()):
        dropped |= equal & (equal.flip(-1).cumsum(-1).flip(-1) > num_equal)
    return scores.masked_fill(dropped & (excluded_mass > 0), -torch.inf)


def _most_likely(scores: Logits, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest scores of every row, and the total probability before each of them.

    On the CPU, where reading a result costs nothing, they are as few as have the wanted mass in
    every row; elsewhere all.
    """
    probs, vocab_size = scores.softmax(-1), scores.shape[-1]
    num_looked = min(FIRST_LOOK, vocab_size) if scores.is_cpu else vocab_size
    while True:
        top_scores, tokens = scores.topk(num_looked, dim=-1)
        sums = probs.gather(-1, tokens).cumsum(-1, dtype=torch.float64)
        if num_looked == vocab_size or bool((sums[:, -1:] >= wanted).all()):
            return top_scores, torch.nn.functional.pad(sums[:, :-1], (1, 0))
        num_looked = min(8 * num_looked, vocab_size)
