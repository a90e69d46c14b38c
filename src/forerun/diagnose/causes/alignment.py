"""Causes that lie in what the draft knows of the target and its text."""

from __future__ import annotations

from forerun.diagnose.causes.base import Cause, Remedy, Sign

__all__ = ["ALIGNMENT"]

LOWER_K = Remedy(
    change="draft as many tokens as pay at this acceptance (K of highest tau / kappa)",
    price="less to gain where the text is easy",
    effect="best_k",
)
TURN_OFF = Remedy(
    change="turn speculation off for this traffic",
    price="no gain where the draft is good; its memory is free",
    effect="off",
)
TRAIN = Remedy(
    change="train the draft further on outputs of this target",
    price="GPU hours and a data set; a new draft to roll out and version with the target",
    effect="fewer_rejections",
)
GO_BACK = Remedy(
    change="go back to the draft and K that accepted more",
    price="what the change was made for",
    effect="as_before",
)

ALIGNMENT: tuple[Cause, ...] = (
    Cause(
        label="low_alignment",
        family="alignment",
        what="The draft predicts this target poorly, everywhere and from the first position on.",
        why="Few drafted tokens survive, so a step that costs more than a plain one yields little "
        "more than one token.",
        prior=0.2,
        signs=(
            Sign(fact="acceptance_low", yes=2.0, no=-2.5),
            Sign(fact="changed", word="draft", yes=3.5),
            Sign(fact="unchanged", word="draft", yes=-0.5),
            Sign(fact="method", word="eagle", yes=-0.6),
            Sign(fact="method", word="mtp", yes=-0.6),
            Sign(fact="slower_with_k", yes=-0.7),
            Sign(fact="gap_share_rejection", ramp=(0.3, 0.7), yes=0.3, no=-1.2),
            Sign(fact="speedup_of_best_k", ramp=(1.05, 0.9), yes=1.0),
            Sign(fact="gain_of_lower_k", ramp=(1.08, 1.3), yes=-2.5),
            Sign(fact="context_ratio", ramp=(0.97, 0.85), yes=-2.0),
            Sign(fact="vocabularies_differ", yes=-2.5),
            Sign(fact="drawn_share", ramp=(0.15, 0.35), yes=-2.5),
            Sign(fact="undertrained_draft", yes=3.0, no=-0.7),
            Sign(fact="draft_self_trained", yes=1.2, no=-0.2),
            Sign(fact="replay_accepts_more", yes=-3.0, no=1.5),
            Sign(fact="acceptance_differs_by_domain", yes=-1.5, no=0.4),
            Sign(fact="acceptance_dropped", yes=-1.5, no=0.3),
            Sign(fact="acceptance_zero", yes=-1.0),
            Sign(fact="card_ratio", ramp=(0.9, 0.6), yes=-1.5),
            Sign(fact="acceptance_falls_after_partial", yes=-1.8),
            Sign(fact="acceptance_falls_after_full", yes=-1.8),
            Sign(fact="acceptance_falls_with_context", yes=-1.8),
            Sign(fact="acceptance_falls_with_generation", yes=-0.8),
            Sign(fact="acceptance_falls_with_batch", yes=-1.0),
            Sign(fact="acceptance_falls_after_handoff", yes=-1.8),
            Sign(fact="acceptance_differs_by_template", yes=-1.0),
            Sign(fact="acceptance_differs_by_precision", yes=-1.0),
            Sign(fact="acceptance_falls_with_temperature", yes=-1.0, no=0.3),
            Sign(fact="acceptance_differs_by_backend", yes=-2.0),
            Sign(fact="acceptance_differs_by_graph", yes=-2.0),
            Sign(fact="acceptance_below_reference", yes=-1.0),
            Sign(fact="output_differs_at_ties", yes=0.0, no=-2.0),
            Sign(fact="calibration", ramp=(0.9, 0.97), yes=0.5, no=-1.0),
        ),
        remedies=(TRAIN, GO_BACK, LOWER_K, TURN_OFF),
    ),
    Cause(
        label="domain_shift",
        family="alignment",
        what="The draft knows some kinds of text and not others.",
        why="Acceptance of the strange kinds pulls tau down, and one K cannot suit both.",
        signs=(
            Sign(fact="acceptance_differs_by_domain", yes=3.5, no=-2.0),
            Sign(fact="changed", word="traffic", yes=2.0),
            Sign(fact="replay_accepts_more", yes=-2.0, no=0.7),
            Sign(fact="acceptance_differs_by_template", yes=-0.5),
            Sign(fact="acceptance_low", yes=0.3),
        ),
        remedies=(
            Remedy(
                change="train the draft on text of the weak domain",
                price="data of that domain; strong domains may lose a little",
                effect="fewer_rejections",
            ),
            Remedy(
                change="choose K per domain, or off for the weak one",
                price="requests have to say what they are, or a controller has to learn it",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="prompt_format_mismatch",
        family="alignment",
        what="The draft was trained with another prompt format or mode than it is served with.",
        why="Template tokens steer every prediction; what the draft never saw it cannot follow.",
        signs=(
            Sign(fact="acceptance_differs_by_template", yes=3.5, no=-2.0),
            Sign(fact="template_differs", yes=3.5, no=-1.5),
            Sign(fact="template_has_modes", yes=1.8),
            Sign(fact="changed", word="template", yes=3.0),
            Sign(fact="acceptance_low", yes=0.3),
        ),
        remedies=(
            Remedy(
                change="serve with the template and mode the draft was trained on",
                price="that mode may not be the one wanted",
                effect="fewer_rejections",
            ),
            Remedy(
                change="train the draft on the served format, every mode of it",
                price="data per mode and a training run",
                effect="fewer_rejections",
            ),
        ),
    ),
    Cause(
        label="stale_draft",
        family="alignment",
        what="The target changed and the draft did not.",
        why="The draft predicts the old target; each difference is a rejection.",
        signs=(
            Sign(fact="changed", word="target", yes=3.5),
            Sign(fact="changed", word="adapter", yes=3.5),
            Sign(fact="changed", word="engine", yes=-1.0),
            Sign(fact="unchanged", word="target", yes=-3.0),
            Sign(fact="weights_reloaded", yes=1.5),
            Sign(fact="draft_of_other_target", yes=3.5, no=-1.0),
            Sign(fact="card_ratio", ramp=(0.9, 0.7), yes=1.0, no=-1.0),
            Sign(fact="acceptance_dropped", yes=1.5, no=-1.0),
            Sign(fact="reference_ratio", ramp=(0.97, 0.7), yes=0.5, no=-1.0),
            Sign(fact="acceptance_differs_by_backend", yes=-1.5),
            Sign(fact="replay_accepts_more", yes=-2.0, no=0.5),
        ),
        remedies=(
            Remedy(
                change="align the draft to the new target (a short training on its outputs)",
                price="a training run per target release",
                effect="fewer_rejections",
            ),
            Remedy(
                change="pin target and draft to one version, and roll both out together",
                price="releases wait for the draft",
                effect="reference_acceptance",
            ),
            LOWER_K,
        ),
    ),
    Cause(
        label="high_entropy_workload",
        family="alignment",
        what="The text itself is hard to predict: open-ended prompts or a high temperature.",
        why="Acceptance is one minus the distance of two laws; where the target is undecided, even "
        "a good draft is rejected often.",
        signs=(
            Sign(fact="open_ended_text", yes=2.8, no=-0.7),
            Sign(fact="random_prompts", yes=-1.5),
            Sign(fact="target_entropy", ramp=(1.0, 2.5), yes=2.0, no=-1.5),
            Sign(fact="temperature", ramp=(0.5, 1.0), yes=0.6, no=-0.5),
            Sign(fact="acceptance_falls_with_temperature", yes=0.8, no=-0.7),
            Sign(fact="acceptance_low", yes=0.7, no=-1.5),
            Sign(fact="acceptance_dropped", yes=-0.5),
            Sign(fact="acceptance_zero", yes=-2.0),
            Sign(fact="replay_accepts_more", yes=-2.0, no=0.5),
        ),
        remedies=(LOWER_K, TURN_OFF),
    ),
    Cause(
        label="tokenizer_mismatch",
        family="alignment",
        what="Draft and target give different strings the same id.",
        why="What the draft means is not what its ids say to the target, so nothing but chance is "
        "accepted.",
        signs=(
            Sign(fact="vocabularies_differ", yes=4.5, no=-2.5),
            Sign(fact="acceptance_zero", yes=1.3, no=-0.7),
            Sign(fact="alpha_1", ramp=(0.2, 0.05), yes=0.8),
            Sign(fact="draft_nan", yes=0.3),
            Sign(fact="acceptance_differs_by_backend", yes=-1.5),
        ),
        remedies=(
            Remedy(
                change="take a draft with the target's tokenizer",
                price="fewer drafts to choose from",
                effect="fewer_rejections",
            ),
            Remedy(
                change="draft by n-gram or suffix, which needs no second vocabulary",
                price="gains only where the text repeats its context",
                effect="none",
            ),
        ),
    ),
    Cause(
        label="draft_context_overflow",
        family="alignment",
        what="Contexts are longer than the positions the draft was made for.",
        why="Beyond them the draft sees positions it never learnt, or loses the text before.",
        signs=(
            Sign(fact="context_over_window", ramp=(0.9, 1.05), yes=3.5, no=-3.0),
            Sign(fact="context_ratio", ramp=(0.97, 0.85), yes=4.0, no=-1.5),
            Sign(fact="acceptance_falls_with_context", yes=2.6, no=-2.0),
            Sign(fact="slower_with_context", yes=1.3, no=-0.7),
            Sign(fact="gap_share_verify", ramp=(0.2, 0.5), yes=-1.5),
            Sign(fact="acceptance_fine", yes=-1.0),
        ),
        remedies=(
            Remedy(
                change="let the draft see a window of the last tokens it was made for",
                price="predictions that need the far context are lost",
                effect="fewer_rejections",
            ),
            Remedy(
                change="train or scale the draft to the served length",
                price="long training examples; a training run",
                effect="fewer_rejections",
            ),
            TURN_OFF,
        ),
    ),
    Cause(
        label="precision_mismatch",
        family="alignment",
        what="Low precision of weights or KV cache moves one of the two laws.",
        why="A quantised draft or cache predicts slightly, or entirely, other tokens.",
        signs=(
            Sign(fact="acceptance_differs_by_precision", yes=3.5, no=-1.5),
            Sign(fact="changed", word="precision", yes=2.5),
            Sign(fact="draft_kv_quantised", yes=1.5, no=-0.3),
            Sign(fact="draft_quantised", yes=1.2),
            Sign(fact="acceptance_low", yes=0.4),
            Sign(fact="acceptance_differs_by_backend", yes=-0.5),
        ),
        remedies=(
            Remedy(
                change="keep the draft's weights and KV cache in 16 bits",
                price="some memory; the draft is small",
                effect="fewer_rejections",
            ),
            Remedy(
                change="calibrate or train the draft against the quantised target",
                price="a calibration or training run",
                effect="fewer_rejections",
            ),
        ),
    ),
)
