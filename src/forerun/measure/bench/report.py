"""Summaries and reports of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean

from forerun.measure.bench.compare import BenchArm, Block, Measurement
from forerun.measure.bench.config import LEAST_BLOCKS, BenchConfig
from forerun.provenance import Provenance
from forerun.theory.acceptance import distinct_ngram_share
from forerun.theory.figures import Figures, Group, resample_ratio, summarise_groups
from forerun.theory.intervals import Interval, bootstrap, bootstrap_ratio

MIN_BLOCKS = 5
"""Least number of blocks from which an interval is trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary(Figures):
    """Figures of one arm over all blocks.

    Its speedup is of plain seconds over this arm's, per token and paired by prompt, prefill
    included; kappa is the mean time of a decode step in those of the plain arm.

    Attributes:
        decode_tokens_per_s: without the prefill and the token it yields.
        step_s: mean seconds of a decode step.
        break_even: accepted / drafted at which tau equals kappa; None where nothing was drafted.
        distinct_4gram_share: mean over the completions; low where text loops.
        disturbance: what shows that something else slowed one of the arms; None if nothing does.
    """

    arm: BenchArm
    tokens_per_s: Interval
    decode_tokens_per_s: Interval
    speedup: Interval
    cycle_cost: Interval
    decode_speedup: Interval
    step_s: float
    break_even: float | None
    distinct_4gram_share: float
    disturbance: str | None = None

    def to_dict(self) -> dict[str, object]:
        values, arm = super(ArmSummary, self).to_dict(), self.arm
        del values["arm"]
        return {
            "name": arm.name,
            "method": arm.method,
            "k": arm.num_speculative_tokens,
            "tree": None if arm.tree is None else str(arm.tree),
            "num_blocks": values.pop("num_groups"),
            **values,
        }


def summarise(
    blocks: Sequence[Block], *, seed: int = 0, num_resamples: int = 2000
) -> list[ArmSummary]:
    """Compute the figures of every arm, compared with the first arm."""
    columns = _split_arms(measurable(blocks))
    return [_summarise_arm(column, columns[0], seed, num_resamples) for column in columns]


def rows_of(blocks: Sequence[Block]) -> tuple[ArmSummary, ...]:
    """Return the figures of every arm; empty if too few blocks were measured."""
    enough = len(measurable(blocks)) >= LEAST_BLOCKS
    return tuple(summarise(blocks)) if enough else ()


def measurable(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if all(m.num_decoded > 0 for m in block)]


def _summarise_arm(
    own: Sequence[Measurement], plain: Sequence[Measurement], seed: int, num_resamples: int
) -> ArmSummary:
    """Compute the figures of one arm from its measurements and those of plain decoding."""
    interval = partial(bootstrap_ratio, seed=seed, num_resamples=num_resamples)
    over_blocks = partial(resample_ratio, seed=seed, num_resamples=num_resamples)
    groups = [Group(acceptance=m.acceptance, num_tokens=m.num_tokens) for m in own]
    figures = summarise_groups(groups, over_blocks)
    step_ratio = partial(_compare_steps, own, plain)
    kappa = bootstrap(step_ratio, [len(own)], seed=seed, num_resamples=num_resamples)
    num_steps, num_drafted = figures.num_steps, figures.num_drafted
    changes = {
        "speedup": interval(
            [m.total_s for m in plain],
            [m.total_s * p.num_tokens / m.num_tokens for m, p in zip(own, plain, strict=True)],
        ),
        "cycle_cost": kappa,
    }
    return ArmSummary(
        **figures.fields | changes,
        arm=own[0].arm,
        tokens_per_s=interval([m.num_tokens for m in own], [m.total_s for m in own]),
        decode_tokens_per_s=interval([m.num_decoded for m in own], [m.decode_s for m in own]),
        decode_speedup=interval(
            [m.decode_s for m in plain],
            [m.decode_s * p.num_decoded / m.num_decoded for m, p in zip(own, plain, strict=True)],
        ),
        step_s=step_s(own),
        # tau = 1 + rate * nodes per step, so tau = kappa at this rate, for every acceptance profile
        break_even=(kappa.estimate - 1.0) * num_steps / num_drafted if num_drafted else None,
        distinct_4gram_share=mean([distinct_ngram_share(t) for m in own for t in m.token_ids]),
        disturbance=find_disturbance(own, plain, kappa.estimate),
    )


def _compare_steps(
    own: Sequence[Measurement], plain: Sequence[Measurement], groups: Sequence[Sequence[int]]
) -> float:
    """Return the time of a step in plain steps, over the chosen blocks."""
    chosen = groups[0]
    return step_s([own[index] for index in chosen]) / step_s([plain[index] for index in chosen])


LEAST_CYCLE_COST = 0.95
"""Least kappa that is believed: a step with a draft has a whole pass of the target, too."""
PAUSE_RATIO, PAUSE_SHARE = 3.0, 0.1
"""A block with a pause takes so many times what it should, and so much of the arm's time more."""


def find_disturbance(
    own: Sequence[Measurement], plain: Sequence[Measurement], kappa: float
) -> str | None:
    """Return what shows that the times of an arm or of plain decoding were disturbed, else None.

    A step that drafts cannot be shorter than a plain step, so a kappa below 1 says that the plain
    arm was slowed. A pause that hit one block is seen in the block itself.
    """
    if pause_s := max(find_longest_pause(plain, own), find_longest_pause(own, plain)):
        return f"one block took {pause_s:.2g} s longer than the others"
    if kappa < LEAST_CYCLE_COST:
        return f"a step came out at {kappa:.2f} plain steps, and cannot take less than one"
    return None


def find_longest_pause(own: Sequence[Measurement], other: Sequence[Measurement]) -> float:
    """Return the longest pause in the blocks of an arm; 0 if none was long.

    A block should take its steps times what a step usually takes (the upper quartile over blocks),
    and the prefill of the same prompts in the other arm.
    """
    steps_s = sorted(step_s([m]) for m in own if m.num_decode_steps)
    usual_s = steps_s[3 * (len(steps_s) - 1) // 4]
    total_s, longest_s = sum(m.total_s for m in own), 0.0
    for m, same in zip(own, other, strict=True):
        prefill_s = min(m.total_s - m.decode_s, same.total_s - same.decode_s)
        expected_s = usual_s * m.num_decode_steps / len(m.batch) + max(0.0, prefill_s)
        pause_s = m.total_s - expected_s
        if m.total_s > PAUSE_RATIO * expected_s and pause_s > PAUSE_SHARE * total_s:
            longest_s = max(longest_s, pause_s)
    return longest_s


def best_arm(blocks: Sequence[Block]) -> BenchArm:
    def tokens_per_s(measurements: Sequence[Measurement]) -> float:
        return sum(m.num_tokens for m in measurements) / sum(m.total_s for m in measurements)

    return max(_split_arms(blocks), key=tokens_per_s)[0].arm


def _split_arms(blocks: Sequence[Block]) -> list[list[Measurement]]:
    return [list(column) for column in zip(*blocks, strict=True)]


def step_s(measurements: Sequence[Measurement]) -> float:
    """Return the mean seconds of a decode step."""
    # The prompts of a batch share their steps: each is counted with its own seconds.
    seconds = sum(m.decode_s * len(m.batch) for m in measurements)
    return seconds / sum(m.num_decode_steps for m in measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfSeveral:
    """Best arm, chosen on one half of the blocks, with its figures on the other half."""

    num_candidates: int
    num_chosen_on: int
    summary: ArmSummary

    def to_dict(self) -> dict[str, object]:
        return {
            "num_candidates": self.num_candidates,
            "num_chosen_on": self.num_chosen_on,
            "scored": self.summary.to_dict(),
        }


def best_of_several(blocks: Sequence[Block]) -> BestOfSeveral | None:
    """Choose the best arm except the first on every other block, and score it on the rest."""
    blocks = measurable(blocks)
    chosen_on, scored_on = blocks[0::2], blocks[1::2]
    if len(scored_on) < LEAST_BLOCKS or len(blocks[0]) < 3:
        return None
    winner = best_arm([block[1:] for block in chosen_on])
    pairs = [(block[0], next(m for m in block if m.arm.name == winner.name)) for block in scored_on]
    return BestOfSeveral(
        num_candidates=len(blocks[0]) - 1, num_chosen_on=len(chosen_on), summary=summarise(pairs)[1]
    )


def verdict(summary: ArmSummary) -> str:
    """Return a sentence that states whether the arm is faster, and why."""
    if summary.disturbance is not None:
        return outcome(summary)
    if summary.arm.num_speculative_tokens == 0:
        return f"baseline: one target pass per token, {1000.0 * summary.step_s:.1f} ms each"
    return f"{outcome(summary)}: {reason(summary)}"


def outcome(summary: ArmSummary) -> str:
    """Return a phrase: the arm is faster, slower, or not shown to be either."""
    speedup = summary.speedup
    if summary.disturbance is not None:
        return f"the measurement was disturbed: {summary.disturbance}; repeat it on a quiet machine"
    if speedup.low <= 1.0 <= speedup.high:
        return f"no difference shown (the interval {speedup.show_ends()} includes 1)"
    side = "faster" if speedup.is_above(1.0) else "slower"
    return f"{side}, {speedup.estimate:.2f}x{warn_of_few(summary.num_groups)}"


def warn_of_few(num_blocks: int) -> str:
    """Return what qualifies an interval of few blocks; empty if there are enough."""
    few = f" (from {num_blocks} blocks only: its interval is a rough one)"
    return few if num_blocks < MIN_BLOCKS else ""


def reason(summary: ArmSummary) -> str:
    """Explain an arm's speedup by its draft acceptance rate, compared with the break-even rate."""
    rate, break_even = summary.draft_acceptance_rate, summary.break_even
    if rate is None or break_even is None:
        return "nothing was drafted"
    counts = f"accepts {summary.num_accepted} of {summary.num_drafted} drafted ({rate:.2f})"
    if break_even > 1.0:
        costs = f"a step costs {summary.cycle_cost.estimate:.2f} plain steps"
        return f"{counts}, and {costs}, more than full acceptance would repay"
    side = "above" if rate > break_even else "below"
    sentence = f"{counts}, {side} the break-even of {max(0.0, break_even):.2f}"
    if rate > break_even and summary.speedup.is_below(1.0):
        return f"{sentence}; reading the prompt with the draft costs the rest"
    return sentence


def faster_chain(tree: ArmSummary, rows: Sequence[ArmSummary]) -> ArmSummary | None:
    """Return the fastest chain of a tree's draft, if its interval lies above that of the tree."""
    chains = [
        row
        for row in rows
        if row.arm.draft == tree.arm.draft
        and row.arm.num_speculative_tokens
        and row.arm.tree is None
        and not row.arm.adaptive
        and row.disturbance is None
    ]
    best = max(chains, key=lambda row: row.speedup.estimate, default=None)
    if tree.arm.tree is None or tree.disturbance is not None or best is None:
        return None
    return best if best.speedup.is_above(tree.speedup.high) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """Results at one temperature and batch size.

    Attributes:
        rows: every arm, plain decoding first; empty where too few blocks were measured.
        best: the best arm, where there was a choice and blocks enough.
    """

    temperature: float
    batch: int
    rows: tuple[ArmSummary, ...]
    best: BestOfSeveral | None
    blocks: Sequence[Block]

    @classmethod
    def of(cls, blocks: Sequence[Block], *, temperature: float, batch: int) -> CellReport:
        """Compute the report from the blocks measured so far."""
        rows = rows_of(blocks)
        return cls(
            temperature=temperature,
            batch=batch,
            rows=rows,
            best=best_of_several(blocks) if rows else None,
            blocks=blocks,
        )

    @property
    def title(self) -> str:
        how = "greedy (T=0)" if self.temperature == 0 else f"sampled (T={self.temperature:g})"
        return f"{how}, batch {self.batch}, {len(self.blocks)} blocks"

    def to_dict(self) -> dict[str, object]:
        return {
            "temperature": self.temperature,
            "batch": self.batch,
            "rows": [self.row(summary) for summary in self.rows],
            "best_of_several": self.best.to_dict() if self.best else None,
            "blocks": [[_write_sample(m) for m in block] for block in self.blocks],
        }

    def row(self, summary: ArmSummary) -> dict[str, object]:
        chain = faster_chain(summary, self.rows)
        said = {"verdict": verdict(summary), "faster_chain": chain and chain.arm.name}
        return summary.to_dict() | said


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Results of a comparison."""

    cells: tuple[CellReport, ...]
    provenance: Provenance
    config: BenchConfig
    num_prompts: int

    @property
    def has_results(self) -> bool:
        """Whether enough was measured for a table."""
        return any(cell.rows for cell in self.cells)

    def to_dict(self) -> dict[str, object]:
        return {
            "cells": [cell.to_dict() for cell in self.cells],
            "provenance": self.provenance.to_dict(),
            "config": asdict(self.config) | {"num_prompts": self.num_prompts},
        }


def _write_sample(measurement: Measurement) -> dict[str, object]:
    return {
        "arm": measurement.arm.name,
        "total_s": measurement.total_s,
        "decode_s": measurement.decode_s,
        "num_tokens": measurement.num_tokens,
        "num_decode_steps": measurement.num_decode_steps,
        "num_drafted": measurement.acceptance.num_drafted,
        "num_accepted": measurement.acceptance.num_accepted,
    }
