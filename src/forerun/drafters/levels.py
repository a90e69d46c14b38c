"""Chains drafted level by level: one pass, one distribution and one draw per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.drafters.branch import Branch
from forerun.drafters.stopping import Stopping
from forerun.models.base import LanguageModel, RowBatch
from forerun.sampling.choice import Choice
from forerun.sampling.history import RowHistory
from forerun.sampling.largest import largest
from forerun.sampling.noise import Purpose, draw, position_key, step_key, uniform
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.walk import target_tokens

__all__ = ["Levels", "draft_keys", "draft_levels", "fit_vocabulary", "race_keys"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The chains of one call side by side.

    Attributes:
        tokens: drafted tokens; meaningless past the budget of a branch.
        draft_probs: the rows they were drawn from, likewise; None where all chains are
            deterministic.
        stop_values: per branch, what its stop rule measured before its draws, up to the first node
            it leaves out; empty where no branch has a rule.
    """

    tokens: Int64[Tensor, "levels branches"]
    draft_probs: Float[Tensor, "levels branches vocab"] | None
    stop_values: Sequence[Sequence[float]] = ()


def draft_levels(
    model: LanguageModel, branches: Sequence[Branch], batch: RowBatch, vocab_size: int
) -> Levels:
    """Draft every branch to its budget, or until all that go on are stopped by their rules.

    Args:
        model: the draft.
        branches: those that go deepest first, so that the ones going on are always the first.
        batch: feeds all they have pending, and wants the last row of each.
        vocab_size: of the target.
    """
    num_levels, device = branches[0].budget, model.device
    chooser = Chooser(branches, num_levels, device)
    params = pack_params([branch.params for branch in branches], device)
    draft_probs = None
    if any(branch.choice is not Choice.DETERMINISTIC for branch in branches):
        draft_probs = torch.empty(num_levels, len(branches), vocab_size, device=device)
    positions = batch.positions.index_select(0, batch.logit_rows)
    stopping = Stopping(branches, device) if any(b.stop is not None for b in branches) else None
    drafted: list[Tensor] = []
    for level in range(num_levels):
        if level > 0:
            branches = [branch for branch in branches if branch.budget > level]
            positions = positions[: len(branches)] + 1
            batch = next_pass(branches, drafted[-1][: len(branches)], positions)
        logits = fit_vocabulary(model.forward(batch).logits, vocab_size)
        probs = target_probs(
            logits,
            params.rows(slice(len(branches))),
            row_histories(branches, drafted),
            out=None if draft_probs is None else draft_probs[level, : len(branches)],
        )
        if stopping is not None:
            stopping.look(logits, probs)
        drafted.append(chooser.choose(probs, level))
        if stopping is not None and stopping.ended(len(branches)):
            break
    return Levels(
        tokens=torch.nn.utils.rnn.pad_sequence(drafted, batch_first=True),
        draft_probs=None if draft_probs is None else draft_probs[: len(drafted)],
        stop_values=() if stopping is None else stopping.values,
    )


def draft_keys(branches: Sequence[Branch], num_levels: int) -> Int64[Tensor, "levels branches"]:
    """Keys of sampled nodes.

    By committed length and node: a rejected position is drawn afresh next step.
    """
    keys = [
        [step_key(b.request.noise_key, b.num_committed, level, Purpose.DRAFT) for b in branches]
        for level in range(num_levels)
    ]
    return torch.tensor(keys, dtype=torch.int64)


def race_keys(branches: Sequence[Branch], num_levels: int) -> Int64[Tensor, "levels branches"]:
    """Keys of coupled nodes: of the race the target will run at the same position."""
    keys = [
        [position_key(b.request.noise_key, b.num_committed + level) for b in branches]
        for level in range(num_levels)
    ]
    return torch.tensor(keys, dtype=torch.int64)


def next_pass(branches: Sequence[Branch], tokens: Tensor, positions: Tensor) -> RowBatch:
    """Feeds the token each branch has just drafted."""
    return RowBatch(
        tokens=tokens,
        positions=positions,
        spans=tuple(branch.next_span() for branch in branches),
        logit_rows=torch.arange(len(branches), device=tokens.device),
    )


class Chooser:
    """Draws the nodes of a level, each branch by its own choice and noise.

    Args:
        branches: all of them.
        num_levels: of the deepest.
        device: of the draft.
    """

    def __init__(self, branches: Sequence[Branch], num_levels: int, device: torch.device) -> None:
        self.choices = [branch.choice for branch in branches]
        self.kinds = set(self.choices)
        if Choice.SAMPLED in self.kinds:
            self.uniforms = uniform(draft_keys(branches, num_levels).to(device))
        if Choice.COUPLED in self.kinds:
            self.positions = race_keys(branches, num_levels).to(device)

    def choose(
        self, probs: Float[Tensor, "branches vocab"], level: int
    ) -> Int64[Tensor, " branches"]:
        """The next token of every branch that goes on."""
        if len(self.kinds) == 1:
            return self._choose(self.choices[0], probs, level, slice(len(probs)))
        tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
        for choice in self.kinds:
            rows = [row for row in range(len(probs)) if self.choices[row] is choice]
            tokens[rows] = self._choose(choice, probs[rows], level, rows)
        return tokens

    def _choose(self, choice: Choice, probs: Tensor, level: int, rows: slice | list[int]) -> Tensor:
        if choice is Choice.DETERMINISTIC:
            return largest(probs)[1]
        if choice is Choice.SAMPLED:
            return draw(probs, self.uniforms[level, rows])
        return target_tokens(probs, self.positions[level, rows])


def row_histories(branches: Sequence[Branch], drafted: Sequence[Tensor]) -> list[RowHistory | None]:
    """What penalties count up to the next node; reading the drafted ids waits for the device."""
    if all(branch.request.history is None for branch in branches):
        return []
    levels: list[list[int]] = [tokens.tolist() for tokens in drafted]
    return [
        history.at([tokens[row] for tokens in levels])
        if (history := branch.request.history) is not None
        else None
        for row, branch in enumerate(branches)
    ]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits over the target's ids: padding ids are cut off or made impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
