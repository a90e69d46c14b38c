"""A simulated request, and the states and records that a controller receives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import overload

from forerun.control.base import Plan, RequestState
from forerun.plan.simulation.traffic import Traffic
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import Measure, StopRule

__all__ = ["Records", "SimulatedCycle", "SimulatedRequest", "States", "stopped_depth"]


def measured(measure: Measure, alpha: float) -> float:
    """Return the value that a stop rule would measure at a position.

    The draft's top probability is taken to be the probability that its token is accepted, and the
    rest of its distribution to be one other token.
    """
    if measure == "top_probability":
        return alpha
    shares = (alpha, 1.0 - alpha)
    return -math.fsum(share * math.log(share) for share in shares if share)


def stopped_depth(rule: StopRule, alphas: Sequence[float], depth: int) -> int:
    """Return how many of `depth` tokens are drafted; the first one always is."""
    for position in range(1, depth):
        if rule.stops(measured(rule.measure, alphas[position])):
            return position
    return depth


PLAIN = Plan()


class SimulatedRequest:
    """One sequence from arrival to its last token.

    Args:
        traffic: the requests of the workload.
        index: number of this request.

    Attributes:
        index: number of the request.
        name: name for records.
        arrival_s: time of its arrival.
        num_prompt: prompt tokens.
        num_output: tokens until it ends.
        alphas: P(accepted | all before it accepted) by drafted position.
        tags: tags of its kind.
        temperature: temperature of its parameters.
        tpot_target_s: most seconds per token it should take; None: no target.
        phase: number of its phase.
        text: one number per output token; see `Traffic.text`.
        num_unread: prompt tokens the target has not read.
        num_emitted: output tokens.
        num_read: tokens the draft has read.
        num_ahead: drafted tokens that wait to be verified, where drafting overlaps with verifying.
        num_steps: steps that emitted.
        depth: tokens drafted in the current step.
        plan: plan of the current step.
        num_tested: drafted tokens verified in the current step.
        num_accepted: how many of those were accepted.
        num_new: tokens emitted in the current step.
        first_s: time of its first token.
        finished_s: time of its last token.
    """

    __slots__ = (
        "alphas", "arrival_s", "depth", "finished_s", "first_s", "index", "name", "num_accepted",
        "num_ahead", "num_emitted", "num_new", "num_output", "num_prompt", "num_read", "num_steps",
        "num_tested", "num_unread", "phase", "plan", "tags", "temperature", "text", "tpot_target_s",
    )  # fmt: skip

    def __init__(self, traffic: Traffic, index: int) -> None:
        self.index = index
        self.name = f"request-{index}"
        self.arrival_s = traffic.arrival_s[index]
        self.num_prompt = traffic.num_prompt[index]
        self.num_output = traffic.num_output[index]
        self.alphas = traffic.alphas[index]
        self.tags = traffic.tags[index]
        self.temperature = traffic.temperature
        self.tpot_target_s = traffic.tpot_target_s
        self.phase = traffic.phases[index]
        self.text = traffic.text(index)
        self.num_unread = self.num_prompt
        self.num_emitted = 0
        self.num_read = 0
        self.num_steps = 0
        self.rest()
        self.num_new = 0
        self.first_s = 0.0
        self.finished_s = 0.0

    @property
    def num_committed(self) -> int:
        """Return the number of prompt and output tokens."""
        return self.num_prompt + self.num_emitted

    def rest(self) -> None:
        """Draft nothing in this step and drop the tokens that wait to be verified."""
        self.plan = PLAIN
        self.depth = self.num_tested = self.num_accepted = self.num_ahead = 0

    def accepted_of(self, num_tested: int) -> int:
        """Return how many of the next drafted tokens are accepted before a rejection."""
        text, alphas, start = self.text, self.alphas, self.num_emitted
        accepted = 0
        while accepted < num_tested and text[start + accepted] < alphas[accepted]:
            accepted += 1
        return accepted

    def state(self) -> RequestState:
        """Return the state that a controller receives before the next step."""
        return RequestState(
            request_id=self.name,
            num_committed=self.num_committed,
            max_new=self.num_output - self.num_emitted,
            temperature=self.temperature,
            tags=self.tags,
            tpot_target_s=self.tpot_target_s,
        )


class States(Sequence[RequestState]):
    """States of the decoding requests, created when they are accessed."""

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> RequestState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestState]: ...
    def __getitem__(self, index: int | slice) -> RequestState | Sequence[RequestState]:
        if isinstance(index, slice):
            return [request.state() for request in self._requests[index]]
        return self._requests[index].state()

    def __iter__(self) -> Iterator[RequestState]:
        return (request.state() for request in self._requests)


class SimulatedCycle:
    """Holds the figures that all requests of a cycle share.

    Attributes:
        number: number of the cycle.
        started_s: simulated time at its start.
        draft_s: seconds of drafting.
        verify_s: seconds of the target pass.
        other_s: seconds of everything else.
        num_rows: rows of the pass.
        num_prefill_rows: those of them that fed prompts.
    """

    __slots__ = (
        "draft_s", "num_prefill_rows", "num_rows", "number", "other_s", "started_s", "verify_s",
    )  # fmt: skip

    def __init__(self, number: int, started_s: float) -> None:
        self.number = number
        self.started_s = started_s
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.other_s = 0.0
        self.num_rows = 0
        self.num_prefill_rows = 0

    @property
    def num_decode_rows(self) -> int:
        """Return the rows of the pass that verify."""
        return self.num_rows - self.num_prefill_rows

    @property
    def total_s(self) -> float:
        """Return the seconds of the cycle."""
        return self.draft_s + self.verify_s + self.other_s


class Records(Sequence[StepRecord]):
    """Records of the requests that emitted, created when they are accessed."""

    def __init__(self, cycle: SimulatedCycle, requests: Sequence[SimulatedRequest]) -> None:
        self._cycle = cycle
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Sequence[StepRecord]:
        if isinstance(index, slice):
            return [record_of(self._cycle, request) for request in self._requests[index]]
        return record_of(self._cycle, self._requests[index])

    def __iter__(self) -> Iterator[StepRecord]:
        return (record_of(self._cycle, request) for request in self._requests)


def record_of(cycle: SimulatedCycle, request: SimulatedRequest) -> StepRecord:
    """Return the record of one request after a cycle."""
    depth, rule = request.num_tested, request.plan.stop
    return StepRecord(
        cycle_id=cycle.number,
        t_s=cycle.started_s,
        request_id=request.name,
        step=request.num_steps,
        method=request.plan.method if depth else "plain",
        k_budget=request.plan.num_speculative_tokens,
        num_drafted=depth,
        depth_drafted=depth,
        num_accepted=request.num_accepted,
        num_emitted=request.num_new,
        draft_s=cycle.draft_s,
        verify_s=cycle.verify_s,
        other_s=cycle.other_s,
        batch_rows=cycle.num_rows,
        num_prefill_rows=cycle.num_prefill_rows,
        context_tokens=request.num_committed - request.num_new,
        last_token_source="bonus" if request.num_accepted == depth else "recovered",
        expected_accepted=float(request.num_accepted),
        stop_values=None
        if rule is None
        else tuple(measured(rule.measure, alpha) for alpha in request.alphas[:depth]),
    )
