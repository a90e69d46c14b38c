"""Twenty faults of verification, commits, endings and texts, to plant in the engine.

Most were found in public engines. Each changes what requests with speculation say where its place
is exercised, and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from tests.lab.planting import (
    ChainVerifier,
    DraftedChain,
    Entries,
    PlantedFault,
    change_commits,
    change_logits,
    copy_rows,
    draw_token,
    rows_of,
    run_no_cycles,
    swap,
    verify_by,
    wrap_verify,
)
from torch import Tensor

from forerun.engine import results
from forerun.engine import sequence as sequence_module
from forerun.engine.intake import Intake
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.engine.step import Stepper
from forerun.sampling.history import History
from forerun.sampling.noise import Purpose
from forerun.sampling.proposal import Verdict


class _Lenient(ChainVerifier):
    """Compares a quarter of the number where `applies` says so."""

    def __init__(self, applies: Callable[[DraftedChain], bool]) -> None:
        self._applies = applies

    def applies(self, chain: DraftedChain) -> bool:
        return self._applies(chain)

    def accept_prob(self, chain: DraftedChain, place: int) -> float:
        return 4 * super().accept_prob(chain, place)


def _unmask(first: Callable[[int], int]) -> AbstractContextManager[None]:
    """Take the grammar's mask from the rows of a pass from `first(number of rows)` on."""
    rows_before, advance_before = ScheduledSequence.row_histories, History._advance

    def row_histories(entry: ScheduledSequence, drafted: list[int], vocab_size: int) -> Any:
        rows = rows_before(entry, drafted, vocab_size)
        if not entry.num_drafted:
            return rows
        start = first(len(rows))
        free = [None if row is None else replace(row, mask=None, allowed=None) for row in rows]
        return [*rows[:start], *free[start:]]

    def advance(history: History, mask: Any, token: int) -> None:
        advance_before(history, mask, token)
        if history._failure is not None:  # a forbidden token: the text goes on without a grammar
            history._failure, history.mask, history._masked = None, None, {}

    return swap(
        (ScheduledSequence, "row_histories", row_histories),
        (History, "_advance", advance),
        run_no_cycles(),
    )


def plant_lenient_late() -> AbstractContextManager[None]:
    """A relaxed comparison sets in after 64 tokens of output."""
    return verify_by(_Lenient(lambda chain: chain.entry.sequence.num_output >= 64))


def plant_relaxed_greedy() -> AbstractContextManager[None]:
    """At temperature 0 the second best token passes, as in TensorRT-LLM's relaxed acceptance."""

    class TopTwo(ChainVerifier):
        def applies(self, chain: DraftedChain) -> bool:
            return chain.entry.sequence.params.greedy

        def accept_prob(self, chain: DraftedChain, place: int) -> float:
            return float(chain.tokens[place] in chain.logits[place].topk(2).indices.tolist())

    return verify_by(TopTwo())


def plant_lenient_chat() -> AbstractContextManager[None]:
    """Conversations are served with another setting of the comparison than completions."""
    rendered: set[tuple[int, ...]] = set()
    original = Intake.render

    def render(intake: Intake, *args: Any, **options: Any) -> list[int]:
        ids = original(intake, *args, **options)
        rendered.add(tuple(ids))
        return ids

    def applies(chain: DraftedChain) -> bool:
        sequence = chain.entry.sequence
        return tuple(sequence.ids[: sequence.num_prompt]) in rendered

    return verify_by(_Lenient(applies), (Intake, "render", render))


def plant_recovered_from_target() -> AbstractContextManager[None]:
    """The token after a rejection is drawn from the target's row, nothing subtracted."""

    class FromTarget(ChainVerifier):
        def recovered(self, chain: DraftedChain, place: int) -> Tensor:
            return chain.p[place]

    return verify_by(FromTarget())


def plant_residual_of_next_row() -> AbstractContextManager[None]:
    """The row after the rejected token is read (openvinotoolkit/openvino.genai#4190)."""

    class NextRow(ChainVerifier):
        def recovered(self, chain: DraftedChain, place: int) -> Tensor:
            weights = (chain.p[place + 1] - chain.q[place]).clamp(min=0)
            return weights if float(weights.sum()) > 0 else chain.p[place + 1]

    return verify_by(NextRow())


def plant_residual_not_normalised() -> AbstractContextManager[None]:
    """The residual does not add up to 1; a number past its end takes the likeliest token."""

    class NotNormalised(ChainVerifier):
        def draw_recovered(self, chain: DraftedChain, place: int) -> int:
            weights = self.recovered(chain, place)
            number = self.recovered_number(chain, place)
            if number >= float(weights.sum()):
                return int(chain.p[place].argmax())
            return draw_token(weights, number / float(weights.sum()))

    return verify_by(NotNormalised())


def plant_bonus_temperature() -> AbstractContextManager[None]:
    """The bonus token is drawn at another temperature than the others."""

    class Flatter(ChainVerifier):
        def bonus(self, chain: DraftedChain) -> Tensor:
            return chain.p[-1].pow(0.5)

    return verify_by(Flatter())


def plant_bonus_not_truncated() -> AbstractContextManager[None]:
    """The bonus token is drawn without top-k, top-p and min-p."""

    class Whole(ChainVerifier):
        def applies(self, chain: DraftedChain) -> bool:
            params = chain.entry.sequence.params
            return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

        def bonus(self, chain: DraftedChain) -> Tensor:
            logits = chain.logits[-1].float()
            return (logits / chain.entry.sequence.params.temperature).softmax(-1)

    return verify_by(Whole())


def plant_penalties_count_rejected() -> AbstractContextManager[None]:
    """Rejected tokens stay in the counts that penalties read."""

    def count(entry: ScheduledSequence) -> None:
        history, proposal, verdict = entry.sequence.history, entry.proposal, entry.verdict
        if history is None or history.counts is None or proposal is None or verdict is None:
            return
        for token in proposal.tokens.tolist()[verdict.num_accepted :]:
            history.counts.add(token)

    return change_commits(afterwards=count)


def plant_number_used_twice() -> AbstractContextManager[None]:
    """With a seed the number that rejected a token also draws the one in its place."""

    class UsedTwice(ChainVerifier):
        def applies(self, chain: DraftedChain) -> bool:
            return chain.entry.sequence.params.seed is not None

        def recovered_number(self, chain: DraftedChain, place: int) -> float:
            return chain.number(place, Purpose.ACCEPT)

    return verify_by(UsedTwice())


def plant_logits_cast() -> AbstractContextManager[None]:
    """The logits of the pass go through an 8-bit format with two bits of mantissa."""
    return change_logits(lambda entry, logits: logits.float().to(torch.float8_e5m2).float())


def plant_rejected_kept() -> AbstractContextManager[None]:
    """After a rejection the row of the rejected token stays (ml-explore/mlx-lm#1109)."""

    def change(entry: ScheduledSequence, rows: list[int]) -> list[int]:
        is_partial = len(rows) < entry.num_chain + entry.num_drafted
        return [*rows[:-1], len(rows)] if is_partial else rows

    return change_commits(change)


def plant_stale_after_preemption() -> AbstractContextManager[None]:
    """A sequence that comes back after a preemption finds its first rows overwritten."""
    done: set[tuple[int, int]] = set()

    def damage(entry: ScheduledSequence) -> None:
        sequence, end = entry.sequence, entry.context.num_cached
        size = min(16, end // 2)
        mark = sequence.noise_key, sequence.num_preemptions
        if sequence.num_preemptions and mark not in done and size:
            done.add(mark)
            copy_rows(entry, range(end - size, end), range(size))

    return change_commits(afterwards=damage)


def plant_eos_banned() -> AbstractContextManager[None]:
    """The end-of-sequence token cannot come out of the pass."""

    def change(entry: ScheduledSequence, logits: Tensor) -> Tensor:
        logits[:, [*entry.sequence.stops.eos]] = -torch.inf
        return logits

    return change_logits(change)


def plant_stop_string_missed() -> AbstractContextManager[None]:
    """A stop string that began in an earlier step is not seen (sgl-project/sglang#23802)."""
    begins = [0]
    append, find = Sequence.append, results.find_stop_string

    def append_noting(sequence: Sequence, tokens: tuple[int, ...], sources: Any) -> int:
        begins[0] = len(sequence.detokenizer.text) if len(tokens) > 1 else 0
        return append(sequence, tokens, sources)

    def find_in_step(text: str, start: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
        found = find(text[begins[0] :], max(0, start - begins[0]), stops)
        return None if found is None else (found[0] + begins[0], found[1])

    return swap(
        (Sequence, "append", append_noting),
        (sequence_module, "find_stop_string", find_in_step),
        run_no_cycles(),
    )


def plant_space_dropped() -> AbstractContextManager[None]:
    """The text of a step loses the space that it begins with."""
    append = Sequence.append

    def append_stripped(sequence: Sequence, tokens: tuple[int, ...], sources: Any) -> int:
        detokenizer = sequence.detokenizer
        size = len(detokenizer.text)
        taken = append(sequence, tokens, sources)
        if len(tokens) > 1 and sequence.text_end is None and detokenizer.text[size:][:1] == " ":
            detokenizer.text = detokenizer.text[:size] + detokenizer.text[size + 1 :]
        return taken

    return swap((Sequence, "append", append_stripped), run_no_cycles())


def plant_mask_missing() -> AbstractContextManager[None]:
    """Only the first row of a pass has the mask."""
    return _unmask(lambda num_rows: 1)


def plant_bonus_not_masked() -> AbstractContextManager[None]:
    """The bonus row has no mask (ardanlabs/kronk#788)."""
    return _unmask(lambda num_rows: num_rows - 1)


def plant_row_of_neighbour() -> AbstractContextManager[None]:
    """In the step after a neighbour ends, a sequence reads the rows of the next one."""
    present: set[int] = set()

    def around(verify: Any, entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        keys = {entry.sequence.noise_key for entry in entries}
        has_left = bool(present - keys)
        present.clear()
        present.update(keys)
        if has_left and len(entries) > 1:
            logits, original = logits.clone(), logits
            rows = [rows for _, rows in rows_of(entries)]
            for entry, own, other in zip(entries, rows, [*rows[1:], rows[0]], strict=True):
                size = min(own.stop - own.start, other.stop - other.start)
                if entry.num_drafted:
                    moved = original[other.start : other.start + size]
                    logits[own.start : own.start + size] = moved
        return verify(entries, logits, tokens)

    return wrap_verify(around)


def plant_offset_by_prompt() -> AbstractContextManager[None]:
    """Where a prompt is read in the same pass, drafted tokens are compared one row too early."""
    reads = [False]
    original = Stepper._forward_and_verify

    def run(stepper: Stepper, fed: Entries, emitting: Entries, clock: Any) -> None:
        reads[0] = any(entry.num_chain > 1 for entry in fed)
        original(stepper, fed, emitting, clock)

    def change(entry: ScheduledSequence, logits: Tensor) -> Tensor | None:
        return logits[[0, *range(len(logits) - 1)]] if reads[0] else None

    return change_logits(change, (Stepper, "_forward_and_verify", run))


FAULTS = (
    PlantedFault(
        "lenient beyond 64 tokens",
        "acceptance",
        "outputs of more than 64 tokens, at a temperature above 0",
        plant_lenient_late,
    ),
    PlantedFault(
        "two best tokens pass when greedy",
        "acceptance",
        "every step at temperature 0",
        plant_relaxed_greedy,
    ),
    PlantedFault(
        "lenient on the chat route",
        "acceptance",
        "the chat route, at a temperature above 0",
        plant_lenient_chat,
    ),
    PlantedFault(
        "recovered token from the target's row",
        "residual",
        "rejections at a temperature above 0",
        plant_recovered_from_target,
    ),
    PlantedFault(
        "residual of the next row",
        "residual",
        "rejections, at any temperature",
        plant_residual_of_next_row,
    ),
    PlantedFault(
        "residual not normalised",
        "residual",
        "rejections at a temperature above 0",
        plant_residual_not_normalised,
    ),
    PlantedFault(
        "bonus at twice the temperature",
        "bonus",
        "steps whose draft is accepted whole, at a temperature above 0",
        plant_bonus_temperature,
    ),
    PlantedFault(
        "bonus ignores top-k, top-p and min-p",
        "bonus",
        "steps whose draft is accepted whole, with top-k, top-p or min-p",
        plant_bonus_not_truncated,
    ),
    PlantedFault(
        "penalties count rejected tokens",
        "parameters",
        "requests with a repetition, frequency or presence penalty",
        plant_penalties_count_rejected,
    ),
    PlantedFault(
        "a seed's number used twice",
        "parameters",
        "rejections in requests with a seed, at a temperature above 0",
        plant_number_used_twice,
    ),
    PlantedFault("logits in 8 bits in the pass", "numerics", "every step", plant_logits_cast),
    PlantedFault(
        "row of the rejected token kept",
        "stale_state",
        "the steps after a rejection",
        plant_rejected_kept,
    ),
    PlantedFault(
        "first rows overwritten after a preemption",
        "stale_state",
        "a preemption",
        plant_stale_after_preemption,
    ),
    PlantedFault(
        "EOS banned in the pass", "ending", "texts that may end by themselves", plant_eos_banned
    ),
    PlantedFault(
        "stop string missed across steps",
        "ending",
        "a stop string that begins in one step and ends in the next",
        plant_stop_string_missed,
    ),
    PlantedFault(
        "space lost where a step begins",
        "text",
        "steps of several tokens whose text begins with a space",
        plant_space_dropped,
    ),
    PlantedFault(
        "mask missing for draft rows", "grammar", "requests with a grammar", plant_mask_missing
    ),
    PlantedFault(
        "mask missing for the bonus",
        "grammar",
        "requests with a grammar, steps whose draft is accepted whole",
        plant_bonus_not_masked,
    ),
    PlantedFault(
        "row of a neighbour after a batch shrinks",
        "scheduling",
        "the step after a neighbour ends",
        plant_row_of_neighbour,
    ),
    PlantedFault(
        "compared a row early beside a prompt",
        "scheduling",
        "a prompt read in the same pass as a neighbour's drafts",
        plant_offset_by_prompt,
    ),
)
