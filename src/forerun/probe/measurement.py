"""Measures a target and its draft: memory read rate, all cells in rounds, and cost tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypedDict

from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.probe.config import (
    ProbeConfig,
    Quantity,
    chain_cells,
    pass_cells,
    read_cells,
    step_cells,
)
from forerun.probe.engine_rig import EngineRig
from forerun.probe.fit import cost_table, reading_cost
from forerun.probe.head_rig import HeadRig, head_prefixes
from forerun.probe.pair import LoadedPair, ModelFacts, num_threads_of, setup_of
from forerun.probe.pass_rig import PassRig, prefixes
from forerun.probe.profile import MeasuredCell, Profile, ReadLimit
from forerun.probe.rounds import Rig, Samples, estimates, measure
from forerun.probe.stopwatch import Bandwidth, Stopwatch, read_bandwidth, timed
from forerun.provenance import collect
from forerun.theory.cost import CostTable
from forerun.theory.reading_cost import ReadingCost

__all__ = ["estimates_of", "measure_pair"]


def measure_pair(
    pair: LoadedPair,
    facts: tuple[ModelFacts, ModelFacts],
    config: ProbeConfig,
    *,
    clock: Callable[[], float],
    notify: Callable[[int, float], None],
) -> Profile:
    """Measure a loaded target with its draft and return the profile.

    Args:
        pair: target and draft.
        facts: of target and draft.
        config: what to measure, and until when.
        clock: seconds.
        notify: called after each round with the number of rounds and the widest relative error.

    Raises:
        NotEnoughMemory: not even the smallest batch fits.
    """
    target, draft = facts
    stopwatch = Stopwatch(clock, pair.target.device)
    num_threads = num_threads_of(pair.engine)
    before = read_bandwidth(target.pass_bytes, stopwatch, num_threads)
    rounds = measure(rigs(pair, config, stopwatch), config, clock, notify)
    # The machine's best: it may have been busy the first time.
    after = read_bandwidth(target.pass_bytes, stopwatch, num_threads)
    return Profile(
        target=target.name,
        draft=draft.name,
        setup=setup_of(pair, target, draft),
        provenance=collect({fact.name: fact.content_hash for fact in facts}, num_threads).to_dict(),
        limit=read_limit(before, after, target, draft),
        left_out=rounds.left_out,
        stable=rounds.stable,
        **estimates_of(rounds.samples),
    )


class SampleEstimates(TypedDict):
    """Fields of a profile that are computed from its samples."""

    measured: tuple[MeasuredCell, ...]
    greedy: CostTable
    sampled: CostTable
    reading: ReadingCost | None


def estimates_of(samples: Samples) -> SampleEstimates:
    """Compute estimates from samples; machine drift is divided out round by round."""
    found = estimates(samples)
    return SampleEstimates(
        measured=tuple(
            MeasuredCell(cell=cell, seconds=found[cell], samples_s=tuple(map(tuple, visits)))
            for cell, visits in samples.items()
        ),
        greedy=cost_table(found, sampled=False),
        sampled=cost_table(found, sampled=True),
        reading=reading_cost(found),
    )


def rigs(pair: LoadedPair, config: ProbeConfig, stopwatch: Stopwatch) -> Sequence[Rig]:
    """Return all measurements, grouped by the models and sequences they need."""
    pair.target.store.keep_features(())
    target_prefixes = prefixes(pair.target, config.contexts)
    shortest = config.contexts[0]
    passes = [
        PassRig(pair.target, list(pass_cells(config, context)), prefix, stopwatch)
        for context, prefix in target_prefixes.items()
    ]
    if config.read:
        cells = list(read_cells(config, Quantity.TARGET_READ))
        passes.append(PassRig(pair.target, cells, target_prefixes[shortest], stopwatch))
    steps = EngineRig(
        target=timed(pair.target, stopwatch),
        draft=timed(pair.drafter.model, stopwatch),
        drafter_of=pair.drafter.through,
        tokenizer=pair.tokenizer,
        config=pair.engine,
        cells=list(step_cells(config)),
    )
    return [*passes, *draft_rigs(pair, config, stopwatch), steps]


def draft_rigs(pair: LoadedPair, config: ProbeConfig, stopwatch: Stopwatch) -> Iterator[PassRig]:
    """Yield the measurements of the draft's passes by context, and of its prompt reading."""
    drafter, shortest = pair.drafter, config.contexts[0]
    rig: Callable[..., PassRig]
    if isinstance(drafter, Eagle3Drafter):
        shape = len(drafter.feature_layers), pair.target.hidden_size
        found = head_prefixes(drafter.attached, config.contexts, shape)
        rig = partial(HeadRig, drafter.attached, stopwatch=stopwatch, shape=shape)
        catches_up = True
    else:
        found = prefixes(drafter.model, config.contexts)
        rig = partial(PassRig, drafter.model, stopwatch=stopwatch)
        catches_up = False
    for context, prefix in found.items():
        yield rig(list(chain_cells(config, context, catches_up=catches_up)), prefix)
    if config.read:
        yield rig(list(read_cells(config, Quantity.DRAFT_READ)), found[shortest])


def read_limit(
    before: Bandwidth, after: Bandwidth, target: ModelFacts, draft: ModelFacts
) -> ReadLimit:
    """Return the higher of two read rates, with the bytes that a pass of each model reads."""
    best = max(before, after, key=lambda bandwidth: bandwidth.bytes_per_s)
    return ReadLimit(
        bytes_per_s=best.bytes_per_s,
        buffer_bytes=best.buffer_bytes,
        target_bytes=target.pass_bytes,
        draft_bytes=draft.pass_bytes,
        kv_token_bytes=target.kv_token_bytes,
    )
