"""Counts and times that a simulation collects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.plan.simulation.request import SimulatedCycle, SimulatedRequest

__all__ = ["SimulationTally"]


@dataclass(slots=True, kw_only=True)
class SimulationTally:
    """Counts by phase, and the times of every finished request.

    Attributes:
        num_phases: of the workload.
        tokens: emitted by decode steps, by phase.
        decode_s: request-seconds of decode steps, by phase: what all requests together waited.
        depths: decode steps by phase and tokens drafted.
        accepted: drafted tokens accepted, by phase.
        busy_s: cycles.
        num_cycles: how many.
        num_decoding: requests in them that decoded.
        arrival_s: of finished requests, in the order they finished.
        first_s: of the same requests.
        finished_s: of the same requests.
        num_output: of the same requests.
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
        """One entry per phase."""
        self.tokens = [0] * self.num_phases
        self.decode_s = [0.0] * self.num_phases
        self.depths = [Counter() for _ in range(self.num_phases)]
        self.accepted = [0] * self.num_phases

    def steps(self, requests: Sequence[SimulatedRequest], seconds: float) -> None:
        """Add the decode steps of one cycle."""
        tokens, decode_s, depths, accepted = self.tokens, self.decode_s, self.depths, self.accepted
        for request in requests:
            phase = request.phase
            tokens[phase] += request.num_new
            decode_s[phase] += seconds
            depths[phase][request.num_tested] += 1
            accepted[phase] += request.num_accepted

    def finish(self, request: SimulatedRequest) -> None:
        """Add the times of a finished request."""
        self.arrival_s.append(request.arrival_s)
        self.first_s.append(request.first_s)
        self.finished_s.append(request.finished_s)
        self.num_output.append(request.num_output)

    def cycle(self, cycle: SimulatedCycle, num_decoding: int) -> None:
        """Add a finished cycle."""
        self.busy_s += cycle.total_s
        self.num_cycles += 1
        self.num_decoding += num_decoding
