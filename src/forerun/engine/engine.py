"""The public engine: load a pair, generate, stream, or drive it step by step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NoReturn

from forerun.control.base import Controller
from forerun.control.step_times import CostSource
from forerun.drafters.base import Drafter
from forerun.drafters.several import SeveralDrafters
from forerun.engine.backend import BackendStats, Capabilities
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.controlling import default_controller
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.guarding import EngineGuard
from forerun.engine.intake import Intake, Prompt, as_prompts, params_for
from forerun.engine.loading import (
    Source,
    as_sources,
    check_features,
    load_drafters,
    load_target,
    warn_if_stale,
)
from forerun.engine.observing import StepObserver
from forerun.engine.results import RequestOutput, StreamChunk
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence, output_of
from forerun.engine.step import Stepper
from forerun.engine.stopping import FinishReason, Stop
from forerun.errors import EngineStopped, InvalidRequest, NumericalError
from forerun.models.base import LanguageModel
from forerun.models.context import Context
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.mask import TokenMask

__all__ = ["Engine"]


class Engine:
    """Speculative decoding of one target; every method must be called from one thread.

    For requests from several threads there is `EngineThread`. An interrupt from the keyboard is
    raised between two steps, after which the engine can be used further.

    Example:
        engine = Engine.load("zoo:target", draft="zoo:draft-domain")
        print(engine.generate("def add(a, b):")[0].text)

    Attributes:
        drafter: what proposes tokens; None decodes plainly.
        controller: what decides the plan of every step.
        observers: what sees every step, in this order; add to the list or remove from it between
            steps.
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

    @classmethod
    def load(  # noqa: PLR0913 (keyword-only parts, each replaceable)
        cls,
        target: Source,
        draft: Source | Seq[Source] | None = None,
        *,
        tokenizer: object = None,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        controller: Controller | None = None,
        costs: Mapping[str, CostSource] | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a target, and a draft if one is given, from a local folder, the hub or the zoo.

        Args:
            target: folder, hub name, "zoo:target", or a model that transformers has loaded, whose
                weights are then shared.
            draft: the same for a draft model, "suffix" or "self:N" (see `DRAFTERS`), or several of
                them for the controller to choose from; None decodes plainly.
            tokenizer: of a target that is already loaded: a transformers tokenizer, or a folder or
                name to read it from. A loaded draft must have been trained with the same one.
            dtype: "auto" (as stored), "bfloat16", "float16" or "float32".
            device: "auto", "cpu", "cuda" or "mps".
            config: engine settings.
            controller: what chooses K; None builds the one that the settings name.
            costs: of the drafters by their methods, for controllers that need them.
            settings: fields of `EngineConfig` by name, which override `config`, as in
                `num_speculative_tokens=5`.

        Raises:
            InvalidModel: the folder is missing, damaged or of an unsupported kind.
            IncompatibleDraft: the tokenizers differ.
            UnsupportedFeatures: the drafter reads layers that the target does not have.
            InvalidRequest: a setting is unknown or cannot work.
            NotEnoughMemory: weights and KV do not fit; nothing has been allocated yet.
        """
        config = (config or EngineConfig()).with_settings(settings)
        model, own_tokenizer, ends = load_target(
            target, tokenizer, dtype=dtype, device=device, config=config
        )
        engine = cls(target=model, tokenizer=own_tokenizer, config=config, eos_token_ids=ends)
        if draft is None:
            return engine
        drafts = as_sources(draft)
        for name in drafts:
            warn_if_stale(name, target)
        return engine.with_draft(drafts, dtype=dtype, controller=controller, costs=costs)

    def with_draft(
        self,
        draft: Source | Seq[Source] | Drafter | None,
        num_speculative_tokens: int | None = None,
        *,
        dtype: str = "auto",
        controller: Controller | None = None,
        costs: Mapping[str, CostSource] | None = None,
    ) -> Engine:
        """A new engine over the same loaded target with another drafter, K or controller."""
        config = self.config
        if num_speculative_tokens is not None:
            config = replace(config, num_speculative_tokens=num_speculative_tokens)
        if isinstance(draft, Drafter) or draft is None:
            drafter = draft
        else:
            drafts = as_sources(draft)
            drafter = load_drafters(drafts, self.target, self.tokenizer, dtype=dtype, config=config)
        return Engine(
            target=self.target,
            tokenizer=self.tokenizer,
            drafter=drafter,
            controller=controller,
            costs=costs,
            config=config,
            eos_token_ids=self.eos_token_ids,
            observers=self.observers,
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an Engine holds weights and threads of this process and cannot be copied or pickled: "
            "load it again, or use with_draft for another engine over the same target"
        )

    @property
    def max_context(self) -> int:
        """Prompt plus output tokens one sequence may have."""
        return self.intake.max_context

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    def generate(
        self,
        prompts: str | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        terms: RequestTerms | None = None,
        *,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Finish all prompts together; requests added before go on meanwhile.

        However many prompts there are, no more are queued than may wait.

        Args:
            prompts: one text, or a list of texts or of token-id lists.
            params: for all prompts, or one per prompt.
            terms: for all prompts; a deadline counts from when a prompt is queued.
            sampling_params: another name of `params`.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: a prompt is empty or too long, or a parameter cannot be honoured.
            NumericalError: as `step`; the other prompts are aborted.
        """
        batch = as_prompts(prompts)
        each = params_for(batch, params if sampling_params is None else sampling_params)
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
        params: SamplingParams | None = None,
        terms: RequestTerms | None = None,
    ) -> Iterator[StreamChunk]:
        """Chunks of one prompt as they are decided; closing the iterator aborts the request.

        Requests added before go on meanwhile, and several streams may be read in turns: chunks of
        other streams wait for their own iterator, and the text of other requests is kept for
        `take_output`.

        Raises:
            InvalidRequest: as `add_request`.
            QueueFull: as many sequences wait as may.
            NumericalError: as `step`.
        """
        request_id = self.add_request(prompt, params, terms=terms)
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
        messages: Seq[Mapping[str, str]],
        params: SamplingParams | None = None,
        terms: RequestTerms | None = None,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the chat template of the target's tokenizer.

        Args:
            messages: each with a "role" and a "content", the last one first to be answered.
            params: how the answer's tokens are chosen.
            terms: how the request is treated among others.

        Raises:
            InvalidRequest: the tokenizer has no template, the template refuses the messages, or as
                `generate`.
        """
        text = self.tokenizer.render_chat(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([ids], params, terms)[0]

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> str:
        """Queue a prompt; its samples join the batch at the next steps with a free place.

        Args:
            prompt: a text or a list of token ids.
            params: how its tokens are chosen.
            request_id: its name; made up where None.
            terms: how it is treated among others.
            mask: a grammar its output has to follow, at its beginning; every sample has a fork.

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
        """Queue the samples of a request that `intake` has made.

        Raises:
            InvalidRequest: their id is in use.
        """
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
            What each sequence gained (nothing while a prompt is still being read), and the end of
            those whose deadline has passed.

        Raises:
            NumericalError: the target returned NaN; nothing is lost, abort the `request_id` named.
        """
        with self._guard:
            self._check_whole()
            if not self._end_late_ones():
                self._step()
        chunks, self._chunks = self._chunks, []
        return chunks

    def _step(self) -> None:
        if not self.scheduler.is_settled:
            self._arrange()
        running = list(self.scheduler.running)
        if not running:
            return
        try:
            self.stepper.run()
        except BaseException as error:
            if isinstance(error, NumericalError):
                for sequence in running:
                    sequence.kv_invalid |= error.request_id in (None, sequence.request_id)
            elif self.stepper.is_committing:
                self._damage = error
            raise
        finally:
            for sequence in self.scheduler.drop_finished():
                self._release(sequence)
            self._emit([s for s in running if s.num_output > s.num_streamed])

    def _emit(self, gained: Seq[Sequence]) -> None:
        """Keep what sequences gained for the caller of `step`, and for the streams."""
        chunks = [sequence.take_chunk() for sequence in gained]
        self._chunks += chunks
        if self._inboxes:
            for chunk in chunks:
                if chunk.request_id in self._inboxes:
                    self._inboxes[chunk.request_id].append(chunk)

    def _check_whole(self) -> None:
        if self._damage is not None:
            raise EngineStopped(
                f"an exception broke off a step while its tokens were committed "
                f"({self._damage!r}): call reset(), which aborts all requests"
            ) from self._damage

    def reset(self) -> None:
        """Abort all requests and forget what the KV holds of them; the engine is as new."""
        with self._guard:
            for sequence in self.scheduler.running:
                sequence.kv_invalid = True
            for request_id in list(self._requests):
                self.abort(request_id)
            self._chunks = []
            self._damage = None

    def _arrange(self) -> None:
        """Who has to go, goes; who has room, joins, beginning with what the KV holds already."""
        store = self.target.store
        if not self.scheduler.running and store.feature_layers != self.stepper.feature_layers:
            self._keep_features()
        for sequence in self.scheduler.preempt(store.num_free):
            self._release(sequence)
        for sequence in self.scheduler.admit(store.num_free):
            sequence.context = Context(store, sequence.ids, sequence.scope)
            if sequence.joined_at_s is None:
                sequence.joined_at_s = time.monotonic()
                sequence.num_cached = sequence.context.num_cached

    def _keep_features(self) -> None:
        """Have the store keep what this engine's drafter reads; others may have used it before."""
        try:
            self.target.store.keep_features(self.stepper.feature_layers)
        except ValueError as error:
            raise InvalidRequest(
                f"the target's store cannot keep the features this engine needs ({error}): finish "
                "or abort the requests of other engines over the same target first"
            ) from error

    def _end_late_ones(self) -> bool:
        """End the sequences that are past their deadline; returns whether there were any."""
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
        """End a sequence that would have gone on."""
        sequence.stop = Stop(finish_reason=finish_reason)
        sequence.finished_at_s = now_s
        self.scheduler.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back what a sequence held in target and drafter; others may begin with it."""
        if sequence.context is not None:
            sequence.context.close(0 if sequence.kv_invalid else sequence.context.num_cached)
            sequence.context = None
        if self.stepper.drafter is not None:
            self.stepper.drafter.forget(sequence)

    def take_output(self, request_id: str) -> RequestOutput:
        """Collect a finished request and forget it.

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
        """End a request wherever it is, and forget it; its places are free at once.

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

    def stats(self) -> BackendStats:
        """Counts since the engine was made."""
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
        """What the engine can be asked for."""
        drafter = self.drafter
        methods: tuple[str, ...] = () if drafter is None else (drafter.method,)
        if isinstance(drafter, SeveralDrafters):
            methods = tuple(drafter.drafters)
        return Capabilities(
            max_context=self.max_context, max_batch=self.config.max_batch, methods=methods
        )

    def _forget(self, request_id: str) -> list[Sequence]:
        samples = self._requests.pop(request_id, [])
        self._keys -= {sample.key for sample in samples}
        return samples
