"""A workload from a trace: its arrivals, lengths and acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from forerun.errors import InvalidTrace
from forerun.plan.acceptance import MIN_ALLOWED
from forerun.plan.simulation.config import Phase, SimulatedServerConfig, Slo, Workload
from forerun.plan.simulation.kinds.config import Constant, Listed, PerPosition, Recorded
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.schema import Item

__all__ = ["workload_of"]


@dataclass(slots=True, kw_only=True)
class Seen:
    """Holds one request of a trace.

    Attributes:
        first_token_s: end of the cycle of its first record.
        counts: acceptance counts of its drafts.
        record: record of its end; None where it did not end.
    """

    first_token_s: float
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    record: RequestRecord | None = None


def workload_of(
    items: Iterable[Item], where: str, server: SimulatedServerConfig, slo: Slo, temperature: float
) -> Workload:
    """Return the requests of a trace that ended as a workload.

    A request arrives its time to first token before its first token. Acceptance is that of all
    requests together, by position: requests keep their own lengths, but not their own alphas.

    Args:
        items: records of the trace.
        where: name of the trace, for messages.
        server: settings of the server.
        slo: latency limits of the requests.
        temperature: temperature at which the costs are read.

    Raises:
        InvalidTrace: no request of it ended with a token, or too little was drafted.
        InvalidRequest: the requests do not fit the server.
    """
    seen = read(items)
    ended = sorted(finished(seen), key=lambda pair: pair[0])
    if not ended:
        raise InvalidTrace(f"no request of the trace {where} ended: there is nothing to repeat")
    start_s = ended[0][0]
    records = [record for _, record in ended]
    return Workload(
        requests=len(ended),
        arrivals=Recorded(times_s=tuple(arrival_s - start_s for arrival_s, _ in ended)),
        prompt_tokens=Listed(values=tuple(record.num_prompt_tokens for record in records)),
        output_tokens=Listed(values=tuple(record.num_output_tokens for record in records)),
        phases=(Phase(share=1.0, acceptance=acceptance_of(seen.values())),),
        temperature=temperature,
        server=server,
        slo=slo,
    )


def read(items: Iterable[Item]) -> dict[str, Seen]:
    """Return the requests that have records, by id."""
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


def finished(seen: dict[str, Seen]) -> Iterator[tuple[float, RequestRecord]]:
    """Yield the arrival times of finished requests, and their records."""
    for found in seen.values():
        record = found.record
        if record is not None and record.ttft_s is not None and record.num_output_tokens:
            yield found.first_token_s - record.ttft_s, record


def acceptance_of(requests: Iterable[Seen]) -> Constant | PerPosition:
    """Return the acceptance of all drafts together, or 0 where nothing was drafted."""
    pooled = sum((request.counts for request in requests), AcceptanceCounts())
    reached = pooled.reached_per_position
    deepest = next((i for i, n in enumerate(reached) if n < MIN_ALLOWED), len(reached))
    return PerPosition(beta=pooled.survival[:deepest]) if deepest else Constant(alpha=0.0)
