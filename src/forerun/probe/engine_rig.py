"""Measures whole engine steps and their overhead outside both models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from forerun.drafters.base import Drafter
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.base import LanguageModel
from forerun.models.tokenizers import Tokenizer
from forerun.probe.config import OVERHEAD_OF, ProfileCell, Quantity
from forerun.probe.pass_rig import some_tokens
from forerun.probe.stopwatch import TimedModel
from forerun.sampling.config import SamplingParams

__all__ = ["MOST_STEPS", "EngineRig"]

NUM_WARM_STEPS = 4
"""After all prompts were read: the first lets the draft read them, the next find cold caches."""
WARM_S, MOST_WARM_STEPS = 0.02, 16
"""Or more of them, for so long: where a step takes a millisecond, caches take a dozen to settle."""
NUM_STEPS, SPARE_STEPS = 6, 2
"""That are timed, and that there is room for beyond them."""
MOST_STEPS = MOST_WARM_STEPS + NUM_STEPS + SPARE_STEPS
"""Of a visit, once all prompts are read."""
SAMPLED = (Quantity.SAMPLED_STEP, Quantity.SAMPLED_OVERHEAD)


class EngineRig:
    """Measures steps of short generations by the engine.

    Args:
        target: the target, timed.
        draft: the draft's model, timed.
        drafter_of: returns a drafter over a model.
        tokenizer: the target's.
        config: settings of the engine; K is each cell's own.
        cells: what to measure; their context is the length of the prompts.
    """

    def __init__(
        self,
        *,
        target: TimedModel,
        draft: TimedModel,
        drafter_of: Callable[[LanguageModel], Drafter],
        tokenizer: Tokenizer,
        config: EngineConfig,
        cells: Sequence[ProfileCell],
    ) -> None:
        self.target = target
        self.draft = draft
        self.drafter_of = drafter_of
        self.tokenizer = tokenizer
        self.config = config
        self._cells = tuple(cells)

    @property
    def cells(self) -> Sequence[ProfileCell]:
        """Return the cells that this rig can measure."""
        return self._cells

    @property
    def rounds_per_visit(self) -> int:
        """Steps are measured every fifth round, because a visit is slow and yields many samples."""
        return 5

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Do nothing: visits share no state."""
        yield

    def visit(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        """Return the seconds of whole steps and of their overhead outside both models.

        Costs of speculative steps are reported in plain steps, so plain steps are measured
        directly after them: the speed of the machine drifts.
        """
        found = dict(self._steps(cell))
        if cell.size:
            found |= self._steps(replace(cell, size=0))
        return found

    def _steps(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        engine = self._engine(cell.size)
        sampled = cell.quantity in SAMPLED
        step = replace(cell, quantity=Quantity.SAMPLED_STEP if sampled else Quantity.GREEDY_STEP)
        params = SamplingParams(temperature=float(sampled), ignore_eos=True)
        prompt = some_tokens(cell.context, self.target.vocab_size)
        requests = [engine.add_request(prompt, params) for _ in range(cell.batch)]
        try:
            unread = set(requests)
            while unread:
                unread -= {chunk.request_id for chunk in engine.step()}
            self._warm_up(engine, cell)
            times = [self._timed_step(engine) for _ in range(NUM_STEPS)]
        finally:
            for request_id in requests:
                engine.abort(request_id)
        outside = replace(step, quantity=OVERHEAD_OF[step.quantity])
        return {step: [total for total, _ in times], outside: [rest for _, rest in times]}

    def _warm_up(self, engine: Engine, cell: ProfileCell) -> None:
        """Run steps until memory and kernel caches are warm, within the room of the context."""
        room = min(self.target.max_context, self.draft.max_context) - cell.context
        most = max(NUM_WARM_STEPS, room // (cell.size + 1) - NUM_STEPS - SPARE_STEPS)
        clock = self.target.stopwatch.clock
        begun_s = clock()
        for num_steps in range(min(most, MOST_WARM_STEPS)):
            if num_steps >= NUM_WARM_STEPS and clock() - begun_s >= WARM_S:
                return
            engine.step()

    def _engine(self, k: int) -> Engine:
        drafter = self.drafter_of(self.draft) if k else None
        return Engine(
            target=self.target,
            tokenizer=self.tokenizer,
            drafter=drafter,
            config=replace(
                self.config, num_speculative_tokens=k, sharing="none", controller="fixed"
            ),
        )

    def _timed_step(self, engine: Engine) -> tuple[float, float]:
        """Return the seconds of one step, and of its overhead outside both models."""
        before_s = self.target.inside_s + self.draft.inside_s
        step_s = self.target.stopwatch.seconds(engine.step)
        return step_s, step_s - (self.target.inside_s + self.draft.inside_s - before_s)
