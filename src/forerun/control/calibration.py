"""Estimates P(drafted token accepted) as a function of the draft's confidence, in bins.

Confidence is the top probability of the distribution a node is drawn from, or exp(-entropy),
which is 1 for a certain distribution and falls with the number of likely tokens. Only nodes whose
predecessors were accepted are counted, because the others were not tested.
"""

from __future__ import annotations

import math

from forerun.control.config import CALIBRATION_BINS
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import Measure, StopRule

__all__ = ["Calibration"]


class Calibration:
    """Estimates P(accepted given confidence), and the confidence below which drafting costs time.

    Args:
        measure: what stop rules look at.
        memory: weight that an observation keeps after one more in its bin.
        strength: observations that the bin above is worth to a bin.
    """

    def __init__(self, measure: Measure, memory: float = 0.995, strength: float = 4.0) -> None:
        self.measure = measure
        self.memory = memory
        self.strength = strength
        self.trials = [0.0] * CALIBRATION_BINS
        self.wins = [0.0] * CALIBRATION_BINS
        self._rules = [self.at(lowest / CALIBRATION_BINS) for lowest in range(CALIBRATION_BINS)]

    def observe(self, record: StepRecord) -> None:
        """Update the bins from a step whose plan had a stop rule with this measure."""
        num_reached = min(record.num_accepted + 1, record.depth_drafted)
        for index, value in enumerate((record.stop_values or ())[:num_reached]):
            confidence = math.exp(-value) if self.measure == "entropy" else value
            at = min(CALIBRATION_BINS - 1, int(confidence * CALIBRATION_BINS))
            self.trials[at] = self.trials[at] * self.memory + 1.0
            self.wins[at] = self.wins[at] * self.memory + (index < record.num_accepted)

    def rule(self, needed: float) -> StopRule:
        """Return the stop rule that ends drafts in bins whose acceptance is below `needed`.

        A bin that was hardly seen is believed to be like the one above, so nothing stops that has
        not been seen to fail.
        """
        trials, wins, strength = self.trials, self.wins, self.strength
        above, lowest = 1.0, CALIBRATION_BINS
        while lowest:
            above = (wins[lowest - 1] + above * strength) / (trials[lowest - 1] + strength)
            if above < needed:
                break
            lowest -= 1
        # Above all bins nothing would ever be drafted, so nothing learnt: the surest stay.
        return self._rules[min(lowest, CALIBRATION_BINS - 1)]

    def at(self, confidence: float) -> StopRule:
        """Return the stop rule for a confidence threshold; at 0 it measures but never stops."""
        if self.measure == "top_probability":
            return StopRule(measure=self.measure, threshold=confidence)
        threshold = -math.log(confidence) if confidence > 0.0 else math.inf
        return StopRule(measure=self.measure, threshold=threshold)
