"""Collects evidence for `forerun diagnose` by running an engine: `probe_engine`.

    probe_engine(probed, prompts, params=None, config=EvidenceConfig(), notify=silent) -> Evidence

takes a live engine, a broken one too, and only observes it; `QUICK` is the configuration for
hundreds of engines in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from forerun.diagnose.evidence import Evidence, Reading
from forerun.diagnose.readers.trace import METHODS
from forerun.drafters.config import parse_drafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.foreign import OwnTokenDraft, TextDraft
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt
from forerun.engine.loading import load_pair_member
from forerun.errors import NotEnoughMemory
from forerun.measure.judge import draft_model_of, evenly_spaced
from forerun.models.base import LanguageModel
from forerun.models.load import model_folder
from forerun.probe.config import EvidenceConfig
from forerun.probe.models import (
    add_card_ratio,
    add_files,
    add_head_files,
    add_pass_costs,
    add_self_draft,
    add_step_costs,
    drafting_for_itself,
    pass_config,
)
from forerun.probe.tallies import GreedyTally, SampledTally, noise_width
from forerun.probe.tape import (
    ReferenceHead,
    TapedRequest,
    Transform,
    reference_head,
    replay,
    run_taped,
)
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord

Notify = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbedEngine:
    """The engine, models and settings of a probe.

    Attributes:
        draft: the model behind the drafter, for replays; None takes the drafter's own where it is a
            `DraftModel`. Behind a wrapped drafter give the model as it is served.
        self_drafting: an engine built like this one but with the target, loaded once more, as its
            draft; None drafts with the target's own layers in the target's own KV.
    """

    engine: Engine
    draft: LanguageModel | None = None
    self_drafting: Engine | None = None
    target_folder: Path | None = None
    draft_folder: Path | None = None

    @property
    def draft_model(self) -> LanguageModel | None:
        """The draft model; None if the drafter has none."""
        return self.draft or draft_model_of(self.engine)

    @property
    def reads_features(self) -> bool:
        drafter = self.engine.drafter
        return drafter is not None and bool(drafter.required_features)

    @cached_property
    def reference(self) -> LanguageModel | ReferenceHead | None:
        if self.reads_features and self.draft is None and self.draft_folder is not None:
            return reference_head(self.draft_folder, self.engine.target)
        return self.draft_model


def silent(what: str, share: float) -> None:
    """Ignore a progress report."""


def probe_engine(
    probed: ProbedEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    config: EvidenceConfig | None = None,
    notify: Notify = silent,
) -> Evidence:
    """Collect all evidence that can be measured with the loaded target and draft.

    Args:
        prompts: texts or token ids, of the kind that is served; some are used, evenly from all.
        params: as deployed. The sampled half runs at their temperature, at 1 where that is 0; their
            lengths, seeds and number of samples are the probe's own.

    Returns:
        Evidence with facts for `forerun diagnose`, each with its counts as source.

    Raises:
        InvalidRequest: there is no prompt, or one does not fit.
    """
    config = config or EvidenceConfig()
    evidence = Evidence(readings=[Reading(source="forerun probe", kinds={"probe"})])
    evidence.add("target_recurrent", False, "it keeps its context in rows, which can be cut")
    ids = chosen(probed.engine, prompts, config)
    asked = params_of(params or SamplingParams(), len(ids), config)
    notify("greedy text", 0.0)
    greedy, plain = _probe_greedy(probed, ids, asked)
    greedy.add_facts(evidence)
    notify("sampled text", 0.4)
    sampled = _probe_sampled(probed, ids, asked, config)
    sampled.add_facts(evidence)
    served = params is None or params.temperature > 0.0
    _add_acceptance(evidence, sampled.records if served else greedy.records, probed.engine)
    _add_both(evidence, greedy, sampled, reads_features=probed.reads_features)
    if probed.target_folder is not None and probed.draft_folder is not None:
        folders = probed.target_folder, probed.draft_folder
        if probed.reads_features:
            add_head_files(evidence, *folders)
        else:
            is_foreign = isinstance(probed.engine.drafter, OwnTokenDraft | TextDraft)
            add_files(evidence, *folders, is_foreign=is_foreign)
        found = ((asked[0].temperature, sampled.alphas), (0.0, greedy.alphas))
        means = [(temperature, fmean(alphas)) for temperature, alphas in found if alphas]
        add_card_ratio(evidence, probed.draft_folder, means)
    notify("the target as its own draft", 0.8)
    itself = probed.self_drafting or drafting_for_itself(probed.engine)
    if itself is not None and (num := config.num_self_prompts):
        add_self_draft(evidence, itself, ids[:num], asked[:num], config.num_self_tokens)
    notify("costs of passes", 0.9)
    if config.costs_s:
        add_step_costs(evidence, plain)
        _probe_costs(evidence, probed, config)
    return evidence


def _add_both(
    evidence: Evidence, greedy: GreedyTally, sampled: SampledTally, *, reads_features: bool
) -> None:
    use_probs = sampled.state.onsets and evidence.flag("draft_probs_differ") is False
    state = (sampled if use_probs else greedy).state
    state.add_facts(evidence, reads_features=reads_features)
    high, low = greedy.hits, sampled.hits
    words = f"{high.words} accepted at temperature 0, {low.words} above"
    evidence.add("acceptance_falls_with_temperature", low.is_below(high), words)


def _add_acceptance(evidence: Evidence, records: Sequence[StepRecord], engine: Engine) -> None:
    """Add what was drafted and accepted at the served temperature, by position."""
    drafting = [record for record in records if record.num_drafted]
    counts = AcceptanceCounts.from_records(drafting)
    if not counts.num_steps:
        return
    source = f"{counts.num_steps} drafting steps of the probe"
    for name, value in (
        ("num_drafts", counts.num_steps),
        ("num_drafted", counts.num_drafted),
        ("num_accepted", counts.num_accepted),
        ("accepted_per_position", counts.accepted_per_position),
        ("drafted_per_position", counts.drafted_per_position),
        ("k", min(engine.config.num_speculative_tokens, counts.max_depth)),
        ("method", METHODS.get(drafting[0].method, "other")),
    ):
        evidence.add(name, value, source)


def chosen(
    engine: Engine, prompts: Sequence[Prompt], config: EvidenceConfig
) -> list[tuple[int, ...]]:
    """Return the token ids of some prompts, selected at equal distances."""
    params = SamplingParams(max_tokens=config.num_tokens)
    indices = evenly_spaced(len(prompts), config.num_prompts)
    return [tuple(engine.intake.check(prompts[index], params)) for index in indices]


def params_of(params: SamplingParams, num: int, config: EvidenceConfig) -> list[SamplingParams]:
    """Return the parameters of the sampled requests, each with its own seed.

    A request without a seed goes through block verification, as it does when it is served; the seed
    given here only makes the probe repeatable.
    """
    temperature = params.temperature or 1.0
    verification = params.verification
    if params.seed is None and verification == "auto":
        verification = "block"
    most = config.num_tokens
    return [
        replace(
            params,
            temperature=temperature,
            seed=config.seed + index,
            verification=verification,
            max_tokens=most,
            min_tokens=min(params.min_tokens, most),
            n=1,
            logprobs=None,
        )
        for index in range(num)
    ]


def groups(engine: Engine, num: int) -> Iterator[range]:
    """Split prompts into groups that run together, which bounds the memory for distributions."""
    size = engine.config.max_batch
    for start in range(0, num, size):
        yield range(start, min(start + size, num))


def _probe_greedy(
    probed: ProbedEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[GreedyTally, list[TapedRequest]]:
    """Compare greedy text with plain decoding and with replays."""
    engine, draft = probed.engine, probed.reference
    plain = engine.with_draft(None)
    greedy = [replace(asked, temperature=0.0) for asked in params]
    tally: GreedyTally | None = None
    plain_steps: list[TapedRequest] = []
    for group in groups(engine, len(prompts)):
        some, asked = [prompts[i] for i in group], [greedy[i] for i in group]
        alone = run_taped(plain, some, asked)
        plain_steps += alone
        for request, other in zip(run_taped(engine, some, asked), alone, strict=True):
            replayed = replay(request, engine.target, draft, engine.eos_token_ids)
            if tally is None:
                rows = engine.config.num_speculative_tokens + 1
                noise = noise_width(engine.target, request, replayed, rows)
                tally = GreedyTally(noise, first_only=probed.reads_features)
            tally.add(request, replayed, other.token_ids)
    assert tally is not None
    return tally, plain_steps


def _probe_sampled(
    probed: ProbedEngine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: EvidenceConfig,
) -> SampledTally:
    """Compare sampled text with the distributions that it should be drawn from."""
    engine, draft = probed.engine, probed.reference
    tally = SampledTally(Transform(config.seed))
    for group in groups(engine, len(prompts)):
        some, asked = [prompts[i] for i in group], [params[i] for i in group]
        taped = run_taped(engine, some, asked)
        if probed.reads_features:  # once more, with prefixes from the cache
            again = [replace(one, seed=(one.seed or 0) + len(prompts)) for one in asked]
            taped += run_taped(engine, some, again)
        for request in taped:
            tally.add(request, replay(request, engine.target, draft, engine.eos_token_ids))
    return tally


def _probe_costs(evidence: Evidence, probed: ProbedEngine, config: EvidenceConfig) -> None:
    """Measure the time of passes of target and draft, up to K + 1 rows where contexts allow it."""
    engine, draft = probed.engine, probed.draft_model
    k = engine.config.num_speculative_tokens
    room = engine.max_context if draft is None else min(engine.max_context, draft.max_context)
    timed = pass_config(min(config.max_rows, k + 1), config.costs_s, room)
    if timed is not None:
        add_pass_costs(evidence, engine.target, draft, k, timed)


logger = logging.getLogger("forerun.probe")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairNames:
    """Names of the models to load, in the form that `Engine.load` accepts."""

    target: str
    draft: str
    dtype: str = "auto"
    device: str = "auto"

    @property
    def folders(self) -> tuple[Path | None, Path | None]:
        draft = None if parse_drafter(self.draft) else model_folder(self.draft)
        return model_folder(self.target), draft


def load_probed(names: PairNames, config: EngineConfig, *, twice: bool) -> ProbedEngine:
    """Load target and draft, and load the target again as its own draft."""
    engine = Engine.load(
        names.target, names.draft, dtype=names.dtype, device=names.device, config=config
    )
    itself: Engine | None = None
    if twice:
        try:
            copy, _ = load_pair_member(
                names.target, dtype=names.dtype, device=names.device, config=config
            )
            itself = engine.with_draft(DraftModel(copy, engine.target.vocab_size))
        except NotEnoughMemory as error:
            logger.warning("the target drafts for itself with its own KV only: %s", error)
    target, draft = names.folders
    return ProbedEngine(
        engine=engine, self_drafting=itself, target_folder=target, draft_folder=draft
    )
