"""Settings of a workload: arrivals, lengths, acceptance by phase, and the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.errors import InvalidRequest, Range, check_ranges
from forerun.plan.simulation.kinds import (
    Acceptance,
    Arrivals,
    Fixed,
    Lengths,
    Recorded,
    Together,
)

MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1_000_000_000
"""Prompts and outputs together, by their means; more would take a simulation hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A run of consecutive requests with the same distribution of acceptance.

    Attributes:
        share: share of all requests.
        acceptance: acceptance of its requests.
        name: name for reports.
    """

    share: float
    acceptance: Acceptance
    name: str = ""

    def __post_init__(self) -> None:
        check_ranges(self, Range("share", 0, high=1, above_low=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServerConfig:
    """Settings of the simulated server, with the names and meanings of the engine's settings.

    Attributes:
        max_batch: sequences decoded at once.
        max_context: prompt plus output tokens of a sequence.
        prefill_chunk: most prompt tokens of one sequence in one pass.
        max_step_rows: most rows of one pass.
        max_prefill_rows: most prompt tokens in one pass (None: what max_step_rows leaves).
        max_k: most tokens of a drafted chain, and most levels of a tree.
        max_tree_nodes: most nodes of a draft tree.
    """

    max_batch: int = 8
    max_context: int = 4096
    prefill_chunk: int = 256
    max_step_rows: int = 1024
    max_prefill_rows: int | None = None
    max_k: int = 8
    max_tree_nodes: int = 16

    def __post_init__(self) -> None:
        """Refuse values that cannot work together."""
        check_ranges(
            self,
            Range("max_batch", 1, integer=True),
            Range("max_context", 2, integer=True),
            Range("prefill_chunk", 1, integer=True),
            Range("max_step_rows", 1, integer=True),
            Range("max_prefill_rows", 1, integer=True, optional=True),
            Range("max_k", 0, high=64, integer=True),
            Range("max_tree_nodes", 0, high=64, integer=True),
        )
        if self.max_step_rows < self.max_batch * (self.max_k + 1):
            raise InvalidRequest(
                f"max_step_rows is {self.max_step_rows}, below max_batch x (max_k + 1) = "
                f"{self.max_batch * (self.max_k + 1)}; raise it or lower max_k"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level objectives: the latency limits of a request.

    Attributes:
        ttft_s: most seconds to the first token (None: no limit).
        tpot_s: most seconds per token after it, on average (None: no limit).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse limits that are not above 0."""
        check_ranges(
            self,
            Range("ttft_s", 0, above_low=True, optional=True),
            Range("tpot_s", 0, above_low=True, optional=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that a simulation needs except the cost table and the controller.

    Attributes:
        requests: number of requests.
        arrivals: their arrival times.
        prompt_tokens: lengths of their prompts.
        output_tokens: lengths of their outputs.
        phases: acceptance of drafts, for one run of requests after the other.
        sibling_acceptance: P(a further likely token is accepted | those before it at the same
            place are not), for draft trees; 0 means that branches are never accepted.
        temperature: temperature of all requests; it decides between greedy and sampled drafts.
        server: settings of the server.
        slo: latency limits of the requests.

    Raises:
        InvalidRequest: a value cannot work, or the workload would not end.
    """

    requests: int
    output_tokens: Lengths
    phases: tuple[Phase, ...]
    arrivals: Arrivals = field(default_factory=Together)
    prompt_tokens: Lengths = field(default_factory=lambda: Fixed(tokens=128))
    sibling_acceptance: float = 0.0
    temperature: float = 0.0
    server: SimulatedServerConfig = field(default_factory=SimulatedServerConfig)
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        """Refuse values that do not fit together."""
        check_ranges(
            self,
            Range("requests", 1, high=MAX_REQUESTS, integer=True),
            Range("temperature", 0),
            Range("sibling_acceptance", 0, high=1),
        )
        _check_shares(self.phases)
        if isinstance(self.arrivals, Recorded) and len(self.arrivals.times_s) != self.requests:
            raise InvalidRequest(
                f"{len(self.arrivals.times_s)} arrivals are recorded for {self.requests} requests"
            )
        longest = self.prompt_tokens.most + self.output_tokens.most
        if longest > self.server.max_context:
            raise InvalidRequest(
                f"a request may have {longest} tokens, and max_context is "
                f"{self.server.max_context}: it would never finish; raise it, or limit the lengths"
            )
        total = self.requests * (self.prompt_tokens.mean + self.output_tokens.mean)
        if total > MAX_TOKENS:
            raise InvalidRequest(
                f"{total:.1e} tokens in all are too many to simulate; {MAX_TOKENS:.0e} are possible"
            )


def _check_shares(phases: Sequence[Phase]) -> None:
    total = math.fsum(phase.share for phase in phases)
    if not phases or abs(total - 1.0) > 1e-6:
        raise InvalidRequest(f"the shares of the phases add up to {total:g}; it must be 1")
