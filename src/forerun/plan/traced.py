"""Outcomes and times of the drafts in a trace by drafter, and estimates for a smaller K.

A draft of which five tokens were accepted shows how shorter ones would have fared: with K = 2 the
same text takes two steps, of which the first accepts both of its tokens, and the bonus token stands
where the third one stood. So a smaller K begins more often after tokens that were easy, and its
tau is not that of the first positions of longer drafts, which begin after a rejection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forerun.drafters.config import parse_drafter
from forerun.errors import InvalidTrace
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import Item


@dataclass(slots=True)
class Drafts:
    """Counts the steps of one or more requests; `a + b` merges two objects.

    Attributes:
        steps: number of steps per (depth that was allowed, depth drafted, tokens accepted).
    """

    steps: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def add(self, allowed: int, depth: int, num_accepted: int) -> None:
        """Count one step."""
        if not 0 <= num_accepted <= depth <= allowed:
            raise ValueError(
                f"step that accepted {num_accepted} of {depth} where {allowed} were allowed; they "
                "must be non-negative and in this order"
            )
        self.steps[allowed, depth, num_accepted] += 1

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.steps + other.steps)

    @property
    def accepted(self) -> AcceptanceCounts:
        """Return acceptance counts by allowed depth; undrafted positions count as rejected."""
        return self._counts(depth_counts=False)

    @property
    def drafted(self) -> AcceptanceCounts:
        """Return counts like `accepted`, but of drafted instead of accepted tokens."""
        return self._counts(depth_counts=True)

    def limited(self, num_speculative_tokens: int) -> Drafts:
        """Return the steps that the same texts would take with at most this K.

        This is exact where a draft goes on after its bonus token as the longer one did: greedy
        drafts do, and sampled ones do in distribution if verification decides token by token.
        """
        k = num_speculative_tokens
        found: Counter[tuple[int, int, int]] = Counter()
        for (allowed, depth, accepted), n in self.steps.items():
            num_whole, left = divmod(accepted, k + 1)
            if num_whole:
                found[k, k, k] += n * num_whole
            used = num_whole * (k + 1)
            if allowed > used or not num_whole:
                found[min(k, allowed - used), min(k, depth - used), left] += n
        return Drafts(found)

    def _counts(self, *, depth_counts: bool) -> AcceptanceCounts:
        counts = AcceptanceCounts()
        for (allowed, depth, accepted), n in self.steps.items():
            counts.steps[allowed, depth if depth_counts else accepted] += n
            counts.num_drafted += n * allowed
        return counts


@dataclass(slots=True, kw_only=True)
class TracedDraft:
    """Outcomes and times of the steps in a trace that used one drafter.

    Attributes:
        most_allowed: largest K of any step, by request.
        draft_s: seconds of drafting, in cycles that read no prompt.
        other_s: seconds beyond drafting and the pass, in those of these cycles that drafted.
    """

    header: TraceHeader
    requests: dict[str, Drafts] = field(default_factory=dict)
    most_allowed: dict[str, int] = field(default_factory=dict)
    draft_s: float = 0.0
    num_drafted: int = 0
    other_s: float = 0.0
    num_cycles: int = 0

    @property
    def name(self) -> str:
        return str(self.header.draft)

    @property
    def draft_token_s(self) -> float | None:
        """Return the seconds per drafted token; None if every draft shared a step with a prompt."""
        return self.draft_s / self.num_drafted if self.num_drafted else None

    @property
    def overhead_s(self) -> float | None:
        """Return a cycle's seconds beyond drafting and pass; None if each one contained prompts."""
        return self.other_s / self.num_cycles if self.num_cycles else None

    @property
    def has_drafted(self) -> bool:
        return any(depth for drafts in self.requests.values() for _, depth, _ in drafts.steps)

    @property
    def pauses(self) -> bool:
        return parse_drafter(self.name) is not None

    def add(self, record: StepRecord) -> None:
        name, allowed = record.request_id, record.k_budget
        drafts = self.requests.setdefault(name, Drafts())
        drafts.add(allowed, record.depth_drafted, record.num_accepted)
        self.most_allowed[name] = max(allowed, self.most_allowed.get(name, 0))
        if not record.num_prefill_rows:
            self.draft_s += record.draft_s
            self.num_drafted += record.depth_drafted
            if record.depth_drafted:
                self.other_s += record.other_s
                self.num_cycles += 1

    def add_plain(self, record: StepRecord) -> None:
        if self.pauses and not record.num_prefill_rows:
            self.requests[record.request_id].add(self.most_allowed[record.request_id], 0, 0)


@dataclass(slots=True, kw_only=True)
class TracedDrafts:
    """The outcomes and times of all drafters in a trace."""

    drafts: dict[str, TracedDraft] = field(default_factory=dict)
    temperatures: dict[str, float] = field(default_factory=dict)
    num_damaged: int = 0

    def counts(self, draft: str, temperature: float) -> list[Drafts]:
        """Return one drafter's greedy or sampled requests; unfinished requests count as both."""
        requests = self.drafts[draft].requests
        found = [
            counts
            for request_id, counts in requests.items()
            if (self.temperatures.get(request_id, temperature) == 0) == (temperature == 0)
        ]
        if not found:
            raise InvalidTrace(
                f"the trace has no step of {draft} at temperature {temperature:g}, but "
                f"{len(requests)} requests at others; give --temperature"
            )
        return found


def drafts_in(items: Iterable[Item], where: str) -> TracedDrafts:
    """Count the drafts of a trace by drafter and request."""
    found = TracedDrafts()
    headers: list[TraceHeader] = []
    drafters: dict[str, TracedDraft] = {}
    num_steps = 0
    for item in items:
        if isinstance(item, TraceHeader):
            headers.append(item)
        elif isinstance(item, RequestRecord):
            found.temperatures[item.request_id] = temperature_of(item.parameters)
        elif isinstance(item, StepRecord):
            num_steps += 1
            if item.k_budget:
                header = _header_of(item, headers, where)
                draft = found.drafts.setdefault(str(header.draft), TracedDraft(header=header))
                draft.add(item)
                drafters[item.request_id] = draft
            elif item.request_id in drafters:
                drafters[item.request_id].add_plain(item)
        else:
            found.num_damaged += 1
    if not any(draft.has_drafted for draft in found.drafts.values()):
        raise InvalidTrace(
            f"the trace {where} has {num_steps} steps and drafted in none of them, so that "
            "acceptance is not known"
        )
    return found


def _header_of(record: StepRecord, headers: Iterable[TraceHeader], where: str) -> TraceHeader:
    drafts = [header for header in headers if header.draft is not None]
    named = [h for h in drafts if str(h.draft).partition(":")[0] == record.method]
    alike = named or [h for h in drafts if h.draft_hash == record.drafter_hash]
    if len(alike) != 1 and len(drafts) == 1:
        alike = drafts
    if len(alike) != 1:
        raise InvalidTrace(
            f"the trace {where} does not identify which of its {len(drafts)} drafters request "
            f"{record.request_id} used at step {record.step}"
        )
    return alike[0]


def temperature_of(parameters: Mapping[str, object]) -> float:
    """Return the temperature of a request; the default is 1, as for sampling parameters."""
    value = parameters.get("temperature", 1.0)
    return float(value) if isinstance(value, int | float) else 1.0
