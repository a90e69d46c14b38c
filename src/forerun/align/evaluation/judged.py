"""What judging one held-out prompt yields: counts of steps, and alpha at every position."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.theory.acceptance import AcceptanceCounts

__all__ = ["HeldOut", "JudgedPrompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A prompt that no draft learns from.

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
    """How a draft did on one prompt.

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
        """Tokens the same steps emit if no more than so many are drafted.

        A little low: longer steps accept more, so the next one begins at a harder place, and block
        verification of a chain cut short may accept more of it.
        """
        return sum(
            (1 + min(accepted, num_speculative_tokens)) * steps
            for (_, accepted), steps in self.acceptance.steps.items()
        )
