"""The results of one held-out prompt, and intervals over prompts.

Whole prompts are resampled, because the steps of one prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import Interval, bootstrap_ratio

__all__ = ["EvaluationPrompt", "JudgedPrompt", "over_prompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPrompt:
    """A prompt that no draft is trained on.

    Attributes:
        prompt_ids: its tokens, chat template included.
        tag: its label, such as a domain; figures are given by it.
        response_ids: what the target itself answered under the judge's parameters; None where it
            has not been asked yet.
    """

    prompt_ids: tuple[int, ...]
    tag: str = ""
    response_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPrompt:
    """The results of a draft on one prompt.

    Only steps that could draft all K tokens count, so that tau is 1 + the sum of beta: neither the
    step that ends the prefill nor the last ones, whose K is cut to what the request has left. Nor
    does any step behind the first repeated 32-gram of its text.

    Attributes:
        tag: of the prompt.
        acceptance: counts of those steps.
        num_context_tokens: tokens before each of those steps, summed.
        num_tokens: emitted tokens, up to the first repeated 32-gram.
        looped: whether there was one.
        distinct_4gram_share: of the tokens before it.
        alphas: acceptance probability at every position of the target's own response, the draft
            reading what the target wrote; empty for drafters without a model.
    """

    tag: str
    acceptance: AcceptanceCounts
    num_context_tokens: int
    num_tokens: int
    looped: bool
    distinct_4gram_share: float
    alphas: tuple[float, ...]

    def num_emitted_at(self, num_speculative_tokens: int) -> int:
        """Return the tokens that the same steps emit if at most so many are drafted.

        A little low: longer steps accept more, so the next one begins at a harder place, and block
        verification of a chain cut short may accept more of it.
        """
        return sum(
            (1 + min(accepted, num_speculative_tokens)) * steps
            for (_, accepted), steps in self.acceptance.steps.items()
        )


def over_prompts(
    numerators: Sequence[float],
    denominators: Sequence[float],
    bounds: tuple[float, float],
    *,
    seed: int,
) -> Interval | None:
    """Return sum(numerators) / sum(denominators) with a 95% bootstrap interval over prompts.

    Args:
        numerators: one per prompt.
        denominators: of the same prompts; those with 0 were not observed and are left out.
        bounds: what the ratio can be at all: one prompt alone narrows it down no further.
        seed: decides the resamples.

    Returns:
        None where no prompt was observed.
    """
    seen = [pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0]
    if not seen:
        return None
    above, below = zip(*seen, strict=True)
    if len(seen) == 1:
        return Interval(estimate=above[0] / below[0], low=bounds[0], high=bounds[1])
    return bootstrap_ratio(above, below, seed=seed)
