"""Causes that lie in what a step costs."""

from __future__ import annotations

from forerun.diagnose.causes.base import Cause, Remedy, Sign

__all__ = ["COST"]

BEST_K = Remedy(
    change="set K where tau / kappa is highest for these costs",
    price="fewer tokens at once where the text is easy",
    effect="best_k",
)
OFF_THERE = Remedy(
    change="turn speculation off in that regime, by batch size or context",
    price="no gain there; a switch to maintain",
    effect="off",
)

COST: tuple[Cause, ...] = (
    Cause(
        label="draft_too_slow",
        family="cost",
        what="Drafting costs too much of a plain step.",
        why="K sequential draft passes are paid whatever is accepted; at c = 0.2 and K = 5 a step "
        "has to yield two tokens before anything is gained.",
        prior=0.1,
        signs=(
            Sign(fact="gap_share_draft", ramp=(0.2, 0.45), yes=2.5, no=-2.0),
            Sign(fact="draft_share_high", yes=1.7, no=-1.2),
            Sign(fact="draft_cost", ramp=(0.1, 0.3), yes=1.0, no=-1.5),
            Sign(fact="cost_independent_of_k", yes=-1.5),
            Sign(fact="gap_share_rejection", ramp=(0.6, 0.25), yes=0.9, no=-0.9),
            Sign(fact="draft_size_ratio", ramp=(0.04, 0.12), yes=1.8, no=-1.0),
            Sign(fact="slower_with_fast_target", yes=1.8),
            Sign(fact="slower_with_k", yes=0.7),
            Sign(fact="slower_than_plain", yes=0.6, no=-0.3),
            Sign(fact="acceptance_fine", yes=0.5),
            Sign(fact="acceptance_zero", yes=-1.5),
            Sign(fact="method", word="draft_model", yes=0.4),
            Sign(fact="method", word="eagle", yes=-0.4),
            Sign(fact="method", word="mtp", yes=-0.4),
            Sign(fact="method", word="block", yes=-0.4),
            Sign(fact="method", word="ngram", yes=-4.0),
            Sign(fact="slower_with_tensor_parallel", yes=-0.7),
            Sign(fact="slower_with_batch", yes=-0.7),
            Sign(fact="prefill_share", ramp=(0.4, 0.8), yes=-2.5),
        ),
        remedies=(
            Remedy(
                change="take a draft of half the cost: smaller, fewer layers, or one that drafts "
                "in parallel",
                price="usually lower acceptance; measure both",
                effect="cheaper_draft",
            ),
            BEST_K,
            OFF_THERE,
        ),
    ),
    Cause(
        label="draft_placement_or_tp",
        family="cost",
        what="The draft runs in the wrong place: split over devices, or away from the target.",
        why="A small model is bound by launches and messages, so splitting it makes it slower, "
        "while the target it is compared with gets faster.",
        signs=(
            Sign(fact="slower_with_tensor_parallel", yes=3.2, no=-1.5),
            Sign(fact="draft_elsewhere", yes=3.2, no=-1.2),
            Sign(fact="draft_tensor_parallel", ramp=(1.0, 4.0), yes=1.0, no=-0.7),
            Sign(fact="gap_share_draft", ramp=(0.2, 0.5), yes=0.7, no=-0.7),
        ),
        remedies=(
            Remedy(
                change="run the draft on one device (tensor parallelism 1), beside the target",
                price="memory of the whole draft on that device; the others wait",
                effect="cheaper_draft",
            ),
            BEST_K,
        ),
    ),
    Cause(
        label="verify_not_parallel",
        family="cost",
        what="The target pass costs almost as much per drafted row as a step each.",
        why="Speculation gains by verifying K + 1 rows for about the price of one. Kernels that "
        "take rows one by one, or small-batch kernels past their tile, lose that.",
        signs=(
            Sign(fact="verify_serial", yes=3.0, no=-1.0),
            Sign(fact="cost_independent_of_k", yes=-1.5),
            Sign(fact="verify_linearity", ramp=(0.15, 0.5), yes=2.5, no=-2.0),
            Sign(fact="gap_share_rejection", ramp=(0.6, 0.25), yes=0.9, no=-0.9),
            Sign(fact="gap_share_verify", ramp=(0.2, 0.5), yes=1.5, no=-1.5),
            Sign(fact="batch", ramp=(2.0, 16.0), yes=-1.5, no=0.3),
            Sign(fact="rows_over_free", ramp=(0.25, 1.5), yes=-1.5),
            Sign(fact="verify_over_batch", ramp=(1.0, 2.5), yes=1.0, no=-2.0),
            Sign(fact="target_quantised", yes=0.7),
            Sign(fact="acceptance_fine", yes=0.4),
            Sign(fact="slower_than_plain", yes=0.3),
            Sign(fact="target_moe", yes=-0.7),
            Sign(fact="slower_with_k", yes=0.5),
            Sign(fact="faster_with_k", yes=-1.0),
            Sign(fact="slower_with_context", yes=-3.0),
        ),
        remedies=(
            Remedy(
                change="use kernels that serve several query rows per pass of the weights",
                price="another backend, or another quantisation format",
                effect="parallel_verify",
            ),
            Remedy(
                change="keep K below the row count where the pass jumps (measure v(n))",
                price="fewer tokens per step",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="compute_bound_batch",
        family="cost",
        what="The batch alone keeps the device busy, so every drafted row costs its share.",
        why="Below some hundred rows, on a CPU some ten, the pass waits for weights and further "
        "rows are free; with batch x (K + 1) above it they are not.",
        signs=(
            Sign(fact="slower_with_context", yes=-1.5),
            Sign(fact="slower_with_batch", yes=2.5, no=-1.5),
            Sign(fact="rows_over_free", ramp=(0.125, 1.0), yes=1.5, no=-1.0),
            Sign(fact="batch_linearity", ramp=(0.05, 0.25), yes=1.5, no=-1.5),
            Sign(fact="verify_over_batch", ramp=(2.5, 1.0), yes=1.0, no=-1.0),
            Sign(fact="batch", ramp=(2.0, 16.0), yes=1.5, no=-1.0),
            Sign(fact="gap_share_verify", ramp=(0.2, 0.5), yes=1.0, no=-1.5),
            Sign(fact="acceptance_falls_with_batch", yes=-2.0, no=0.3),
            Sign(fact="graphs_off", yes=-1.0),
            Sign(fact="slow_without_drafts", yes=-1.0),
        ),
        remedies=(
            Remedy(
                change="let K fall with the batch, down to 0",
                price="a table or controller; a switch costs a step or two",
                effect="best_k",
            ),
            OFF_THERE,
        ),
    ),
    Cause(
        label="moe_expert_loading",
        family="cost",
        what="Each drafted row wakes experts of its own.",
        why="A mixture of experts reads few weights for one token and nearly all for many, so the "
        "pass grows with its rows until every expert is read anyway.",
        prior=-1.6,
        signs=(
            Sign(fact="target_moe", yes=2.8, no=-2.0),
            Sign(fact="experts_dominate", yes=3.0, no=-0.7),
            Sign(fact="gap_share_verify", ramp=(0.2, 0.5), yes=1.3, no=-1.5),
            Sign(fact="verify_linearity", ramp=(0.1, 0.3), yes=0.8, no=-1.5),
            Sign(fact="slower_with_k", yes=0.7),
            Sign(fact="slower_than_plain", yes=0.3),
            Sign(fact="no_gain", yes=0.3),
            Sign(fact="rows", ramp=(64.0, 256.0), yes=-1.0, no=0.2),
            Sign(fact="acceptance_zero", yes=-1.5),
        ),
        remedies=(
            BEST_K,
            Remedy(
                change="speculate at medium batches, where every expert is read anyway",
                price="latency of waiting for a batch",
                effect="none",
            ),
        ),
    ),
    Cause(
        label="long_context_kv_cost",
        family="cost",
        what="Reading the KV cache dominates, once per drafted row or for the draft as well.",
        why="The cache grows with the context while the weights do not; a kernel that reads it per "
        "query row pays K + 1 times.",
        signs=(
            Sign(fact="slower_with_context", yes=3.2, no=-1.5),
            Sign(fact="context_tokens", ramp=(8000.0, 32000.0), yes=1.2, no=-1.0),
            Sign(fact="acceptance_falls_with_context", yes=-1.0, no=0.7),
            Sign(fact="context_over_window", ramp=(0.8, 1.0), yes=-1.5),
            Sign(fact="gap_share_verify", ramp=(0.2, 0.5), yes=0.7, no=-0.7),
        ),
        remedies=(
            Remedy(
                change="verify with a kernel that reads the cache once for all rows (split-KV)",
                price="another attention backend",
                effect="parallel_verify",
            ),
            Remedy(
                change="let K fall with the context, or give the draft a window",
                price="a table or controller; less lookahead on long texts",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="graphs_missing_or_launch_bound",
        family="cost",
        what="Speculative passes run without captured graphs, and the host cannot keep up.",
        why="Graphs are captured for certain row counts; a pass of batch x (K + 1) rows outside "
        "them launches every kernel by hand.",
        signs=(
            Sign(fact="graphs_off", yes=3.5, no=-2.0),
            Sign(fact="rows_over_graph", ramp=(0.95, 1.05), yes=2.5, no=-0.7),
            Sign(fact="gap_share_rejection", ramp=(0.6, 0.25), yes=0.9, no=-0.9),
            Sign(fact="device_idle", yes=1.8),
            Sign(fact="cost_independent_of_k", yes=1.0),
            Sign(fact="gap_share_overhead", ramp=(0.2, 0.5), yes=0.7, no=-0.3),
            Sign(fact="slowed_down", yes=0.8),
            Sign(fact="acceptance_fine", yes=0.7),
            Sign(fact="acceptance_dropped", yes=-1.5),
            Sign(fact="acceptance_differs_by_graph", yes=-1.5),
        ),
        remedies=(
            Remedy(
                change="capture graphs for every batch x (K + 1) that occurs, drafts included",
                price="start-up time and device memory per graph",
                effect="no_overhead",
            ),
            Remedy(
                change="choose K so that batch x (K + 1) stays within the captured sizes",
                price="fewer tokens per step at large batches",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="engine_overhead",
        family="cost",
        what="Host work around the passes takes a large part of each step.",
        why="Synchronising, sampling on the host, rebuilding metadata or scheduling once per step "
        "is paid per step, and a speculative step has more of it.",
        signs=(
            Sign(fact="gap_share_overhead", ramp=(0.15, 0.45), yes=2.5, no=-2.0),
            Sign(fact="overhead", ramp=(0.4, 1.0), yes=0.7, no=-1.0),
            Sign(fact="host_work", yes=2.8, no=-1.0),
            Sign(fact="cost_independent_of_k", yes=2.2, no=-1.0),
            Sign(fact="gap_share_rejection", ramp=(0.6, 0.25), yes=0.9, no=-0.9),
            Sign(fact="cost_changed_with_engine", yes=2.5),
            Sign(fact="changed", word="engine", yes=1.0),
            Sign(fact="unchanged", word="engine", yes=-0.5),
            Sign(fact="slow_without_drafts", yes=1.2),
            Sign(fact="device_idle", yes=1.0),
            Sign(fact="slowed_down", yes=0.8),
            Sign(fact="slower_than_plain", yes=0.4),
            Sign(fact="acceptance_fine", yes=0.7),
            Sign(fact="method", word="ngram", yes=0.5),
            Sign(fact="acceptance_dropped", yes=-2.0),
            Sign(fact="acceptance_zero", yes=-2.0),
            Sign(fact="graphs_off", yes=-1.0),
            Sign(fact="cache_hits_lower", yes=-1.0),
        ),
        remedies=(
            Remedy(
                change="profile one step and overlap or fuse what is not a pass (one host "
                "synchronisation per step is enough)",
                price="engineering; results one step later",
                effect="no_overhead",
            ),
            Remedy(
                change="go back to the engine version or scheduler that was faster",
                price="what the newer one brought",
                effect="no_overhead",
            ),
            BEST_K,
        ),
    ),
    Cause(
        label="memory_pressure_or_cache_loss",
        family="cost",
        what="The draft takes memory or cache blocks that plain decoding had.",
        why="Fewer sequences fit, more are preempted, or prefixes are computed again that were "
        "cached before.",
        signs=(
            Sign(fact="memory_pressure", yes=3.0, no=-1.0),
            Sign(fact="cache_hits_lower", yes=3.5, no=-1.5),
            Sign(fact="slow_without_drafts", yes=0.8),
            Sign(fact="acceptance_low", yes=-0.7),
        ),
        remedies=(
            Remedy(
                change="give the draft a fixed budget, and lower the batch limit to what fits "
                "beside it",
                price="fewer sequences at once",
                effect="none",
            ),
            Remedy(
                change="turn speculation off for workloads that live on the prefix cache",
                price="no gain in decoding there",
                effect="off",
            ),
        ),
    ),
    Cause(
        label="prefill_dominated",
        family="cost",
        what="Most of the time is spent before the first token, where speculation cannot help.",
        why="End to end the gain is 1 / ((1 - f) + f / S) with f the decode share; and the draft's "
        "own prefill delays the first token.",
        signs=(
            Sign(fact="prefill_share", ramp=(0.3, 0.6), yes=2.7, no=-2.0),
            Sign(fact="ttft_up", yes=2.7, no=-0.7),
            Sign(fact="outputs_short", yes=2.0, no=-0.5),
            Sign(fact="acceptance_low", yes=-0.5),
        ),
        remedies=(
            Remedy(
                change="defer the draft's prefill until the first token is out",
                price="the first step after it drafts nothing",
                effect="none",
            ),
            Remedy(
                change="do not speculate for outputs of a few tokens",
                price="lengths have to be guessed",
                effect="off",
            ),
        ),
    ),
)
