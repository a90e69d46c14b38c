"""Public engine interface: load target and draft, generate, stream, or run single steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from forerun.control.base import Controller
from forerun.control.costs import CostSource
from forerun.control.named import check_controller
from forerun.drafters.base import Drafter
from forerun.drafters.several import SeveralDrafters
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.core import EngineCore
from forerun.engine.intake import Prompt, as_prompts, params_for
from forerun.engine.loading import Source, as_sources, check_card, load_drafters, load_target
from forerun.engine.results import BackendStats, Capabilities, RequestOutput, StreamChunk
from forerun.sampling.config import SamplingParams


class Engine(EngineCore):
    """Speculative decoding with one target; all methods must be called from one thread.

    For requests from several threads there is `EngineThread`. An interrupt from the keyboard is
    raised between two steps, after which the engine can be used further.

    Example:
        engine = Engine.load("zoo:code-40m", draft="zoo:code-2m-for-40m")
        print(engine.generate("def add(a, b):")[0].text)

    Attributes:
        drafter: the object that proposes tokens; None decodes plainly.
        controller: the object that decides the plan of every step.
        observers: objects that are called after every step, in this order; add to the list or
            remove from it between steps.
        stepper: the parts of a step, of which experiments may replace some.
    """

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
        """Load a target, and optionally a draft, from a local folder, the hub or the zoo.

        Args:
            target: folder, hub name, "zoo:code-40m", or a model that transformers has loaded, whose
                weights are then shared.
            draft: the same for a draft model, the folder of an EAGLE-3 or Medusa head, "suffix",
                "recycling" or "self:N" (see `DRAFTERS`), or several of them for the controller to
                choose from; None decodes plainly.
            tokenizer: of a target that is already loaded: a transformers tokenizer, or a folder or
                name to read it from. A loaded draft must have been trained with the same one.
            dtype: "auto" (as stored), "bfloat16", "float16" or "float32".
            device: "auto", "cpu", "cuda" or "mps".
            config: engine settings.
            controller: an object that chooses K; None builds the one that `config` names.
            costs: of the drafters by their methods, for controllers that need them.
            settings: fields of `EngineConfig` by name, which override `config`, as in
                `num_speculative_tokens=5`.

        Raises:
            InvalidModel: the folder is missing, damaged or of an unsupported kind.
            IncompatibleDraft: the tokenizers differ, or a head was trained for another target.
            UnsupportedFeatures: the drafter reads layers that the target does not have.
            InvalidRequest: a setting is unknown or cannot work, or `controller` is no controller.
            NotEnoughMemory: weights and KV do not fit; nothing has been allocated yet.
        """
        check_controller(controller)
        config = (config or EngineConfig()).with_settings(settings)
        model, own_tokenizer, ends = load_target(
            target, tokenizer, dtype=dtype, device=device, config=config
        )
        engine = cls(target=model, tokenizer=own_tokenizer, config=config, eos_token_ids=ends)
        if draft is None:
            return engine
        drafts = as_sources(draft)
        for name in drafts:
            check_card(name, target)
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
        """Return a new engine over the same target with another drafter, K or controller.

        Args:
            draft: a `Drafter` instance, which may be your own, or what `load` takes.
            num_speculative_tokens: K; None keeps that of this engine.
            dtype: as for `load`.
            controller: as for `load`.
            costs: as for `load`.

        Raises:
            ForerunError: as for `load`.
        """
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

    def generate(
        self,
        prompts: str | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        terms: RequestTerms | None = None,
        *,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts together; requests added before are advanced too.

        There may be more prompts than `max_waiting`: they are queued as places become free.

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
        *,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of one prompt step by step; closing the iterator aborts the request.

        Several streams may be read alternately: a step advances all requests, and the chunks of
        another stream are kept for its own iterator. Text of requests without a stream is kept for
        `take_output`. `sampling_params` is another name of `params`.

        Raises:
            InvalidRequest: as `add_request`.
            QueueFull: as many sequences wait as may.
            NumericalError: as `step`.
        """
        params = params if sampling_params is None else sampling_params
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
        *,
        sampling_params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the chat template of the target's tokenizer.

        Args:
            messages: each with a "role" and a "content", the last one first to be answered.
            params: how the answer's tokens are chosen.
            terms: how the request is treated among others.
            sampling_params: another name of `params`.

        Raises:
            InvalidRequest: the tokenizer has no template, the template refuses the messages, or as
                `generate`.
        """
        text = self.tokenizer.render_chat(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([ids], params, terms, sampling_params=sampling_params)[0]

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
        drafter = self.drafter
        methods: tuple[str, ...] = () if drafter is None else (drafter.method,)
        if isinstance(drafter, SeveralDrafters):
            methods = tuple(drafter.drafters)
        return Capabilities(
            max_context=self.max_context, max_batch=self.config.max_batch, methods=methods
        )
