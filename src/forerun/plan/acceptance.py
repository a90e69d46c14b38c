"""Acceptance by position with its standard error, given by the user or counted in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forerun.drafters.config import parse_drafter
from forerun.errors import InvalidRequest, InvalidTrace
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import DiscountedRatio, Interval, normal_interval
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.theory.speedup import acceptance_length, constant_survival, survival
from forerun.trace.files import Item


@dataclass(slots=True)
class Drafts:
    """Counts the steps of one or more requests; `a + b` merges two objects.

    Attributes:
        steps: number of steps per (depth that was allowed, depth drafted, tokens accepted).
    """

    steps: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def add(self, allowed: int, depth: int, num_accepted: int) -> None:
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
        return self._count(depth_counts=False)

    @property
    def drafted(self) -> AcceptanceCounts:
        """Return counts like `accepted`, but of drafted instead of accepted tokens."""
        return self._count(depth_counts=True)

    def limited(self, num_speculative_tokens: int) -> Drafts:
        """Return the steps that the same texts would take with at most this K.

        A draft of which five tokens were accepted shows how shorter ones would have fared: with
        K = 2 the same text takes two steps, of which the first accepts both of its tokens, and the
        bonus token stands where the third one stood. So tau is not that of the first positions of
        longer drafts, which begin after a rejection.

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

    def _count(self, *, depth_counts: bool) -> AcceptanceCounts:
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
        pauses = parse_drafter(self.name) is not None
        if pauses and not record.num_prefill_rows:
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
                header = _find_header(item, headers, where)
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


def _find_header(record: StepRecord, headers: Iterable[TraceHeader], where: str) -> TraceHeader:
    drafts = [header for header in headers if header.draft is not None]
    named = [h for h in drafts if record.method in (h.draft, str(h.draft).partition(":")[0])]
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


MIN_ALLOWED = 20
"""Least number of steps allowed to draft a depth for a plan to use that depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Acceptance by position when drafts have a given K.

    Attributes:
        survival: P(accepted through i) for i = 1..K.
        drafted: P(drafted through i), below 1 where the drafter itself may end a draft.
        standard_error: of tau, 0 where it is not known.
    """

    survival: tuple[float, ...]
    drafted: tuple[float, ...]
    standard_error: float = 0.0

    @classmethod
    def of(cls, survival: Sequence[float]) -> Drafting:
        return cls(survival=tuple(survival), drafted=(1.0,) * len(survival))


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance for every K at which it was measured or given.

    Attributes:
        num_requests: it was counted in; 0 where it was given.
        is_constant: given as one alpha, which holds at any depth.
    """

    by_k: tuple[Drafting, ...]
    num_requests: int = 0
    is_constant: bool = False

    @classmethod
    def of(cls, survival: Sequence[float], *, is_constant: bool = False) -> Acceptance:
        """Return an acceptance with the same survival for every K."""
        by_k = tuple(Drafting.of(survival[:k]) for k in range(1, len(survival) + 1))
        return cls(by_k=by_k, is_constant=is_constant)

    @property
    def survival(self) -> tuple[float, ...]:
        """Return the probabilities of acceptance through each position at the largest K."""
        return self.by_k[-1].survival if self.by_k else ()

    def at(self, num_speculative_tokens: int) -> Drafting:
        """Return the acceptance at one K; at K = 0 nothing is drafted."""
        k = num_speculative_tokens
        if k > len(self.by_k):
            raise ValueError(f"acceptance is known for {len(self.by_k)} positions, not {k}")
        return self.by_k[k - 1] if k else Drafting.of(())

    def length(self, num_speculative_tokens: int) -> Interval:
        """Return tau at K; its 95% interval needs several requests."""
        drafting = self.at(num_speculative_tokens)
        tau = acceptance_length(drafting.survival)
        most = num_speculative_tokens + 1.0
        return normal_interval(tau, drafting.standard_error, least=1.0, most=most)


def given(figures: Sequence[float], *, conditional: bool, max_k: int) -> Acceptance:
    """Build the acceptance from figures that a user gives.

    Args:
        figures: one is a constant alpha; several are beta by position, or with `conditional` the
            acceptance of each position given all before it.
        conditional: what several figures are.
        max_k: how deep a constant goes.
    """
    if not figures:
        raise InvalidRequest("acceptance is empty; give alpha, or one figure per drafted position")
    for figure in figures:
        if not 0.0 <= figure <= 1.0:
            raise InvalidRequest(f"acceptance {figure:g} is no probability; it must be in [0, 1]")
    if len(figures) == 1:
        return Acceptance.of(constant_survival(figures[0], max_k), is_constant=True)
    if conditional:
        return Acceptance.of(survival(figures))
    for position, (before, here) in enumerate(pairwise(figures), start=2):
        if here > before:
            raise InvalidRequest(
                f"acceptance rate {here:g} at position {position} is above {before:g} before it, "
                "which is impossible: a step that accepts a position has accepted those "
                "before it. If these are conditional on the positions before, add --conditional"
            )
    return Acceptance.of(figures)


def counted(requests: Iterable[Drafts]) -> Acceptance:
    """Return the acceptance of traced requests at all depths allowed in enough steps."""
    found = [drafts for drafts in requests if drafts.drafted.num_accepted]
    pooled = sum(found, Drafts())
    allowed = pooled.accepted.drafted_per_position
    deepest = next((i for i, n in enumerate(allowed) if n < MIN_ALLOWED), len(allowed))
    if not deepest:
        raise InvalidRequest(
            f"{sum(drafts.steps.total() for drafts in found)} steps drafted anything; "
            f"a plan needs at least {MIN_ALLOWED}"
        )
    return Acceptance(
        by_k=tuple(drafting(found, k) for k in range(1, deepest + 1)), num_requests=len(found)
    )


def drafting(requests: Sequence[Drafts], k: int) -> Drafting:
    """Return the acceptance at K; requests are independent, steps of one request are not."""
    limited = [drafts.limited(k) for drafts in requests]
    pooled = sum(limited, Drafts())
    survived, ratio = pooled.accepted.survival[:k], DiscountedRatio(1.0)
    for counts in (drafts.accepted for drafts in limited):
        ratio.observe(counts.num_steps, counts.num_emitted)
    error = ratio.relative_error if len(requests) > 1 else 0.0
    return Drafting(
        survival=survived,
        drafted=pooled.drafted.survival[:k],
        standard_error=error * acceptance_length(survived),
    )
