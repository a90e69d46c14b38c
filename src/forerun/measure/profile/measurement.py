"""Measures a target and its draft, and computes cost tables from the measured cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.measure.profile.config import (
    ProfileCell,
    ProfileConfig,
    Quantity,
    chain_cells,
    pass_cells,
    read_cells,
    sizes,
    step_cells,
)
from forerun.measure.profile.profile import MeasuredCell, Profile, ReadLimit
from forerun.measure.profile.rigs import (
    EngineRig,
    HeadRig,
    LoadedPair,
    ModelFacts,
    PassRig,
    head_prefixes,
    num_threads_of,
    prefixes,
    setup_of,
)
from forerun.measure.profile.rounds import (
    Rig,
    Samples,
    Stopwatch,
    estimates,
    measure,
    read_bandwidth,
    timed,
)
from forerun.provenance import collect
from forerun.theory.cost import CostLine, CostReading, CostTable, ReadingCost, interpolate
from forerun.theory.intervals import Interval

Estimates = Mapping[ProfileCell, Interval]


def cost_table(found: Estimates, *, sampled: bool) -> CostTable:
    """Return the cost table of greedy or of sampled decoding from measured cells.

    A plain step is measured whole at the shortest context; at others it grows as its pass does. Of
    a speculative step, what is beyond its passes measured alone (the engine's own work, and passes
    that are slower among it) is laid on a straight line over K. Its slope and that of the draft's
    chains are what a drafted token adds. What is left of a step, at every measured K, is its
    overhead, so that at the shortest context a cycle takes just what was measured. Only where less
    than nothing is left, the overhead is 0 and the cycle costs more than was measured.
    """
    places = {(c.batch, c.context) for c in found if c.quantity is Quantity.TARGET_PASS}
    (shortest,) = {c.context for c in found if c.quantity is Quantity.GREEDY_STEP}
    lines = {
        place: _without_overhead(found, *place, shortest, sampled=sampled)
        for place in sorted(places)
    }
    return CostTable(
        lines=tuple(
            _with_overhead(line, lines[batch, shortest], found, sampled=sampled)
            for (batch, _), line in lines.items()
        )
    )


def _without_overhead(
    found: Estimates, batch: int, context: int, shortest: int, *, sampled: bool
) -> CostLine:
    """Return the costs at one batch size and context, without the overhead outside both models."""
    plain, steps = _whole_steps(found, batch, shortest, sampled=sampled)
    passes = readings(found, Quantity.TARGET_PASS, batch, context)
    short_passes = readings(found, Quantity.TARGET_PASS, batch, shortest)
    if context != shortest:
        plain = total(plain, passes[1], less(short_passes[1]))
    chain = drafting(found, batch, shortest, steps, sampled=sampled)
    beyond = {
        k: total(step, less(chain[k]), less(_at_size(short_passes, k + 1)))
        for k, step in steps.items()
    }
    chains = drafting(found, batch, context, steps, sampled=sampled)
    draft = total(slope_of(chains), slope_of(beyond))
    return CostLine(
        batch=batch,
        context=context,
        rows=tuple(passes),
        verify_s=tuple(reading.s for reading in passes.values()),
        verify_error_s=tuple(reading.error_s for reading in passes.values()),
        plain_s=plain.s,
        plain_error_s=plain.error_s,
        draft_s=draft.s,
        draft_error_s=draft.error_s,
    )


def _with_overhead(
    line: CostLine, shortest: CostLine, found: Estimates, *, sampled: bool
) -> CostLine:
    """Return the costs at one context with the overhead outside both models added.

    At other contexts than the shortest, the chains of those take the place of its own. The error is
    that of the step: those of drafting and of the pass are counted with drafting and the pass. The
    steps were measured on arbitrary tokens, of which none is accepted; a head that reads accepted
    tokens again is charged for half of K.
    """
    _, steps = _whole_steps(found, line.batch, shortest.context, sampled=sampled)
    here, there = (
        drafting(found, line.batch, context, steps, sampled=sampled)
        for context in (line.context, shortest.context)
    )
    again = {k: _catch_up_s(found, line.batch, line.context, k) for k in steps}
    left_s = [
        step.s - shortest.verify(k + 1).s - k * line.draft_s + here[k].s - there[k].s + again[k]
        for k, step in steps.items()
    ]
    return replace(
        line,
        overhead_ks=tuple(steps),
        overhead_s=tuple(max(0.0, s) for s in left_s),
        overhead_error_s=tuple(step.error_s for step in steps.values()),
    )


def _catch_up_s(found: Estimates, batch: int, context: int, k: int) -> float:
    passes = readings(found, Quantity.DRAFT_PASS, batch, context)
    return max(0.0, _at_size(passes, 1 + k / 2).s - passes[1].s) if len(passes) > 1 else 0.0


def reading_cost(found: Estimates) -> ReadingCost | None:
    """Return the prompt reading cost; None unless two sizes were measured for both models."""
    target, draft = (
        {cell.size: interval.estimate for cell, interval in found.items() if cell.quantity is kind}
        for kind in (Quantity.TARGET_READ, Quantity.DRAFT_READ)
    )
    common = sorted(target.keys() & draft.keys())
    if len(common) < 2:
        return None
    return ReadingCost(
        tokens=tuple(common),
        target_s=tuple(target[size] for size in common),
        draft_s=tuple(draft[size] for size in common),
    )


def _whole_steps(
    found: Estimates, batch: int, context: int, *, sampled: bool
) -> tuple[CostReading, dict[int, CostReading]]:
    quantity = Quantity.SAMPLED_STEP if sampled else Quantity.GREEDY_STEP
    steps = readings(found, quantity, batch, context)
    return steps.pop(0), steps


def drafting(
    found: Estimates, batch: int, context: int, ks: Iterable[int], *, sampled: bool
) -> dict[int, CostReading]:
    """Return the draft time of a cycle by K, as measured without a target pass."""
    if sampled:
        one = readings(found, Quantity.DRAFT_PASS, batch, context)[1]
        return {k: one.times(k) for k in ks}
    chains = readings(found, Quantity.DRAFT_CHAIN, batch, context)
    return {k: chains[k] for k in ks}


def _at_size(points: Mapping[int, CostReading], size: float) -> CostReading:
    return interpolate(list(points), list(points.values()), size)


def readings(
    found: Estimates, quantity: Quantity, batch: int, context: int
) -> dict[int, CostReading]:
    result = {}
    for size in sizes(found, quantity, batch, context):
        interval = found[ProfileCell(quantity, batch, context, size)]
        result[size] = CostReading(interval.estimate, (interval.high - interval.low) / 2)
    return result


def total(*times: CostReading) -> CostReading:
    return CostReading(
        s=math.fsum(reading.s for reading in times),
        error_s=math.hypot(*(reading.error_s for reading in times)),
    )


def less(time: CostReading) -> CostReading:
    return CostReading(-time.s, time.error_s)


def slope_of(points: Mapping[int, CostReading]) -> CostReading:
    """Return the additional time per unit of size, by least squares.

    A single point, or a line that would start below 0, goes through the origin; a falling one is
    flat. Where even the mean is below 0 there is nothing at all.
    """
    xs, times = list(points), list(points.values())
    if sum(reading.s for reading in times) < 0:
        return CostReading(0.0)
    middle = sum(xs) / len(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    if not spread:
        return _through_origin(xs, times)
    slope_weights = [(x - middle) / spread for x in xs]
    start_weights = [1 / len(xs) - middle * weight for weight in slope_weights]
    slope, start = combined(slope_weights, times), combined(start_weights, times)
    if slope.s < 0:
        return CostReading(0.0, slope.error_s)
    return slope if start.s >= 0 else _through_origin(xs, times)


def _through_origin(xs: Sequence[int], times: Sequence[CostReading]) -> CostReading:
    square = sum(x * x for x in xs)
    return combined([x / square for x in xs], times)


def combined(weights: Sequence[float], times: Sequence[CostReading]) -> CostReading:
    return CostReading(
        s=math.fsum(w * reading.s for w, reading in zip(weights, times, strict=True)),
        error_s=math.hypot(*(w * r.error_s for w, r in zip(weights, times, strict=True))),
    )


def measure_pair(
    pair: LoadedPair,
    facts: tuple[ModelFacts, ModelFacts],
    config: ProfileConfig,
    *,
    clock: Callable[[], float],
    notify: Callable[[int, float], None],
) -> Profile:
    """Measure a loaded target with its draft and return the profile."""
    target, draft = facts
    stopwatch = Stopwatch(clock, pair.target.device)
    num_threads = num_threads_of(pair.engine)
    before = read_bandwidth(target.pass_bytes, stopwatch, num_threads)
    rounds = measure(rigs(pair, config, stopwatch), config, clock, notify)
    # The machine's best: it may have been busy the first time.
    after = read_bandwidth(target.pass_bytes, stopwatch, num_threads)
    best = max(before, after, key=lambda bandwidth: bandwidth.bytes_per_s)
    return Profile(
        target=target.name,
        draft=draft.name,
        setup=setup_of(pair, target, draft),
        provenance=collect({fact.name: fact.content_hash for fact in facts}, num_threads).to_dict(),
        limit=ReadLimit(
            bytes_per_s=best.bytes_per_s,
            buffer_bytes=best.buffer_bytes,
            target_bytes=target.pass_bytes,
            draft_bytes=draft.pass_bytes,
            kv_token_bytes=target.kv_token_bytes,
        ),
        left_out=rounds.left_out,
        stable=rounds.stable,
        **estimates_of(rounds.samples),
    )


def estimates_of(samples: Samples) -> dict[str, Any]:
    """Return the fields of a profile that samples decide; drift is divided out round by round."""
    found = estimates(samples)
    return dict(
        measured=tuple(
            MeasuredCell(cell=cell, seconds=found[cell], samples_s=tuple(map(tuple, visits)))
            for cell, visits in samples.items()
        ),
        greedy=cost_table(found, sampled=False),
        sampled=cost_table(found, sampled=True),
        reading=reading_cost(found),
    )


def rigs(pair: LoadedPair, config: ProfileConfig, stopwatch: Stopwatch) -> Sequence[Rig]:
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
    return [*passes, *_draft_rigs(pair, config, stopwatch), steps]


def _draft_rigs(pair: LoadedPair, config: ProfileConfig, stopwatch: Stopwatch) -> Iterator[PassRig]:
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
