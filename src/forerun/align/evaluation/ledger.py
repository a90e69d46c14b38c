"""The acceptance ledger: why a step emits fewer than K + 1 tokens, in tokens per step.

Starting from the measured length, one assumption after another is added, always in the same order:
only prompts of the tag the draft was made for; temperature 1; the draft reads the target's text
instead of its own. What is then missing to K + 1 is capacity, which only a better draft provides.
The items add up by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.align.evaluation.figures import DraftFigures
from forerun.align.evaluation.judged import JudgedPrompt
from forerun.theory.intervals import Interval, bootstrap

__all__ = ["Ledger", "LedgerItem", "ledger_of", "teacher_forced_length"]

Length = tuple[float, float]
"""Emitted tokens and steps of one prompt; lengths are ratios of their sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerItem:
    """Expected gain in tokens per step from one further assumption.

    Attributes:
        name: the condition that differs.
        gain: tokens per step; below 0 where it costs acceptance.
        length: expected tokens per step with this and everything before it.
    """

    name: str
    gain: Interval
    length: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Acceptance ledger of a draft: measured tau, gains and capacity, which sum to K + 1.

    Attributes:
        draft: which, in words.
        measured: tau as deployed, over all prompts.
        items: in the order in which they are supposed.
        capacity: what remains.
        limit: K + 1.
    """

    draft: str
    measured: Interval
    items: tuple[LedgerItem, ...]
    capacity: Interval
    limit: int


def ledger_of(deployed: DraftFigures, sampled: DraftFigures, in_domain: str | None) -> Ledger:
    """Compute the ledger of one draft.

    Token by token verification is what the last supposition reckons with. Block verification
    accepts a little more, so under it that item is a little low, and capacity as much high.

    Args:
        deployed: figures under the deployed parameters.
        sampled: figures on the same prompts at temperature 1; `deployed` itself if that is it.
        in_domain: the tag the draft was made for; None takes all prompts for it.

    Raises:
        ValueError: the two are not of the same prompts and K, or no prompt has the tag.
    """
    check(deployed, sampled, in_domain)
    k = deployed.num_speculative_tokens
    inside = [i for i, p in enumerate(deployed.prompts) if in_domain in (None, p.tag)]
    outside = [i for i in range(len(deployed.prompts)) if i not in set(inside)]
    names, lengths = assumptions(
        [deployed.prompts[i] for i in inside], [sampled.prompts[i] for i in inside], k
    )
    elsewhere = [measured_length(deployed.prompts[i]) for i in outside]

    def interval(statistic: Callable[[list[float]], float]) -> Interval:
        def of_groups(groups: Sequence[Sequence[int]]) -> float:
            within = [[length[i] for i in groups[0]] for length in lengths]
            everywhere = within[0] + [elsewhere[i] for i in groups[1]]
            return statistic([mean_length(everywhere), *map(mean_length, within)])

        return bootstrap(of_groups, [len(inside), len(outside)], seed=0)

    def item(n: int, name: str) -> LedgerItem:
        gain = interval(lambda levels: levels[n] - levels[n - 1])
        return LedgerItem(name=name, gain=gain, length=interval(lambda levels: levels[n]))

    return Ledger(
        draft=deployed.draft,
        measured=interval(lambda levels: levels[0]),
        items=tuple(item(n, name) for n, name in enumerate(names, start=1)),
        capacity=interval(lambda levels: k + 1 - levels[-1]),
        limit=k + 1,
    )


def check(deployed: DraftFigures, sampled: DraftFigures, in_domain: str | None) -> None:
    """Refuse figures that come from different prompts or different K."""
    if sampled.temperature != 1:
        raise ValueError(f"the sampled figures are at temperature {sampled.temperature}, not 1")
    tags = [prompt.tag for prompt in deployed.prompts]
    if (
        tags != [prompt.tag for prompt in sampled.prompts]
        or deployed.num_speculative_tokens != sampled.num_speculative_tokens
    ):
        raise ValueError("the two figures are not of the same prompts at the same K")
    if in_domain is not None and in_domain not in tags:
        raise ValueError(f"no held-out prompt has the tag {in_domain!r}; there are {set(tags)}")


def assumptions(
    deployed: Sequence[JudgedPrompt], sampled: Sequence[JudgedPrompt], k: int
) -> tuple[list[str], list[list[Length]]]:
    """Return the names of the assumptions and the lengths of the in-domain prompts under each."""
    names = ["in-domain prompts", "temperature 1"]
    lengths = [[*map(measured_length, deployed)], [*map(measured_length, sampled)]]
    if any(prompt.alphas for prompt in sampled):
        names.append("teacher-forced prefix")
        lengths.append([teacher_forced_length(prompt.alphas, k) for prompt in sampled])
    return names, lengths


def measured_length(prompt: JudgedPrompt) -> Length:
    """Return the emitted tokens and the steps that the verifier counted."""
    return float(prompt.acceptance.num_emitted), float(prompt.acceptance.num_steps)


def mean_length(lengths: Sequence[Length]) -> float:
    """Return the mean tokens per step; 1, as in plain decoding, if no step drafted."""
    num_steps = sum(steps for _, steps in lengths)
    return sum(emitted for emitted, _ in lengths) / num_steps if num_steps else 1.0


def teacher_forced_length(alphas: Sequence[float], num_speculative_tokens: int) -> Length:
    """Return the expected tokens and steps if every position is accepted with its alpha.

    The text is the target's. A step begins after the token that ended the one before; the first
    begins at the second token, for the prefill yields the first. With alphas of 0 and 1, which
    greedy decoding has, this is what the verifier does.

    Args:
        alphas: of the positions of one text.
        num_speculative_tokens: K; steps that cannot draft as many are not counted.
    """
    k = num_speculative_tokens
    begins = [0.0] * (len(alphas) + 1)  # probability that a step begins at a position
    begins[1:2] = [1.0]
    emitted = steps = 0.0
    for start in range(1, len(alphas) - k):
        through = begins[start]
        steps += through
        emitted += through
        for position in range(start, start + k):
            onwards = through * alphas[position]
            begins[position + 1] += through - onwards
            emitted += onwards
            through = onwards
        begins[start + k + 1] += through
    return emitted, steps
