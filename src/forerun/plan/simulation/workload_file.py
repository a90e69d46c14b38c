"""Workload files in TOML, and traces that are repeated as workloads."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from forerun.bounded_read import read_bytes
from forerun.errors import InvalidRequest, InvalidTrace, UnreadableInput
from forerun.plan.acceptance import MIN_ALLOWED
from forerun.plan.simulation.config import (
    Acceptance,
    Constant,
    Phase,
    Settings,
    SimulatedServerConfig,
    Slo,
    Workload,
)
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.files import Item, read_trace


@dataclass(slots=True, kw_only=True)
class Seen:
    """Figures of one request of a trace.

    Attributes:
        record: record of its end; None where it did not end.
    """

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
