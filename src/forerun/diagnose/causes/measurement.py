"""Causes that lie in the measurement, or in speculation not running at all."""

from __future__ import annotations

from forerun.diagnose.causes.base import Cause, Remedy, Sign

__all__ = ["MEASUREMENT"]

MEASUREMENT: tuple[Cause, ...] = (
    Cause(
        label="measurement_artifact",
        family="measurement",
        what="The rate is measured wrongly, most often by counting stream chunks as tokens.",
        why="A speculative step delivers several tokens at once, so counting deliveries loses a "
        "factor of tau, and a rate over prompt and output together hides decoding.",
        signs=(
            Sign(fact="tools_disagree", yes=3.0, no=-1.5),
            Sign(fact="client_counts_chunks", yes=4.0, no=-1.0),
            Sign(fact="client_ratio", ramp=(1.1, 1.5), yes=1.0, no=-2.0),
            Sign(fact="client_ratio_is_tau", yes=2.0, no=-0.5),
            Sign(fact="definitions_differ", yes=-0.5),
        ),
        remedies=(
            Remedy(
                change="count token ids (usage.completion_tokens), not stream chunks",
                price="one change in the client; nothing in the server gets faster",
                effect="none",
            ),
            Remedy(
                change="time decoding from the first token on, prompt reading apart",
                price="two figures instead of one",
                effect="none",
            ),
        ),
    ),
    Cause(
        label="metric_definition_mismatch",
        family="measurement",
        what="Figures of one name but different definitions are compared.",
        why="The bonus token in or out moves tau by 1; accepted per drafted token, per step and "
        "per position given the ones before are three different rates.",
        signs=(
            Sign(fact="definitions_differ", yes=4.0, no=-1.0),
            Sign(fact="compared_with_published", yes=2.0, no=-0.5),
            Sign(fact="later_over_first", ramp=(0.5, 0.75), yes=0.8, no=-0.3),
            Sign(fact="slower_than_plain", yes=-1.5),
            Sign(fact="acceptance_zero", yes=-1.5),
        ),
        remedies=(
            Remedy(
                change="convert both to accepted / drafted and tau with the bonus token, then "
                "compare per position conditionally",
                price="arithmetic only",
                effect="none",
            ),
            Remedy(
                change="publish the definition with every figure",
                price="longer log lines",
                effect="none",
            ),
        ),
    ),
    Cause(
        label="unrepresentative_benchmark",
        family="measurement",
        what="The benchmark's text is unlike what is served.",
        why="Acceptance is a property of the text: random tokens are unpredictable, and output "
        "forced past its end is repetitive or senseless.",
        signs=(
            Sign(fact="random_prompts", yes=3.0, no=-1.0),
            Sign(fact="benchmark_unlike_traffic", yes=3.0, no=-1.0),
            Sign(fact="ignore_eos", yes=0.8, no=-0.2),
        ),
        remedies=(
            Remedy(
                change="measure with prompts sampled from traffic, at its temperature",
                price="a data set to keep; figures are no longer comparable with the old ones",
                effect="fewer_rejections",
            ),
            Remedy(
                change="pin synthetic acceptance where only the engine is under test",
                price="says nothing about the draft",
                effect="none",
            ),
        ),
    ),
    Cause(
        label="speculation_not_engaged",
        family="measurement",
        what="Nothing is drafted: speculation was refused, disabled or never asked for.",
        why="Every token is a plain step, so the rate is the plain one and a draft only takes "
        "memory.",
        prior=0.2,
        signs=(
            Sign(fact="speculation_refused", yes=4.5, no=-0.5),
            Sign(fact="drafts_absent", yes=4.0, no=-4.0),
            Sign(fact="speculation_off", yes=3.0, no=-1.0),
            Sign(fact="no_gain", yes=1.2, no=-0.7),
            Sign(fact="acceptance_low", yes=-1.5),
            Sign(fact="output_differs", yes=-2.0),
        ),
        remedies=(
            Remedy(
                change="read the engine's start-up log for why it declined, and change that",
                price="may need another target, attention backend or sampling option",
                effect="none",
            ),
            Remedy(
                change="remove the draft until it can run",
                price="no speculation; its memory goes to the KV cache",
                effect="off",
            ),
        ),
    ),
    Cause(
        label="degenerate_output_inflation",
        family="measurement",
        what="Repetitive output makes any draft look good.",
        why="Loops are predictable, so tau nears K + 1 on text nobody wants.",
        signs=(
            Sign(fact="output_repetitive", yes=3.0, no=-1.5),
            Sign(fact="distinct_4gram_share", ramp=(0.6, 0.3), yes=1.5, no=-1.5),
            Sign(fact="length_over_ceiling", ramp=(0.85, 0.98), yes=1.2, no=-0.7),
            Sign(fact="ignore_eos", yes=0.7),
            Sign(fact="acceptance_low", yes=-2.5),
            Sign(fact="slower_than_plain", yes=-2.0),
        ),
        remedies=(
            Remedy(
                change="cut completions at the first repeated 32-gram before measuring",
                price="shorter texts, wider intervals",
                effect="none",
            ),
            Remedy(
                change="report the distinct 4-gram share beside every speed",
                price="one more column",
                effect="none",
            ),
        ),
    ),
)
