"""Chains copied from an earlier match, as long as one more token is expected to save time."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters.suffix.automaton import NONE, ROOT, SEPARATOR, SuffixAutomaton
from forerun.drafters.suffix.config import SuffixConfig

__all__ = ["NOTHING", "Copy", "HitRates", "Match", "OwnMatch", "StoredMatch", "copy_on"]


PRIOR = (0.0, 0.15, 0.35, 0.55, 0.7, 0.85, 0.95)
"""Rates before anything is known, for matches of 0, 1, 2-3, 4-7, 8-15, 16-31 and more tokens.

Between those of prose and of repeated edits, near those of code: benchmarks/suffix.
"""
LONGEST = len(PRIOR) - 1
SPEED = 1 / 8
"""Weight of the latest observation."""


class HitRates:
    """How often the most frequent continuation of a match is right, by the length of the match.

    Every token of the output is an observation, whether it was drafted or not, so a request that
    starts to copy is noticed while nothing is drafted.
    """

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates = list(PRIOR)

    def probability(self, length: int, share: float) -> float:
        """Return the probability that the most frequent continuation of a match comes next.

        Args:
            length: tokens of the match.
            share: of its occurrences that went on that way.
        """
        return self._rates[min(LONGEST, length.bit_length())] * share

    def observe(self, length: int, share: float, hit: bool) -> None:
        """Count whether the most frequent continuation of a match was the next token."""
        bucket = min(LONGEST, length.bit_length())
        rate = self._rates[bucket]
        self._rates[bucket] = min(1.0, max(0.0, rate + SPEED * (hit - rate * share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A chain of copied tokens, with its expected number of accepted tokens.

    Attributes:
        tokens: what is drafted.
        score: how many of them are expected to be accepted.
        value: tokens per plain step the draft is expected to make; 1 is plain decoding.
    """

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    value: float = 1.0


NOTHING = Copy()


class OwnMatch:
    """Finds the longest earlier occurrence of a text's end within the same text.

    Attributes:
        automaton: of the text.
        rates: how far it has been right.
    """

    __slots__ = ("automaton", "rates")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.rates = HitRates()

    @property
    def place(self) -> tuple[int, int]:
        """Return the automaton state and length of the longest suffix that also occurs earlier."""
        state = self.automaton.repeated
        return state, self.automaton.length(state)

    def advance(self, token: int) -> None:
        """Append one token to the text."""
        self.automaton.append(token)


class StoredMatch:
    """Finds the longest occurrence of a text's end in stored texts, which may grow meanwhile.

    Attributes:
        automaton: of the other texts.
        rates: how far they have been right.
        place: state and length of the longest suffix that occurs there.
    """

    __slots__ = ("automaton", "place", "rates")

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.rates = HitRates()
        self.place = (ROOT, 0)

    def advance(self, token: int) -> None:
        """Append one token to the text, in amortised constant time."""
        automaton = self.automaton
        state, length = self.place
        while True:
            # The texts may have grown and given the shorter strings of a state one of their own.
            while state != ROOT and length <= automaton.length(link := automaton.link(state)):
                state = link
            after = automaton.follow(state, token)
            if after != NONE:
                self.place = (after, length + 1)
                return
            if state == ROOT:
                self.place = (ROOT, 0)
                return
            state = automaton.link(state)
            length = automaton.length(state)


Match = OwnMatch | StoredMatch


def copy_on(match: Match, most: int, config: SuffixConfig) -> Copy:
    """Return the longest copied chain whose every token is expected to make the step faster.

    With S tokens expected to be accepted of n drafted, a step yields 1 + S tokens and costs
    kappa = 1 + step_cost + n row_cost. The next token, accepted with all before it with
    probability p, raises (1 + S) / kappa where p kappa > (1 + S) row_cost. p falls with every
    token, so the first that does not pay is the end.

    Args:
        match: where to copy from.
        most: K.
        config: budget and costs.

    Returns:
        The draft; nothing where plain decoding is expected to be as fast.
    """
    automaton, rates = match.automaton, match.rates
    state, length = match.place
    most = min(most, int(config.tokens_per_match * length))
    tokens: list[int] = []
    reached, emitted, kappa = 1.0, 1.0, 1 + config.step_cost
    while len(tokens) < most:
        token, share = automaton.favourite(state)
        if token == NONE:  # the match overlaps the end of the text: the period goes on
            state = automaton.link(state)
            if state in (ROOT, NONE):
                break
            continue
        reached *= rates.probability(length + len(tokens), share)
        if token == SEPARATOR or reached * kappa <= emitted * config.row_cost:
            break
        tokens.append(token)
        emitted += reached
        kappa += config.row_cost
        state = automaton.follow(state, token)
    if emitted <= kappa:
        return NOTHING
    return Copy(tokens=tuple(tokens), score=emitted - 1, value=emitted / kappa)
