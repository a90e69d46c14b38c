"""Who runs, and who gets how many rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import tiny
from tests.tabular import TokenStore

from forerun.engine.config import EngineConfig
from forerun.engine.results import Stop
from forerun.engine.scheduler import ScheduledSequence, Scheduler
from forerun.models.base import Context
from forerun.models.kv_store import MIN_SHARED_TOKENS
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.tree import TokenTree


def running(config: EngineConfig, num_pending: list[int]) -> Scheduler:
    """A scheduler whose running sequences have so many tokens to feed."""
    store = TokenStore(len(num_pending), 100, 64)
    scheduler = Scheduler(config)
    for pending in num_pending:
        scheduler.add(tiny.sequence(num_prompt=pending))
    for admitted in scheduler.admit(len(num_pending)):
        admitted.context = Context(store, admitted.ids)
    return scheduler


def config(**changes: int) -> EngineConfig:
    return EngineConfig(**({"max_batch": 4, "num_speculative_tokens": 3} | changes))


def assigned(scheduler: Scheduler, drafted: list[int]) -> list[ScheduledSequence]:
    """The entries of the running sequences, each with so many draft nodes."""
    entries = []
    for each, num_nodes in zip(scheduler.running, drafted, strict=True):
        entry = ScheduledSequence.of(each)
        entry.draft(
            Proposal(
                tokens=torch.zeros(num_nodes, dtype=torch.int64),
                tree=TokenTree.chain(num_nodes),
                choice=Choice.DETERMINISTIC,
            )
        )
        entries.append(entry)
    scheduler.assign_rows(entries)
    return entries


def rows(scheduler: Scheduler, drafted: list[int]) -> list[tuple[int, bool]]:
    return [(entry.num_chain, entry.completes) for entry in assigned(scheduler, drafted)]


def test_first_come_first_served_within_batch_and_slots():
    scheduler = Scheduler(config(max_batch=3))
    sequences = [tiny.sequence(name) for name in "abcde"]
    for each in sequences:
        scheduler.add(each)
    assert not scheduler.running
    assert scheduler.has_unfinished
    assert [*scheduler.admit(num_free_slots=2)] == sequences[:2]
    assert [*scheduler.admit(num_free_slots=0)] == []
    assert [*scheduler.admit(num_free_slots=9)] == sequences[2:3]
    assert scheduler.running == sequences[:3]


def test_finished_ones_make_room():
    scheduler = Scheduler(config(max_batch=1))
    first, second = tiny.sequence("a"), tiny.sequence("b")
    scheduler.add(first)
    scheduler.add(second)
    assert [*scheduler.admit(4)] == [first]
    first.stop = Stop(finish_reason="length")
    assert scheduler.drop_finished() == [first]
    assert [*scheduler.admit(4)] == [second]


@pytest.mark.parametrize("which", [0, 1])
def test_removed_from_queue_or_batch(which):
    scheduler = Scheduler(config(max_batch=1))
    pair = [tiny.sequence("a"), tiny.sequence("b")]
    for each in pair:
        scheduler.add(each)
    assert [*scheduler.admit(4)] == pair[:1]
    scheduler.remove(pair[which])
    assert [*scheduler.running, *scheduler.waiting] == [pair[1 - which]]


@pytest.mark.parametrize(("priority", "gives_way"), [(-1, True), (0, False), (1, False)])
def test_a_sequence_gives_way_to_a_lower_priority_number_only(priority, gives_way):
    scheduler = Scheduler(config(max_batch=1))
    first, second = tiny.sequence("a"), tiny.sequence("b")
    second.rank = (priority, 1)
    scheduler.add(first)
    assert [*scheduler.admit(4)] == [first]
    scheduler.add(second)
    assert scheduler.preempt(num_free_slots=3) == ([first] if gives_way else [])
    assert scheduler.running == ([] if gives_way else [first])


@pytest.mark.parametrize("num_reusable", [MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS])
def test_a_sequence_waits_for_a_prefix_that_is_long_enough_without_its_last_token(num_reusable):
    """The last token of a prompt is always fed, for its logits; it cannot be reused."""
    reader = tiny.sequence("a", num_prompt=MIN_SHARED_TOKENS + 9)
    second = tiny.sequence("b", num_prompt=num_reusable + 1)
    reader.scope = second.scope = "shared"
    scheduler = Scheduler(config())
    scheduler.add(reader)
    assert [*scheduler.admit(4)] == [reader]
    reader.context = Context(TokenStore(2, 100, 64), reader.ids)
    scheduler.add(second)
    waits = num_reusable >= MIN_SHARED_TOKENS
    assert [*scheduler.admit(3)] == ([] if waits else [second])


def test_prompts_are_fed_in_chunks():
    scheduler = running(config(prefill_chunk=8), [8, 9])
    assert rows(scheduler, [0, 0]) == [(8, True), (8, False)]


def test_decoding_comes_before_prefill_even_of_older_sequences():
    scheduler = running(config(max_step_rows=16), [40, 1, 30, 1])
    assert rows(scheduler, [0, 3, 0, 3]) == [(8, False), (1, True), (0, False), (1, True)]
    assert rows(scheduler, [0, 0, 0, 0]) == [(14, False), (1, True), (0, False), (1, True)]


@given(
    data=st.data(),
    num_pending=st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=1, max_size=4),
    max_step_rows=st.integers(16, 40),
    prefill_chunk=st.integers(1, 20),
)
def test_no_pass_exceeds_its_rows_and_some_sequence_advances(
    data, num_pending, max_step_rows, prefill_chunk
):
    scheduler = running(
        config(max_step_rows=max_step_rows, prefill_chunk=prefill_chunk), num_pending
    )
    drafted = [data.draw(st.integers(0, 3)) if n == 1 else 0 for n in num_pending]
    entries = assigned(scheduler, drafted)
    assert sum(entry.num_chain for entry in entries) + sum(drafted) <= max_step_rows
    assert any(entry.num_chain for entry in entries)
    for entry, pending in zip(entries, num_pending, strict=True):
        assert 0 <= entry.num_chain <= min(pending, prefill_chunk)
        assert entry.num_chain == 1 or pending > 1
        assert entry.completes == (entry.num_chain == pending)
