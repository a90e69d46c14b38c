"""Derives costs in plain steps from times and rates."""

from __future__ import annotations

from forerun.diagnose.evidence import Evidence

__all__ = ["add_costs", "add_ratios"]


def add_costs(evidence: Evidence) -> None:
    """Add kappa, its parts and the speedup, from timers or from two rates."""
    add_times(evidence)
    add_parts(evidence)
    with_s, plain = evidence.number("tokens_per_s"), evidence.number("tokens_per_s_plain")
    if with_s and plain:
        evidence.conclude("speedup", with_s / plain, "tokens/s with over without speculation")
    tau, kappa = evidence.number("acceptance_length"), evidence.number("cycle_cost")
    gain = evidence.number("speedup")
    if kappa is None and tau and gain:
        kappa = tau / gain
        evidence.conclude("cycle_cost", kappa, "tau / speedup")
    if tau and kappa and gain is None:
        evidence.conclude("speedup", tau / kappa, "tau / kappa")
    add_rest(evidence)
    add_linearity(evidence)


def add_rest(evidence: Evidence) -> None:
    """Add v, the cost of a target pass that was not timed, from the rest of a step."""
    kappa, c, k = (evidence.number(name) for name in ("cycle_cost", "draft_cost", "k"))
    if kappa and c is not None and k and "verify_cost" not in evidence and kappa > k * c:
        evidence.conclude("verify_cost", kappa - k * c, "kappa - K c: the pass, overhead included")


def add_times(evidence: Evidence) -> None:
    """Add times of a step that follow from rates, where one sequence decodes."""
    if evidence.number("batch") not in (None, 1.0):
        return
    tau, rate = evidence.number("acceptance_length"), evidence.number("tokens_per_s")
    if tau and rate and "cycle_s" not in evidence:
        evidence.conclude("cycle_s", tau / rate, "tau / (tokens/s)")
    plain = evidence.number("tokens_per_s_plain")
    if plain and "plain_step_s" not in evidence:
        evidence.conclude("plain_step_s", 1.0 / plain, "1 / (plain tokens/s)")


def add_parts(evidence: Evidence) -> None:
    """Add the costs of drafting, of the target pass and of the rest, from timers."""
    plain_s, k = evidence.number("plain_step_s"), evidence.number("k")
    if not plain_s:
        return
    cycle_s, verify_s = evidence.number("cycle_s"), evidence.number("verify_s")
    draft_s, other_s = evidence.number("draft_s"), evidence.number("other_s")
    if cycle_s:
        evidence.conclude("cycle_cost", cycle_s / plain_s, "step time / plain step time")
    if verify_s is not None:
        evidence.conclude("verify_cost", verify_s / plain_s, "target pass / plain step time")
    if other_s is not None:
        evidence.conclude("overhead", other_s / plain_s, "other time / plain step time")
    token_s = evidence.number("draft_token_s")
    if draft_s is not None and k:
        evidence.conclude("draft_cost", draft_s / plain_s / k, "drafting / K / plain step time")
    elif token_s is not None:
        evidence.conclude("draft_cost", token_s / plain_s, "drafted token / plain step time")


def add_linearity(evidence: Evidence) -> None:
    """Add the total draft cost, the rows of a pass, and how the pass grows with its rows."""
    k, batch = evidence.number("k"), evidence.number("batch")
    c, v = evidence.number("draft_cost"), evidence.number("verify_cost")
    if k and c is not None:
        evidence.conclude("draft_cost_total", k * c, "K c")
    if k and batch:
        add_rows(evidence, k, batch)
    rows, costs = evidence.numbers("verify_rows"), evidence.numbers("verify_costs")
    if len(rows) > 1 and len(rows) == len(costs) and rows[-1] > rows[0]:
        slope = max(0.0, (costs[-1] - costs[0]) / (rows[-1] - rows[0]))
        evidence.conclude("verify_linearity", slope, "slope of v over rows per sequence")
    elif k and v is not None:
        evidence.conclude("verify_linearity", max(0.0, v - 1.0) / k, "(v - 1) / K")


FREE_ROWS = 128.0
"""Where passes of usual accelerators turn from waiting for weights to computing; some hundred."""
FREE_ROWS_CPU = 16.0
MIN_GROWTH = 0.05
"""Of a pass: less is not told from nothing."""


def add_rows(evidence: Evidence, k: float, batch: float) -> None:
    """Add the rows of a pass, and whether they are many for the device or due to the batch.

    Where n sequences take 1 + s (n - 1) of the plain step of one, a pass over n (K + 1) rows that
    is no worse than that takes (1 + s (n (K + 1) - 1)) / (1 + s (n - 1)) of a plain step of n.
    """
    rows = batch * (k + 1)
    evidence.conclude("rows", rows, "batch x (K + 1)")
    on_cpu = any(name.startswith("cpu") for name in evidence.words("device"))
    free = FREE_ROWS_CPU if on_cpu else FREE_ROWS
    evidence.conclude("rows_over_free", rows / free, f"rows over {free:g}")
    slope, v = evidence.number("batch_linearity"), evidence.number("verify_cost")
    if slope is not None and v is not None and batch > 1.0:
        as_batch = (1.0 + slope * (rows - 1.0)) / (1.0 + slope * (batch - 1.0))
        share = max(0.0, v - 1.0) / max(MIN_GROWTH, as_batch - 1.0)
        evidence.conclude(
            "verify_over_batch", share, f"v {v:.2f}, by the batch alone {as_batch:.2f}"
        )


RATIOS = (
    ("slowdown", "tokens_per_s_before", "tokens_per_s"),
    ("client_ratio", "tokens_per_s_server", "tokens_per_s_client"),
    ("reference_ratio", "acceptance_length", "reference_acceptance_length"),
    ("reference_ratio", "draft_acceptance_rate", "reference_acceptance_rate"),
    ("draft_size_ratio", "draft_parameters", "target_parameters"),
    ("context_over_window", "context_tokens", "draft_max_context"),
    ("ttft_ratio", "ttft_s", "ttft_s_plain"),
    ("rows_over_graph", "rows", "graph_max_rows"),
)
"""Name, over, under."""


def add_ratios(evidence: Evidence) -> None:
    """Add facts that are ratios of two others."""
    if "tokens_per_s_client" in evidence and "tokens_per_s_server" not in evidence:
        rate = evidence.number("tokens_per_s")
        evidence.conclude("tokens_per_s_server", rate, "the rate that was measured at the engine")
    k, before = evidence.number("k"), evidence.number("reference_k")
    if k and before and k != before:  # tau grows with K, whatever the draft
        add_ratio(evidence, "reference_ratio", "alpha", "reference_alpha")
    for name, over, under in RATIOS:
        add_ratio(evidence, name, over, under)
    with_rate = evidence.number("prefix_hit_rate")
    without = evidence.number("prefix_hit_rate_plain")
    if with_rate is not None and without is not None:
        lost = max(0.0, without - with_rate)
        evidence.conclude("prefix_hit_loss", lost, "prefix hit rate without minus with speculation")


def add_ratio(evidence: Evidence, name: str, over: str, under: str) -> None:
    """Add one figure over another, where both are known and the ratio is not."""
    above, below = evidence.number(over), evidence.number(under)
    if above is not None and below and name not in evidence:
        evidence.conclude(name, above / below, f"{over} / {under}")
