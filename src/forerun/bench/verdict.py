"""One sentence per arm, made of its figures."""

from __future__ import annotations

from forerun.bench.summary import MIN_BLOCKS, ArmSummary

__all__ = ["outcome", "verdict"]


def verdict(summary: ArmSummary) -> str:
    """What the figures of one arm amount to, and why."""
    if summary.arm.num_speculative_tokens == 0:
        return f"baseline: one target pass per token, {1000.0 * summary.step_s:.1f} ms each"
    return f"{outcome(summary)}: {reason(summary)}"


def outcome(summary: ArmSummary) -> str:
    """Faster, slower, or not shown to be either."""
    speedup = summary.speedup
    if summary.num_blocks < MIN_BLOCKS:
        return f"not shown ({summary.num_blocks} blocks are too few)"
    if speedup.is_above(1.0):
        return f"faster, {speedup.estimate:.2f}x"
    if speedup.is_below(1.0):
        return f"slower, {speedup.estimate:.2f}x"
    return f"not shown (the interval {speedup.low:.2f} to {speedup.high:.2f} includes 1)"


def reason(summary: ArmSummary) -> str:
    """Accepted over drafted against the rate at which a cycle pays for itself."""
    acceptance, break_even = summary.acceptance, summary.break_even
    rate = acceptance.draft_acceptance_rate
    if rate is None or break_even is None:
        return "nothing was drafted"
    counts = f"accepts {acceptance.num_accepted} of {acceptance.num_drafted} drafted ({rate:.2f})"
    if break_even > 1.0:
        costs = f"a step costs {summary.cycle_cost:.2f} plain steps"
        return f"{counts}, and {costs}, more than full acceptance would repay"
    side = "above" if rate > break_even else "below"
    sentence = f"{counts}, {side} the break-even of {max(0.0, break_even):.2f}"
    if rate > break_even and summary.speedup.is_below(1.0):
        return f"{sentence}; reading the prompt with the draft costs the rest"
    return sentence
