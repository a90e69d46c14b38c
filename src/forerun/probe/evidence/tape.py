"""Records the steps of an engine with the probabilities that its drafts were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
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
        params: of the request.
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


class PassRecorder:
    """An observer that keeps the steps of every request with their proposals."""

    wants_logits = False

    def __init__(self) -> None:
        self.steps: dict[str, list[TapedStep]] = {}

    def observe(self, step: ObservedStep) -> None:
        """Record the step."""
        for record, entry in zip(step.records, step.emitting, strict=True):
            proposal = entry.proposal if entry.num_drafted else None
            taped = TapedStep(record=record, proposal=proposal)
            self.steps.setdefault(record.request_id, []).append(taped)


def run_taped(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[TapedRequest]:
    """Generate, and return the recorded requests.

    Args:
        engine: with nothing else to do.
        prompts: token ids.
        params: one per prompt, one sample each.

    Raises:
        NumericalError: the target returned NaN.
    """
    recorder = PassRecorder()
    engine.observers.append(recorder)
    try:
        outputs = engine.generate([list(prompt) for prompt in prompts], list(params))
    finally:
        engine.observers.remove(recorder)
    return [
        TapedRequest(
            prompt_ids=output.prompt_token_ids,
            token_ids=output.token_ids,
            params=asked,
            steps=tuple(recorder.steps.get(output.request_id, ())),
        )
        for output, asked in zip(outputs, params, strict=True)
    ]
