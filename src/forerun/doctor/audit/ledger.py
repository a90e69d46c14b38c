"""Statistics over the answers of an audit: sequential tests, deviations, likelihoods of faults."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from forerun.doctor.audit.config import GRAMMAR, AuditConfig, Kind
from forerun.doctor.audit.readings import ExpectedRows, TokenReading, read_sampled
from forerun.doctor.audit.records import Arm, AuditAnswer, Question
from forerun.doctor.audit.reference import Reference

_SHARES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3])[:, None]
"""Stakes that are bet in parallel, as shares of the largest one that cannot lose everything."""


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
        self._logs = np.zeros(len(_SHARES))

    def update(self, values: Float[ndarray, " n"], expected: Float[ndarray, " n"]) -> None:
        """Add the values of further tokens, each in [0, 1] or NaN, with their expectations."""
        known = ~np.isnan(values)
        values, allowed = values[known], expected[known] + self.tolerance
        factors = 1.0 + _SHARES / allowed * (values - allowed)
        self._logs += np.log(np.maximum(factors, 1e-12)).sum(axis=1)

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value."""
        return _log_mean_exp(self._logs)


def combined(bets: list[Bet]) -> float:
    """Return the logarithm of the mean of the e-values, which is an e-value itself."""
    return _log_mean_exp(np.array([bet.log_e for bet in bets])) if bets else 0.0


def mean_interval(values: Float[ndarray, " n"], error_rate: float) -> tuple[float, float, float]:
    """Return a mean and the ends of a confidence sequence for it.

    The mean of the conditional expectations lies outside, at any time, with about the error rate
    (asymptotically, in the number of values).

    Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, equation 4.
    """
    num = len(values)
    if num < 2:
        return 0.0, -1.0, 1.0
    mean, spread = float(values.mean()), float(values.std())
    shape = 1e-3  # narrowest at some ten thousand values
    grown = num * shape + 1.0
    reach = spread * math.sqrt(
        2 * grown / (num * num * shape) * math.log(math.sqrt(grown) / error_rate)
    )
    return mean, max(-1.0, mean - reach), min(1.0, mean + reach)


def _log_mean_exp(logs: Float[ndarray, " n"]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))


_WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Shares of the tokens that a fault may concern; the likeliest counts."""
ONE_SIDED = frozenset({"copied", "excluded", "not_best", "grammar", "repeats", "draft"})
"""Directions that a fault moves up; the others may move either way."""

_STRICT, _STRICTER = frozenset({"excluded", "grammar"}), 0.005
"""Directions that rounding does not move, and their share of the tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Mean difference of one statistic from its expectation, with a confidence sequence."""

    kind: str
    direction: str
    num_tokens: int
    mean: float
    low: float
    high: float
    log_e: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDeviation:
    """Deviation of one direction at one place, with its standard error."""

    place: int
    num_tokens: int
    mean: float
    error: float


@dataclass(slots=True)
class ArmTally:
    """Statistics of the answers of one arm: as the server speculates, or without speculation.

    Attributes:
        bets: by kind of request, direction, and 1 (upwards) or -1.
        num_tokens: that could be judged, by kind.
    """

    bets: dict[tuple[str, str, int], Bet] = field(default_factory=dict)
    readings: dict[str, list[TokenReading]] = field(default_factory=lambda: defaultdict(list))
    num_tokens: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Collects the statistics of all answers of an audit."""

    def __init__(self, config: AuditConfig, reference: Reference | None) -> None:
        self.config = config
        self.reference = reference
        self.kinds = {kind.name: kind for kind in config.kinds}
        self.arms: dict[Arm, ArmTally] = {"served": ArmTally(), "control": ArmTally()}
        self._earlier: dict[tuple[Arm, int], tuple[int, ...]] = {}

    def add(self, question: Question, answer: AuditAnswer) -> None:
        """Add an answer; one that cannot be judged adds nothing."""
        kind, tally = self.kinds[question.kind], self.arms[question.arm]
        reading = self._reading_of(question, answer, kind)
        if reading is None:
            return
        tally.readings[kind.name].append(reading)
        tally.num_tokens[kind.name] += len(reading.indices)
        for name, (values, expected) in reading.values.items():
            self._bet(tally, kind.name, name, 1).update(values, expected)
            if name not in ONE_SIDED:
                self._bet(tally, kind.name, name, -1).update(1.0 - values, 1.0 - expected)

    def _bet(self, tally: ArmTally, kind: str, direction: str, sign: int) -> Bet:
        key = (kind, direction, sign)
        if key not in tally.bets:
            strict = direction in _STRICT
            tally.bets[key] = Bet(self.config.tolerance * (_STRICTER if strict else 1.0))
        return tally.bets[key]

    def _reading_of(
        self, question: Question, answer: AuditAnswer, kind: Kind
    ) -> TokenReading | None:
        if kind.has_grammar:
            return _grammar_reading(answer)
        prompt = question.prompt
        if self.reference is None or answer.token_ids is None:
            return None
        before = () if isinstance(prompt, str) else prompt
        rows = self.reference.rows(before, answer, kind)
        if rows is None:
            return None
        num = len(rows.columns)
        tokens = answer.token_ids[:num]
        ratios: dict[str, ndarray] = {}
        if kind.temperature == 0.0:
            values = _greedy_values(rows, self.config.tie_margin)
        else:
            key = (question.arm, question.group)
            values, ratios = read_sampled(rows, before, tokens, self._earlier.get(key, ()))
            self._earlier[key] = answer.token_ids
        sizes = answer.step_sizes
        places = [*islice((place for size in sizes for place in range(size)), num)]
        places += [0] * max(0, num - len(places))
        return TokenReading(
            values=values,
            ratios=ratios,
            indices=np.arange(num),
            offsets=np.array(places, dtype=np.int64),
        )

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value against "every token follows the reference"."""
        return combined([*self.arms["served"].bets.values()])

    def deviations(self, arm: Arm) -> list[Deviation]:
        """Return the deviation of every direction in every kind of request, largest e first."""
        tally, found = self.arms[arm], []
        pairs = sorted({(kind, name) for kind, name, _ in tally.bets})
        for kind, name in pairs:
            moved = self.moved(arm, name, kind)
            mean, low, high = mean_interval(moved, 0.05 / len(pairs))
            logs = [
                tally.bets[key].log_e for s in (1, -1) if (key := (kind, name, s)) in tally.bets
            ]
            found.append(
                Deviation(
                    kind=kind,
                    direction=name,
                    num_tokens=len(moved),
                    mean=mean,
                    low=low,
                    high=high,
                    log_e=max(logs),
                )
            )
        return sorted(found, key=lambda item: -item.log_e)

    def moved(self, arm: Arm, direction: str, kind: str | None = None) -> Float[ndarray, " n"]:
        """Return value - expectation of every judged token, of one kind of request or of all."""
        parts = [
            reading.values[direction][0] - reading.values[direction][1]
            for name, readings in self.arms[arm].readings.items()
            if kind in (None, name)
            for reading in readings
            if direction in reading.values
        ]
        found = np.concatenate(parts) if parts else np.zeros(0)
        known: ndarray = found[~np.isnan(found)]
        return known

    def bound(self, least: int) -> float | None:
        """Return an upper limit (95%) of the deviation, over directions with enough tokens."""
        names = {name for _, name, _ in self.arms["served"].bets}
        moved = [found for n in names if len(found := self.moved("served", n)) >= least]
        ends = [mean_interval(found, 0.05 / len(moved))[1:] for found in moved]
        return max((max(-low, high) for low, high in ends), default=None)

    def by_place(
        self, kind: str, direction: str, *, in_step: bool, most: int = 16
    ) -> list[PlaceDeviation]:
        """Return the deviation by position in the answer, or by position within a step's tokens."""
        parts: dict[int, list[float]] = defaultdict(list)
        for reading in self.arms["served"].readings[kind]:
            if direction not in reading.values:
                continue
            values, expected = reading.values[direction]
            places = reading.offsets if in_step else reading.indices
            for place, moved in zip(places.tolist(), (values - expected).tolist(), strict=True):
                if place < most and moved == moved:
                    parts[place].append(moved)
        return [
            PlaceDeviation(
                place=place,
                num_tokens=len(moved),
                mean=float(np.mean(moved)),
                error=float(np.std(moved)) / max(1.0, len(moved)) ** 0.5,
            )
            for place, moved in sorted(parts.items())
        ]

    def likelihoods(self, kind: str) -> dict[str, float]:
        """Return how much likelier the served text is under every alternative, as logarithms.

        The first token of an answer, which no draft precedes, is left out.
        """
        parts: dict[str, list[ndarray]] = defaultdict(list)
        for reading in self.arms["served"].readings[kind]:
            for name, ratio in reading.ratios.items():
                parts[name].append(np.maximum(ratio[reading.indices > 0], 1e-6))
        return {
            name: max(
                float(np.log(1.0 - weight + weight * np.concatenate(found)).sum())
                for weight in _WEIGHTS
            )
            for name, found in parts.items()
        }


def _greedy_values(rows: ExpectedRows, tie_margin: float) -> dict[str, tuple[ndarray, ndarray]]:
    if rows.margins is None:
        return {}
    return {"not_best": ((rows.margins > tie_margin) * 1.0, np.zeros(len(rows.margins)))}


def _grammar_reading(answer: AuditAnswer) -> TokenReading | None:
    if answer.finish_reason is None or not answer.text:
        return None
    is_wrong = re.fullmatch(GRAMMAR, answer.text) is None
    one = np.zeros(1, dtype=np.int64)
    values = {"grammar": (np.array([float(is_wrong)]), np.zeros(1))}
    return TokenReading(values=values, ratios={}, indices=one, offsets=one)
