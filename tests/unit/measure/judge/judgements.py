"""Judged prompts and figures for tests, made without a model."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.measure.judge import DraftFigures, JudgedPrompt, judge_figures
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.cost import CostTable

K = 3


def judged(
    accepted: Sequence[int], *, tag: str = "", alphas: Sequence[float] = (), k: int = K
) -> JudgedPrompt:
    """A prompt whose steps accepted so many of k drafted tokens each."""
    counts = AcceptanceCounts()
    for number in accepted:
        counts.add(k, number)
    return JudgedPrompt(
        tag=tag,
        acceptance=counts,
        num_context_tokens=10 * len(accepted),
        num_tokens=counts.num_emitted,
        looped=False,
        distinct_4gram_share=1.0,
        alphas=tuple(alphas),
    )


def figures(
    prompts: Sequence[JudgedPrompt],
    *,
    temperature: float = 1.0,
    k: int = K,
    costs: CostTable | None = None,
) -> DraftFigures:
    return judge_figures("draft", temperature, k, prompts, costs)
