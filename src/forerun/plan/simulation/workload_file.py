"""Reader of workload files in YAML, whose errors contain the path of the wrong field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun.bounded_documents import YAML_LIMITS, parse_yaml
from forerun.bounded_read import read_bytes
from forerun.errors import InvalidRequest, InvalidTrace, UnreadableInput
from forerun.plan.acceptance import MIN_ALLOWED
from forerun.plan.simulation import kinds
from forerun.plan.simulation.config import Phase, SimulatedServerConfig, Slo, Workload
from forerun.plan.simulation.kinds import Constant, Listed, PerPosition, Recorded
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.files import read_trace
from forerun.trace.schema import Item


@dataclass(slots=True, kw_only=True)
class Seen:
    """Figures of one request of a trace.

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
    """Return the finished requests of a trace as a workload.

    A request arrives its time to first token before its first token. Acceptance is that of all
    requests together, by position: requests keep their own lengths, but not their own alphas.
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
        phases=(Phase(share=1.0, acceptance=_acceptance_of(seen.values())),),
        temperature=temperature,
        server=server,
        slo=slo,
    )


def read(items: Iterable[Item]) -> dict[str, Seen]:
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


def finished(seen: dict[str, Seen]) -> Iterator[tuple[float, RequestRecord]]:
    """Yield the arrival times of finished requests, and their records."""
    for found in seen.values():
        record = found.record
        if record is not None and record.ttft_s is not None and record.num_output_tokens:
            yield found.first_token_s - record.ttft_s, record


def _acceptance_of(requests: Iterable[Seen]) -> Constant | PerPosition:
    """Return the acceptance of all drafts together, or 0 where nothing was drafted."""
    pooled = sum((request.counts for request in requests), AcceptanceCounts())
    reached = pooled.reached_per_position
    deepest = next((i for i, n in enumerate(reached) if n < MIN_ALLOWED), len(reached))
    return PerPosition(beta=pooled.survival[:deepest]) if deepest else Constant(alpha=0.0)


KINDS: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "arrivals": {
            "together": kinds.Together,
            "poisson": kinds.Poisson,
            "bursty": kinds.Bursty,
            "recorded": kinds.Recorded,
        },
        "lengths": {
            "fixed": kinds.Fixed,
            "uniform": kinds.Uniform,
            "lognormal": kinds.Lognormal,
            "listed": kinds.Listed,
        },
        "acceptance": {
            "constant": kinds.Constant,
            "per-position": kinds.PerPosition,
            "clustered": kinds.Clustered,
            "drifting": kinds.Drifting,
            "mixed": kinds.Mixed,
        },
    }
)
"""Families of fields that can be of several kinds, and the names of the kinds."""
OF_KIND = MappingProxyType(
    {
        "arrivals": "arrivals",
        "prompt_tokens": "lengths",
        "output_tokens": "lengths",
        "acceptance": "acceptance",
    }
)
"""Fields that are a choice between kinds."""
PARTS: Mapping[str, type] = MappingProxyType({"server": SimulatedServerConfig, "slo": Slo})
"""Fields that are one kind of object."""
WITH_TRACE = frozenset({"server", "slo", "temperature"})
"""Fields that may be given beside a trace."""
LISTS: Mapping[str, type] = MappingProxyType({"phases": Phase, "parts": kinds.AcceptancePart})
"""Fields that are lists of objects."""


def load_workload(path: Path) -> Workload:
    """Read a workload file, which describes a workload or names a trace to repeat.

    The path of the trace is relative to the folder of the workload file.

    Raises:
        InvalidRequest: the file cannot be read, is no YAML, or describes no workload.
        InvalidTrace: the trace it names cannot be read, or no request of it ended.
    """
    try:
        content = parse_yaml(read_bytes(path, YAML_LIMITS), str(path))
    except UnreadableInput as error:
        raise InvalidRequest(f"the workload cannot be used: {error}") from error
    if isinstance(content, Mapping) and "trace" in content:
        return traced(content, path)
    return workload_from(content, str(path))


def traced(content: Mapping[str, Any], path: Path) -> Workload:
    """Return the workload that consists of the requests of a trace.

    Raises:
        InvalidRequest: a field is given that the trace decides, or a field is malformed.
        InvalidTrace: the trace cannot be read, or no request of it ended.
    """
    options = {name: value for name, value in content.items() if name != "trace"}
    if decided := options.keys() - WITH_TRACE:
        raise InvalidRequest(
            f"{path} takes {', '.join(sorted(decided))} from its trace; beside one there may be "
            f"{', '.join(sorted(WITH_TRACE))}"
        )
    trace = content["trace"]
    if not isinstance(trace, str):
        raise InvalidRequest(f"{path}, trace is {trace!r}; it must be a path")
    server = _value_of("server", options.get("server", {}), str(path))
    slo = _value_of("slo", options.get("slo", {}), str(path))
    assert isinstance(server, SimulatedServerConfig) and isinstance(slo, Slo)
    file = path.parent / trace
    temperature = options.get("temperature", 0.0)
    return workload_of(read_trace(file), str(file), server, slo, temperature)


def workload_from(content: object, where: str) -> Workload:
    """Return the workload that YAML or JSON describes.

    One `acceptance` may stand for a single phase.
    """
    values: Mapping[str, Any] = _as_mapping(content, where)
    if "acceptance" in values:
        if "phases" in values:
            raise InvalidRequest(f"{where}: give acceptance, or phases that have one each")
        values = dict(values)
        values["phases"] = [{"share": 1.0, "acceptance": values.pop("acceptance")}]
    found = built(Workload, values, where)
    assert isinstance(found, Workload)
    return found


def built(cls: type, values: Mapping[str, Any], where: str) -> object:
    """Build an object of a class from a mapping of its fields, nested objects included."""
    assert is_dataclass(cls)
    known = {item.name: item for item in fields(cls)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
            raise InvalidRequest(f"{where} has no field {name!r}; {hint}")
    for name, item in known.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and name not in values:
            raise InvalidRequest(f"{where} lacks {name}")
    arguments = {name: _value_of(name, value, where) for name, value in values.items()}
    try:
        return cls(**arguments)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where} is malformed: {error}") from error


def _value_of(name: str, value: object, where: str) -> object:
    """Return the value of a field; a mapping for an object is converted to that object."""
    place = f"{where}, {name}"
    if name in OF_KIND:
        return of_kind(OF_KIND[name], value, place)
    if name in PARTS:
        return built(PARTS[name], _as_mapping(value, place), place)
    if name in LISTS:
        if not isinstance(value, list):
            raise InvalidRequest(f"{place} is {value!r}; it must be a list")
        return tuple(
            built(LISTS[name], _as_mapping(entry, f"{place} {number}"), f"{place} {number}")
            for number, entry in enumerate(value, start=1)
        )
    return tuple(value) if isinstance(value, list) else value


def of_kind(family: str, value: object, where: str) -> object:
    """Build one of several classes, chosen by the field `kind`; a number is a fixed length."""
    if family == "lengths" and isinstance(value, int) and not isinstance(value, bool):
        value = {"kind": "fixed", "tokens": value}
    values = dict(_as_mapping(value, where))
    choices = KINDS[family]
    kind = values.pop("kind", None)
    if kind not in choices:
        raise InvalidRequest(f"{where} has kind {kind!r}; use one of {', '.join(choices)}")
    return built(choices[kind], values, where)


def _as_mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequest(f"{where} is {value!r}; it must be names and values")
    return value
