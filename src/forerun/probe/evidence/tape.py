"""What a live engine does, step by step, with the very laws its drafts were drawn from.

The drafter is listened to while the engine runs; nothing else of the engine is touched, so that
whatever is wrong with it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome
from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.record import StepRecord

__all__ = ["TapedRequest", "TapedStep", "run_taped"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapedStep:
    """One step of one request.

    Attributes:
        record: as the engine traces it.
        proposal: what was drafted; None for a plain step.
    """

    record: StepRecord
    proposal: Proposal | None

    @property
    def num_drafted(self) -> int:
        """Nodes proposed."""
        return 0 if self.proposal is None else self.record.num_drafted

    @property
    def num_reached(self) -> int:
        """Drafted positions whose predecessors were all accepted."""
        return min(self.num_drafted, self.record.num_accepted + 1)

    @property
    def was_cut(self) -> bool:
        """Whether a stop left out tokens of the verdict."""
        return self.record.num_emitted <= self.record.num_accepted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapedRequest:
    """One finished request.

    Attributes:
        prompt_ids: its prompt.
        token_ids: its output.
        params: it was asked for with.
        steps: in order.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    params: SamplingParams
    steps: tuple[TapedStep, ...]

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt_ids + self.token_ids


@dataclass(slots=True)
class PassRecorder:
    """A drafter that does what another one does, and keeps its proposals.

    Attributes:
        inner: the other one.
        proposals: by request and committed tokens at the start of the step.
    """

    inner: Drafter
    proposals: dict[tuple[str, int], Proposal] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Of the drafter."""
        return self.inner.method

    @property
    def required_features(self) -> tuple[int, ...]:
        """Of the drafter."""
        return self.inner.required_features

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """Proposals of the drafter, kept."""
        answers = self.inner.propose(requests, plans)
        for request, answer in zip(requests, answers, strict=False):
            if isinstance(answer, Proposal):
                self.proposals[request.request_id, len(request.ids)] = answer
        return answers

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Tell the drafter."""
        self.inner.observe(outcomes)

    def forget(self, request_id: str) -> None:
        """Tell the drafter."""
        self.inner.forget(request_id)


def run_taped(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[TapedRequest]:
    """Generate, and keep what happened.

    Args:
        engine: with nothing else to do.
        prompts: token ids.
        params: one per prompt, one sample each.

    Raises:
        NumericalError: the target returned NaN.
    """
    records: dict[str, list[StepRecord]] = {}
    with listening(engine, records) as proposals:
        outputs = engine.generate([list(prompt) for prompt in prompts], list(params))
    return [
        taped(output, asked, records.get(output.request_id, []), proposals)
        for output, asked in zip(outputs, params, strict=True)
    ]


@contextmanager
def listening(
    engine: Engine, records: dict[str, list[StepRecord]]
) -> Iterator[dict[tuple[str, int], Proposal]]:
    """Steps into `records` by request, proposals into what this yields; then all is as before."""
    guard, told = engine.drafter, engine.on_record
    listener = None if guard is None else PassRecorder(guard.drafter)

    def keep(record: StepRecord) -> None:
        records.setdefault(record.request_id, []).append(record)
        if told is not None:
            told(record)

    engine.on_record = keep
    if guard is not None and listener is not None:
        guard.drafter = listener
    try:
        yield {} if listener is None else listener.proposals
    finally:
        engine.on_record = told
        if guard is not None and listener is not None:
            guard.drafter = listener.inner


def taped(
    output: RequestOutput,
    params: SamplingParams,
    records: Sequence[StepRecord],
    proposals: dict[tuple[str, int], Proposal],
) -> TapedRequest:
    """One request's part of the tape; a proposal belongs to the step that drafted as much."""
    steps = []
    for record in records:
        proposal = proposals.get((output.request_id, record.context_tokens))
        used = proposal is not None and 0 < record.num_drafted == proposal.num_drafted
        steps.append(TapedStep(record=record, proposal=proposal if used else None))
    return TapedRequest(
        prompt_ids=output.prompt_token_ids,
        token_ids=output.token_ids,
        params=params,
        steps=tuple(steps),
    )
