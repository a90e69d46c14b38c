"""What a report of tune says in words and cells, the same on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from forerun.models.memory import readable
from forerun.terminal_text import write_count
from forerun.theory.intervals import Interval
from forerun.tune.arms import Speculation
from forerun.tune.race import LEAST_BLOCKS, LEAST_GAIN, NO_TIME
from forerun.tune.report import ArmResult, LoadResult, TuneReport

HEADINGS = (
    "setting",
    "tokens/s\n(95%)",
    "speedup\n(95%)",
    "TTFT, ms\np50 / p95",
    "TPOT, ms\np50 / p95",
    "tau",
    "accepted",
    "same\ntexts",
    "memory",
    "blocks",
)
LEGEND = (
    "TTFT: time to first token; TPOT: time per output token; tau: tokens per step that drafted; "
    "accepted: share of steps by position, or draft tokens; same texts: as the baseline, at T=0"
)
GAIN = 1.3
"""Speedup for which the needed acceptance length is named."""
MOST_POSITIONS = 6


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A sentence, and the command or address that it ends with."""

    sentence: str
    command: str | None = None


def list_cells(report: TuneReport, arm: ArmResult) -> list[str]:
    """Return the cells of an arm below `HEADINGS`; what is not known is empty."""
    memory = report.memory_bytes.get(arm.arm)
    tau = None if arm.drafting is None else arm.drafting.acceptance_length
    return [
        arm.arm,
        _show(arm.figures.get("tokens_per_s"), ".1f", "\n"),
        "" if arm.arm == report.baseline else _show(arm.speedup, ".2f", "\n"),
        _show_times(arm, "ttft"),
        _show_times(arm, "tpot"),
        "" if tau is None else f"{tau:.2f}",
        _show_accepted(arm),
        "" if arm.equal_texts is None else f"{arm.equal_texts:.0%}",
        "" if not memory else readable(memory),
        str(arm.num_blocks),
    ]


def list_given_up(result: LoadResult) -> list[str]:
    """Return the arms that were given up at a load, each with its reason."""
    return [f"{arm.arm}: {arm.reason}" for arm in result.arms if arm.reason is not None]


def list_advice(report: TuneReport) -> Iterator[Recommendation]:
    """Yield what to run: for all loads where one setting is best everywhere, then for each."""
    if report.acceptance_length is not None:
        for result in report.loads:
            yield from map(Recommendation, _describe_needs(report, result))
        yield Recommendation("Drafts were accepted by chance, so nothing is recommended.")
        return
    chosen = {result.recommended for result in report.loads}
    [common] = chosen if len(chosen) == 1 and len(report.loads) > 1 else [None]
    if common is not None:
        same = f"{common} is best at all loads."
        if common == report.baseline:
            same = f"No setting is shown to be faster than {common} at any load."
        yield _advise(report, same, common)
    for result in report.loads:
        sentence = f"{result.load.label}: {_describe_gain(report, result)}"
        name = result.recommended if common is None else None
        yield Recommendation(sentence) if name is None else _advise(report, sentence, name)
        if result.recommended == report.baseline:
            yield from map(Recommendation, _describe_needs(report, result)[:1])
    if len(report.loads) > 1 and any(result.check for result in report.loads):
        yield Recommendation("Each setting was audited once, for all loads.")
    if _is_k_of_vllm_alone(report):
        yield Recommendation(
            "The best settings differ in K alone. One vLLM server can choose K by the "
            'number of running requests: "num_speculative_tokens_per_batch_size" in '
            "--speculative-config is a list of [first, last, K]. This was not measured here."
        )


def _advise(report: TuneReport, sentence: str, name: str) -> Recommendation:
    arm = next(arm for arm in report.arms if arm.name == name)
    verb = "Run" if arm.command else "Use"
    return Recommendation(f"{sentence} {verb}", arm.shown_command)


def _describe_gain(report: TuneReport, result: LoadResult) -> str:
    """Return the outcome at a load as a sentence."""
    name, baseline = result.recommended, report.baseline
    if name is None:
        best = next((a for a in result.arms if a.reason is None and a.arm != baseline), None)
        if best is None or best.speedup is None:
            return "not decided."
        speedup = _show(best.speedup, ".2f", " ")
        return f"not decided; the fastest so far is {best.arm}: {speedup} times as fast."
    if name == baseline:
        num_left = sum(arm.reason == NO_TIME for arm in result.arms)
        verb = "was" if num_left == 1 else "were"
        more = f"; {num_left} {verb} given up for lack of time: give more --minutes"
        if not num_left:
            more = _describe_undecided(baseline, result)
        return f"no setting is shown to be faster than {baseline}{more}."
    shown = result.confirmed
    gain = "" if shown is None else f" {shown.estimate:.2f} times ({shown.show_ends()})"
    starts = f", over {write_count(result.num_starts, 'start')} of each server"
    return (
        f"{name} is{gain} as fast as {baseline} on prompts that had no part in the choice"
        f"{starts if result.num_starts else ''}; {_describe_check(result)}."
    )


def _describe_undecided(baseline: str, result: LoadResult) -> str:
    """Return the fastest setting, if it may be faster than the baseline; else nothing."""
    best = next((a for a in result.arms if a.reason is None and a.arm != baseline), None)
    if best is None or best.speedup is None or best.speedup.estimate < LEAST_GAIN:
        return ""
    shown = _show(best.speedup, ".2f", " ")
    return f"; {best.arm} may be, at {shown} times its speed: give more --minutes"


def _describe_check(result: LoadResult) -> str:
    """Return what the audit of the recommended arm says, without a full stop."""
    check = result.check
    if check is None or check.status == "not_audited":
        return "its text was not audited"
    if check.status == "no_deviation":
        above = "" if check.bound is None else f" above TV {check.bound:.3f} at 95%"
        return f"text unchanged: no deviation{above} in {check.num_tokens:,} audited tokens"
    return f"its text cannot be judged: {check.sentence.rstrip('.')}"


def _describe_needs(report: TuneReport, result: LoadResult) -> list[str]:
    """Return the acceptance length that would pay, by the cost of each draft that does not.

    Drafts without a fixed K are left out, which may draft in some steps alone.
    """
    settings = {arm.name: arm.speculation or Speculation() for arm in report.arms}
    needs = list[str]()
    for arm in result.arms:
        setting, cost = settings[arm.arm], arm.cycle_cost
        if setting.draft is None or setting.k is None or arm.num_blocks < LEAST_BLOCKS:
            continue
        if arm.drafting is None or cost is None or arm.speedup is None:
            continue
        if arm.speedup.estimate < 1.0 or report.acceptance_length is not None:
            needs.append(
                f"{result.load.label}: {arm.arm} makes {arm.drafting.acceptance_length:.2f} tokens "
                f"per step; a draft that costs as much needs {cost:.2f} to be as fast as "
                f"{report.baseline}, and "
                f"{GAIN * cost:.2f} to be {GAIN:g} times as fast."
            )
    return needs


def _is_k_of_vllm_alone(report: TuneReport) -> bool:
    """Return whether vLLM's best settings at the loads are of one method with different K."""
    arms = {arm.name: arm for arm in report.arms}
    best = [arms[name] for name in {r.recommended for r in report.loads} if name is not None]
    of_vllm = all(any("--speculative-config" in w for w in arm.command) for arm in best)
    kinds = {(a.speculation.method, a.speculation.draft) if a.speculation else None for a in best}
    return of_vllm and len(best) > 1 and len(kinds) == 1 and None not in kinds


def _show(interval: Interval | None, spec: str, gap: str) -> str:
    """Return a figure with its interval; a single block, or start of a server, has none."""
    if interval is None:
        return ""
    if not math.isfinite(interval.high):
        return f"{interval.estimate:{spec}}{gap}(no interval)"
    return interval.show(spec, gap)


def _show_times(arm: ArmResult, name: str) -> str:
    shown = (arm.figures.get(f"{name}_{share}_s") for share in ("median", "p95"))
    spec = ".0f" if name == "ttft" else ".1f"
    return " / ".join(f"{1e3 * time.estimate:{spec}}" for time in shown if time is not None)


def _show_accepted(arm: ArmResult) -> str:
    """Return the share of steps that accepted each position, or else the tokens."""
    counts = arm.drafting
    if counts is None or not counts.num_drafts:
        return ""
    shares = [f"{n / counts.num_drafts:.2f}" for n in counts.accepted_per_position]
    more = ["…"] if len(shares) > MOST_POSITIONS else []
    tokens = f"{counts.num_accepted:,} of {counts.num_drafted:,}"
    return " ".join(shares[:MOST_POSITIONS] + more) or tokens
