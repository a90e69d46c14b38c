"""Two drafts on the same prompts: what rose, what fell, and what was not shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from forerun.align.evaluation.figures import AcceptanceFigures, DraftFigures
from forerun.theory.intervals import Interval

__all__ = ["Change", "Finding", "changes", "finding"]

Finding = Literal["higher", "lower", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure of two drafts.

    Attributes:
        figure: its name in `AcceptanceFigures`.
        tag: of the prompts it is over; None for all.
        before: of the one draft.
        after: of the other.
    """

    figure: str
    tag: str | None
    before: Interval
    after: Interval

    @property
    def finding(self) -> Finding:
        """Whether the figure differs."""
        return finding(self.before, self.after)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {**asdict(self), "finding": self.finding}


def finding(before: Interval, after: Interval) -> Finding:
    """A difference is shown by 95% intervals that have nothing in common."""
    if after.is_above(before.high):
        return "higher"
    return "lower" if after.is_below(before.low) else "not shown"


def changes(before: DraftFigures, after: DraftFigures) -> tuple[Change, ...]:
    """tau, alpha and predicted speedup, over all prompts and then by tag.

    Raises:
        ValueError: they were judged at another temperature or K, or over other prompts.
    """
    for name in ("temperature", "num_speculative_tokens"):
        if getattr(before, name) != getattr(after, name):
            raise ValueError(
                f"{name} is {getattr(before, name)} before and {getattr(after, name)} after; "
                "figures compare where both are judged alike"
            )
    if [prompt.tag for prompt in before.prompts] != [prompt.tag for prompt in after.prompts]:
        raise ValueError("the two drafts were not judged on the same prompts")
    pairs: list[tuple[str | None, AcceptanceFigures, AcceptanceFigures]]
    pairs = [(None, before.overall, after.overall)]
    if len(before.by_tag) > 1:
        pairs += [(tag, before.by_tag[tag], after.by_tag[tag]) for tag in before.by_tag]
    return tuple(change for pair in pairs for change in changes_of(*pair))


def changes_of(
    tag: str | None, before: AcceptanceFigures, after: AcceptanceFigures
) -> Iterator[Change]:
    """Figures that both have."""
    pairs = {
        "acceptance_length": (before.acceptance_length, after.acceptance_length),
        "acceptance_probability": (before.acceptance_probability, after.acceptance_probability),
        "speedup": (speedup_of(before), speedup_of(after)),
    }
    for figure, (first, second) in pairs.items():
        if first is not None and second is not None:
            yield Change(figure=figure, tag=tag, before=first, after=second)


def speedup_of(figures: AcceptanceFigures) -> Interval | None:
    """Predicted at the K that was judged: at the best K, drafts that do not pay are all alike."""
    return None if figures.speedup is None else figures.speedup.at_max_k
