"""Drafts the trees of a whole batch with a draft model, with one pass per level.

Every pass reads the nodes above the last level once more, as a tree after the last committed
token: of rows that earlier passes staged, a pass can see a chain but no branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.draft_sequence import DraftSequence
from forerun.drafters.levels import fit_vocabulary
from forerun.drafters.tree_growth import (
    BestFirst,
    Drawings,
    Drawn,
    draw_behind_top,
    draw_siblings,
    race_siblings,
)
from forerun.models.base import LanguageModel, RowBatch, Span, pack
from forerun.sampling.config import Choice
from forerun.sampling.history import RowHistory
from forerun.sampling.kernels import on_host
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree


def draft_trees(
    model: LanguageModel, sequences: Sequence[DraftSequence], batch: RowBatch, vocab_size: int
) -> list[Proposal]:
    """Draft a tree per sequence; the shapes may differ."""
    growths: list[BestFirst | Drawn] = [
        BestFirst(s) if s.tree_choice is Choice.DETERMINISTIC else Drawn(s) for s in sequences
    ]
    going = growths
    while going:
        logits = fit_vocabulary(model.forward(batch).logits, vocab_size)
        _add_level(going, _frontier_probs(going, logits))
        going = [growth for growth in going if growth.frontier]
        if going:
            batch = next_pass(going, model.device)
    return [growth.proposal() for growth in growths]


def next_pass(growths: Sequence[BestFirst | Drawn], device: torch.device) -> RowBatch:
    """Return the pass that feeds every tree so far and computes logits after the frontiers."""
    spans: list[Span] = []
    tokens: list[int] = []
    wanted: list[int] = []
    for growth in growths:
        sequence, paths, first = growth.sequence, growth.read_paths(), len(tokens) + 1
        rows = {path: row for row, path in enumerate(paths)}
        spans.append(
            sequence.tree_span(TokenTree(tuple([rows.get(p[:-1], -1) for p in paths])), rows)
        )
        tokens += [sequence.context.ids[-1], *[path[-1] for path in paths]]
        wanted += [first + rows[path] for path in growth.frontier]
    return pack(spans, tokens, wanted, device)


def _frontier_probs(
    growths: Sequence[BestFirst | Drawn], logits: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    """Return the distribution after every path of the frontiers, with penalties for its history."""
    rows = [index for index, growth in enumerate(growths) for _ in growth.frontier]
    params = pack_params([g.sequence.tree_params for g in growths], logits.device, rows)
    histories: list[RowHistory | None] = []
    if any(growth.sequence.request.history is not None for growth in growths):
        histories = [
            None if (history := growth.sequence.request.history) is None else history.at(path)
            for growth in growths
            for path in growth.frontier
        ]
    return target_probs(logits, params, histories)


def _add_level(growths: Sequence[BestFirst | Drawn], probs: Float[Tensor, "rows vocab"]) -> None:
    """Add the children of the frontier to every tree; this waits for the device once."""
    members: dict[Choice, list[BestFirst | Drawn]] = {}
    rows: dict[Choice, list[int]] = {}
    first = 0
    for growth in growths:
        choice, end = growth.sequence.tree_choice, first + len(growth.frontier)
        members.setdefault(choice, []).append(growth)
        rows.setdefault(choice, []).extend(range(first, end))
        first = end
    chosen = [
        choose(choice, members[choice], probs if len(rows) == 1 else probs[rows[choice]])
        for choice in members
    ]
    columns = on_host(*[column.flatten() for c in chosen for column in (c.tokens, c.chances)])
    for group, found in zip(members.values(), chosen, strict=True):
        tokens, chances = (_row_lists(columns.pop(0), found.tokens.shape[1]) for _ in range(2))
        row = 0
        for growth in group:
            num_rows = len(growth.frontier)
            growth.add(
                [*islice(tokens, num_rows)],
                [*islice(chances, num_rows)],
                found.rows[row : row + num_rows],
            )
            row += num_rows


def _row_lists(column: list[Any], width: int) -> Iterator[list[Any]]:
    for start in range(0, len(column), width):
        yield column[start : start + width]


def choose(
    choice: Choice, growths: Sequence[BestFirst | Drawn], probs: Float[Tensor, "rows vocab"]
) -> Drawings:
    """Choose the children of the frontiers of all trees with the same rule for choosing nodes."""
    if choice is Choice.DETERMINISTIC:
        width = max(growth.sequence.tree_shape.width for growth in growths)
        values, tokens = probs.topk(min(width, probs.shape[1]), dim=-1)
        return Drawings(tokens=tokens, chances=values, rows=probs)
    keys = [keys for g in growths if isinstance(g, Drawn) for keys in g.noise_keys()]
    counts = torch.tensor([*map(len, keys)], device=probs.device)
    padded = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, keys)], batch_first=True)
    if choice is Choice.TOP_AND_SAMPLED:
        return draw_behind_top(probs, padded.to(probs.device), counts)
    draw = race_siblings if choice is Choice.COUPLED else draw_siblings
    return draw(probs, padded.to(probs.device))
