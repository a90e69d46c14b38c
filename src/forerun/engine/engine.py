"""Public engine interface: load target and draft, generate, stream, or run single steps."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed does not describe it
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from forerun.control.base import Controller, MethodChoice
from forerun.control.costs import CostSource
from forerun.control.named import check_controller
from forerun.drafters.base import Drafter
from forerun.drafters.config import NONE
from forerun.engine.auto_drafts import with_auto
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.intake import Conversation, Intake, Prompt, as_prompts, params_for
from forerun.engine.loading import (
    Source,
    as_sources,
    check_choice,
    check_draft,
    check_features,
    default_controller,
    load_drafters,
    load_target,
    sampling_defaults,
)
from forerun.engine.observing import StepObserver
from forerun.engine.results import (
    BackendStats,
    Capabilities,
    FinishReason,
    RequestOutput,
    Stop,
    StreamChunk,
)
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import DraftState, Sequence, output_of
from forerun.engine.step import Stepper
from forerun.errors import EngineBusy, EngineStopped, InvalidRequest, NumericalError
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.memory import return_freed_memory
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import TokenMask

if TYPE_CHECKING:
    import torch


logger = logging.getLogger("forerun.loading")

SIGINT = int(signal.SIGINT)
STEPS_BETWEEN_RETURNS = 128
"""Least steps from one return of freed memory to the system to the next."""


class EngineGuard:
    """Context manager for every change of an engine's state; it can be nested.

    It raises EngineBusy in a second thread and in a forked process. An interrupt from the keyboard
    (SIGINT with Python's own handler) is raised when the outermost block ends, so that a step is
    taken as a whole; a second interrupt is raised at once, for a step that does not end.
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
        # The handler comes first: an interrupt between lock and handler would leave the lock taken.
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


class Engine:
    """Speculative decoding with one target; all methods must be called from one thread.

    For requests from several threads there is `EngineThread`. An interrupt from the keyboard is
    raised between two steps, after which the engine can be used further.

    Example:
        engine = Engine.load("zoo:smollm2-135m", draft="auto")
        print(engine.generate("def add(a, b):")[0].text)

    Attributes:
        drafter: the object that proposes tokens; None decodes plainly.
        controller: the object that decides the plan of every step.
        observers: objects that are called after every step, in this order; add to the list or
            remove from it between steps.
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
        defaults: Mapping[str, float] | None = None,
        observers: Seq[StepObserver] = (),
    ) -> None:
        self.config = config or EngineConfig()
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.observers = list(observers)
        self.scheduler = Scheduler(self.config)
        self.intake = Intake(
            target=target,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            config=self.config,
            defaults=defaults or {},
        )
        self._draft_with(drafter, controller, costs or {})
        self._guard = EngineGuard()
        self._requests: dict[str, list[Sequence]] = {}
        self._keys: set[str] = set()
        self._inboxes: dict[str, deque[StreamChunk]] = {}
        self._chunks: list[StreamChunk] = []
        self._num_requests = 0
        self._num_sequences = 0
        self._next_deadline_s = math.inf
        self._next_return = STEPS_BETWEEN_RETURNS
        self._damage: BaseException | None = None

    def _draft_with(
        self,
        drafter: Drafter | None,
        controller: Controller | None,
        costs: Mapping[str, CostSource],
    ) -> None:
        """Set the drafter and all that depends on it."""
        check_controller(controller)
        target = self.target
        if drafter is not None:
            self._check_depth(drafter)
        controller = controller or default_controller(self.config, drafter, costs, target)
        stepper = Stepper(
            target=target,
            drafter=None if drafter is None else GuardedDrafter(drafter, target.vocab_size),
            controller=controller,
            scheduler=self.scheduler,
            config=self.config,
            observers=self.observers,
        )
        check_features(stepper.feature_layers, target)
        self.drafter, self.controller, self.stepper = drafter, controller, stepper

    def use_drafter(self, drafter: Drafter) -> None:
        """Draft with another drafter from the next step on; running requests go on with it.

        No text depends on when it comes: it is verified like the one before. The controller learns
        anew what drafting costs.

        Raises:
            InvalidRequest: it reads other layers of the target than the one before, whose features
                running requests do not have, or drafts fewer tokens than K.
        """
        with self._guard:
            self._check_whole()
            before = self.stepper
            self.check_drafter(drafter)
            self._draft_with(drafter, None, {})
            for sequence in (*self.scheduler.running, *self.scheduler.waiting):
                if before.drafter is not None:
                    before.drafter.forget(sequence)
                sequence.draft = DraftState()
            self.stepper.continue_counts(before)

    def check_drafter(self, drafter: Drafter) -> None:
        """Refuse a drafter that `use_drafter` would refuse (InvalidRequest)."""
        self._check_depth(drafter)
        kept, wanted = self.stepper.feature_layers, drafter.required_features
        if wanted != kept or drafter.required_top_k:
            raise InvalidRequest(
                f"this {drafter.method} draft reads the layers {wanted} of the target, the present "
                f"draft {kept}: it can take over only where both read the same"
            )

    def _check_depth(self, drafter: Drafter) -> None:
        k = self.config.num_speculative_tokens
        for method, each in drafter.by_method().items():
            if (most := each.max_k) is not None and k > most:
                raise InvalidRequest(
                    f"num_speculative_tokens is {k}, but this {method} draft proposes at most "
                    f"{most} tokens per step: give num_speculative_tokens={most} (--k {most}; in "
                    f"bench DRAFT@{most})"
                )

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

    @classmethod
    def load(  # noqa: PLR0913 (keyword-only parts, each replaceable)
        cls,
        target: Source | None = None,
        draft: Source | Seq[Source] | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        controller: Controller | None = None,
        costs: Mapping[str, CostSource] | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a target, and optionally a draft, from a local folder, the hub or the zoo.

        Args:
            target: folder, hub name or "zoo:smollm2-135m".
            draft: likewise, or a folder of an EAGLE-3, DFlash or Medusa head, or a name of
                `METHODS` such as "suffix", or several; "auto" finds some (`auto_drafts`). None and
                "none" decode plainly.
            dtype: "auto" (as stored), "bfloat16", "float16" or "float32", or a torch type.
            device: "auto", "cpu", "cuda" or "mps".
            controller: an object that chooses K; None builds the one that `config` names.
            costs: of the drafters by their methods, for controllers that need them.
            config, settings: engine settings; single fields override `config`: `max_batch=4`.

        Raises:
            InvalidModel: the folder is missing, damaged or of an unsupported kind.
            IncompatibleDraft: the tokenizers differ, or a head was trained for another target.
            UnsupportedFeatures: the drafter reads layers that the target does not have.
            InvalidRequest: a setting is unknown or cannot work, or `controller` is no controller.
            NotEnoughMemory: weights and KV do not fit; nothing has been allocated yet.
        """
        check_controller(controller)
        if target is None:
            raise InvalidRequest(_without_target(settings))
        dtype = str(dtype).removeprefix("torch.")
        config = (config or EngineConfig()).with_settings(settings)
        target = ModelFiles.open(target)
        asked = [] if draft in (None, NONE) else as_sources(draft)
        drafts, found = with_auto(asked, target, device, dtype, config) if asked else ([], [])
        check_choice(drafts, config, controller)
        defaults = sampling_defaults(target)
        # What "auto" stands for has been checked, and is left out if it cannot be loaded.
        drafts = [name if name in found else check_draft(name, target) for name in drafts]
        model, own, ends = load_target(target, dtype=dtype, device=device, config=config)
        engine = cls(target=model, tokenizer=own, config=config, eos_token_ids=ends)
        engine.intake.defaults = defaults
        if draft in (None, NONE):
            return engine
        drafter = load_drafters(drafts, model, own, dtype=dtype, config=config, optional=found)
        return engine.with_draft(drafter, controller=controller, costs=costs)

    def with_draft(
        self,
        draft: Source | Seq[Source] | Drafter | None,
        num_speculative_tokens: int | None = None,
        *,
        dtype: str = "auto",
        controller: Controller | None = None,
        costs: Mapping[str, CostSource] | None = None,
    ) -> Engine:
        """Return a new engine over the same target with another drafter, K or controller.

        Args:
            draft: a `Drafter` instance, which may be your own, or what `load` takes.
            num_speculative_tokens: K; None keeps that of this engine.
            dtype: as for `load`.

        Raises:
            ForerunError: as for `load`.
        """
        config = self.config
        if num_speculative_tokens is not None:
            config = replace(config, num_speculative_tokens=num_speculative_tokens)
        if isinstance(draft, Drafter):
            drafter: Drafter | None = draft
        elif draft in (None, NONE):
            drafter = None
        else:
            drafts = as_sources(draft)
            check_choice(drafts, config, controller)
            drafter = load_drafters(drafts, self.target, self.tokenizer, dtype=dtype, config=config)
        return Engine(
            target=self.target,
            tokenizer=self.tokenizer,
            drafter=drafter,
            controller=controller,
            costs=costs,
            config=config,
            eos_token_ids=self.eos_token_ids,
            defaults=self.intake.defaults,
            observers=self.observers,
        )

    def generate(
        self,
        prompts: str | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        terms: RequestTerms | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts together; requests added before are advanced too.

        There may be more prompts than `max_waiting`: they are queued as places become free.

        Args:
            prompts: one text, or a list of texts or of token-id lists.
            sampling_params: for all prompts, or one per prompt; None takes what the model states
                in its generation_config.json, and else `SamplingParams()`.
            terms: for all prompts; a deadline counts from when a prompt is queued.

        Raises:
            InvalidRequest: a prompt is empty or too long, or a parameter cannot be honoured.
            NumericalError: as `step`; the other prompts are aborted.
        """
        batch = as_prompts(prompts)
        each = params_for(
            batch, self.intake.default_params if sampling_params is None else sampling_params
        )
        checked = [(self.intake.check(p, s), s) for p, s in zip(batch, each, strict=True)]
        ids: list[str] = []
        try:
            for prompt_ids, its_params in checked:
                most = self.intake.max_unfinished - its_params.n
                while self.scheduler.num_unfinished > most:
                    self.step()
                ids.append(self.add_request(prompt_ids, its_params, terms=terms))
            while any(s.stop is None for i in ids for s in self._requests[i]):
                self.step()
            return [self.take_output(i) for i in ids]
        finally:
            for request_id in ids:
                self.abort(request_id)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        terms: RequestTerms | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of one prompt step by step; closing the iterator aborts the request.

        Several streams may be read alternately: a step advances all requests, and the chunks of
        another stream are kept for its own iterator. Text of requests without a stream is kept for
        `take_output`.

        Raises:
            InvalidRequest: as `add_request`.
            QueueFull: as many sequences wait as may.
            NumericalError: as `step`.
        """
        request_id = self.add_request(prompt, sampling_params, terms=terms)
        samples = self._requests[request_id]
        inbox = self._inboxes[request_id] = deque()
        try:
            while inbox or any(s.stop is None for s in samples):
                if not inbox:
                    self.step()
                while inbox:
                    yield inbox.popleft()
        finally:
            del self._inboxes[request_id]
            self.abort(request_id)

    def chat(
        self,
        messages: Conversation | Seq[Conversation],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        terms: RequestTerms | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered by the chat template of the target's tokenizer.

        Args:
            messages: one conversation or a list of them; a conversation is a list of messages, each
                with a "role" and a "content" (a text, or a list of its parts), and its last message
                is answered. A text is one message of a user.
            sampling_params: for all conversations, or one per conversation.

        Raises:
            InvalidRequest: the tokenizer has no template, the template refuses the messages, or as
                `generate`.
        """
        given: Any = messages  # of any type: `render` says what is wrong with it
        is_list = isinstance(given, Seq) and not isinstance(given, str) and len(given) > 0
        conversations = given if is_list and not isinstance(given[0], Mapping) else [given]
        ids = [self.intake.render(conversation) for conversation in conversations]
        return self.generate(ids, sampling_params, terms)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> str:
        """Queue a prompt and return the request's id; its samples join the batch at later steps.

        `mask` is a grammar in its initial state, which the output has to follow; it is forked for
        every sample.

        Raises:
            InvalidRequest: the prompt is empty or too long, a parameter cannot be honoured, or the
                id is in use.
            QueueFull: as many sequences wait as may.
        """
        params = params or self.intake.default_params
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
        """Advance every running request by a step.

        Where nothing of Python is needed between steps, by up to `EngineConfig.cycles_per_call`
        that one call of the kernels runs; their tokens are returned together.

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
        try:
            if self.scheduler.waiting and not self.scheduler.running:
                self._keep_features()
            self.stepper.run()
        except BaseException as error:
            if isinstance(error, NumericalError):
                for sequence in self.scheduler.running:
                    sequence.kv_invalid |= error.request_id in (None, sequence.request_id)
            elif self.stepper.is_committing or not isinstance(error, Exception):
                self._damage = error  # an interrupt may come in the middle of any change
            raise
        finally:
            running = self.scheduler.running
            for sequence in self.scheduler.drop_finished():
                self.stepper.release(sequence)
                if self.stepper.cycle_id >= self._next_return:
                    return_freed_memory()
                    self._next_return = self.stepper.cycle_id + STEPS_BETWEEN_RETURNS
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

    def _keep_features(self) -> None:
        """Let the store keep the features that the drafter reads."""
        store, layers = self.target.store, self.stepper.feature_layers
        if store.feature_layers == layers:
            return
        try:
            store.keep_features(layers)
        except ValueError as error:
            raise InvalidRequest(
                f"the target's store cannot keep the features this engine needs ({error}): "
                "finish or abort the requests of other engines over the same target first"
            ) from error

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
        self.stepper.release(sequence)

    def take_output(self, request_id: str) -> RequestOutput:
        """Return the output of a finished request and remove the request.

        Raises InvalidRequest where there is no such request, or it has not finished.
        """
        samples = self._requests.get(request_id)
        if samples is None:
            raise InvalidRequest(f"there is no request {request_id!r}: never added, or taken")
        if any(sample.stop is None for sample in samples):
            raise InvalidRequest(f"request {request_id!r} has not finished; step on, or abort it")
        return output_of(self._forget(request_id), self.tokenizer)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a running or waiting request, remove it and return what there was until then.

        Its slots are free immediately. Returns None where the id is unknown.
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

    def choices(self) -> list[MethodChoice]:
        """Return what the controller chose so far, and the speed it expects of every way to draft.

        Empty without a draft, and under controllers other than "auto".
        """
        return self.stepper.controller.choices()

    def stats(self) -> BackendStats:
        """Return counts since the engine was created."""
        stepper = self.stepper
        return BackendStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_steps=stepper.cycle_id,
            num_drafted=stepper.num_drafted,
            num_accepted=stepper.num_accepted,
            num_emitted=stepper.num_emitted,
        )

    def capabilities(self) -> Capabilities:
        """Return what the engine supports."""
        return Capabilities(
            max_context=self.max_context,
            max_batch=self.config.max_batch,
            methods=() if self.drafter is None else tuple(self.drafter.by_method()),
        )


def _without_target(settings: Mapping[str, object]) -> str:
    """Return the error of `Engine.load` without a target."""
    named = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    example = 'Engine.load needs a target as its first argument: Engine.load("zoo:smollm2-135m")'
    return f"{example}; it was given {named}" if named else example
