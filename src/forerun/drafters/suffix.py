"""A drafter without a model, which copies the tokens after an earlier match of the text's end.

No model and no training: chains are copied from the request's own prompt and output. They are
deterministic, so they are verified by the walk and bias nothing. Where copying is not expected to
pay, nothing is drafted. Cost per token: a few microseconds, and the bytes named below.

The states are the substrings of the text, those that end at the same places together. Construction
is Blumer et al. 1985 (doi:10.1016/0304-3975(85)90157-4), online and amortised O(1) per token. What
follows a state most often is known without a search, since every state keeps a favourite.

Memory: at most two states per token of 20 bytes each, and a small dict for states with more than
one continuation; 40 to 140 bytes per token of code or prose, 230 at worst.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forerun.control.base import Chain, Plan, Tree
from forerun.drafters.base import Drafter, DraftRequest, Pause
from forerun.drafters.config import SuffixConfig
from forerun.models.base import LanguageModel
from forerun.sampling.config import Choice
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree

NONE = -1
"""No state, no token."""
ROOT = 0
"""The empty string."""
MAX_UPDATES = 32
"""Suffixes whose counts a token updates, the longest first.

More than these end at one place in periodic text only; the short ones are then counted too low.
"""


class SuffixAutomaton:
    """All substrings of a text to which tokens are only appended."""

    __slots__ = ("_branches", "_child", "_count", "_length", "_link", "_token", "last")

    def __init__(self) -> None:
        self.last = ROOT
        self._link = array("i", [NONE])
        self._length = array("i", [0])
        self._count = array("i", [0])
        # The favourite continuation of every state, the only one of most.
        self._token = array("i", [NONE])
        self._child = array("i", [NONE])
        # All continuations of the states that have several.
        self._branches: dict[int, dict[int, int]] = {}

    def length(self, state: int) -> int:
        """Return the length in tokens of the longest string of `state`."""
        return self._length[state]

    def link(self, state: int) -> int:
        return self._link[state]

    def follow(self, state: int, token: int) -> int:
        """Return the state reached from `state` by `token`; NONE if that string does not occur."""
        if self._token[state] == token:
            return self._child[state]
        branches = self._branches.get(state)
        return NONE if branches is None else branches.get(token, NONE)

    @property
    def repeated(self) -> int:
        return max(ROOT, self._link[self.last])

    def favourite(self, state: int) -> tuple[int, float]:
        """Return the most frequent, then latest, continuation of `state` and its share."""
        child = self._child[state]
        if child == NONE:
            return NONE, 0.0
        if state not in self._branches:
            return self._token[state], 1.0
        # The occurrence at the end of the text has no continuation; only there is it counted.
        num_followed = self._count[state] - (state == self._link[self.last])
        return self._token[state], min(1.0, self._count[child] / max(1, num_followed))

    def append(self, token: int) -> None:
        before = self.last
        self.last = self._extend(before, token)
        self._count_ends()
        self._prefer(before, token)

    def _extend(self, state: int, token: int) -> int:
        """Add the states of the text with `token` appended, and return the longest one."""
        link, length = self._link, self._length
        new = self._new_state(length[state] + 1)
        target = NONE
        while state != NONE and (target := self.follow(state, token)) == NONE:
            self._connect(state, token, new)
            state = link[state]
        if state == NONE:
            link[new] = ROOT
        elif length[target] == length[state] + 1:
            link[new] = target
        else:
            link[new] = self._split(state, token, target)
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        link = self._link
        short = self._new_state(self._length[state] + 1)
        link[short] = link[target]
        self._count[short] = self._count[target]
        self._token[short], self._child[short] = self._token[target], self._child[target]
        if target in self._branches:
            self._branches[short] = self._branches[target].copy()
        while state != NONE and self.follow(state, token) == target:
            self._connect(state, token, short)
            state = link[state]
        link[target] = short
        return short

    def _new_state(self, length: int) -> int:
        self._link.append(NONE)
        self._length.append(length)
        self._count.append(0)
        self._token.append(NONE)
        self._child.append(NONE)
        return len(self._link) - 1

    def _connect(self, state: int, token: int, child: int) -> None:
        favourite = self._token[state]
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = child
        elif favourite not in (NONE, token):
            self._branches[state] = {favourite: self._child[state], token: child}
        if favourite in (NONE, token):
            self._token[state], self._child[state] = token, child

    def _count_ends(self) -> None:
        state, count, link = self.last, self._count, self._link
        for _ in range(MAX_UPDATES):
            if state == ROOT:
                return
            count[state] += 1
            state = link[state]

    def _prefer(self, state: int, token: int) -> None:
        """Make `token` the favourite of the suffixes it follows if none is more frequent."""
        tokens, children, count, link = self._token, self._child, self._count, self._link
        for _ in range(MAX_UPDATES):
            if state == NONE:
                return
            if tokens[state] != token:
                child = self._branches[state][token]
                if count[child] >= count[children[state]]:
                    tokens[state], children[state] = token, child
            state = link[state]


PRIOR = (0.0, 0.15, 0.35, 0.55, 0.7, 0.85, 0.95)
"""Rates before anything is known, for matches of 0, 1, 2-3, 4-7, 8-15, 16-31 and more tokens.

Between those of prose and of repeated edits, near those of code: benchmarks/speed/suffix.
"""
LONGEST = len(PRIOR) - 1
SPEED = 1 / 8
"""Weight of the latest observation."""


class HitRates:
    """Hit rates of the most frequent continuation of a match, by the length of the match.

    Every token of the output is an observation, whether it was drafted or not, so a request that
    starts to copy is noticed while nothing is drafted.
    """

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates = list(PRIOR)

    def probability(self, length: int, share: float) -> float:
        """Return the probability that the most frequent continuation of a match comes next."""
        return self._rates[min(LONGEST, length.bit_length())] * share

    def observe(self, length: int, share: float, hit: bool) -> None:
        """Count whether the most frequent continuation of a match was the next token."""
        bucket = min(LONGEST, length.bit_length())
        rate = self._rates[bucket]
        self._rates[bucket] = min(1.0, max(0.0, rate + SPEED * (hit - rate * share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A chain of copied tokens, with its expected number of accepted tokens."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


NOTHING = Copy()


@dataclass(slots=True, eq=False)
class Match:
    """Finds the longest earlier occurrence of a text's end within the same text."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    rates: HitRates = field(default_factory=HitRates)

    @property
    def place(self) -> tuple[int, int]:
        """Return the automaton state and length of the longest suffix that also occurs earlier."""
        state = self.automaton.repeated
        return state, self.automaton.length(state)

    def advance(self, token: int) -> None:
        self.automaton.append(token)


def copy_on(match: Match, most: int, config: SuffixConfig) -> Copy:
    """Return the longest copied chain whose every token is expected to make the step faster.

    With S tokens expected to be accepted of n drafted, a step yields 1 + S tokens and costs
    kappa = 1 + step_cost + n row_cost. The next token, accepted with all before it with
    probability p, raises (1 + S) / kappa where p kappa > (1 + S) row_cost. p falls with every
    token, so the first that does not pay is the end.
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
        if reached * kappa <= emitted * config.row_cost:
            break
        tokens.append(token)
        emitted += reached
        kappa += config.row_cost
        state = automaton.follow(state, token)
    if emitted <= kappa:
        return NOTHING
    return Copy(tokens=tuple(tokens), score=emitted - 1)


MOST_IDLE = 9
"""Number of calls without a copy after which pauses grow no further."""


class SuffixDrafter(Drafter):
    """Copies tokens from the request's own text."""

    method = "suffix"

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self._readers: dict[str, Reader] = {}

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | Pause]:
        """Return a chain per request, or a pause if copying is expected to cost time."""
        return [
            self._reader(request).propose(plan.shape, self.config)
            for request, plan in zip(requests, plans, strict=True)
        ]

    def _reader(self, request: DraftRequest) -> Reader:
        """Return the state of a request after its latest tokens were read."""
        reader = self._readers.get(request.request_id)
        if reader is None:
            reader = self._readers[request.request_id] = Reader(request)
        reader.read()
        return reader

    def forget(self, request_id: str) -> None:
        self._readers.pop(request_id, None)


@dataclass(slots=True, eq=False)
class Reader:
    """The state of one request: where the end of its text occurs earlier in it."""

    request: DraftRequest
    match: Match = field(default_factory=Match)
    num_read: int = 0
    num_idle: int = 0

    def read(self) -> None:
        """Read the tokens committed since the last call, and count hits for output tokens."""
        ids, match = self.request.ids, self.match
        output = max(self.num_read, self.request.num_prompt)
        for token in ids[self.num_read : output]:
            match.advance(token)
        for token in ids[output:]:
            judge(match, token)
            match.advance(token)
        self.num_read = len(ids)

    def propose(self, shape: Chain | Tree, config: SuffixConfig) -> Proposal | Pause:
        """Return the best copy, or a pause that grows with each call that finds none.

        The search costs about as much as drafting, because the CPU caches are cold after a pass.
        """
        copy = copy_on(self.match, min(shape.num_nodes, shape.depth), config)
        if copy.tokens:
            self.num_idle = int(self.num_idle / (1 + copy.score))
            return Proposal(
                tokens=torch.tensor(copy.tokens),
                tree=TokenTree.chain(len(copy.tokens)),
                choice=Choice.DETERMINISTIC,
                stop_reason="score",
            )
        self.num_idle = min(MOST_IDLE, self.num_idle + 1)
        return Pause(num_tokens=1 << (self.num_idle + 1) // 2)


def judge(match: Match, token: int) -> None:
    """Count whether the most frequent continuation would have been the next token."""
    state, length = match.place
    favourite, share = match.automaton.favourite(state)
    if length and favourite != NONE:
        match.rates.observe(length, share, favourite == token)


def build_suffix(argument: str, target: LanguageModel) -> SuffixDrafter:
    """Build `suffix`, which copies from a request itself."""
    return SuffixDrafter()
