"""Facts about both models: their files, untrained weights, and the costs of passes and steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from statistics import median

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from forerun.diagnose.evidence import Evidence, Reading
from forerun.drafters.draft_model import SelfDraft
from forerun.engine.engine import Engine
from forerun.errors import IncompatibleDraft
from forerun.measure.profile.config import ProfileCell, ProfileConfig, Quantity
from forerun.measure.profile.rigs import PassRig, prefixes
from forerun.measure.profile.rounds import Stopwatch, measure
from forerun.models.base import LanguageModel, LayeredModel
from forerun.models.checkpoint import read_checkpoint, template_hash
from forerun.models.draft_card import DraftCard, identify, read_card
from forerun.models.load import load_tokenizer, read_config
from forerun.models.tokenizers import check_vocabularies
from forerun.probe.tape import TapedRequest
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import wilson_interval


def add_files(evidence: Evidence, target: Path, draft: Path, *, is_foreign: bool) -> None:
    """Add facts about two model folders; with `is_foreign` their vocabularies may differ.

    Raises:
        InvalidModel: files are missing or damaged.
    """
    positions = read_config(read_checkpoint(draft))[1].max_positions
    evidence.add("draft_max_context", positions, f"{draft.name}: positions of the configuration")
    if is_foreign:
        words = "the drafter matches the tokens of both vocabularies"
        evidence.add("vocabularies_differ", False, words)
    else:
        _add_vocabularies(evidence, target, draft)
    card = read_card(draft)
    if card is not None:
        _add_card(evidence, card, target, is_foreign=is_foreign)
    elif template_hash(draft) == template_hash(target):
        evidence.add("template_differs", False, "both folders have one chat template")
    add_weights(evidence, read_checkpoint(draft).weight_files)


def add_head_files(evidence: Evidence, target: Path, head: Path) -> None:
    """Add facts about the folders of a target and of a head on its hidden states."""
    card = read_card(head)
    if card is not None:
        _add_card(evidence, card, target, is_foreign=False)
    add_weights(evidence, sorted(head.glob("*.safetensors")))


def _add_vocabularies(evidence: Evidence, target: Path, draft: Path) -> None:
    """Add whether both tokenizers map every id to the same text."""
    try:
        check_vocabularies(load_tokenizer(target), load_tokenizer(draft))
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
    evidence = Evidence(readings=[Reading(source="forerun probe", kinds={"probe"})])
    evidence.add("vocabularies_differ", True, str(error))
    return evidence


MIN_SIZE = 64
"""Least rows and columns of a matrix that is examined."""
MAX_Z = 3.0
POWER_STEPS = 20
"""Where a direction stands out, this many passes find it; where none does, any will do."""


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
"""Rows of timed passes: powers of two and one more, where kernels change tiles."""
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
    rigs = [_rig_of(target, target_cells, context, clock)]
    drafting = ProfileCell(Quantity.DRAFT_CHAIN, 1, context, num_speculative_tokens)
    if draft is not None and num_speculative_tokens:
        rigs.append(_rig_of(draft, [drafting], context, clock))
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


def _rig_of(
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
    if not isinstance(target, LayeredModel) or not engine.config.num_speculative_tokens:
        return None
    whole = target.first_layers(target.num_layers)
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
