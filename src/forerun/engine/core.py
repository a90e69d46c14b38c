"""The core of an engine: requests, their sequences, and the steps that advance them."""

from __future__ import annotations

# `signal` converts to enumerations on every call, which costs a step 20 us.
import _signal  # type: ignore[import-not-found]  # typeshed does not describe it
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import FrameType, TracebackType
from typing import NoReturn

from forerun.control.base import Controller
from forerun.control.costs import CostSource
from forerun.control.named import check_controller
from forerun.drafters.base import Drafter
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.intake import Intake, Prompt
from forerun.engine.loading import check_features, default_controller
from forerun.engine.observing import StepObserver
from forerun.engine.results import FinishReason, RequestOutput, Stop, StreamChunk
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence, output_of
from forerun.engine.step import Stepper
from forerun.errors import EngineBusy, EngineStopped, InvalidRequest, NumericalError
from forerun.models.base import Context, LanguageModel
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import TokenMask

SIGINT = int(signal.SIGINT)


class EngineGuard:
    """Context manager for every change of an engine's state; it can be nested.

    It refuses a second thread and a forked process. An interrupt from the keyboard (SIGINT with
    Python's own handler) is raised when the outermost block ends, so that a step is taken as a
    whole; a second interrupt is raised at once, for a step that does not end.

    Raises:
        EngineBusy: another thread is inside, or this process was forked after the engine was made.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._main_thread = threading.main_thread().ident
        self._depth = 0
        self._defers = False
        self._interrupted = False

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise EngineBusy(
                "the engine was made in another process, and its threads and device memory do not "
                "survive a fork: load it in the process that uses it"
            )
        # An interrupt behind the lock but ahead of the handler would leave the lock taken.
        self._begin_deferring()
        if not self._lock.acquire(blocking=False):
            self._end_deferring(None)
            raise EngineBusy(
                "another thread is using the engine: call it from one thread, or put it into an "
                "EngineThread, which takes requests from any"
            )
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        is_outermost = self._depth == 0
        self._lock.release()
        if is_outermost:
            self._end_deferring(error)

    def _begin_deferring(self) -> None:
        """Replace Python's interrupt handler, unless a custom handler is installed."""
        if self._defers or threading.get_ident() != self._main_thread:
            return
        if _signal.getsignal(SIGINT) is signal.default_int_handler:
            self._interrupted = False
            _signal.signal(SIGINT, self._note)
            self._defers = True

    def _end_deferring(self, error: BaseException | None) -> None:
        """Restore Python's interrupt handler, and raise an interrupt that was deferred."""
        if not self._defers or threading.get_ident() != self._main_thread:
            return
        self._defers = False
        _signal.signal(SIGINT, signal.default_int_handler)
        interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            raise KeyboardInterrupt from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True


class EngineCore:
    """Adds, advances and ends requests on a loaded target; `Engine` is the public interface.

    Attributes:
        drafter: the object that proposes tokens; None decodes plainly.
        controller: the object that decides the plan of every step.
        observers: objects that are called after every step, in this order; add to the list or
            remove from it between steps.
        stepper: the parts of a step, of which experiments may replace some.
    """

    def __init__(  # noqa: PLR0913 (keyword-only parts, each replaceable)
        self,
        *,
        target: LanguageModel,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        costs: Mapping[str, CostSource] | None = None,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        observers: Seq[StepObserver] = (),
    ) -> None:
        self.config = config or EngineConfig()
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.drafter = drafter
        check_controller(controller)
        self.controller = controller or default_controller(self.config, drafter, costs or {})
        self.observers = list(observers)
        self.scheduler = Scheduler(self.config)
        self.intake = Intake(
            target=target, tokenizer=tokenizer, eos_token_ids=eos_token_ids, config=self.config
        )
        self.stepper = Stepper(
            target=target,
            drafter=None if drafter is None else GuardedDrafter(drafter, target.vocab_size),
            controller=self.controller,
            scheduler=self.scheduler,
            config=self.config,
            observers=self.observers,
        )
        self._guard = EngineGuard()
        self._requests: dict[str, list[Sequence]] = {}
        self._keys: set[str] = set()
        self._inboxes: dict[str, deque[StreamChunk]] = {}
        self._chunks: list[StreamChunk] = []
        self._num_requests = 0
        self._num_sequences = 0
        self._next_deadline_s = math.inf
        self._damage: BaseException | None = None
        check_features(self.stepper.feature_layers, target)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise an error, because an engine cannot be copied or pickled."""
        raise TypeError(
            "an Engine holds weights and threads of this process and cannot be copied or pickled: "
            "load it again, or use with_draft for another engine over the same target"
        )

    @property
    def max_context(self) -> int:
        """Maximum number of prompt and output tokens of one sequence."""
        return self.intake.max_context

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return self.scheduler.has_unfinished

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> str:
        """Queue a prompt; its samples join the batch at later steps that have free slots.

        Args:
            prompt: a text or a list of token ids.
            params: how its tokens are chosen.
            request_id: its name; made up where None.
            terms: how it is scheduled among others.
            mask: a grammar in its initial state, which the output has to follow; it is forked for
                every sample.

        Returns:
            The request's id.

        Raises:
            InvalidRequest: the prompt is empty or too long, a parameter cannot be honoured, or the
                id is in use.
            QueueFull: as many sequences wait as may.
        """
        params = params or SamplingParams()
        ids = self.intake.check(prompt, params, mask)
        terms = self.intake.check_terms(terms)
        request_id = request_id or self._unused_id()
        self.intake.check_open(params.n, self.scheduler.num_unfinished)
        self.enlist(self.intake.sequences(request_id, ids, params, terms, mask))
        return request_id

    def enlist(self, samples: list[Sequence]) -> None:
        """Queue the samples of a request, created by `intake.sequences`."""
        request_id, keys = samples[0].request_id, {sample.key for sample in samples}
        with self._guard:
            if request_id in self._requests or keys & self._keys:
                raise InvalidRequest(f"request id {request_id!r} is already in use")
            self._keys |= keys
            self._requests[request_id] = samples
            for sample in samples:
                self._queue(sample)

    def _unused_id(self) -> str:
        while (request_id := f"request-{self._num_requests}") in self._requests:
            self._num_requests += 1
        self._num_requests += 1
        return request_id

    def _queue(self, sequence: Sequence) -> None:
        priority, _ = sequence.rank
        sequence.rank = (priority, self._num_sequences)
        self._num_sequences += 1
        self._next_deadline_s = min(self._next_deadline_s, sequence.ends_at_s)
        self.scheduler.add(sequence)

    def step(self) -> list[StreamChunk]:
        """Advance every running request once.

        Returns:
            New tokens of each sequence (none while its prompt is being read), and the last chunk of
            sequences whose deadline has passed.

        Raises:
            NumericalError: the target returned NaN; nothing is lost, abort the named `request_id`.
            EngineBusy: another thread is using the engine.
            EngineStopped: an earlier step was broken off while it committed; call `reset`.
        """
        with self._guard:
            self._check_whole()
            if not self._end_late_ones():
                self._step()
        chunks, self._chunks = self._chunks, []
        return chunks

    def _step(self) -> None:
        running: list[Sequence] = []
        try:
            if self.scheduler.may_change_batch:
                self._arrange()
            running = list(self.scheduler.running)
            if not running:
                return
            self.stepper.run()
        except BaseException as error:
            if isinstance(error, NumericalError):
                for sequence in running:
                    sequence.kv_invalid |= error.request_id in (None, sequence.request_id)
            elif self.stepper.is_committing or not isinstance(error, Exception):
                self._damage = error  # an interrupt may come in the middle of any change
            raise
        finally:
            for sequence in self.scheduler.drop_finished():
                self._release(sequence)
            self._emit([s for s in running if s.num_output > s.num_streamed])

    def _emit(self, gained: Seq[Sequence]) -> None:
        """Pass new tokens of sequences to the caller of `step` and to open streams."""
        chunks = [sequence.take_chunk() for sequence in gained]
        self._chunks += chunks
        if self._inboxes:
            for chunk in chunks:
                if chunk.request_id in self._inboxes:
                    self._inboxes[chunk.request_id].append(chunk)

    def _check_whole(self) -> None:
        if self._damage is not None:
            raise EngineStopped(
                f"a step was broken off while the engine's state was being changed "
                f"({self._damage!r}): call reset(), which aborts all requests"
            ) from self._damage

    def reset(self) -> None:
        """Abort all requests and drop their KV; the engine can then be used again."""
        with self._guard:
            for sequence in self.scheduler.running:
                sequence.kv_invalid = True
            for request_id in list(self._requests):
                self.abort(request_id)
            self._chunks = []
            self.stepper.is_committing = False
            self._damage = None

    def _arrange(self) -> None:
        """Preempt and admit sequences; an admitted one reuses a prefix that is in the KV store."""
        store = self.target.store
        if not self.scheduler.running and store.feature_layers != self.stepper.feature_layers:
            try:
                store.keep_features(self.stepper.feature_layers)
            except ValueError as error:
                raise InvalidRequest(
                    f"the target's store cannot keep the features this engine needs ({error}): "
                    "finish or abort the requests of other engines over the same target first"
                ) from error
        for sequence in self.scheduler.preempt(store.num_free):
            self._release(sequence)
        for sequence in self.scheduler.admit(store.num_free):
            sequence.context = Context(store, sequence.ids, sequence.scope)
            if sequence.joined_at_s is None:
                sequence.joined_at_s = time.monotonic()
                sequence.num_cached = sequence.context.num_cached

    def _end_late_ones(self) -> bool:
        """End the sequences that are past their deadline; returns whether any was ended."""
        if self._next_deadline_s == math.inf:
            return False
        now_s = time.monotonic()
        if now_s < self._next_deadline_s:
            return False
        unfinished = [*self.scheduler.running, *self.scheduler.waiting]
        late = [sequence for sequence in unfinished if sequence.ends_at_s <= now_s]
        for sequence in late:
            self._end(sequence, "deadline", now_s)
        deadlines = (s.ends_at_s for s in unfinished if s.stop is None)
        self._next_deadline_s = min(deadlines, default=math.inf)
        self._emit(late)
        return bool(late)

    def _end(self, sequence: Sequence, finish_reason: FinishReason, now_s: float) -> None:
        """End a sequence before it reaches a stop condition."""
        sequence.stop = Stop(finish_reason=finish_reason)
        sequence.finished_at_s = now_s
        self.scheduler.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the KV slot of a sequence, whose rows may stay cached, and its draft state."""
        if sequence.context is not None:
            sequence.context.close(0 if sequence.kv_invalid else sequence.context.num_cached)
            sequence.context = None
        if self.stepper.drafter is not None:
            self.stepper.drafter.forget(sequence)

    def take_output(self, request_id: str) -> RequestOutput:
        """Return the output of a finished request and remove the request.

        Raises:
            InvalidRequest: there is no such request, or it has not finished.
        """
        samples = self._requests.get(request_id)
        if samples is None:
            raise InvalidRequest(f"there is no request {request_id!r}: never added, or taken")
        if any(sample.stop is None for sample in samples):
            raise InvalidRequest(f"request {request_id!r} has not finished; step on, or abort it")
        return output_of(self._forget(request_id), self.tokenizer)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a running or waiting request and remove it; its slots are free immediately.

        Returns:
            What there was until then; None where the id is unknown.
        """
        with self._guard:
            samples = self._forget(request_id)
            now_s = time.monotonic()
            for sequence in samples:
                if sequence.stop is None:
                    self._end(sequence, "abort", now_s)
        return output_of(samples, self.tokenizer) if samples else None

    def _forget(self, request_id: str) -> list[Sequence]:
        samples = self._requests.pop(request_id, [])
        self._keys -= {sample.key for sample in samples}
        return samples
