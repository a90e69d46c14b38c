"""Judges a draft with the engine's own verifier on held-out prompts.

Figures are counted, not modelled: every draft continues the same prompts under the deployed
parameters. Looping text is easy to draft, so a text counts up to its first repeated 32-gram.

Whole prompts are resampled, because the steps of one prompt are not independent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.drafters.draft_sequence import fit_vocabulary
from forerun.drafters.eagle3.head import Eagle3Head, is_eagle3
from forerun.drafters.eagle3.load import read_eagle3_head
from forerun.drafters.heads import over_target_vocabulary
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput
from forerun.errors import InvalidRequest
from forerun.models.base import Context, LanguageModel, ModelOutput, pack
from forerun.models.checkpoint import ModelFiles, read_object
from forerun.sampling.config import SamplingParams, draft_params
from forerun.sampling.history import History, RowHistory
from forerun.sampling.processors import pack_params, target_probs
from forerun.theory.acceptance import AcceptanceCounts, distinct_ngram_share, first_repeat
from forerun.theory.cost import CostTable
from forerun.theory.figures import Figures, Group, resample_ratio, summarise_groups
from forerun.theory.intervals import Interval, divide
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPrompt:
    """A prompt that no draft is trained on.

    Attributes:
        response_ids: what the target itself answered under the judge's parameters; None where it
            has not been asked yet.
    """

    prompt_ids: tuple[int, ...]
    tag: str = ""
    response_ids: tuple[int, ...] | None = None


@dataclass(slots=True, kw_only=True)
class JudgedPrompt(Group):
    """The results of a draft on one prompt.

    Only steps that could draft all K tokens count, so that tau is 1 + the sum of beta: neither the
    step that ends the prefill nor the last ones, whose K is cut to what the request has left. Nor
    does any step after the first repeated 32-gram of its text.

    Attributes:
        alphas: acceptance probability at every position of the target's own response, the draft
            reading what the target wrote; empty for drafters without a model.
    """

    tag: str
    num_context_tokens: int
    looped: bool
    distinct_4gram_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeedup(Interval):
    """Predicted speedup of speculative over plain decoding at the K of the judgement.

    Attributes:
        num_speculative_tokens: the K in 0..max of highest speedup; 0 if drafting costs more
            than it saves.
        best: speedup at the best K, which the one half of the prompts chooses for the other; 1
            where plain decoding (K = 0) is best.
        per_k: speedup at K = 1, 2, ...
    """

    num_speculative_tokens: int
    best: Interval
    per_k: tuple[Interval, ...]

    @property
    def best_drafting(self) -> float:
        return max(speedup.estimate for speedup in self.per_k)


def predicted_speedup(
    prompts: Sequence[JudgedPrompt], table: CostTable, max_k: int, *, seed: int
) -> PredictedSpeedup | None:
    """Predict the speedup, tau over kappa, for one sequence at the mean context of the steps.

    The best of several K is flattered by the prompts it won on. So every second prompt chooses the
    K that the others are scored at, and the other way round.
    """
    prompts = [prompt for prompt in prompts if prompt.acceptance.num_steps]
    if not prompts:
        return None
    num_steps = sum(prompt.acceptance.num_steps for prompt in prompts)
    context = round(sum(prompt.num_context_tokens for prompt in prompts) / num_steps)
    kappas = [table.cycle_cost_interval(k, context) for k in range(max_k + 1)]
    if any(kappa.low <= 0 for kappa in kappas):
        return None
    even, odd = prompts[::2], prompts[1::2]
    chosen = [_choose_k(odd or even, kappas), _choose_k(even, kappas)]
    best_k = _choose_k(prompts, kappas)
    best = _predict(prompts, [chosen[i % 2] for i in range(len(prompts))], kappas, seed)
    if best_k == 0 or best.estimate < 1.0:  # plain decoding is always possible
        best_k, best = 0, Interval(estimate=1.0, low=1.0, high=1.0)
    per_k = tuple(_predict(prompts, [k] * len(prompts), kappas, seed) for k in range(1, max_k + 1))
    return PredictedSpeedup(
        **asdict(per_k[-1]), num_speculative_tokens=best_k, best=best, per_k=per_k
    )


def _choose_k(prompts: Sequence[JudgedPrompt], kappas: Sequence[Interval]) -> int:
    """Return the K with the highest predicted speedup; the smallest K in a tie."""

    def speedup(k: int) -> float:
        emitted = (prompt.acceptance.with_chains_of(k).num_emitted for prompt in prompts)
        return sum(emitted) / kappas[k].estimate

    return max(range(len(kappas)), key=speedup)


def _predict(
    prompts: Sequence[JudgedPrompt], ks: Sequence[int], kappas: Sequence[Interval], seed: int
) -> Interval:
    """Return the predicted speedup over plain decoding, where every prompt has its own K."""
    counts = [prompt.acceptance for prompt in prompts]
    used = [kappas[k] for k in ks]
    found = resample_ratio(
        [count.with_chains_of(k).num_emitted for count, k in zip(counts, ks, strict=True)],
        [count.num_steps * cost.estimate for count, cost in zip(counts, used, strict=True)],
        (min(1 / cost.estimate for cost in used), max((1 + k) / kappas[k].estimate for k in ks)),
        seed=seed,
    )
    assert found is not None
    error = Interval(
        estimate=1.0,
        low=min(cost.low / cost.estimate for cost in used),
        high=max(cost.high / cost.estimate for cost in used),
    )
    return divide(found, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFigures(Figures):
    """Figures of a draft over some prompts, with 95% intervals over prompts.

    alpha is teacher-forced over the target's own responses, by the rule deployed: the sum of
    min(target, draft), which for greedy drafts is the target's probability of the draft's most
    likely token.

    Attributes:
        looped_share: completions that were cut where they began to loop.
        distinct_4gram_share: mean over completions, up to there.
    """

    looped_share: float
    distinct_4gram_share: float
    speedup: PredictedSpeedup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """All figures of a draft that was judged with one set of sampling parameters."""

    draft: str
    temperature: float
    num_speculative_tokens: int
    overall: AcceptanceFigures
    by_tag: dict[str, AcceptanceFigures]
    prompts: tuple[JudgedPrompt, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, object]:
        """Return JSON values without the single prompts."""
        values = asdict(self)
        del values["prompts"]
        return values


def judge_figures(
    draft: str,
    temperature: float,
    num_speculative_tokens: int,
    prompts: Sequence[JudgedPrompt],
    costs: CostTable | None = None,
    *,
    seed: int = 0,
) -> DraftFigures:
    def over(chosen: Sequence[JudgedPrompt]) -> AcceptanceFigures:
        return _build_figures(chosen, num_speculative_tokens, costs, seed=seed)

    tags = sorted({prompt.tag for prompt in prompts})
    overall = over(prompts)
    by_tag = {tag: over([p for p in prompts if p.tag == tag]) for tag in tags}
    return DraftFigures(
        draft=draft,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
        overall=overall,
        by_tag=by_tag,
        prompts=tuple(prompts),
    )


def _build_figures(
    prompts: Sequence[JudgedPrompt],
    num_speculative_tokens: int,
    costs: CostTable | None,
    *,
    seed: int,
) -> AcceptanceFigures:
    figures = summarise_groups(prompts, partial(resample_ratio, seed=seed))
    speedup = None
    if costs is not None:
        speedup = predicted_speedup(prompts, costs, num_speculative_tokens, seed=seed)
    return AcceptanceFigures(
        **figures.fields | {"speedup": speedup},
        looped_share=mean(float(prompt.looped) for prompt in prompts),
        distinct_4gram_share=mean(prompt.distinct_4gram_share for prompt in prompts),
    )


Finding = Literal["higher", "lower", "no difference shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """A figure of two drafts, and whether the difference between them is shown."""

    figure: str
    tag: str | None
    before: Interval
    after: Interval

    @property
    def finding(self) -> Finding:
        """Whether the figure is higher, lower, or no difference is shown."""
        return finding(self.before, self.after)

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as JSON values."""
        return {**asdict(self), "finding": self.finding}


def finding(before: Interval, after: Interval) -> Finding:
    """Compare two 95% intervals: a difference is shown where they do not overlap."""
    if after.is_above(before.high):
        return "higher"
    return "lower" if after.is_below(before.low) else "no difference shown"


def changes(before: DraftFigures, after: DraftFigures) -> tuple[FigureChange, ...]:
    """Compare tau, alpha and predicted speedup of two drafts, over all prompts and by tag."""
    for name in ("temperature", "num_speculative_tokens"):
        if getattr(before, name) != getattr(after, name):
            raise ValueError(
                f"{name} is {getattr(before, name)} before and {getattr(after, name)} after; "
                "figures compare where both are judged alike"
            )
    if [prompt.tag for prompt in before.prompts] != [prompt.tag for prompt in after.prompts]:
        raise ValueError("the two drafts were not judged on the same prompts")
    pairs: dict[str | None, tuple[AcceptanceFigures, AcceptanceFigures]]
    pairs = {None: (before.overall, after.overall)}
    if len(before.by_tag) > 1:
        pairs |= {tag: (before.by_tag[tag], after.by_tag[tag]) for tag in before.by_tag}
    return tuple(
        FigureChange(figure=name, tag=tag, before=first, after=second)
        for tag, pair in pairs.items()
        for name in ("acceptance_length", "acceptance_probability", "speedup")
        if (first := _find_interval(pair[0], name)) is not None
        and (second := _find_interval(pair[1], name)) is not None
    )


def _find_interval(figures: AcceptanceFigures, name: str) -> Interval | None:
    found: Interval | None = getattr(figures, name)
    return found.per_k[-1] if isinstance(found, PredictedSpeedup) else found


CHUNK = 256
"""Rows of one pass; those of a chunk are the largest tensors here."""


@torch.inference_mode()
def acceptance_probabilities(
    target: LanguageModel,
    draft: LanguageModel,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return the acceptance probability at every token of the target's response."""
    ids = [*prompt_ids, *response_ids]
    # The last token need not be read.
    reach = min(target.max_context, draft.max_context, num_known(draft, ids) + 1)
    ids, response = ids[:reach], response_ids[: max(0, reach - len(prompt_ids))]
    if not response:
        return []
    first = len(prompt_ids) - 1
    passes = zip(logits_of(target, ids, first), logits_of(draft, ids, first), strict=True)
    return overlaps(passes, prompt_ids, response, params, target.vocab_size, eos_token_ids)


def overlaps(
    passes: Iterable[tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows draft_vocab"]]],
    prompt_ids: Sequence[int],
    response: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return the acceptance probability at every token of a response, from chunks of logits."""
    history = None
    if params.needs_history:
        history = History.of(params, prompt_ids, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    alphas: list[float] = []
    for target_logits, draft_logits in passes:
        chunk = response[len(alphas) : len(alphas) + len(target_logits)]
        histories = [] if history is None else histories_before(history, chunk)
        target_rows = probs_of_rows(target_logits, params, histories)
        shared = fit_vocabulary(draft_logits.to(target_rows.device), vocab_size)
        draft_rows = probs_of_rows(shared, draft_params(params), histories)
        alphas += overlap(target_rows, draft_rows).tolist()
        if history is not None:
            for token in chunk:
                history.append(token)
    return alphas


def logits_of(
    model: LanguageModel, ids: Sequence[int], first: int, chunk: int | None = None
) -> Iterator[Float[Tensor, "rows vocab"]]:
    """Yield the logits of the rows from `first` to the last but one, chunk by chunk."""
    return (output.logits for output in _read_in_chunks(model, ids, first, chunk=chunk))


def _read_in_chunks(
    model: LanguageModel,
    ids: Sequence[int],
    first: int = 0,
    *,
    chunk: int | None = None,
    layers: tuple[int, ...] = (),
) -> Iterator[ModelOutput]:
    """Feed a text without its last token; yield the passes with rows from `first` on."""
    fed, chunk = list(ids[:-1]), chunk or CHUNK
    context = Context(model.store, fed)
    try:
        for start in range(0, len(fed), chunk):
            size = min(chunk, len(fed) - start)
            wanted = range(max(first - start, 0), size)
            batch = pack([context.span(size)], context.pending(size), wanted, model.device)
            output = model.forward(replace(batch, feature_layers=layers))
            context.commit(range(size))
            if wanted:
                yield output
    finally:
        context.close()


def num_known(model: LanguageModel, ids: Sequence[int]) -> int:
    """Return the number of ids before the first one outside the model's vocabulary."""
    return next((i for i, token in enumerate(ids) if token >= model.vocab_size), len(ids))


def overlap(one: Float[Tensor, "*rows vocab"], other: Float[Tensor, "*rows vocab"]) -> Tensor:
    """Return the sum of min(one, other): the acceptance probability of two distributions.

    The result is 0 where one is NaN: a draft whose probabilities are NaN drafts nothing.
    """
    return torch.minimum(one, other).sum(-1).nan_to_num(0.0)


def histories_before(history: History, tokens: Sequence[int]) -> list[RowHistory]:
    """Return the state of the logits processors before each of the tokens, in order."""
    return history.along(TokenTree.chain(len(tokens) - 1), tokens[:-1])


def probs_of_rows(
    logits: Float[Tensor, "rows vocab"], params: SamplingParams, histories: Sequence[RowHistory]
) -> Float[Tensor, "rows vocab"]:
    """Return the distribution of every row under the same sampling parameters."""
    rows = pack_params([params], logits.device, [0] * len(logits))
    return target_probs(logits, rows, histories)


def head_in(draft: str | Path, target: LanguageModel) -> Eagle3Head | None:
    """Read the EAGLE-3 head of a folder, in fp32; None if it holds another kind of draft."""
    folder = ModelFiles.find(draft).folder
    if not is_eagle3(read_object(folder / "config.json")):
        return None
    return read_eagle3_head(folder, num_target_layers=target.num_layers).to(target.device)


@torch.inference_mode()
def attached_acceptance(
    target: LanguageModel,
    head: Eagle3Head,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return alpha of the head's first drafted token at every token of a response.

    Row t of the head drafts token t + 2, so a prompt needs two tokens; of a shorter one the first
    token of the response is left out.
    """
    skipped = max(0, 2 - len(prompt_ids))
    prompt, response = [*prompt_ids, *response_ids[:skipped]], response_ids[skipped:]
    ids = [*prompt, *response][: target.max_context]
    response = response[: max(0, len(ids) - len(prompt))]
    if not response:
        return []
    target_logits, features = read_text(target, ids, head.config.feature_layers)
    drafted = head_logits(target, head, ids, features)
    first = len(prompt) - 1
    both = (torch.split(rows, CHUNK) for rows in (target_logits[first:], drafted[first - 1 : -1]))
    passes = zip(*both, strict=True)
    return overlaps(passes, prompt, response, params, target.vocab_size, eos_token_ids)


def read_text(
    target: LanguageModel, ids: Sequence[int], layers: tuple[int, ...]
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows layers width"]]:
    """Return the target's logits and features at all tokens of a text except the last."""
    target.store.keep_features(())  # an engine over the same target may have asked for some
    logits, features = [], []
    for output in _read_in_chunks(target, ids, layers=layers):
        assert output.features is not None  # layers are asked for
        logits.append(output.logits)
        features.append(output.features)
    return torch.cat(logits), torch.cat(features)


def head_logits(
    target: LanguageModel,
    head: Eagle3Head,
    ids: Sequence[int],
    features: Float[Tensor, "rows layers width"],
) -> Float[Tensor, "rows vocab"]:
    """Return the head's logits over the target's vocabulary at all rows except the last."""
    device, dtype = target.device, head.fc.weight.dtype
    following = torch.tensor(ids[1 : len(features) + 1], device=device)
    if head.embed_tokens is not None:
        embedded = head.embed_tokens(following)
    else:
        embedded = target.embed(following).to(dtype)
    positions = torch.arange(len(following), device=device)
    found = head.logits(head(embedded, head.fuse(features.to(dtype)), positions, _attend_causally))
    return over_target_vocabulary(found, head.target_ids.to(device), target.vocab_size)


def _attend_causally(
    queries: Float[Tensor, "rows heads dim"],
    keys: Float[Tensor, "rows kv_heads dim"],
    values: Float[Tensor, "rows kv_heads dim"],
) -> Float[Tensor, "rows heads dim"]:
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    )
    return attended.transpose(0, 1)


class Judge:
    """Judges drafts of one target under one set of sampling parameters.

    The target answers every prompt once, at the first judgement that needs it. Draws without a seed
    of the user's are keyed by prompt, so that a judgement is a function of its arguments.

    Args:
        engine: over the target, idle; its K must be at least that of the judge.
        prompts: that no draft was trained on, two or more.
        num_speculative_tokens: K, at least 1.
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
        """Decode the held-out prompts with a draft and return its figures."""
        steps: defaultdict[str, list[StepRecord]] = defaultdict(list)
        engine = alone(self.engine).with_draft(draft, self.num_speculative_tokens)
        engine.observers[:] = [EmittedRecords(lambda r: steps[r.request_id].append(r))]
        chosen = evenly_spaced(len(self.prompts), max_prompts)
        prompts = [self.prompts[index].prompt_ids for index in chosen]
        outputs = engine.generate(prompts, [self._build_params(index) for index in chosen])
        alphas = self._score(engine, draft, chosen)
        judged = [
            _build_judged(
                self.prompts[index].tag,
                output,
                steps[output.request_id],
                self.num_speculative_tokens,
                its_alphas,
            )
            for index, output, its_alphas in zip(chosen, outputs, alphas, strict=True)
        ]
        return judge_figures(
            name or (str(draft) if isinstance(draft, str | Path) else draft.method),
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
            [self._build_params(index) for index in missing],
        )
        for index, output in zip(missing, outputs, strict=True):
            answered = replace(self.prompts[index], response_ids=output.token_ids)
            self.prompts[index] = answered
        return [self.prompts[index].response_ids or () for index in chosen]

    def _score(
        self, engine: Engine, draft: str | Path | Drafter, chosen: Sequence[int]
    ) -> list[tuple[float, ...]]:
        scored = _choose_scorer(engine, draft)
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

    def _build_params(self, index: int) -> SamplingParams:
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


def _build_judged(
    tag: str,
    output: RequestOutput,
    records: Sequence[StepRecord],
    num_speculative_tokens: int,
    alphas: tuple[float, ...],
) -> JudgedPrompt:
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
"""From prompt, response, parameters and end-of-text ids: an acceptance probability per token."""


def _choose_scorer(engine: Engine, draft: str | Path | Drafter) -> Scorer | None:
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
    if drafter is not None and drafter.model is not None and not drafter.required_features:
        return None if drafter.model.store is engine.target.store else drafter.model
    return None


def evenly_spaced(num_prompts: int, most: int | None) -> list[int]:
    """Return at most `most` evenly spaced indices, to cover all sources of a file."""
    count = num_prompts if most is None else min(most, num_prompts)
    return [index * num_prompts // count for index in range(count)]


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
