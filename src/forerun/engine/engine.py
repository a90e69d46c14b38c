"""The public engine: load a pair, generate, stream, or drive it step by step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from forerun.control.base import Controller
from forerun.control.fixed import FixedController
from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.loading import check_pair, eos_token_ids, load_pair_member
from forerun.engine.results import RequestOutput, StreamChunk
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.step import Stepper
from forerun.engine.stopping import Stop, TokenStops
from forerun.errors import InvalidRequest
from forerun.models.base import LanguageModel
from forerun.models.context import Context
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.noise import request_key
from forerun.theory.record import StepRecord

__all__ = ["Engine"]

Prompt = str | Seq[int]
OnRecord = Callable[[StepRecord], None]


class Engine:
    """Speculative decoding of one target; every method must be called from one thread.

    Example:
        engine = Engine.load("zoo:target", draft="zoo:draft-domain")
        print(engine.generate("def add(a, b):")[0].text)
    """

    def __init__(  # noqa: PLR0913 (keyword-only parts, each replaceable)
        self,
        *,
        target: LanguageModel,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        on_record: OnRecord | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.on_record = on_record
        self.drafter = GuardedDrafter(drafter, target.vocab_size) if drafter is not None else None
        self.scheduler = Scheduler(self.config)
        self._requests: dict[str, list[Sequence]] = {}
        self._keys: set[str] = set()
        self._num_requests = 0
        self._stepper = Stepper(
            target=target,
            drafter=self.drafter,
            controller=controller or FixedController(self.config.num_speculative_tokens),
            scheduler=self.scheduler,
            config=self.config,
        )

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
    ) -> Engine:
        """Load a target, and a draft if one is given, from a local folder, the hub or the zoo.

        Args:
            target: folder, hub name or "zoo:target".
            draft: the same for a draft model; None decodes plainly.
            dtype: "auto" (as stored), "bfloat16", "float16" or "float32".
            device: "auto", "cpu", "cuda" or "mps".
            config: engine settings.

        Raises:
            InvalidModel: the folder is missing, damaged or of an unsupported kind.
            IncompatibleDraft: the tokenizers differ.
            NotEnoughMemory: weights and KV do not fit, said before allocating.
        """
        config = config or EngineConfig()
        model, tokenizer = load_pair_member(target, dtype=dtype, device=device, config=config)
        engine = cls(
            target=model,
            tokenizer=tokenizer,
            config=config,
            eos_token_ids=eos_token_ids(target, tokenizer),
        )
        return engine.with_draft(draft, dtype=dtype) if draft is not None else engine

    def with_draft(
        self,
        draft: str | Path | Drafter | None,
        num_speculative_tokens: int | None = None,
        *,
        dtype: str = "auto",
    ) -> Engine:
        """A new engine over the same loaded target with another drafter and K.

        It drafts K tokens at every step; for another controller build an `Engine` from the parts.
        """
        config = self.config
        if num_speculative_tokens is not None:
            config = replace(config, num_speculative_tokens=num_speculative_tokens)
        if isinstance(draft, str | Path):
            device = str(self.target.device)
            loaded = load_pair_member(draft, dtype=dtype, device=device, config=config)
            check_pair(self.target, self.tokenizer, loaded)
            drafter: Drafter | None = DraftModel(loaded[0], vocab_size=self.target.vocab_size)
        else:
            drafter = draft
        return Engine(
            target=self.target,
            tokenizer=self.tokenizer,
            drafter=drafter,
            config=config,
            eos_token_ids=self.eos_token_ids,
            on_record=self.on_record,
        )

    @property
    def max_context(self) -> int:
        """Prompt plus output tokens one sequence may have."""
        return min(self.config.max_context, self.target.max_context)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    def generate(
        self,
        prompts: str | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Finish all prompts together; requests added before go on meanwhile.

        Args:
            prompts: one text, or a list of texts or of token-id lists.
            params: for all prompts, or one per prompt.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: a prompt is empty or too long, or a parameter cannot be honoured.
        """
        batch: Seq[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        each = self._params_for(batch, params)
        ids: list[str] = []
        try:
            ids += (self.add_request(p, s) for p, s in zip(batch, each, strict=True))
            while any(s.stop is None for i in ids for s in self._requests[i]):
                self.step()
            return [self.take_output(i) for i in ids]
        finally:
            for request_id in ids:
                self.abort(request_id)

    def _params_for(
        self, batch: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> Seq[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * len(batch)
        if len(params) != len(batch):
            raise InvalidRequest(f"{len(params)} sampling parameters for {len(batch)} prompts")
        return params

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Chunks of one prompt as they are decided; closing the iterator aborts the request.

        Requests added before go on meanwhile; their chunks are not returned, their text is kept
        for `take_output`.
        """
        request_id = self.add_request(prompt, params)
        samples = self._requests[request_id]
        try:
            while any(s.stop is None for s in samples):
                yield from (c for c in self.step() if c.request_id == request_id)
        finally:
            self.abort(request_id)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt; it joins the batch at the next step with a free place.

        Returns:
            The request's id.

        Raises:
            InvalidRequest: the prompt is empty or too long, a parameter cannot be honoured, or the
                id is in use.
        """
        params = params or SamplingParams()
        request_id = request_id or self._unused_id()
        ids = self._prompt_ids(prompt)
        self._check_ids(params)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        samples = [self._sequence(request_id, i, ids, params, seed) for i in range(params.n)]
        keys = {sample.key for sample in samples}
        if request_id in self._requests or keys & self._keys:
            raise InvalidRequest(f"request id {request_id!r} is already in use")
        self._keys |= keys
        self._requests[request_id] = samples
        for sample in samples:
            self.scheduler.add(sample)
        return request_id

    def _unused_id(self) -> str:
        while (request_id := f"request-{self._num_requests}") in self._requests:
            self._num_requests += 1
        self._num_requests += 1
        return request_id

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if len(ids) >= self.max_context:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; the context holds {self.max_context}, "
                "one of them for output: shorten the prompt or raise max_context"
            )
        outside = next((t for t in ids if not 0 <= t < self.target.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(
                f"prompt token {outside} is outside 0..{self.target.vocab_size - 1}"
            )
        return ids

    def _check_ids(self, params: SamplingParams) -> None:
        """Token ids named by the parameters must exist."""
        for name, token in params.named_tokens():
            if token >= self.target.vocab_size:
                raise InvalidRequest(
                    f"{name} names token {token}, outside 0..{self.target.vocab_size - 1}"
                )

    def _sequence(
        self, request_id: str, index: int, ids: list[int], params: SamplingParams, seed: int
    ) -> Sequence:
        room = self.max_context - len(ids)
        max_new = room if params.max_tokens is None else min(room, params.max_tokens)
        return Sequence(
            request_id=request_id,
            index=index,
            params=params,
            ids=list(ids),
            num_prompt=len(ids),
            noise_key=request_key(seed, index),
            stops=TokenStops(params, self.eos_token_ids, max_new),
            detokenizer=Detokenizer(self.tokenizer),
            history=self._history(params, ids),
            arrived_at_s=time.monotonic(),
        )

    def _history(self, params: SamplingParams, ids: list[int]) -> History | None:
        """Token counts and masks, for requests whose processors need them."""
        if not params.needs_history:
            return None
        return History.of(
            params,
            ids,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            device=self.target.device,
        )

    def step(self) -> list[StreamChunk]:
        """Advance every running request once.

        Returns:
            What each sequence gained (nothing while a prompt is still being read).

        Raises:
            NumericalError: the target returned NaN; nothing is lost, abort the `request_id` named.
        """
        for sequence in self.scheduler.admit(self.target.store.num_free):
            sequence.context = Context(self.target.store, sequence.ids)
            sequence.joined_at_s = time.monotonic()
        if not self.scheduler.running:
            return []
        running = list(self.scheduler.running)
        records = self._stepper.run()
        for sequence in self.scheduler.drop_finished():
            self._release(sequence)
        if self.on_record is not None:
            for record in records:
                self.on_record(record)
        return [s.take_chunk() for s in running if s.num_output > s.num_streamed]

    def _release(self, sequence: Sequence) -> None:
        """Give back what a sequence held in target and drafter."""
        if sequence.context is not None:
            sequence.context.close()
            sequence.context = None
        if self.drafter is not None:
            self.drafter.forget(sequence)

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
        self._forget(request_id)
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=tuple(samples[0].ids[: samples[0].num_prompt]),
            completions=tuple(s.completion() for s in samples),
        )

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; unknown or finished ids are ignored."""
        for sequence in self._forget(request_id):
            if sequence.stop is None:
                sequence.stop = Stop(finish_reason="abort")
                self.scheduler.remove(sequence)
                self._release(sequence)

    def _forget(self, request_id: str) -> list[Sequence]:
        samples = self._requests.pop(request_id, [])
        self._keys -= {sample.key for sample in samples}
        return samples
