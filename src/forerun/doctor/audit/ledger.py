"""Statistics over the answers of an audit: sequential tests, deviations, likelihoods of faults."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from forerun.doctor.audit.config import GRAMMAR, AuditConfig, Kind
from forerun.doctor.audit.readings import DIRECTIONS, ExpectedRows, TokenReading, read_sampled
from forerun.doctor.audit.records import Arm, AuditAnswer, Question
from forerun.doctor.audit.reference import Reference

FEW, SIGMAS = 30, 3.0
"""Least number of values whose mean is judged, and least difference in standard errors."""
_SHARES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3])[:, None]
"""Stakes that are bet in parallel, as shares of the largest one that cannot lose everything."""


@dataclass(slots=True)
class Moments:
    """Number, mean and spread of values that are added one after the other."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Float[ndarray, " n"]) -> None:
        """Add further values."""
        self.num += len(values)
        self.total += float(values.sum())
        self.squares += float((values * values).sum())

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation."""
        return math.sqrt(max(0.0, self.squares / self.num - self.mean**2)) if self.num else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean; the last term is for rates of 0 or 1 in the sample."""
        return self.spread / math.sqrt(self.num) + 1.0 / (2 * self.num) if self.num else math.inf

    @property
    def is_clear(self) -> bool:
        """Whether the mean of enough values is not zero, beyond chance."""
        return self.num >= FEW and abs(self.mean) > SIGMAS * self.spread / math.sqrt(self.num)


class Bet:
    """Sequential test, by betting, of whether values exceed their expectation by a tolerance.

    It pays 1 + stake * (value - expected - tolerance) per token. If the expectation of every value,
    given everything before it, is at most expected + tolerance, the product is a non-negative
    supermartingale from 1 on, so it ever reaches 1 / a with probability at most a, however often
    one looks.

    Source: Ville 1939; Waudby-Smith and Ramdas 2024.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.moved = Moments()
        self._logs = np.zeros(len(_SHARES))

    def update(self, values: Float[ndarray, " n"], expected: Float[ndarray, " n"]) -> None:
        """Add the values of further tokens, each in [0, 1] or NaN, with their expectations."""
        known = ~np.isnan(values)
        self.moved.add(values[known] - expected[known])
        values, allowed = values[known], expected[known] + self.tolerance
        factors = 1.0 + _SHARES / allowed * (values - allowed)
        self._logs += np.log(np.maximum(factors, 1e-12)).sum(axis=1)

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value."""
        return _log_mean_exp(self._logs)


def mean_interval(moved: Moments, error_rate: float) -> tuple[float, float]:
    """Return the ends of a confidence sequence for a mean of values in [-1, 1].

    The mean of the conditional expectations lies outside, at any time, with about the error rate
    (asymptotically, in the number of values). The last term is for values that never differ yet.

    Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, equation 4.
    """
    num, shape = moved.num, 1e-3  # narrowest at some ten thousand values
    if num < 2:
        return -1.0, 1.0
    grown = num * shape + 1.0
    reach = moved.spread * math.sqrt(
        2 * grown / (num * num * shape) * math.log(math.sqrt(grown) / error_rate)
    )
    reach += math.log(1.0 / error_rate) / num
    return max(-1.0, moved.mean - reach), min(1.0, moved.mean + reach)


def _log_mean_exp(logs: Float[ndarray, " n"]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))


_WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Shares of the tokens that a fault may concern; the likeliest counts."""
EVERYTHING = "all"
_SLOTS = 32
"""Bets of one group, of which some may never be made: directions, up and down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Mean difference of one statistic from its expectation, with a confidence sequence.

    Attributes:
        group: of tokens: "all", "kind NAME", "clients N", "setting NAME", "place ..." or
            "step ...".
    """

    group: str
    direction: str
    num_tokens: int
    mean: float
    low: float
    high: float
    log_e: float


@dataclass(slots=True)
class ArmTally:
    """Statistics of the answers of one arm: as the server speculates, or without speculation.

    Attributes:
        bets: by group of tokens, direction, and 1 (upwards) or -1.
        num_tokens: that could be judged, by group.
        num_drafted: draft tokens verified, by group; `num_answered` counts their output tokens.
    """

    bets: dict[tuple[str, str, int], Bet] = field(default_factory=dict)
    readings: list[TokenReading] = field(default_factory=list)
    num_tokens: Counter[str] = field(default_factory=Counter)
    num_drafted: Counter[str] = field(default_factory=Counter)
    num_answered: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Collects the statistics of all answers of an audit."""

    def __init__(
        self, config: AuditConfig, reference: Reference | None, max_context: int | None
    ) -> None:
        self.config = config
        self.max_context = max_context
        self.reference = reference
        self.kinds = {kind.name: kind for kind in config.kinds}
        self.arms: dict[Arm, ArmTally] = {"served": ArmTally(), "control": ArmTally()}
        self._deepest = 0
        self._earlier: dict[tuple[Arm, int], tuple[int, ...]] = {}

    def add(self, question: Question, answer: AuditAnswer) -> None:
        """Add an answer; one that cannot be judged adds nothing."""
        kind, tally = self.kinds[question.kind], self.arms[question.arm]
        groups = groups_of(question, self.config)
        num_drafted = num_drafted_of(answer)
        if num_drafted is not None:
            for group in groups:
                tally.num_drafted[group] += num_drafted
                tally.num_answered[group] += answer.num_charged
        found = (
            None if kind.has_grammar or kind.has_stop else self._read(question, answer, kind),
            self._check_form(question, answer, kind),
        )
        for reading in found:
            if reading is not None:
                self._tally(tally, replace(reading, groups=groups, deepest=self._deepest))
        self._deepest = max(self._deepest, *answer.step_sizes, 0)

    def _tally(self, tally: ArmTally, reading: TokenReading) -> None:
        tally.readings.append(reading)
        for group, members in reading.members():
            tally.num_tokens[group] += int(members.sum())
            for name, (values, expected) in reading.values.items():
                here, there = values[members], expected[members]
                self._bet(tally, group, name, 1).update(here, there)
                if DIRECTIONS[name].kind == "either way":
                    self._bet(tally, group, name, -1).update(1.0 - here, 1.0 - there)

    def _bet(self, tally: ArmTally, group: str, direction: str, sign: int) -> Bet:
        key = (group, direction, sign)
        if key not in tally.bets:
            tally.bets[key] = Bet(self.config.tolerance * DIRECTIONS[direction].tolerance)
        return tally.bets[key]

    def _read(self, question: Question, answer: AuditAnswer, kind: Kind) -> TokenReading | None:
        if self.reference is None or answer.token_ids is None:
            return None
        rows = self.reference.rows(question, answer, kind)
        if rows is None:
            return None
        ratios: dict[str, ndarray] = {}
        if kind.temperature == 0.0:
            values = _greedy_values(rows, self.config.tie_margin)
        else:
            key = (question.arm, question.group)
            previous = () if kind.is_seeded else self._earlier.get(key, ())
            before = () if isinstance(question.prompt, str) else question.prompt
            values, ratios = read_sampled(rows, before, answer.token_ids, previous)
            self._earlier[key] = answer.token_ids
        indices = rows.indices
        num = int(indices.max(initial=0)) + 1
        steps = (place for size in answer.step_sizes for place in range(size))
        places = [*islice(chain(steps, repeat(0)), num)]
        return TokenReading(
            values=values, ratios=ratios, indices=indices, offsets=np.array(places)[indices]
        )

    def _check_form(
        self, question: Question, answer: AuditAnswer, kind: Kind
    ) -> TokenReading | None:
        """Compare the whole text with its grammar, its ids and the places where it should end."""
        ids, found = answer.token_ids or (), dict[str, bool]()
        if kind.has_grammar and answer.text and answer.finish_reason is not None:
            found["grammar"] = re.fullmatch(GRAMMAR, answer.text) is None
        if ids and (answer.finish_reason is not None or len(ids) > question.num_tokens):
            ends: frozenset[int] = getattr(self.reference, "eos_token_ids", frozenset())
            goes_on = len(ids) > question.num_tokens or not ends.isdisjoint(ids[:-1])
            fits = self.max_context is not None and (
                len(question.prompt) + question.num_tokens <= self.max_context
                and not isinstance(question.prompt, str)
            )
            is_short = fits and answer.finish_reason == "length" and len(ids) < question.num_tokens
            is_missed = bool(question.stop) and question.stop in answer.text
            found["ending"] = goes_on or is_missed or (is_short and not kind.has_grammar)
            decoded = self.reference.text_of(question, answer) if self.reference else None
            if decoded is not None and not kind.has_grammar:
                found["text"] = not _is_same_text(answer.text, decoded, question.stop)
        if not found:
            return None
        one = np.zeros(1, dtype=np.int64)
        values = {name: (np.array([float(is_bad)]), np.zeros(1)) for name, is_bad in found.items()}
        return TokenReading(values=values, ratios={}, indices=one, offsets=one, is_whole=True)

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value against "every token follows the reference".

        It is a mean with fixed weights over all bets: a half for all tokens together, and a half
        for the groups; one that has not begun counts 1.
        """
        num_groups = len(self.kinds) + 16
        logs, weights = [0.0], [0.0]
        for (group, _, _), bet in self.arms["served"].bets.items():
            logs.append(bet.log_e)
            weights.append(0.5 / _SLOTS / (1 if group == EVERYTHING else num_groups))
        weights[0] = max(0.0, 1.0 - sum(weights))
        top = max(logs)
        return top + math.log(float(np.dot(weights, np.exp(np.array(logs) - top))) + 1e-300)

    def deviations(self, arm: Arm) -> list[Deviation]:
        """Return the deviation of every direction in every group of tokens, largest e first."""
        bets, found = self.arms[arm].bets, []
        pairs = sorted({(group, name) for group, name, _ in bets})
        for group, name in pairs:
            moved = bets[group, name, 1].moved
            low, high = mean_interval(moved, 0.05 / len(pairs))
            found.append(
                Deviation(
                    group=group,
                    direction=name,
                    num_tokens=moved.num,
                    mean=moved.mean,
                    low=low,
                    high=high,
                    log_e=max(
                        bets[key].log_e for s in (1, -1) if (key := (group, name, s)) in bets
                    ),
                )
            )
        return sorted(found, key=lambda item: -item.log_e)

    def moved(self, arm: Arm, direction: str, group: str = EVERYTHING) -> Moments:
        """Return number, mean and spread of value - expectation over the tokens of a group."""
        bet = self.arms[arm].bets.get((group, direction, 1))
        return Moments() if bet is None else bet.moved

    def bounds(self) -> dict[str, float]:
        """Return an upper limit (95% for all) of the deviation in each group, over directions.

        The end of texts counts where it is known at most tokens.
        """
        found: dict[str, float] = {}
        for item in self.deviations("served"):
            is_known = 2 * item.num_tokens > self.arms["served"].num_tokens[item.group]
            is_of_answer = DIRECTIONS[item.direction].kind == "answer"
            if not is_of_answer and (is_known or item.direction != "ends"):
                found[item.group] = max(found.get(item.group, 0.0), -item.low, item.high)
        return found

    def by_place(
        self, group: str, direction: str, *, in_step: bool, most: int = 16
    ) -> dict[int, Moments]:
        """Return the deviation by position in the answer, or by position within a step's tokens."""
        found: defaultdict[int, Moments] = defaultdict(Moments)
        for reading in self.arms["served"].readings:
            members = dict(reading.members()).get(group)
            if direction not in reading.values or members is None:
                continue
            values, expected = reading.values[direction]
            places, moved = reading.offsets if in_step else reading.indices, values - expected
            members = members & (places < most) & ~np.isnan(moved)
            for place in np.unique(places[members]).tolist():
                found[place].add(moved[members & (places == place)])
        return dict(sorted(found.items()))

    def likelihoods(self, group: str) -> dict[str, float]:
        """Return how much likelier the served text is under every alternative, as logarithms.

        The first token of an answer, which no draft precedes, is left out.
        """
        parts: dict[str, list[ndarray]] = defaultdict(list)
        for reading in self.arms["served"].readings:
            members = dict(reading.members()).get(group)
            if members is None:
                continue
            for name, ratio in reading.ratios.items():
                parts[name].append(np.maximum(ratio[members & (reading.indices > 0)], 1e-6))
        return {
            name: max(
                float(np.log(1.0 - weight + weight * np.concatenate(found)).sum())
                for weight in _WEIGHTS
            )
            for name, found in parts.items()
        }


def groups_of(question: Question, config: AuditConfig) -> tuple[str, ...]:
    """Return the groups that all tokens of an answer are in."""
    is_alone = question.setting == "alone"
    route = "chat" if question.message else "stream" if question.is_streamed else "whole"
    return (
        EVERYTHING,
        f"kind {question.kind}",
        f"clients {1 if is_alone else config.num_clients}",
        f"setting {question.setting}",
        f"route {route}",
    )


_FEW_EVENTS = 8


def num_drafted_of(answer: AuditAnswer) -> int | None:
    """Return the draft tokens of an answer, by the server's count or the steps of its stream."""
    if answer.num_drafted is not None:
        return answer.num_drafted
    steps = [size for size in answer.step_sizes if size]
    if len(steps) > _FEW_EVENTS and len({*steps[:-1]}) == 1 < steps[0]:
        return None  # a server that groups its tokens sends as many in every event
    return sum(steps) - len(steps) if steps else None


def _is_same_text(text: str, decoded: str, stop: str) -> bool:
    """Whether a text is that of its ids, which may end within a character or a stop string."""
    cut = decoded[: decoded.index(stop)] if stop and stop in decoded else decoded
    return text.strip().rstrip("\ufffd") == cut.strip().rstrip("\ufffd")


def _greedy_values(rows: ExpectedRows, tie_margin: float) -> dict[str, tuple[ndarray, ndarray]]:
    if rows.margins is None:
        return {}
    return {"not_best": ((rows.margins > tie_margin) * 1.0, np.zeros(len(rows.margins)))}
