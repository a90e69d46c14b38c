"""Counts made while a simulation runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.plan.simulation.request import SimulatedCycle, SimulatedRequest

__all__ = ["SimulationTally"]


@dataclass(slots=True, kw_only=True)
class SimulationTally:
    """Holds counts by phase, and the times of every request.

    Attributes:
        num_phases: number of phases of the workload.
        tokens: emitted by decode steps, by phase.
        decode_s: request-seconds of decode steps, by phase.
        depths: decode steps by phase and tokens drafted.
        accepted: drafted tokens accepted, by phase.
        busy_s: seconds of cycles.
        num_cycles: number of cycles.
        num_decoding: requests that decoded, summed over cycles.
        arrival_s: arrivals of finished requests, in the order they finished.
        first_s: times of their first tokens.
        finished_s: times of their last tokens.
        num_output: their output tokens.
    """

    num_phases: int
    tokens: list[int] = field(init=False)
    decode_s: list[float] = field(init=False)
    depths: list[Counter[int]] = field(init=False)
    accepted: list[int] = field(init=False)
    busy_s: float = 0.0
    num_cycles: int = 0
    num_decoding: int = 0
    arrival_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    num_output: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Create one entry per phase."""
        self.tokens = [0] * self.num_phases
        self.decode_s = [0.0] * self.num_phases
        self.depths = [Counter() for _ in range(self.num_phases)]
        self.accepted = [0] * self.num_phases

    def steps(self, requests: Sequence[SimulatedRequest], seconds: float) -> None:
        """Count the decode steps of one cycle."""
        tokens, decode_s, depths, accepted = self.tokens, self.decode_s, self.depths, self.accepted
        for request in requests:
            phase = request.phase
            tokens[phase] += request.num_new
            decode_s[phase] += seconds
            depths[phase][request.num_tested] += 1
            accepted[phase] += request.num_accepted

    def finish(self, request: SimulatedRequest) -> None:
        """Count a request that has its last token."""
        self.arrival_s.append(request.arrival_s)
        self.first_s.append(request.first_s)
        self.finished_s.append(request.finished_s)
        self.num_output.append(request.num_output)

    def cycle(self, cycle: SimulatedCycle, num_decoding: int) -> None:
        """Count a cycle that has ended."""
        self.busy_s += cycle.total_s
        self.num_cycles += 1
        self.num_decoding += num_decoding
