"""Lines of TensorRT-LLM that are no JSON: the gate that ends speculation."""

from __future__ import annotations

import re

from forerun.diagnose.readers.tally import Tally

__all__ = ["TensorRtLlmLog"]

GATE = re.compile(r"\[SpeculationGate\] Speculative decoding disabled: rolling acceptance avg")


class TensorRtLlmLog:
    """The gate is one-way: below its threshold nothing is drafted until a restart."""

    kind = "TensorRT-LLM log"

    def __init__(self) -> None:
        self.tally = Tally()

    def read(self, line: str) -> bool:
        """One line."""
        if not GATE.search(line):
            return False
        for name in ("speculation_off", "adaptive_k", "adaptive_stuck", "acceptance_low"):
            self.tally.say(name, True)
        return True

    def close(self) -> None:
        """Nothing takes several lines."""
