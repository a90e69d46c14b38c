"""A workload: arrivals, lengths, acceptance by phase, and the server.

Arrivals, lengths and acceptance are numbers, lists, or one of five kinds of random distributions.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from forerun.bounded_read import read_bytes
from forerun.errors import InvalidRequest, InvalidTrace, Range, UnreadableInput, check_ranges
from forerun.plan.acceptance import MIN_ALLOWED
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.files import Item, read_trace

MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1_000_000_000
"""Prompts and outputs together, by their means; more would take a simulation hours."""
SQRT_3 = math.sqrt(3.0)
"""Half the width of a uniform distribution over its standard deviation."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that a workload file holds."""


class Poisson(Settings, frozen=True, tag_field="kind", tag="poisson"):
    """Arrivals of a Poisson process."""

    rate_per_s: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("rate_per_s", 0, above_low=True))


class Uniform(Settings, frozen=True, tag_field="kind", tag="uniform"):
    """A uniformly distributed number of tokens from `least` to `most`."""

    least: int
    most: int

    def __post_init__(self) -> None:
        check_ranges(self, Range("least", 1, integer=True), Range("most", self.least, integer=True))


class Lognormal(Settings, frozen=True, tag_field="kind", tag="lognormal"):
    """Lognormal lengths, many short and few long ones, cut at `most`."""

    median: float
    sigma: float
    most: int

    def __post_init__(self) -> None:
        check_ranges(
            self, Range("median", 1), Range("sigma", 0, high=5), Range("most", 1, integer=True)
        )


class Constant(Settings, frozen=True, tag_field="kind", tag="constant"):
    """The same acceptance probability at every position of every request."""

    alpha: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("alpha", 0, high=1))


class Clustered(Settings, frozen=True, tag_field="kind", tag="clustered"):
    """An acceptance probability per request, uniformly distributed around the mean."""

    alpha: float
    spread: float

    def __post_init__(self) -> None:
        """Refuse alphas outside [0, 1]."""
        check_ranges(self, Range("alpha", 0, high=1), Range("spread", 0))
        most = min(self.alpha, 1.0 - self.alpha) / SQRT_3
        if self.spread > most:
            raise InvalidRequest(
                f"spread is {self.spread}; around {self.alpha} it is at most {most:.3f}, "
                "or some alpha would be no probability"
            )


Arrivals = Poisson | tuple[float, ...]
"""A process, or seconds from the start, ascending, one per request; none: all at once."""
Lengths = Uniform | Lognormal | int | tuple[int, ...]
"""A distribution, one length for all, or lengths that are repeated."""
Acceptance = Constant | Clustered | tuple[float, ...]
"""P(accepted | all before it accepted), or survival by position (beta at a fixed K)."""


def most_tokens(lengths: Lengths) -> int:
    if isinstance(lengths, int):
        return lengths
    return max(lengths) if isinstance(lengths, tuple) else lengths.most


def _mean_tokens(lengths: Lengths) -> float:
    """Return the mean of some lengths; of lognormal ones an upper bound."""
    if isinstance(lengths, int):
        return lengths
    if isinstance(lengths, tuple):
        return sum(lengths) / len(lengths)
    if isinstance(lengths, Uniform):
        return (lengths.least + lengths.most) / 2
    return min(lengths.most, lengths.median * math.exp(lengths.sigma**2 / 2))


class Phase(Settings, frozen=True):
    """A run of consecutive requests with the same distribution of acceptance."""

    share: float
    acceptance: Acceptance
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse survival that rises or is outside [0, 1]."""
        check_ranges(self, Range("share", 0, high=1, above_low=True))
        if not isinstance(self.acceptance, tuple):
            return
        if not self.acceptance:
            raise InvalidRequest("acceptance is empty; give one figure per drafted position")
        before = 1.0
        for position, value in enumerate(self.acceptance, start=1):
            if not 0.0 <= value <= before:
                raise InvalidRequest(
                    f"acceptance at position {position} is {value}; it must be in [0, {before:g}]"
                )
            before = value


class SimulatedServerConfig(Settings, frozen=True):
    """Settings of the simulated server, with the names and meanings of the engine's settings.

    Attributes:
        max_context: prompt plus output tokens of a sequence.
        prefill_chunk: most prompt tokens of one sequence in one pass.
        max_step_rows: most rows of one pass.
        max_prefill_rows: most prompt tokens in one pass (None: what max_step_rows leaves).
        max_k: most tokens of a drafted chain, and most levels of a tree.
    """

    max_batch: int = 8
    max_context: int = 4096
    prefill_chunk: int = 256
    max_step_rows: int = 1024
    max_prefill_rows: int | None = None
    max_k: int = 8
    max_tree_nodes: int = 16

    def __post_init__(self) -> None:
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


class Slo(Settings, frozen=True):
    """Service level objectives: the latency limits of a request.

    Attributes:
        ttft_s: most seconds to the first token (None: no limit).
        tpot_s: most seconds per token after it, on average (None: no limit).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            Range("ttft_s", 0, above_low=True, optional=True),
            Range("tpot_s", 0, above_low=True, optional=True),
        )


class Workload(Settings, frozen=True):
    """Everything that a simulation needs except the cost table and the controller.

    Attributes:
        arrivals: arrival times; empty: all at time 0.
        sibling_acceptance: P(a further likely token is accepted | those before it at the same
            place are not), for draft trees; 0 means that branches are never accepted.
        temperature: of all requests; it decides between greedy and sampled drafts.
    """

    requests: int
    output_tokens: Lengths
    phases: tuple[Phase, ...]
    arrivals: Arrivals = ()
    prompt_tokens: Lengths = 128
    sibling_acceptance: float = 0.0
    temperature: float = 0.0
    server: SimulatedServerConfig = SimulatedServerConfig()
    slo: Slo = Slo()

    def __post_init__(self) -> None:
        check_ranges(
            self,
            Range("requests", 1, high=MAX_REQUESTS, integer=True),
            Range("temperature", 0),
            Range("sibling_acceptance", 0, high=1),
        )
        total_share = math.fsum(phase.share for phase in self.phases)
        if not self.phases or abs(total_share - 1.0) > 1e-6:
            raise InvalidRequest(
                f"the shares of the phases add up to {total_share:g}; it must be 1"
            )
        if isinstance(self.arrivals, tuple) and self.arrivals:
            _check_arrivals(self.arrivals, self.requests)
        for name in ("prompt_tokens", "output_tokens"):
            _check_lengths(getattr(self, name), name)
        longest = most_tokens(self.prompt_tokens) + most_tokens(self.output_tokens)
        if longest > self.server.max_context:
            raise InvalidRequest(
                f"a request may have {longest} tokens, and max_context is "
                f"{self.server.max_context}: it would never finish; raise it, or limit the lengths"
            )
        total = self.requests * (
            _mean_tokens(self.prompt_tokens) + _mean_tokens(self.output_tokens)
        )
        if total > MAX_TOKENS:
            raise InvalidRequest(
                f"{total:.1e} tokens in all are too many to simulate; {MAX_TOKENS:.0e} are possible"
            )


def _check_arrivals(times_s: Sequence[float], num_requests: int) -> None:
    if len(times_s) != num_requests:
        raise InvalidRequest(f"{len(times_s)} arrivals are given for {num_requests} requests")
    for number, (before, after) in enumerate(pairwise((0.0, *times_s)), start=1):
        if not before <= after < math.inf:
            raise InvalidRequest(
                f"arrival {number} is at {after:g} s, after one at {before:g} s; "
                "they must ascend from 0"
            )


def _check_lengths(lengths: Lengths, name: str) -> None:
    if lengths == ():
        raise InvalidRequest(f"{name} is an empty list")
    if isinstance(lengths, int | tuple):
        for value in (lengths,) if isinstance(lengths, int) else lengths:
            Range(name, 1, integer=True).check(value)


@dataclass(slots=True, kw_only=True)
class Seen:
    """Figures of one request of a trace."""

    first_token_s: float
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    record: RequestRecord | None = None


def workload_of(
    items: Iterable[Item], where: str, server: SimulatedServerConfig, slo: Slo, temperature: float
) -> Workload:
    """Return the finished requests of a trace as a workload.

    A request arrives its time to first token before its first token. Acceptance is that of all
    requests together, by position: requests keep their own lengths, but not their own alphas.
    """
    seen = _read(items)
    ended = sorted(_finished(seen), key=lambda pair: pair[0])
    if not ended:
        raise InvalidTrace(f"no request of the trace {where} ended: there is nothing to repeat")
    start_s = ended[0][0]
    records = [record for _, record in ended]
    return Workload(
        requests=len(ended),
        arrivals=tuple(arrival_s - start_s for arrival_s, _ in ended),
        prompt_tokens=tuple(record.num_prompt_tokens for record in records),
        output_tokens=tuple(record.num_output_tokens for record in records),
        phases=(Phase(share=1.0, acceptance=_acceptance_of(seen.values())),),
        temperature=temperature,
        server=server,
        slo=slo,
    )


def _read(items: Iterable[Item]) -> dict[str, Seen]:
    """Return the figures of all requests in a trace, by request id."""
    seen: dict[str, Seen] = {}
    for item in items:
        if isinstance(item, StepRecord):
            cycle_s = item.draft_s + item.verify_s + item.other_s
            found = seen.setdefault(item.request_id, Seen(first_token_s=item.t_s + cycle_s))
            if item.num_drafted:
                found.counts.add(
                    item.depth_drafted, item.num_accepted, num_drafted=item.num_drafted
                )
        elif isinstance(item, RequestRecord) and item.request_id in seen:
            seen[item.request_id].record = item
    return seen


def _finished(seen: dict[str, Seen]) -> Iterator[tuple[float, RequestRecord]]:
    for found in seen.values():
        record = found.record
        if record is not None and record.ttft_s is not None and record.num_output_tokens:
            yield found.first_token_s - record.ttft_s, record


def _acceptance_of(requests: Iterable[Seen]) -> Acceptance:
    """Return the acceptance of all drafts together, or 0 where nothing was drafted."""
    pooled = sum((request.counts for request in requests), AcceptanceCounts())
    reached = pooled.reached_per_position
    deepest = next((i for i, n in enumerate(reached) if n < MIN_ALLOWED), len(reached))
    return pooled.survival[:deepest] or Constant(alpha=0.0)


class _RepeatedTrace(Settings, frozen=True):
    """A workload file that names a trace; the trace decides everything else."""

    trace: str
    temperature: float = 0.0
    server: SimulatedServerConfig = SimulatedServerConfig()
    slo: Slo = Slo()


def load_workload(path: Path) -> Workload:
    """Read a workload file, which describes a workload or names a trace to repeat."""
    try:
        content = tomllib.loads(read_bytes(path).decode())
    except UnreadableInput as error:
        raise InvalidRequest(f"the workload cannot be used: {error}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, too many digits
        raise InvalidRequest(f"the workload {path} is not TOML: {error}") from error
    try:
        if "trace" not in content:
            return workload_from(content)
        repeated = msgspec.convert(content, _RepeatedTrace)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the workload {path} cannot be used: {error}") from error
    file = path.parent / repeated.trace
    return workload_of(
        read_trace(file), str(file), repeated.server, repeated.slo, repeated.temperature
    )


def workload_from(content: dict[str, object]) -> Workload:
    """Return the workload that a TOML document describes."""
    if "acceptance" in content and "phases" not in content:
        content = dict(content)
        content["phases"] = [{"share": 1.0, "acceptance": content.pop("acceptance")}]
    return msgspec.convert(content, Workload)
