"""Results of one controller on a simulated workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from forerun.plan.simulation.config import Slo
from forerun.plan.simulation.request import SimulatedCycle, SimulatedRequest


@dataclass(slots=True, kw_only=True)
class SimulationTally:
    """Holds counts by phase, and the times of every request.

    Attributes:
        decode_s: request-seconds of decode steps, by phase.
        arrival_s: arrivals of finished requests, in the order they finished.
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
        """Count a request that has emitted its last token."""
        self.arrival_s.append(request.arrival_s)
        self.first_s.append(request.first_s)
        self.finished_s.append(request.finished_s)
        self.num_output.append(request.num_output)

    def cycle(self, cycle: SimulatedCycle, num_decoding: int) -> None:
        self.busy_s += cycle.total_s
        self.num_cycles += 1
        self.num_decoding += num_decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Mean and quantiles of seconds over requests."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """Counts of the decode steps of one phase.

    Attributes:
        decode_s: request-seconds of the steps, summed over the requests that waited for them.
    """

    num_steps: int
    num_tokens: int
    decode_s: float
    num_accepted: int
    depths: dict[int, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Return tau: the tokens per decode step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def mean_k(self) -> float:
        """Return the tokens drafted per decode step."""
        drafted = sum(depth * count for depth, count in self.depths.items())
        return drafted / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one controller on one workload.

    Attributes:
        total_s: seconds from the first arrival to the last token.
        ttft_s: seconds to the first token, waiting included.
        tpot_s: seconds per token after it, mean of each request.
    """

    controller: str
    num_requests: int
    num_tokens: int
    total_s: float
    busy_s: float
    num_cycles: int
    mean_batch: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    num_in_slo: int
    phases: tuple[PhaseResult, ...]

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput, idle time included."""
        return self.num_tokens / self.total_s

    @property
    def busy_share(self) -> float:
        """Return the share of the time in which at least one request was served."""
        return self.busy_s / self.total_s

    @property
    def goodput_per_s(self) -> float:
        return self.num_in_slo / self.total_s

    @property
    def decode_s(self) -> float:
        """Return the sum over decode steps of their duration times the number of their requests."""
        return sum(phase.decode_s for phase in self.phases)

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {
            "tokens_per_s": self.tokens_per_s,
            "goodput_per_s": self.goodput_per_s,
            "busy_share": self.busy_share,
        }


def result_of(controller: str, tally: SimulationTally, slo: Slo) -> Result:
    """Return the result of a tally."""
    arrival_s, first_s = np.array(tally.arrival_s), np.array(tally.first_s)
    finished_s, num_output = np.array(tally.finished_s), np.array(tally.num_output)
    ttft_s = first_s - arrival_s
    tpot_s = (finished_s - first_s) / np.maximum(1, num_output - 1)
    kept = np.ones(len(ttft_s), dtype=bool)
    if slo.ttft_s is not None:
        kept &= ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        kept &= tpot_s <= slo.tpot_s
    several = num_output > 1
    return Result(
        controller=controller,
        num_requests=len(ttft_s),
        num_tokens=int(num_output.sum()),
        total_s=float(finished_s.max() - arrival_s.min()),
        busy_s=tally.busy_s,
        num_cycles=tally.num_cycles,
        mean_batch=tally.num_decoding / tally.num_cycles,
        ttft_s=quantiles(ttft_s),
        tpot_s=quantiles(tpot_s[several] if several.any() else tpot_s),
        num_in_slo=int(kept.sum()),
        phases=tuple(
            PhaseResult(
                num_steps=depths.total(),
                num_tokens=tokens,
                decode_s=decode_s,
                num_accepted=accepted,
                depths=dict(sorted(depths.items())),
            )
            for tokens, decode_s, depths, accepted in zip(
                tally.tokens, tally.decode_s, tally.depths, tally.accepted, strict=True
            )
        ),
    )


def quantiles(values: np.ndarray) -> Quantiles:
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return Quantiles(mean=float(values.mean()), p50=float(p50), p99=float(p99))
