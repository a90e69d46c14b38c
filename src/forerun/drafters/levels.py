"""Chains drafted level by level: a level is one pass, one distribution and one draw per chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.drafters.draft_sequence import DraftSequence
from forerun.models.base import LanguageModel, RowBatch
from forerun.sampling.config import Choice
from forerun.sampling.history import RowHistory
from forerun.sampling.kernels import largest
from forerun.sampling.noise import Purpose, draw, position_key, step_keys, uniform
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.walk import target_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The tokens of all chains drafted in one call, and their draft distributions.

    Attributes:
        tokens: drafted tokens; meaningless past the budget of a sequence.
        draft_probs: the rows they were drawn from, likewise; None where all chains are
            deterministic.
        stop_values: per sequence, what its stop rule measured before its draws, up to the first
            node it leaves out; empty where no sequence has a rule.
    """

    tokens: Int64[Tensor, "levels sequences"]
    draft_probs: Float[Tensor, "levels sequences vocab"] | None
    stop_values: Sequence[Sequence[float]] = ()


def draft_levels(
    model: LanguageModel, sequences: Sequence[DraftSequence], batch: RowBatch, vocab_size: int
) -> Levels:
    """Draft every sequence to its budget, or until the stop rules have ended all chains."""
    num_levels, device = sequences[0].budget, model.device
    chooser = Chooser(sequences, num_levels, device)
    params = pack_params([sequence.params for sequence in sequences], device)
    draft_probs = None
    if any(sequence.choice is not Choice.DETERMINISTIC for sequence in sequences):
        draft_probs = torch.empty(num_levels, len(sequences), vocab_size, device=device)
    positions = batch.positions.index_select(0, batch.logit_rows)
    stopping = Stopping(sequences, device) if any(b.stop is not None for b in sequences) else None
    drafted: list[Tensor] = []
    for level in range(num_levels):
        if level > 0:
            sequences = [sequence for sequence in sequences if sequence.budget > level]
            positions = positions[: len(sequences)] + 1
            batch = next_pass(sequences, drafted[-1][: len(sequences)], positions)
        logits = fit_vocabulary(model.forward(batch).logits, vocab_size)
        probs = target_probs(
            logits,
            params.rows(slice(len(sequences))),
            row_histories(sequences, drafted),
            out=None if draft_probs is None else draft_probs[level, : len(sequences)],
        )
        if stopping is not None:
            stopping.measure(logits, probs)
        drafted.append(chooser.choose(probs, level))
        if stopping is not None and stopping.ended(len(sequences)):
            break
    return Levels(
        tokens=torch.nn.utils.rnn.pad_sequence(drafted, batch_first=True),
        draft_probs=None if draft_probs is None else draft_probs[: len(drafted)],
        stop_values=() if stopping is None else stopping.values,
    )


class Stopping:
    """Evaluates stop rules before each draw and notes which chains have ended.

    Attributes:
        values: per chain, what its rule has measured so far; empty without a rule.
    """

    def __init__(self, sequences: Sequence[DraftSequence], device: torch.device) -> None:
        self.rules = [s.stop for s in sequences]
        self.values: list[list[float]] = [[] for _ in sequences]
        self._stopped = [False] * len(sequences)
        is_entropy = [rule is not None and rule.measure == "entropy" for rule in self.rules]
        is_greedy = [s.choice is Choice.DETERMINISTIC for s in sequences]
        self._some_entropy, self._some_greedy = any(is_entropy), any(is_greedy)
        self._is_entropy = torch.tensor(is_entropy, device=device)
        self._is_greedy = torch.tensor(is_greedy, device=device)[:, None]

    def measure(
        self, logits: Float[Tensor, "going vocab"], probs: Float[Tensor, "going vocab"]
    ) -> None:
        """Measure the stop rules of the first chains, as many as `logits` has rows."""
        for index, value in enumerate(self._measured(logits, probs)):
            rule = self.rules[index]
            if rule is None or self._stopped[index]:
                continue
            self.values[index].append(value)
            self._stopped[index] = len(self.values[index]) > 1 and rule.stops(value)

    def ended(self, num_going: int) -> bool:
        return all(self._stopped[:num_going])

    def _measured(self, logits: Tensor, probs: Tensor) -> list[float]:
        going = len(probs)
        if self._some_greedy:
            probs = torch.where(self._is_greedy[:going], logits.float().softmax(-1), probs)
        values = probs.amax(-1)
        if self._some_entropy:
            entropy = torch.special.entr(probs).sum(-1)
            values = torch.where(self._is_entropy[:going], entropy, values)
        measured: list[float] = values.tolist()
        return measured


def draft_keys(
    sequences: Sequence[DraftSequence], num_levels: int
) -> Int64[Tensor, "levels sequences"]:
    """Return the noise keys of sampled draft tokens.

    By committed length and node: a rejected position is drawn afresh next step.
    """
    levels = range(num_levels)
    keys = [
        step_keys(s.request.noise_key, s.num_committed, levels, Purpose.DRAFT) for s in sequences
    ]
    return torch.tensor(keys, dtype=torch.int64).t()


def race_keys(
    sequences: Sequence[DraftSequence], num_levels: int
) -> Int64[Tensor, "levels sequences"]:
    """Return the noise keys of coupled draft tokens, which equal those of the target's draws."""
    keys = [
        [position_key(b.request.noise_key, b.num_committed + level) for b in sequences]
        for level in range(num_levels)
    ]
    return torch.tensor(keys, dtype=torch.int64)


def next_pass(sequences: Sequence[DraftSequence], tokens: Tensor, positions: Tensor) -> RowBatch:
    return RowBatch(
        tokens=tokens,
        positions=positions,
        spans=tuple(sequence.next_span() for sequence in sequences),
        logit_rows=torch.arange(len(sequences), device=tokens.device),
    )


class Chooser:
    """Chooses the next tokens of a level: the likeliest ones or draws, by request."""

    def __init__(
        self, sequences: Sequence[DraftSequence], num_levels: int, device: torch.device
    ) -> None:
        self.choices = [sequence.choice for sequence in sequences]
        self.kinds = set(self.choices)
        if Choice.SAMPLED in self.kinds:
            self.uniforms = uniform(draft_keys(sequences, num_levels).to(device))
        if Choice.COUPLED in self.kinds:
            self.positions = race_keys(sequences, num_levels).to(device)

    def choose(
        self, probs: Float[Tensor, "sequences vocab"], level: int
    ) -> Int64[Tensor, " sequences"]:
        """Return the next token of every sequence that is still drafting."""
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


def row_histories(
    sequences: Sequence[DraftSequence], drafted: Sequence[Tensor]
) -> list[RowHistory | None]:
    """Return the token histories that penalties read for each row; this waits for the device."""
    if all(sequence.request.history is None for sequence in sequences):
        return []
    levels: list[list[int]] = [tokens.tolist() for tokens in drafted]
    return [
        history.at([tokens[row] for tokens in levels])
        if (history := sequence.request.history) is not None
        else None
        for row, sequence in enumerate(sequences)
    ]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Return draft logits over the target's token ids; ids the draft lacks become impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
