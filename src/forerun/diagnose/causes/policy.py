"""Causes that lie in the choice of K; and health."""

from __future__ import annotations

from forerun.diagnose.causes.base import Cause, Remedy, Sign

__all__ = ["HEALTH", "POLICY"]

POLICY: tuple[Cause, ...] = (
    Cause(
        label="k_too_large",
        family="policy",
        what="More is drafted than is accepted often enough to pay.",
        why="The token at position K is worth its acceptance through K; it costs c and its row "
        "whether accepted or not.",
        signs=(
            Sign(fact="gain_of_lower_k", ramp=(1.02, 1.15), yes=3.2, no=-2.0),
            Sign(fact="speedup_of_best_k", ramp=(0.75, 0.95), yes=0.5, no=-1.5),
            Sign(fact="slower_with_k", yes=1.8, no=-0.7),
            Sign(fact="later_over_first", ramp=(0.6, 0.1), yes=1.2, no=-0.2),
            Sign(fact="length_over_ceiling", ramp=(0.6, 0.3), yes=0.8, no=-1.5),
            Sign(fact="k", ramp=(2.0, 12.0), yes=0.9, no=-0.7),
            Sign(fact="changed", word="config", yes=0.7),
            Sign(fact="k_swing", ramp=(0.4, 0.9), yes=-1.5),
            Sign(fact="slower_with_context", yes=-1.0),
            Sign(fact="faster_with_k", yes=-2.5),
            Sign(fact="cost_independent_of_k", yes=-1.5),
            Sign(fact="acceptance_zero", yes=-2.0),
            Sign(fact="acceptance_falls_with_k", yes=-1.0),
            Sign(fact="acceptance_dropped", yes=-2.5),
            Sign(fact="slower_with_batch", yes=-0.5),
        ),
        remedies=(
            Remedy(
                change="lower K to where tau / kappa is highest",
                price="less to gain on easy text",
                effect="best_k",
            ),
            Remedy(
                change="stop drafting where the draft is unsure (decided before each draw)",
                price="a threshold to calibrate",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="k_too_small",
        family="policy",
        what="Nearly everything is accepted and drafting stops too early.",
        why="A step can emit at most K + 1 tokens; if it usually does, the next drafted token "
        "would be accepted too.",
        signs=(
            Sign(fact="full_accept_share", ramp=(0.55, 0.8), yes=1.8, no=-1.5),
            Sign(fact="length_over_ceiling", ramp=(0.75, 0.92), yes=1.8, no=-2.0),
            Sign(fact="gain_of_higher_k", ramp=(1.02, 1.3), yes=2.5, no=-2.0),
            Sign(fact="faster_with_k", yes=2.5, no=-1.5),
            Sign(fact="slower_with_k", yes=-2.0),
            Sign(fact="k", ramp=(6.0, 2.0), yes=0.6, no=-0.6),
            Sign(fact="output_repetitive", yes=-1.5),
            Sign(fact="slower_than_plain", yes=-1.0),
            Sign(fact="output_differs", yes=-1.0),
            Sign(fact="law_differs", yes=-1.5),
        ),
        remedies=(
            Remedy(
                change="raise K to where tau / kappa is highest",
                price="more rows per pass: less gain at large batches",
                effect="best_k",
            ),
            Remedy(
                change="let K follow the acceptance of each request",
                price="a controller; graphs for every K",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="adaptive_policy_pathology",
        family="policy",
        what="The rule that chooses K oscillates, is stuck, or costs more than it gains.",
        why="Positions that are not drafted are not observed; a rule that counts them as rejected, "
        "never explores, or lets the draft's state go stale does not come back.",
        signs=(
            Sign(fact="adaptive_stuck", yes=3.2, no=-1.0),
            Sign(fact="k_change_share", ramp=(0.2, 0.5), yes=1.0, no=-0.7),
            Sign(fact="k_swing", ramp=(0.4, 0.9), yes=3.0, no=-0.7),
            Sign(fact="adaptive_k", yes=1.3, no=-3.0),
            Sign(fact="slow_without_drafts", yes=0.7),
            Sign(fact="k0_share", ramp=(0.3, 0.8), yes=1.0, no=-0.3),
            Sign(fact="gain_of_best_k", ramp=(1.05, 1.25), yes=0.7, no=-0.7),
        ),
        remedies=(
            Remedy(
                change="fix K at the best one for the mean acceptance",
                price="no adaptation to easy or hard requests",
                effect="best_k",
            ),
            Remedy(
                change="add hysteresis and a share of exploring steps; count what was not drafted "
                "as unknown",
                price="some percent of steps at another K",
                effect="best_k",
            ),
        ),
    ),
)

HEALTH = Cause(
    label="healthy",
    family="health",
    what="Speculation does what it should: nothing here explains a complaint.",
    why="Steps yield more tokens than they cost plain steps; no smaller K would do much better.",
    prior=0.5,
    signs=(
        Sign(fact="speedup", ramp=(0.97, 1.1), yes=2.0, no=-3.5),
        Sign(fact="gain_of_lower_k", ramp=(1.15, 1.05), yes=0.7, no=-2.0),
        Sign(fact="full_accept_share", ramp=(0.7, 0.85), yes=-2.0),
        Sign(fact="context_ratio", ramp=(0.97, 0.85), yes=-3.5),
        Sign(fact="drawn_share", ramp=(0.15, 0.35), yes=-3.5),
        Sign(fact="slower_with_batch", yes=-1.5),
        Sign(fact="acceptance_falls_with_temperature", yes=-1.0),
        Sign(fact="acceptance_fine", yes=1.8, no=-1.0),
        Sign(fact="acceptance_low", yes=-1.5, no=0.5),
        Sign(fact="drafts_absent", yes=-4.0),
        Sign(fact="calibration", ramp=(0.9, 0.97), yes=0.4, no=-1.0),
        *(
            Sign(fact=name, yes=-3.5)  # tests that find something in one healthy run of fifty
            for name in (
                *("slower_than_plain", "no_gain", "slowed_down", "acceptance_dropped"),
                *("acceptance_zero", "acceptance_differs_by_domain", "tools_disagree"),
                "acceptance_falls_with_context",
                *("acceptance_falls_after_partial", "acceptance_falls_after_full"),
                *("acceptance_falls_with_batch", "acceptance_falls_with_generation"),
                *("acceptance_falls_with_k", "acceptance_below_reference", "output_repetitive"),
                *("acceptance_falls_after_handoff", "acceptance_differs_by_backend"),
                *("acceptance_differs_by_graph", "acceptance_differs_by_precision"),
                *("acceptance_differs_by_template", "acceptance_above_expected"),
                *("replay_accepts_more", "output_differs", "output_corrupt", "law_differs"),
                *("schema_violations", "slower_with_k", "graphs_off"),
                *("slower_with_context", "slower_with_tensor_parallel", "verify_serial"),
                *("slow_without_drafts", "ttft_up", "cache_hits_lower", "memory_pressure"),
                *("host_work", "faster_with_k", "random_prompts", "adaptive_stuck"),
                *("compared_with_published", "benchmark_unlike_traffic", "open_ended_text"),
                *("cost_changed_with_engine", "undertrained_draft", "slower_with_fast_target"),
                *("speculation_refused", "device_idle", "draft_nan", "draft_probs_differ"),
                *("rollback_wrong", "weights_incomplete", "template_differs", "residual_wrong"),
                *("client_counts_chunks", "definitions_differ", "outputs_short", "law_in_doubt"),
            )
        ),
        Sign(fact="prefill_share", ramp=(0.4, 0.7), yes=-2.0),
        Sign(fact="k_swing", ramp=(0.4, 0.9), yes=-2.0),
        Sign(fact="changed", word="target", yes=-1.5),
        *(Sign(fact=name, yes=-2.0) for name in ("draft_one_hot", "exact_match_rule")),
        Sign(fact="self_draft_rate", ramp=(0.99, 0.9), yes=-2.0, no=0.3),
        Sign(fact="pit_p_value", ramp=(0.02, 0.001), yes=-1.0, no=0.5),
    ),
    remedies=(
        Remedy(
            change="keep it; watch alpha_1 and the speedup's lower bound per traffic class",
            price="none",
            effect="none",
        ),
        Remedy(
            change="set K to the best one for these costs",
            price="a restart",
            effect="best_k",
        ),
    ),
)
