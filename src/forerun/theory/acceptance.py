"""Counts of drafted and accepted tokens by depth, and the acceptance figures derived from them.

Every figure is a ratio of counts over the steps that observed it. A position that a step did not
draft is unobserved there, neither accepted nor rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

from forerun.theory.record import StepRecord


@dataclass(slots=True)
class AcceptanceCounts:
    """Accumulates the outcomes of steps; `a + b` merges two objects.

    A step enters by how deep it drafted and how far it was accepted, so that chains and trees count
    alike: position i is depth i, and entry i - 1 of every per-position tuple. Nodes are counted
    apart, since a tree has more of them than its depth.
    """

    num_drafted: int = 0
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)

    @classmethod
    def from_records(cls, records: Iterable[StepRecord]) -> AcceptanceCounts:
        """Return the counts over the steps of a trace."""
        counts = cls()
        for record in records:
            counts.add(record.depth_drafted, record.num_accepted, num_drafted=record.num_drafted)
        return counts

    @classmethod
    def from_positions(cls, drafted: Sequence[int], accepted: Sequence[int]) -> AcceptanceCounts:
        """Return the counts of chains of which only totals by position are known, with these.

        Which chain was accepted how far is not in the totals: the deepest ones count as accepted
        furthest. tau, beta and every total are the same whichever it was; `survival` is not.
        """
        ends = sorted({0, *drafted, *accepted})
        counts = cls(sum(drafted))
        for start, end in pairwise(ends):
            depth, reached = (sum(n > start for n in totals) for totals in (drafted, accepted))
            counts.steps[depth, reached] += end - start
        return counts

    def add(self, depth_drafted: int, num_accepted: int, *, num_drafted: int | None = None) -> None:
        """Count one step by the depth of its deepest node (0: plain) and its accepted nodes.

        `num_drafted` counts the nodes proposed; None for a chain, where it is the depth. Nodes are
        counted as accepted before a stop truncates the text.

        Raises:
            ValueError: more accepted than the depth, or fewer nodes than the depth.
        """
        if num_drafted is None:
            num_drafted = depth_drafted
        if not 0 <= num_accepted <= depth_drafted <= num_drafted:
            raise ValueError(
                f"step with {num_accepted} accepted, depth {depth_drafted}, {num_drafted} nodes; "
                "they must be non-negative and in this order"
            )
        self.num_drafted += num_drafted
        self.steps[depth_drafted, num_accepted] += 1

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(self.num_drafted + other.num_drafted, self.steps + other.steps)

    @property
    def drafting(self) -> AcceptanceCounts:
        """Return the counts of the steps that drafted, as other engines count them."""
        steps = Counter({key: n for key, n in self.steps.items() if key[0] > 0})
        return AcceptanceCounts(self.num_drafted, steps)

    def with_chains_of(self, most: int) -> AcceptanceCounts:
        """Return the counts as if every chain had been cut to `most` tokens.

        tau is a little low: longer steps accept more, so the next one begins at a harder place, and
        block verification of a chain cut short may accept more of it.
        """
        cut = AcceptanceCounts()
        for (depth, accepted), n in self.steps.items():
            cut.steps[min(depth, most), min(accepted, most)] += n
            cut.num_drafted += min(depth, most) * n
        return cut

    @property
    def num_steps(self) -> int:
        """Return the number of steps counted, plain ones included."""
        return self.steps.total()

    @property
    def num_accepted(self) -> int:
        """Return the number of accepted nodes."""
        return sum(accepted * steps for (_, accepted), steps in self.steps.items())

    @property
    def num_emitted(self) -> int:
        """Return the accepted nodes plus one per step, before stop truncation."""
        return self.num_accepted + self.num_steps

    @property
    def max_depth(self) -> int:
        """Return the deepest position that any step drafted."""
        return max((depth for depth, _ in self.steps), default=0)

    @property
    def drafted_per_position(self) -> tuple[int, ...]:
        """Return how many steps drafted each position: the denominators of the rates."""
        return self._count_through(lambda depth, _: depth)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Return how many steps accepted through each position."""
        return self._count_through(lambda _, accepted: accepted)

    @property
    def reached_per_position(self) -> tuple[int, ...]:
        """Return how many steps drafted each position and accepted all before it."""
        return self._count_through(lambda depth, accepted: min(depth, accepted + 1))

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Return beta_i: of the steps that drafted position i, the share accepted through it.

        Biased where the drafter chose the depth; `survival` is not.
        """
        return _divide(self.accepted_per_position, self.drafted_per_position)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """Return the share of steps that accepted position i among those that reached it, or 0."""
        return _divide(self.accepted_per_position, self.reached_per_position)

    @property
    def survival(self) -> tuple[float, ...]:
        """Return P(accepted through i) had every step drafted i: a product of conditional rates.

        A depth that ended early counts as censored, not as rejected. Source: Kaplan and Meier 1958.
        """
        return tuple(accumulate(self.conditional_acceptance, mul))

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Return accepted / drafted nodes, or None without drafts; not comparable across K."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Return tau: tokens emitted per step, the additional one included; None without steps."""
        return self.num_emitted / self.num_steps if self.num_steps else None

    def to_dict(self) -> dict[str, object]:
        """Return JSON values of the steps that drafted, and the number of the others."""
        drafted = self.drafting
        return {
            "num_steps": drafted.num_steps,
            "num_plain_steps": self.num_steps - drafted.num_steps,
            "num_drafted": drafted.num_drafted,
            "num_accepted": drafted.num_accepted,
            "acceptance_length": drafted.acceptance_length,
            "draft_acceptance_rate": drafted.draft_acceptance_rate,
            "acceptance_rate_per_position": list(drafted.acceptance_rate_per_position),
            "drafted_per_position": list(drafted.drafted_per_position),
        }

    def _count_through(self, last: Callable[[int, int], int]) -> tuple[int, ...]:
        """Count the steps whose last position is at or beyond each position."""
        ends = [0] * (self.max_depth + 1)
        for (depth, accepted), n in self.steps.items():
            ends[last(depth, accepted)] += n
        return tuple(accumulate(reversed(ends[1:])))[::-1]


def _divide(numerators: tuple[int, ...], denominators: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(n / d if d else 0.0 for n, d in zip(numerators, denominators, strict=True))


def ngrams(token_ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Return all n-grams of `size` tokens in order; a shorter text has none."""
    return (tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))


def distinct_ngram_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Return distinct n-grams over all n-grams: 1 without repetition, near 0 for a loop."""
    grams = [*ngrams(token_ids, size)]
    return len(set(grams)) / len(grams) if grams else 1.0


def first_repeat(token_ids: Sequence[int], size: int = 32) -> int:
    """Return the start of the first n-gram that occurred before, or the length if there is none."""
    seen: set[tuple[int, ...]] = set()
    for start, ngram in enumerate(ngrams(token_ids, size)):
        if ngram in seen:
            return start
        seen.add(ngram)
    return len(token_ids)
