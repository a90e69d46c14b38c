"""Judges a draft with the engine's own verifier on held-out prompts.

Figures are counted, not modelled: every draft continues the same prompts under the deployed
parameters. Looping text is easy to draft, so a text counts up to its first repeated 32-gram.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput
from forerun.errors import InvalidRequest
from forerun.measure.judge.figures import DraftFigures, judge_figures
from forerun.measure.judge.judged import EvaluationPrompt, JudgedPrompt
from forerun.measure.judge.teacher_forced import (
    acceptance_probabilities,
    attached_acceptance,
    head_in,
)
from forerun.models.base import LanguageModel
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.cost import CostTable
from forerun.theory.record import StepRecord
from forerun.theory.text import distinct_ngram_share, first_repeat


class Judge:
    """Judges drafts of one target under one set of sampling parameters.

    The target answers every prompt once, at the first judgement that needs it. Draws without a seed
    of the user's are keyed by prompt, so that a judgement is a function of its arguments.

    Args:
        engine: over the target, idle; its K must be at least that of the judge.
        prompts: that no draft was trained on, two or more.
        num_speculative_tokens: K, at least 1.
        costs: to predict speedups from, at this temperature; None predicts none.
        seed: of resamples and of draws.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        prompts: Sequence[EvaluationPrompt],
        params: SamplingParams,
        num_speculative_tokens: int,
        costs: CostTable | None = None,
        seed: int = 0,
    ) -> None:
        check(engine, prompts, num_speculative_tokens)
        self.engine = engine
        self.prompts = list(prompts)
        self.params = params
        self.num_speculative_tokens = num_speculative_tokens
        self.costs = costs
        self.seed = seed

    def at(self, temperature: float, costs: CostTable | None = None) -> Judge:
        """Return a judge of the same prompts at another temperature."""
        return Judge(
            engine=self.engine,
            prompts=[replace(prompt, response_ids=None) for prompt in self.prompts],
            params=replace(self.params, temperature=temperature),
            num_speculative_tokens=self.num_speculative_tokens,
            costs=costs,
            seed=self.seed,
        )

    def judge(
        self,
        draft: str | Path | Drafter,
        *,
        name: str | None = None,
        max_prompts: int | None = None,
    ) -> DraftFigures:
        """Decode the held-out prompts with a draft and return its figures.

        Args:
            draft: a folder or a name, loaded here, or a drafter.
            name: how figures call it; by default the folder or the drafter's method.
            max_prompts: judge on so many, evenly spread over all.
        """
        steps: defaultdict[str, list[StepRecord]] = defaultdict(list)
        engine = alone(self.engine).with_draft(draft, self.num_speculative_tokens)
        engine.observers[:] = [EmittedRecords(lambda r: steps[r.request_id].append(r))]
        chosen = evenly_spaced(len(self.prompts), max_prompts)
        prompts = [self.prompts[index].prompt_ids for index in chosen]
        outputs = engine.generate(prompts, [self._params_of(index) for index in chosen])
        alphas = self._alphas(engine, draft, chosen)
        judged = [
            _judged_prompt(
                self.prompts[index].tag,
                output,
                steps[output.request_id],
                self.num_speculative_tokens,
                its_alphas,
            )
            for index, output, its_alphas in zip(chosen, outputs, alphas, strict=True)
        ]
        return judge_figures(
            name or named(draft),
            self.params.temperature,
            self.num_speculative_tokens,
            judged,
            self.costs,
            seed=self.seed,
        )

    def responses(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the target's responses to the chosen prompts, generated at the first call only."""
        missing = [index for index in chosen if self.prompts[index].response_ids is None]
        outputs = alone(self.engine).generate(
            [self.prompts[index].prompt_ids for index in missing],
            [self._params_of(index) for index in missing],
        )
        for index, output in zip(missing, outputs, strict=True):
            answered = replace(self.prompts[index], response_ids=output.token_ids)
            self.prompts[index] = answered
        return [self.prompts[index].response_ids or () for index in chosen]

    def _alphas(
        self, engine: Engine, draft: str | Path | Drafter, chosen: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Return the teacher-forced acceptance probabilities of every prompt and position."""
        scored = _scorer_of(engine, draft)
        if scored is None:
            return [()] * len(chosen)
        return [
            tuple(
                scored(
                    self.prompts[index].prompt_ids,
                    response[: first_repeat(response)],
                    self.params,
                    engine.eos_token_ids,
                )
            )
            for index, response in zip(chosen, self.responses(chosen), strict=True)
        ]

    def _params_of(self, index: int) -> SamplingParams:
        """Return the deployed parameters with a seed per prompt and the same verifier."""
        params = replace(self.params, n=1, logprobs=None)
        if params.greedy or params.seed is not None:
            return params
        verification = "block" if params.verification == "auto" else params.verification
        return replace(params, seed=self.seed + index, verification=verification)


def alone(engine: Engine) -> Engine:
    """Return an engine over the same target without a draft and without prefix sharing.

    A prompt found there drafts one step earlier, and figures would depend on what ran before.
    """
    return Engine(
        target=engine.target,
        tokenizer=engine.tokenizer,
        config=replace(engine.config, sharing="none"),
        eos_token_ids=engine.eos_token_ids,
    )


def _judged_prompt(
    tag: str,
    output: RequestOutput,
    records: Sequence[StepRecord],
    num_speculative_tokens: int,
    alphas: tuple[float, ...],
) -> JudgedPrompt:
    """Compute the results of one held-out prompt from its request's step records."""
    tokens = output.token_ids
    end = first_repeat(tokens)
    num_prompt = len(output.prompt_token_ids)
    counted = [
        record
        for record in records
        if record.k_budget == num_speculative_tokens and record.context_tokens < num_prompt + end
    ]
    return JudgedPrompt(
        tag=tag,
        acceptance=AcceptanceCounts.from_records(counted),
        num_context_tokens=sum(record.context_tokens for record in counted),
        num_tokens=end,
        looped=end < len(tokens),
        distinct_4gram_share=distinct_ngram_share(tokens[:end]),
        alphas=alphas,
    )


Scorer = Callable[[Sequence[int], Sequence[int], SamplingParams, frozenset[int]], Sequence[float]]
"""From prompt, response, parameters and ends of texts to one acceptance probability per token."""


def _scorer_of(engine: Engine, draft: str | Path | Drafter) -> Scorer | None:
    """Return the teacher-forced scorer of a draft; None for a draft without a model of its own."""
    drafter = engine.drafter
    if drafter is None:
        return None
    if drafter.required_features:
        head = head_in(draft, engine.target) if isinstance(draft, str | Path) else None
        return None if head is None else partial(attached_acceptance, engine.target, head)
    model = draft_model_of(engine)
    return None if model is None else partial(acceptance_probabilities, engine.target, model)


def draft_model_of(engine: Engine) -> LanguageModel | None:
    """Return the draft model of an engine; None where the drafter has no separate model."""
    drafter = engine.drafter
    if isinstance(drafter, DraftModel) and not drafter.required_features:
        return None if drafter.model.store is engine.target.store else drafter.model
    return None


def evenly_spaced(num_prompts: int, most: int | None) -> list[int]:
    """Return at most `most` evenly spaced indices, to cover all sources of a file."""
    count = num_prompts if most is None else min(most, num_prompts)
    return [index * num_prompts // count for index in range(count)]


def named(draft: str | Path | Drafter) -> str:
    return str(draft) if isinstance(draft, str | Path) else draft.method


def check(engine: Engine, prompts: Sequence[EvaluationPrompt], num_speculative_tokens: int) -> None:
    """Refuse too few prompts, and a K larger than the engine was loaded for."""
    if len(prompts) < 2:
        raise InvalidRequest(
            f"{len(prompts)} held-out prompts; an interval takes two or more: give more prompts, "
            "or raise the held-out share"
        )
    most = engine.config.num_speculative_tokens
    if not 1 <= num_speculative_tokens <= most:
        raise InvalidRequest(
            f"num_speculative_tokens is {num_speculative_tokens}; the engine was loaded for 1 to "
            f"{most}"
        )
