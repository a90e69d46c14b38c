"""Collects evidence for `forerun diagnose` by running an engine: `probe_engine`.

    probe_engine(probed, prompts, params=None, config=EvidenceConfig()) -> Evidence

takes a live engine, a broken one too, and only observes it; `QUICK` is the configuration for
hundreds of engines in one process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, median

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from forerun.doctor.evidence import Evidence, Reading
from forerun.doctor.probe.config import EvidenceConfig
from forerun.doctor.probe.tape import (
    GreedyTally,
    ReferenceHead,
    SampledTally,
    TapedRequest,
    Transform,
    noise_width,
    reference_head,
    replay,
    run_taped,
)
from forerun.doctor.readers.trace import METHODS
from forerun.drafters.config import parse_drafter
from forerun.drafters.draft_model import DraftModel, SelfDraft
from forerun.drafters.foreign import OwnTokenDraft, TextDraft
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt
from forerun.engine.loading import load_pair_member
from forerun.errors import IncompatibleDraft, NotEnoughMemory
from forerun.measure.judge import draft_model_of, evenly_spaced
from forerun.measure.profile import ProfileCell, ProfileConfig, Quantity
from forerun.measure.rigs import PassRig, Stopwatch, measure, prefixes
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import DraftCard, identify, read_card
from forerun.models.tokenizers import check_vocabularies
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import wilson_interval
from forerun.theory.record import StepRecord


def add_files(evidence: Evidence, target: Path, draft: Path, *, is_foreign: bool) -> None:
    """Add facts about two model folders; with `is_foreign` their vocabularies may differ.

    Raises:
        InvalidModel: files are missing or damaged.
    """
    files = ModelFiles.open(draft)
    positions = files.sizes.max_positions
    evidence.add("draft_max_context", positions, f"{draft.name}: positions of the configuration")
    if is_foreign:
        words = "the drafter matches the tokens of both vocabularies"
        evidence.add("vocabularies_differ", False, words)
    else:
        _add_vocabularies(evidence, target, draft)
    card = read_card(draft)
    if card is not None:
        _add_card(evidence, card, target, is_foreign=is_foreign)
    elif files.template_hash == ModelFiles.find(target).template_hash:
        evidence.add("template_differs", False, "both folders have one chat template")
    add_weights(evidence, files.weight_files)


def add_head_files(evidence: Evidence, target: Path, head: Path) -> None:
    """Add facts about the folders of a target and of a head on its hidden states."""
    card = read_card(head)
    if card is not None:
        _add_card(evidence, card, target, is_foreign=False)
    add_weights(evidence, sorted(head.glob("*.safetensors")))


def _add_vocabularies(evidence: Evidence, target: Path, draft: Path) -> None:
    """Add whether both tokenizers map every id to the same text."""
    try:
        check_vocabularies(ModelFiles.find(target).tokenizer, ModelFiles.find(draft).tokenizer)
    except IncompatibleDraft as error:
        evidence.add("vocabularies_differ", True, str(error))
    else:
        evidence.add("vocabularies_differ", False, "both folders' tokenizers compared id by id")


def _add_card(evidence: Evidence, card: DraftCard, target: Path, *, is_foreign: bool) -> None:
    changed = card.made_for.differences(identify(target))
    words = f"the card names {card.target}; not the same: {', '.join(changed) or 'nothing'}"
    evidence.add("draft_of_other_target", "weights" in changed, words)
    evidence.add("template_differs", "chat template" in changed, words)
    if "tokenizer" in changed and not is_foreign:
        evidence.add("vocabularies_differ", True, words)


def add_card_ratio(evidence: Evidence, draft: Path, found: Sequence[tuple[float, float]]) -> None:
    """Add the measured acceptance probability relative to the one on the draft's card."""
    card = read_card(draft)
    if card is None:
        return
    for temperature, alpha in found:
        stated = next((f for f in card.after if math.isclose(f.temperature, temperature)), None)
        expected = None if stated is None else stated.acceptance_probability
        if expected is not None and expected.estimate > 0.0:
            words = f"{alpha:.3f} found by replay, {expected.estimate:.3f} on the card"
            source = f"{words}, at temperature {temperature:g}"
            evidence.add("card_ratio", alpha / expected.estimate, source)
            return


def evidence_of_misfit(error: IncompatibleDraft) -> Evidence:
    """Return the facts about a pair with different tokenizers, which must not be run."""
    evidence = Evidence(readings=[Reading(source="forerun diagnose --probe", kinds={"probe"})])
    evidence.add("vocabularies_differ", True, str(error))
    return evidence


MIN_SIZE = 64
"""Least rows and columns of a matrix that is examined."""
MAX_Z = 3.0
POWER_STEPS = 20
"""Power iterations: enough to find the largest singular vector if its value stands out."""


def add_weights(evidence: Evidence, files: Sequence[Path]) -> None:
    """Add whether matrices are constant or not finite, and the share that appears untrained."""
    wrong: list[str] = []
    drawn: list[str] = []
    num_large = 0
    for name, matrix in matrices(files):
        if not bool(matrix.isfinite().all()) or bool((matrix == matrix[0, 0]).all()):
            wrong.append(name)
        elif min(matrix.shape) >= MIN_SIZE:
            num_large += 1
            if looks_drawn(matrix):
                drawn.append(name)
    if wrong:
        words = f"{len(wrong)} matrices are not finite or constant: {', '.join(wrong[:3])}"
        evidence.add("weights_incomplete", True, words)
    if num_large:
        words = f"{len(drawn)} of {num_large} matrices: {', '.join(drawn[:3]) or 'none'}"
        evidence.add("drawn_share", len(drawn) / num_large, words)


def matrices(files: Sequence[Path]) -> Iterator[tuple[str, Float[Tensor, "rows columns"]]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                if tensor.ndim == 2 and tensor.is_floating_point():
                    yield name, tensor.float()


def looks_drawn(matrix: Float[Tensor, "rows columns"]) -> bool:
    """Whether a matrix is consistent with independent entries from one distribution (untrained)."""
    centred = matrix - matrix.mean()
    squares = centred.square()
    scatter = max(abs(_dispersion(squares)), abs(_dispersion(squares.T)))
    return scatter < MAX_Z and _edge_excess(centred) < MAX_Z


def _dispersion(squares: Float[Tensor, "rows columns"]) -> float:
    """Deviation of the row sums' variance from independent entries, in standard errors."""
    num_rows, num_columns = squares.shape
    expected = squares.var() / num_columns
    ratio = float(squares.mean(1).var() / expected)
    return (ratio - 1.0) / math.sqrt(2.0 / (num_rows - 1))


def _edge_excess(centred: Float[Tensor, "rows columns"]) -> float:
    """Standardised excess of the largest singular value over that of independent entries."""
    long, short = max(centred.shape), min(centred.shape)
    generator = torch.Generator().manual_seed(0)
    vector = torch.empty(centred.shape[1]).normal_(generator=generator)
    for _ in range(POWER_STEPS):
        vector = centred.T @ (centred @ (vector / vector.norm()))
    sides = math.sqrt(long - 1), math.sqrt(short)
    centre = sum(sides) ** 2
    scale: float = sum(sides) * (1.0 / sides[0] + 1.0 / sides[1]) ** (1.0 / 3.0)
    square = float(vector.norm() / centred.var())
    return (square - centre) / scale


CONTEXT = 64
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33)
"""Rows of timed passes: powers of two, and one more than these, where kernels change tiles."""
MIN_STEPS = 20
SERIAL = 0.85
"""Share of a plain step that a further row costs where rows are not verified together."""
PARALLEL = 0.4


def add_pass_costs(
    evidence: Evidence,
    target: LanguageModel,
    draft: LanguageModel | None,
    num_speculative_tokens: int,
    config: ProfileConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    context = config.contexts[0]
    target_cells = [ProfileCell(Quantity.TARGET_PASS, 1, context, rows) for rows in config.rows]
    rigs = [_build_rig(target, target_cells, context, clock)]
    drafting = ProfileCell(Quantity.DRAFT_CHAIN, 1, context, num_speculative_tokens)
    if draft is not None and num_speculative_tokens:
        rigs.append(_build_rig(draft, [drafting], context, clock))
    # The least of all times: a probe is short, and what else a machine does only adds.
    samples = measure(rigs, config, clock, lambda rounds, error: None).samples
    least_s = {cell: min(chain.from_iterable(visits)) for cell, visits in samples.items()}
    plain_s = least_s[target_cells[0]]
    costs = [least_s[cell] / plain_s for cell in target_cells]
    words = f"passes over one sequence of {context} tokens; a plain pass takes {plain_s:.3g} s"
    evidence.add("verify_rows", list(config.rows), words)
    evidence.add("verify_costs", costs, words)
    if len(costs) > 1:
        points = [*zip(config.rows, costs, strict=True)]
        slope = median((v - u) / (n - m) for (m, u), (n, v) in combinations(points, 2))
        answer = True if slope > SERIAL else False if slope < PARALLEL else None
        evidence.add("verify_serial", answer, f"a further row costs {slope:.2f} of a plain step")
    if drafting in least_s:
        token_s = least_s[drafting] / num_speculative_tokens
        words = f"a chain of {num_speculative_tokens} by itself / {num_speculative_tokens}"
        evidence.add("draft_token_s", token_s, words)


def _build_rig(
    model: LanguageModel, cells: list[ProfileCell], context: int, clock: Callable[[], float]
) -> PassRig:
    stopwatch = Stopwatch(clock, model.device)
    return PassRig(model, cells, prefixes(model, [context])[context], stopwatch)


def pass_config(max_rows: int, budget_s: float, room: int) -> ProfileConfig | None:
    """Return the settings of pass timing; None if the context has no room for two pass widths."""
    context = min(CONTEXT, room // 2)
    rows = tuple(width for width in WIDTHS if width <= min(max_rows, room - context))
    if context < 1 or len(rows) < 2 or budget_s <= 0.0:
        return None
    return ProfileConfig(
        rows=rows,
        batches=(1,),
        contexts=(context,),
        drafted=(1,),
        max_pass_rows=rows[-1] + 1,
        min_rounds=3,
        budget_s=budget_s,
    )


def add_step_costs(evidence: Evidence, plain: Iterable[TapedRequest]) -> None:
    steps = {
        step.record.cycle_id: step.record
        for request in plain
        for step in request.steps[2:]
        if not step.record.num_prefill_rows
    }
    seconds = [r.draft_s + r.verify_s + r.other_s for r in steps.values() if r.batch_rows == 1]
    if len(seconds) >= MIN_STEPS:
        words = f"median of {len(seconds)} plain steps of one sequence"
        evidence.add("plain_step_s", median(seconds), words)


def drafting_for_itself(engine: Engine) -> Engine | None:
    """Return an engine that drafts with all layers of the target; None if they are not separable.

    They share the target's KV, so this exercises verification and the target's cache, not a draft
    model's; an engine with the target loaded twice exercises both.
    """
    target = engine.target
    whole = target.first_layers(target.num_layers)
    if whole is None or not engine.config.num_speculative_tokens:
        return None
    return engine.with_draft(SelfDraft(whole, vocab_size=target.vocab_size))


def add_self_draft(
    evidence: Evidence,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    num_tokens: int,
) -> None:
    """Add the share of accepted tokens where the target is its own draft, half of it greedy."""
    short = [replace(asked, max_tokens=num_tokens, ignore_eos=True) for asked in params]
    greedy = [replace(asked, temperature=0.0) for asked in short]
    asked = [greedy[i] if i % 2 else short[i] for i in range(len(short))]
    outputs = engine.generate([list(prompt) for prompt in prompts], asked)
    counts = [output.completions[0].acceptance for output in outputs]
    drafted, accepted = sum(c.num_drafted for c in counts), sum(c.num_accepted for c in counts)
    if drafted:
        words = f"{accepted} of {drafted} tokens accepted with the target as its own draft"
        interval = wilson_interval(accepted, drafted)
        evidence.add("self_draft_rate", accepted / drafted, words, interval)


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


def probe_engine(
    probed: ProbedEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    config: EvidenceConfig | None = None,
    notify: Notify = lambda what, share: None,
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
    evidence = Evidence(readings=[Reading(source="forerun diagnose --probe", kinds={"probe"})])
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


logger = logging.getLogger("forerun.doctor.probe")


def load_probed(target: str, draft: str, config: EngineConfig) -> ProbedEngine:
    """Load target and draft, and the target once more as its own draft if memory suffices."""
    engine = Engine.load(target, draft, config=config)
    itself: Engine | None = None
    try:
        copy, _ = load_pair_member(target, dtype="auto", device="auto", config=config)
        itself = engine.with_draft(DraftModel(copy, engine.target.vocab_size))
    except NotEnoughMemory as error:
        logger.warning("the target drafts for itself with its own KV only: %s", error)
    return ProbedEngine(
        engine=engine,
        self_drafting=itself,
        target_folder=ModelFiles.find(target).folder,
        draft_folder=None if parse_drafter(draft) else ModelFiles.find(draft).folder,
    )
