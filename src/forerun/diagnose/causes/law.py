"""Causes that lie in the acceptance rule or in what constrains the output."""

from __future__ import annotations

from forerun.diagnose.causes.base import Cause, Remedy, Sign

__all__ = ["LAW"]

VERIFY_BY_ENUMERATION = Remedy(
    change="check the verifier by enumeration over a small vocabulary, then deploy the exact one",
    price="acceptance may fall to what is right; outputs change in law",
    effect="none",
)

LAW: tuple[Cause, ...] = (
    Cause(
        label="sampling_mismatch_q",
        family="law",
        what="The draft law used for acceptance is not the one the tokens were drawn from.",
        why="Accepting by min(1, p/q) is exact only for the very q of the draw; another "
        "temperature, filter or precision biases the output and moves acceptance.",
        signs=(
            Sign(fact="draft_probs_differ", yes=4.5, no=-1.5),
            Sign(fact="acceptance_above_expected", yes=2.5, no=-1.0),
            Sign(fact="law_differs", yes=1.5, no=-1.5),
            Sign(fact="law_in_doubt", yes=1.2),
            Sign(fact="acceptance_falls_with_temperature", yes=0.5, no=-0.3),
            Sign(fact="temperature", ramp=(0.0, 0.2), yes=0.2, no=-2.0),
            Sign(fact="draft_one_hot", yes=0.3),
        ),
        remedies=(
            Remedy(
                change="keep the tensor the draft was drawn from, and verify against that",
                price="memory of one row of the vocabulary per drafted token",
                effect="none",
            ),
            Remedy(
                change="draft greedily and treat q as one-hot, which is exact",
                price="lower acceptance at temperature above 0",
                effect="none",
            ),
        ),
    ),
    Cause(
        label="suboptimal_accept_rule",
        family="law",
        what="The rule is exact but accepts less than the two laws would allow.",
        why="Accepting a drafted token with its target probability alone, or only where a target "
        "sample equals it, gives p(x) or the sum of p q instead of the sum of min(p, q).",
        signs=(
            Sign(fact="exact_match_rule", yes=2.8, no=-1.0),
            Sign(fact="draft_one_hot", yes=2.8, no=-1.0),
            Sign(fact="acceptance_falls_with_temperature", yes=2.2, no=-2.0),
            Sign(fact="accept_rule_ratio", ramp=(0.95, 0.75), yes=3.0, no=-2.0),
            Sign(fact="temperature", ramp=(0.2, 0.9), yes=1.2, no=-3.5),
            Sign(fact="acceptance_low", yes=0.5, no=-0.7),
            Sign(fact="acceptance_zero", yes=-1.5),
            Sign(fact="law_differs", yes=-1.5, no=0.5),
        ),
        remedies=(
            Remedy(
                change="sample the draft from its own law and accept by min(1, p/q), or by block "
                "verification",
                price="memory for the draft's probabilities; another random stream",
                effect="fewer_rejections",
            ),
            Remedy(
                change="lower K for requests at high temperature",
                price="less to gain where they happen to be predictable",
                effect="best_k",
            ),
        ),
    ),
    Cause(
        label="biased_accept_rule",
        family="law",
        what="The rule does not keep the target's law.",
        why="Accepting too much, or drawing the token after a rejection from anything but the "
        "residual, changes what the model says.",
        signs=(
            Sign(fact="law_differs", yes=3.0, no=-2.5),
            Sign(fact="residual_wrong", yes=3.5, no=-0.7),
            Sign(fact="output_differs_after_partial", yes=-2.0),
            Sign(fact="law_in_doubt", yes=1.8),
            Sign(fact="pit_p_value", ramp=(0.02, 0.001), yes=1.0, no=-1.5),
            Sign(fact="acceptance_above_expected", yes=1.2, no=-0.3),
            Sign(fact="calibration", ramp=(1.03, 1.1), yes=2.0),
            Sign(fact="draft_probs_differ", yes=-0.7),
        ),
        remedies=(
            VERIFY_BY_ENUMERATION,
            Remedy(
                change="turn speculation off until the rule is right",
                price="the gain; the law is the target's again at once",
                effect="off",
            ),
        ),
    ),
    Cause(
        label="grammar_constraint_conflict",
        family="law",
        what="A grammar or schema is not applied at every verified row.",
        why="Rows after the first need the mask of their own prefix, and the matcher has to go "
        "back after a rejection; otherwise forbidden tokens pass, or forced ones are rejected.",
        signs=(
            Sign(fact="schema_violations", yes=4.0, no=-1.5),
            Sign(fact="grammar_used", yes=1.0, no=-2.5),
            Sign(fact="output_corrupt", yes=0.5),
            Sign(fact="target_recurrent", yes=-1.0),
        ),
        remedies=(
            Remedy(
                change="mask every verified row by its own prefix, and roll the matcher back",
                price="one mask per drafted position: some microseconds of host time each",
                effect="none",
            ),
            Remedy(
                change="turn speculation off for constrained requests",
                price="no gain for them, although forced tokens are the easiest to draft",
                effect="off",
            ),
        ),
    ),
    Cause(
        label="numerical_nondeterminism",
        family="law",
        what="Texts part where two tokens are equally likely to within rounding.",
        why="A pass over several rows adds up in another order than a pass over one; at a tie that "
        "decides. The law is the same.",
        signs=(
            Sign(fact="output_differs_at_ties", yes=3.0, no=-2.5),
            Sign(fact="greedy_margin", ramp=(4.0, 1.0), yes=1.0, no=-1.5),
            Sign(fact="output_differs", yes=1.6, no=-1.5),
            Sign(fact="output_corrupt", yes=-2.0),
            Sign(fact="schema_violations", yes=-1.5),
            Sign(fact="law_differs", yes=-2.5, no=1.0),
            Sign(fact="acceptance_low", yes=-0.7),
            Sign(fact="acceptance_dropped", yes=-1.0),
        ),
        remedies=(
            Remedy(
                change="document it: greedy text may part at near ties, never elsewhere",
                price="none",
                effect="none",
            ),
            Remedy(
                change="compute logits in fp32, or with kernels whose rows do not depend on others",
                price="slower passes",
                effect="none",
            ),
        ),
    ),
)
