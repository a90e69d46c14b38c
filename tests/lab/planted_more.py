"""Twenty more planted faults, on which the audit was judged once, on 2026-11-28.

They were written together with those of `tests.lab.planted` and drawn by lot; whoever wrote the
audit did not see them before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
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
    run_no_cycles,
    swap,
    verify_by,
    wrap_verify,
)
from torch import Tensor

from forerun.engine import step
from forerun.engine.engine import Engine
from forerun.engine.results import StreamChunk
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.models.kv_store import TensorKVStore
from forerun.sampling.proposal import Verdict


class _Lenient(ChainVerifier):
    """Compares a quarter of the number where `applies` says so."""

    def __init__(
        self, applies: Callable[[DraftedChain], bool], places: frozenset[int] | None = None
    ) -> None:
        self._applies, self._places = applies, places

    def applies(self, chain: DraftedChain) -> bool:
        return self._applies(chain)

    def accept_prob(self, chain: DraftedChain, place: int) -> float:
        is_faulty = self._places is None or place in self._places
        return (4 if is_faulty else 1) * super().accept_prob(chain, place)


def plant_threshold() -> AbstractContextManager[None]:
    """Any token that the target gives .05 passes, as with SGLang's single threshold below 1."""

    class Threshold(ChainVerifier):
        def accept_prob(self, chain: DraftedChain, place: int) -> float:
            is_likely = float(chain.p[place, chain.tokens[place]]) > 0.05
            return 1.0 if is_likely else super().accept_prob(chain, place)

    return verify_by(Threshold())


def plant_lenient_second() -> AbstractContextManager[None]:
    """The number is scaled at the second place alone."""
    return verify_by(_Lenient(lambda chain: True, frozenset({1})))


def plant_lenient_batch() -> AbstractContextManager[None]:
    """The kernel of wide batches compares with another number (1CatAI/1Cat-vLLM#656)."""
    return verify_by(_Lenient(lambda chain: chain.batch_size >= 8))


def plant_accepts_all_sometimes() -> AbstractContextManager[None]:
    """One request in twenty is never compared."""

    class AcceptsAll(ChainVerifier):
        def applies(self, chain: DraftedChain) -> bool:
            return chain.entry.sequence.noise_key % 20 == 0

        def accept_prob(self, chain: DraftedChain, place: int) -> float:
            return 1.0

    return verify_by(AcceptsAll())


def plant_residual_not_clipped() -> AbstractContextManager[None]:
    """The difference of the rows is taken by its size and not clipped at 0."""

    class NotClipped(ChainVerifier):
        def recovered(self, chain: DraftedChain, place: int) -> Tensor:
            weights = (chain.p[place] - chain.q[place]).abs()
            return weights if float(weights.sum()) > 0 else chain.p[place]

    return verify_by(NotClipped())


def plant_bonus_argmax() -> AbstractContextManager[None]:
    """The bonus token is the likeliest one (ardanlabs/kronk#788)."""

    class Likeliest(ChainVerifier):
        def bonus(self, chain: DraftedChain) -> Tensor:
            return (chain.p[-1] == chain.p[-1].max()).float()

    return verify_by(Likeliest())


def plant_bonus_of_last_row() -> AbstractContextManager[None]:
    """The bonus is drawn from the row that the last drafted token was compared with."""

    class LastRow(ChainVerifier):
        def bonus(self, chain: DraftedChain) -> Tensor:
            return chain.p[-2]

    return verify_by(LastRow())


def plant_truncation_missing() -> AbstractContextManager[None]:
    """The pass leaves out min-p and top-k (vllm-project/vllm#42744)."""

    def around(verify: Any, entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        drafted = [entry for entry in entries if entry.num_drafted]
        before = [entry.sequence.params for entry in drafted]
        try:
            for entry in drafted:
                entry.sequence.params = replace(entry.sequence.params, min_p=0.0, top_k=0)
            return verify(entries, logits, tokens)
        finally:
            for entry, params in zip(drafted, before, strict=True):
                entry.sequence.params = params

    return wrap_verify(around)


def plant_bias_missing() -> AbstractContextManager[None]:
    """The pass leaves out logit_bias (vllm-project/vllm#42744)."""

    def around(verify: Any, entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        histories = [e.sequence.history for e in entries if e.num_drafted and e.sequence.history]
        before = [history.bias for history in histories]
        try:
            for history in histories:
                history.bias = None
            return verify(entries, logits, tokens)
        finally:
            for history, bias in zip(histories, before, strict=True):
                history.bias = bias

    return wrap_verify(around)


def plant_noisy_logits() -> AbstractContextManager[None]:
    """The kernel of several rows adds an error to every logit."""

    def change(entry: ScheduledSequence, logits: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(entry.sequence.ids))
        noise = torch.empty(logits.shape).normal_(generator=generator)
        return logits + 0.7 * noise.to(logits)

    return change_logits(change)


def plant_kv_bits() -> AbstractContextManager[None]:
    """The pass writes keys and values in two bits."""

    def quantise(entry: ScheduledSequence) -> None:
        store, slot = entry.context.store, entry.context.slot
        assert isinstance(store, TensorKVStore)
        rows = torch.arange(entry.num_cached, store.length(slot))
        content = store._take(slot, rows)
        scale = content.float().abs().amax(-1, keepdim=True).clamp(min=1e-6)
        levels = ((content.float() / scale + 1) * 1.5).round() / 1.5 - 1
        store._put(slot, rows, (levels * scale).to(content.dtype))

    return change_commits(afterwards=quantise)


def plant_wide_pass() -> AbstractContextManager[None]:
    """The kernel that takes over at twelve rows has another scale of the logits."""

    def around(verify: Any, entries: Entries, logits: Tensor, tokens: Tensor) -> list[Verdict]:
        if len(logits) >= 12 and any(entry.num_drafted for entry in entries):
            logits = 0.7 * logits
        return verify(entries, logits, tokens)

    return wrap_verify(around)


def plant_stale_prefix() -> AbstractContextManager[None]:
    """After a prefix-cache hit some rows are another block's (text-generation-inference#2711)."""
    done: set[int] = set()

    def damage(entry: ScheduledSequence) -> None:
        sequence = entry.sequence
        size = min(16, sequence.num_cached // 2)
        if size and sequence.noise_key not in done:
            done.add(sequence.noise_key)
            copy_rows(entry, range(size), range(sequence.num_cached - size, sequence.num_cached))

    return change_commits(afterwards=damage)


def plant_shift_after_abort() -> AbstractContextManager[None]:
    """After a neighbour's abort the rows of a sequence are written one place too early."""
    shifted: set[int] = set()
    original = Engine.abort

    def abort(engine: Engine, request_id: str) -> Any:
        is_running = any(s.request_id == request_id for s in engine.scheduler.running)
        output = original(engine, request_id)
        if is_running:
            shifted.update(s.noise_key for s in engine.scheduler.running)
        return output

    def damage(entry: ScheduledSequence) -> None:
        end = entry.context.num_cached
        if entry.sequence.noise_key in shifted and end >= 4:
            copy_rows(entry, range(end - 2, end), range(end - 3, end - 1))

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with swap((Engine, "abort", abort)), change_commits(afterwards=damage):
            yield

    return planted()


def plant_stale_long_prompt() -> AbstractContextManager[None]:
    """With prompts of more than 256 tokens the rows of a step are committed one too late."""

    def change(entry: ScheduledSequence, rows: list[int]) -> list[int]:
        is_partial = len(rows) < entry.num_chain + entry.num_drafted
        is_long = entry.sequence.num_prompt > 256
        return [row + 1 for row in rows] if is_partial and is_long else rows

    return change_commits(change)


def plant_eos_likelier() -> AbstractContextManager[None]:
    """The end-of-sequence token is three times as likely in the pass."""

    def change(entry: ScheduledSequence, logits: Tensor) -> Tensor:
        logits[:, [*entry.sequence.stops.eos]] += math.log(3)
        return logits

    return change_logits(change)


def plant_text_after_eos() -> AbstractContextManager[None]:
    """Tokens of a step that come after the end-of-sequence token are sent (ipex-llm#9963)."""
    append = Sequence.append

    def append_all(sequence: Sequence, tokens: tuple[int, ...], sources: Any) -> int:
        taken = append(sequence, tokens, sources)
        stop = sequence.stop
        if stop is None or stop.finish_reason != "stop" or isinstance(stop.stop_reason, str):
            return taken
        sequence.ids += tokens[taken:]
        sequence.sources += sources[taken:]
        sequence.detokenizer.extend(tokens[taken:])
        return len(tokens)

    return swap((Sequence, "append", append_all), run_no_cycles())


def plant_max_tokens_exceeded() -> AbstractContextManager[None]:
    """The last step is not cut to max_tokens."""
    append, bounded = Sequence.append, step.bounded

    def append_all(sequence: Sequence, tokens: tuple[int, ...], sources: Any) -> int:
        taken = append(sequence, tokens, sources)
        if sequence.stop is None or sequence.stop.finish_reason != "length":
            return taken
        sequence.ids += tokens[taken:]
        sequence.sources += sources[taken:]
        sequence.detokenizer.extend(tokens[taken:])
        return len(tokens)

    return swap(
        (Sequence, "append", append_all),
        (step, "bounded", lambda plan, max_nodes, max_depth: bounded(plan, max_nodes, 1 << 30)),
        run_no_cycles(),
    )


def plant_split_character() -> AbstractContextManager[None]:
    """A character whose bytes two steps share becomes replacement characters."""
    append = Sequence.append

    def append_flushed(sequence: Sequence, tokens: tuple[int, ...], sources: Any) -> int:
        taken = append(sequence, tokens, sources)
        if len(tokens) > 1 and sequence.stop is None:
            sequence.detokenizer.finish()
        return taken

    return swap((Sequence, "append", append_flushed), run_no_cycles())


def plant_stream_loses_text() -> AbstractContextManager[None]:
    """A stream loses the last character of a step of several tokens; whole answers do not."""
    take = Sequence.take_chunk

    def take_cut(sequence: Sequence) -> StreamChunk:
        chunk = take(sequence)
        is_cut = len(chunk.token_ids) > 1 and chunk.finish_reason is None
        return replace(chunk, text=chunk.text[:-1]) if is_cut else chunk

    return swap((Sequence, "take_chunk", take_cut), run_no_cycles())


FAULTS = (
    PlantedFault(
        "any token of probability .05 passes",
        "acceptance",
        "every step at a temperature above 0",
        plant_threshold,
    ),
    PlantedFault(
        "lenient at the second drafted token",
        "acceptance",
        "steps that draft two tokens or more, at a temperature above 0",
        plant_lenient_second,
    ),
    PlantedFault(
        "lenient from 8 requests on",
        "acceptance",
        "8 or more requests at once, at a temperature above 0",
        plant_lenient_batch,
    ),
    PlantedFault(
        "one request in 20 accepts every draft",
        "acceptance",
        "1 of 20 requests, at random",
        plant_accepts_all_sometimes,
    ),
    PlantedFault(
        "residual not clipped",
        "residual",
        "rejections at a temperature above 0",
        plant_residual_not_clipped,
    ),
    PlantedFault(
        "bonus is the likeliest token",
        "bonus",
        "steps whose draft is accepted whole, at a temperature above 0",
        plant_bonus_argmax,
    ),
    PlantedFault(
        "bonus from the row before",
        "bonus",
        "steps whose draft is accepted whole",
        plant_bonus_of_last_row,
    ),
    PlantedFault(
        "min-p and top-k missing in the pass",
        "parameters",
        "requests with min-p or top-k",
        plant_truncation_missing,
    ),
    PlantedFault(
        "logit_bias missing in the pass",
        "parameters",
        "requests with logit_bias",
        plant_bias_missing,
    ),
    PlantedFault("logits with an error in the pass", "numerics", "every step", plant_noisy_logits),
    PlantedFault(
        "KV in two bits in the pass", "numerics", "every step after the first", plant_kv_bits
    ),
    PlantedFault(
        "another scale of the logits from 12 rows on",
        "numerics",
        "several requests at once, 12 or more rows in a pass",
        plant_wide_pass,
    ),
    PlantedFault(
        "stale rows after a prefix-cache hit",
        "stale_state",
        "a prefix-cache hit",
        plant_stale_prefix,
    ),
    PlantedFault(
        "rows one place early after an abort",
        "stale_state",
        "a neighbour's abort",
        plant_shift_after_abort,
    ),
    PlantedFault(
        "rows one late with long prompts",
        "stale_state",
        "prompts of more than 256 tokens, after a rejection",
        plant_stale_long_prompt,
    ),
    PlantedFault(
        "EOS three times as likely in the pass",
        "ending",
        "texts that may end by themselves",
        plant_eos_likelier,
    ),
    PlantedFault(
        "tokens after EOS are sent",
        "ending",
        "texts that end by themselves within a step",
        plant_text_after_eos,
    ),
    PlantedFault(
        "max_tokens exceeded by a step",
        "ending",
        "texts that reach max_tokens",
        plant_max_tokens_exceeded,
    ),
    PlantedFault(
        "character split between steps",
        "text",
        "a character of several bytes across the end of a step",
        plant_split_character,
    ),
    PlantedFault(
        "stream loses a character per step", "text", "streamed answers", plant_stream_loses_text
    ),
)
