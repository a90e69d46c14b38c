"""Means to plant faults in the engine's verification, commits and texts.

Everything is patched where the engine looks it up, so that engines which are loaded already, and
servers over them, have the fault too while the context lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.engine import step
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.step import Stepper
from forerun.engine.verification import VerifyBatch, probabilities, verdict_of
from forerun.models.kv_store import TensorKVStore
from forerun.sampling.noise import Purpose, draw, step_key, uniform
from forerun.sampling.proposal import Verdict

__all__ = [
    "ChainVerifier",
    "DraftedChain",
    "PlantedFault",
    "change_commits",
    "change_logits",
    "copy_rows",
    "draw_token",
    "rows_of",
    "run_no_cycles",
    "swap",
    "verify_by",
    "wrap_verify",
]

Entries = Sequence[ScheduledSequence]
Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class PlantedFault:
    """A fault of the engine that changes the text of requests with speculation.

    Attributes:
        family: acceptance, residual, bonus, numerics, ending, stale_state, parameters, grammar,
            text or scheduling.
        place: when the faulty code runs.
        plant: returns a context in which the engine has the fault.
    """

    name: str
    family: str
    place: str
    plant: Plant


@contextlib.contextmanager
def swap(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes while the context lasts; each change is (owner, name, new value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def run_no_cycles() -> tuple[Any, str, Any]:
    """Return the change by which every step is taken by its parts, which can be patched."""
    return Stepper, "_run_cycles", lambda *_: False


def wrap_verify(
    around: Callable[[Callable[..., list[Verdict]], Entries, Tensor, Tensor], list[Verdict]],
    *others: tuple[Any, str, Any],
) -> AbstractContextManager[None]:
    """Replace the verification of a pass; `around` gets the present one as its first argument."""
    original = step.verify

    def verify(entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        return around(original, entries, logits, tokens)

    return swap((step, "verify", verify), run_no_cycles(), *others)


def rows_of(entries: Entries) -> Iterator[tuple[ScheduledSequence, slice]]:
    """Yield every sequence with the range of its rows of logits."""
    start = 0
    for entry in entries:
        yield entry, slice(start, start + entry.num_logit_rows)
        start += entry.num_logit_rows


def change_logits(
    change: Callable[[ScheduledSequence, Tensor], Tensor | None], *others: tuple[Any, str, Any]
) -> AbstractContextManager[None]:
    """Change the logits of sequences that drafted, before verification; None leaves them."""

    def around(verify: Any, entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        logits = logits.clone()
        for entry, rows in rows_of(entries):
            if entry.num_drafted and (changed := change(entry, logits[rows])) is not None:
                logits[rows] = changed.to(logits.dtype)
        return verify(entries, logits, tokens)

    return wrap_verify(around, *others)


class _Commits:
    """A context whose rows to commit are changed first."""

    def __init__(self, context: Any, change: Callable[[list[int]], Sequence[int]]) -> None:
        self._context, self._change = context, change

    def commit(self, rows: Sequence[int]) -> None:
        self._context.commit(self._change([*rows]))


def change_commits(
    change: Callable[[ScheduledSequence, list[int]], Sequence[int]] = lambda entry, rows: rows,
    afterwards: Callable[[ScheduledSequence], None] = lambda entry: None,
) -> AbstractContextManager[None]:
    """Change which staged rows a drafting sequence commits, and what happens after a commit."""
    original = ScheduledSequence.commit

    def commit(entry: ScheduledSequence) -> None:
        if not entry.num_drafted or not entry.tree.is_chain:
            original(entry)
            return
        context: Any = entry.context
        entry.context = _Commits(context, lambda rows: change(entry, rows))  # type: ignore[assignment]
        try:
            original(entry)
        finally:
            entry.context = context
        afterwards(entry)

    return swap((ScheduledSequence, "commit", commit), run_no_cycles())


def copy_rows(entry: ScheduledSequence, sources: range, targets: range) -> None:
    """Overwrite the KV of some rows of a sequence with that of others."""
    store, slot = entry.context.store, entry.context.slot
    assert isinstance(store, TensorKVStore)
    content = store._take(slot, torch.tensor(sources))
    store._put(slot, torch.tensor(targets), content)


# ------------------------------------------------------------------------------------ verification


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftedChain:
    """A drafted chain with the rows that its verification compares.

    Attributes:
        batch_size: sequences that are verified in this pass.
        logits: of the target, a row per drafted token and one for the bonus.
        p: the same as processed probabilities.
        q: the row that each token was drawn from; one-hot where the draft is deterministic.
    """

    entry: ScheduledSequence
    batch_size: int
    logits: Tensor
    p: Tensor
    q: Tensor
    tokens: list[int]

    def number(self, place: int, purpose: Purpose) -> float:
        """Return the uniform number of a comparison or draw of this step."""
        sequence = self.entry.sequence
        key = step_key(sequence.noise_key, len(sequence.ids), place, purpose)
        return float(uniform(torch.tensor([key]))[0])


class ChainVerifier:
    """Token-by-token verification that is exact; subclasses override what is at fault.

    Trees and plain steps are verified by the engine.
    """

    def applies(self, chain: DraftedChain) -> bool:
        """Whether the faulty code runs; otherwise the chain is verified exactly."""
        return True

    def accept_prob(self, chain: DraftedChain, place: int) -> float:
        token = chain.tokens[place]
        return float(chain.p[place, token]) / max(float(chain.q[place, token]), 1e-30)

    def recovered(self, chain: DraftedChain, place: int) -> Tensor:
        weights = (chain.p[place] - chain.q[place]).clamp(min=0)
        return weights if float(weights.sum()) > 0 else chain.p[place]

    def bonus(self, chain: DraftedChain) -> Tensor:
        return chain.p[-1]

    def recovered_number(self, chain: DraftedChain, place: int) -> float:
        return chain.number(0, Purpose.RECOVERED)

    def draw_recovered(self, chain: DraftedChain, place: int) -> int:
        weights = self.recovered(chain, place)
        return draw_token(weights, self.recovered_number(chain, place))

    def verify(self, chain: DraftedChain) -> Verdict:
        rule = self if self.applies(chain) else ChainVerifier()
        accept, reached, expected = 0, 1.0, 0.0
        probs = [min(1.0, rule.accept_prob(chain, place)) for place in range(len(chain.tokens))]
        for prob in probs:
            reached *= prob
            expected += reached
        while accept < len(probs) and chain.number(accept, Purpose.ACCEPT) < probs[accept]:
            accept += 1
        if accept == len(probs):
            final = draw_token(rule.bonus(chain), chain.number(0, Purpose.BONUS))
        else:
            final = rule.draw_recovered(chain, accept)
        tokens = (*chain.tokens[:accept], final)
        return verdict_of(chain.entry, tuple(range(accept)), tokens, expected)


def draw_token(weights: Tensor, number: float) -> int:
    """Draw a token from weights, which need not sum to 1."""
    return int(draw(weights[None].contiguous(), torch.tensor([number], dtype=torch.float64))[0])


def verify_by(
    verifier: ChainVerifier, *others: tuple[Any, str, Any]
) -> AbstractContextManager[None]:
    """Verify all drafted chains by `verifier`."""

    def around(verify: Any, entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        verdicts: list[Verdict] = verify(entries, logits, tokens)
        for index, (entry, rows) in enumerate(rows_of(entries)):
            if entry.num_drafted and entry.tree.is_chain:
                part = logits[rows], tokens[rows]
                verdicts[index] = verifier.verify(_chain_of(entry, *part, len(entries)))
        return verdicts

    return wrap_verify(around, *others)


def _chain_of(
    entry: ScheduledSequence, logits: Tensor, fed: Tensor, batch_size: int
) -> DraftedChain:
    proposal, tokens = entry.proposal, fed.tolist()[1:]
    assert proposal is not None
    p = probabilities(VerifyBatch(entries=[entry], logits=logits, tokens=fed))
    q = torch.zeros_like(p[:-1])
    if proposal.choice.is_drawn and proposal.draft_probs is not None:
        q = proposal.draft_probs.to(p)
    else:
        q[torch.arange(len(tokens)), torch.tensor(tokens)] = 1.0
    return DraftedChain(entry=entry, batch_size=batch_size, logits=logits, p=p, q=q, tokens=tokens)
