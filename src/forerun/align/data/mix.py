"""Samples of several sources in fixed shares of the learned tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from forerun.align.data.permutation import permuted
from forerun.align.data.sample import Sample, Source
from forerun.errors import InvalidRequest

__all__ = ["mix", "shares_of"]


def shares_of(*, on_policy_share: float, fixed_share: float) -> dict[Source, float]:
    """Share of every source that has one; the target writes what is left.

    Raises:
        InvalidRequest: a share is negative, or together they are more than 1.
    """
    shares: dict[Source, float] = {"draft": on_policy_share, "fixed": fixed_share}
    if min(shares.values()) < 0.0 or sum(shares.values()) > 1.0:
        raise InvalidRequest(
            f"on_policy_share is {on_policy_share}, fixed_share {fixed_share}; they must not be "
            "negative, nor more than 1 together"
        )
    shares["target"] = 1.0 - sum(shares.values())
    return {source: share for source, share in shares.items() if share > 0.0}


def mix(samples: Sequence[Sample], shares: Mapping[Source, float], *, seed: int) -> list[Sample]:
    """As many samples as there are for these shares, none of them twice.

    The source that runs out first decides how many. Of the others a shuffled selection is taken up
    to its share, so that every share is met to within the length of a sample. Sources without a
    share are left out.

    Args:
        samples: of all sources.
        shares: of the learned tokens, adding up to 1.
        seed: of the selection.

    Raises:
        InvalidRequest: there is no sample of a source that has a share.
    """
    groups = {source: [s for s in samples if s.source == source] for source in shares}
    learned = {source: sum(s.num_learned for s in group) for source, group in groups.items()}
    for source, num_learned in learned.items():
        if num_learned == 0:
            raise InvalidRequest(
                f"{shares[source]:.0%} of the tokens are to come from source {source!r}, which has "
                "none: set its share to 0, or give more prompts, for 'fixed' with responses"
            )
    num_all = min(learned[source] / share for source, share in shares.items())
    return [
        sample
        for source, share in shares.items()
        for sample in selection(groups[source], share * num_all, seed)
    ]


def selection(samples: Sequence[Sample], num_learned: float, seed: int) -> Iterator[Sample]:
    """Shuffled samples until so many tokens are learned; the last one may go beyond."""
    num_taken = 0
    for index in range(len(samples)):
        # Half a token of slack: shares of a whole are met exactly, not short of rounding.
        if num_taken + 0.5 > num_learned:
            return
        sample = samples[permuted(index, len(samples), seed)]
        num_taken += sample.num_learned
        yield sample
