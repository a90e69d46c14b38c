"""Causes that lie in what a model is fed: caches, features, weights, kernels."""

from __future__ import annotations

from forerun.diagnose.causes.base import Cause, Remedy, Sign

__all__ = ["STATE"]

OFF_UNTIL_FIXED = Remedy(
    change="turn speculation off until it is fixed",
    price="no gain meanwhile; plain speed and plain text at once",
    effect="off",
)
K_ONE = Remedy(
    change="draft a single token, which needs no draft state within a step",
    price="at most two tokens per step",
    effect="best_k",
)

STATE: tuple[Cause, ...] = (
    Cause(
        label="kv_position_misalignment",
        family="state",
        what="Draft or target read cache rows or positions that are off.",
        why="After a rollback by the wrong count, a missing bonus row or a wrong offset, the draft "
        "predicts from another text than the one that is there.",
        prior=0.1,
        signs=(
            Sign(fact="rollback_wrong", yes=3.0, no=-1.0),
            Sign(fact="changed", word="engine", yes=0.7),
            Sign(fact="acceptance_dropped", yes=0.4),
            Sign(fact="acceptance_falls_after_partial", yes=3.0, no=-0.7),
            Sign(fact="acceptance_falls_after_full", yes=2.5, no=-0.4),
            Sign(fact="acceptance_falls_with_generation", yes=2.5, no=-0.5),
            Sign(fact="acceptance_falls_with_k", yes=2.5, no=-0.5),
            Sign(fact="acceptance_falls_with_batch", yes=2.5, no=-0.3),
            Sign(fact="replay_accepts_more", yes=2.5, no=-2.0),
            Sign(fact="self_draft_rate", ramp=(0.99, 0.9), yes=2.5, no=-1.5),
            Sign(fact="later_over_first", ramp=(0.5, 0.1), yes=1.5, no=-0.3),
            Sign(fact="output_differs_after_partial", yes=4.0),
            Sign(fact="output_differs_only_batched", yes=1.2),
            Sign(fact="output_corrupt", yes=1.4),
            Sign(fact="output_differs", yes=0.5),
            Sign(fact="acceptance_fine", yes=-0.5),
            Sign(fact="acceptance_falls_after_handoff", yes=-2.5),
            Sign(fact="target_recurrent", yes=-1.0),
        ),
        remedies=(
            Remedy(
                change="rewind both caches to the committed length after every step, and feed what "
                "is not cached; test by replaying emitted text with fresh caches",
                price="one row more to feed after a full acceptance",
                effect="fewer_rejections",
            ),
            K_ONE,
            OFF_UNTIL_FIXED,
        ),
    ),
    Cause(
        label="recurrent_state_rollback",
        family="state",
        what="Recurrent state keeps rejected tokens.",
        why="A state that sums up the past cannot be cut like a KV cache; without a checkpoint the "
        "model goes on from text that was rejected, fluently and wrongly.",
        prior=-1.3,
        signs=(
            Sign(fact="target_recurrent", yes=2.5, no=-3.0),
            Sign(fact="output_differs", yes=1.5, no=-1.5),
            Sign(fact="output_corrupt", yes=1.4),
            Sign(fact="output_differs_after_partial", yes=3.0, no=-0.7),
            Sign(fact="rollback_wrong", yes=0.8),
            Sign(fact="output_differs_at_ties", yes=-1.5, no=0.7),
            Sign(fact="speculation_refused", yes=-0.5),
            Sign(fact="replay_accepts_more", yes=1.0),
        ),
        remedies=(
            Remedy(
                change="keep a checkpoint of the state per drafted position, and go back to the "
                "accepted one",
                price="K + 1 states of memory per sequence, and a copy per step",
                effect="none",
            ),
            OFF_UNTIL_FIXED,
        ),
    ),
    Cause(
        label="draft_input_feature_mismatch",
        family="state",
        what="The draft head reads other hidden states than it was trained on.",
        why="A wrong layer, a missing norm or residual shifts every input alike: acceptance is "
        "lower by the same amount on all text.",
        signs=(
            Sign(fact="features_differ", yes=3.5, no=-1.0),
            Sign(fact="acceptance_below_reference", yes=2.5, no=-1.5),
            Sign(fact="method", word="eagle", yes=0.7),
            Sign(fact="method", word="mtp", yes=0.5),
            Sign(fact="method", word="draft_model", yes=-2.5),
            Sign(fact="method", word="ngram", yes=-4.0),
            Sign(fact="acceptance_low", yes=0.8),
            Sign(fact="draft_self_trained", yes=-0.5),
            Sign(fact="acceptance_zero", yes=-0.7),
            Sign(fact="acceptance_differs_by_backend", yes=-1.5),
            Sign(fact="acceptance_differs_by_domain", yes=-1.0),
            Sign(fact="replay_accepts_more", yes=-1.5, no=0.7),
            Sign(fact="acceptance_fine", yes=-0.5),
        ),
        remedies=(
            Remedy(
                change="feed the layers, norm and residual that the checkpoint was trained with; "
                "compare hidden states with the training code on one prompt",
                price="an afternoon; nothing at run time",
                effect="fewer_rejections",
            ),
            Remedy(
                change="train the head on the features that are served",
                price="a training run",
                effect="fewer_rejections",
            ),
        ),
    ),
    Cause(
        label="draft_weights_misloaded",
        family="state",
        what="The draft's weights are not those of its checkpoint, in part or entirely.",
        why="Missing, uninitialised or misread tensors make it emit noise: tau is pinned at 1.",
        signs=(
            Sign(fact="acceptance_zero", yes=2.5, no=-2.5),
            Sign(fact="alpha_1", ramp=(0.2, 0.05), yes=1.2, no=-0.3),
            Sign(fact="drawn_share", ramp=(0.15, 0.35), yes=4.0, no=-2.0),
            Sign(fact="acceptance_below_reference", yes=1.0),
            Sign(fact="changed", word="engine", yes=0.5),
            Sign(fact="weights_incomplete", yes=3.5, no=-1.0),
            Sign(fact="card_ratio", ramp=(0.6, 0.3), yes=2.0, no=-1.0),
            Sign(fact="draft_nan", yes=1.2),
            Sign(fact="weights_reloaded", yes=1.5),
            Sign(fact="draft_quantised", yes=0.7),
            Sign(fact="changed", word="draft", yes=1.0),
            Sign(fact="vocabularies_differ", yes=-2.0),
            Sign(fact="acceptance_differs_by_backend", yes=-2.0),
            Sign(fact="acceptance_differs_by_precision", yes=-0.7),
            Sign(fact="acceptance_differs_by_domain", yes=-1.5),
            Sign(fact="method", word="ngram", yes=-5.0),
            Sign(fact="drafts_absent", yes=-2.0),
        ),
        remedies=(
            Remedy(
                change="load the draft with an audit of every tensor (missing, unexpected, NaN), "
                "and check its perplexity alone",
                price="some seconds at start-up",
                effect="fewer_rejections",
            ),
            Remedy(
                change="serve the draft unquantised, as published",
                price="some memory",
                effect="fewer_rejections",
            ),
            OFF_UNTIL_FIXED,
        ),
    ),
    Cause(
        label="kernel_or_metadata_bug",
        family="state",
        what="One kernel, backend, graph mode or parallel layout computes something else.",
        why="Wrong masks, lengths or captured sizes spoil the rows of a speculative pass only.",
        signs=(
            Sign(fact="acceptance_differs_by_backend", yes=3.5, no=-1.5),
            Sign(fact="acceptance_differs_by_graph", yes=3.5, no=-1.2),
            Sign(fact="acceptance_zero", yes=0.7),
            Sign(fact="changed", word="driver", yes=1.5),
            Sign(fact="changed", word="engine", yes=0.9),
            Sign(fact="changed", word="config", yes=0.7),
            Sign(fact="acceptance_dropped", yes=0.8),
            Sign(fact="acceptance_differs_by_precision", yes=0.5),
            Sign(fact="output_corrupt", yes=0.8),
            Sign(fact="acceptance_fine", yes=-0.7),
        ),
        remedies=(
            Remedy(
                change="switch the attention backend or graph mode of the draft, or run it eagerly",
                price="a slower step until the kernel is fixed",
                effect="reference_acceptance",
            ),
            Remedy(
                change="report it with the two settings that differ, and pin the good one",
                price="a pinned version",
                effect="fewer_rejections",
            ),
            OFF_UNTIL_FIXED,
        ),
    ),
    Cause(
        label="drafter_state_loss",
        family="state",
        what="The draft's own state is lost or stale after a hand-over.",
        why="A prefix hit, a transfer between workers, a resume or a pause restores the target's "
        "cache but not the draft's, which then drafts from little or wrong context.",
        signs=(
            Sign(fact="acceptance_falls_after_handoff", yes=3.5, no=-1.5),
            Sign(fact="replay_accepts_more", yes=1.2, no=-1.5),
            Sign(fact="k0_share", ramp=(0.2, 0.6), yes=0.5),
            Sign(fact="acceptance_zero", yes=-0.3),
        ),
        remedies=(
            Remedy(
                change="move or rebuild the draft's cache and features with the target's",
                price="a draft prefill, or its bytes over the wire",
                effect="fewer_rejections",
            ),
            Remedy(
                change="draft nothing until the draft has caught up",
                price="plain speed for the first tokens after each hand-over",
                effect="none",
            ),
        ),
    ),
)
