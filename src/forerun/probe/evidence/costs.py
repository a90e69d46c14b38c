"""Measures facts about costs of passes and steps, and about the target as its own draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from statistics import median

from forerun.diagnose.evidence import Evidence
from forerun.drafters.draft_model import SelfDraft
from forerun.engine.engine import Engine
from forerun.models.base import LanguageModel, LayeredModel
from forerun.probe.config import ProbeConfig, ProfileCell, Quantity
from forerun.probe.evidence.tape import TapedRequest
from forerun.probe.rigs import PassRig, prefixes
from forerun.probe.rounds import Stopwatch, measure
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import wilson_interval

__all__ = [
    "add_pass_costs",
    "add_self_draft",
    "add_step_costs",
    "drafting_for_itself",
    "pass_config",
]

CONTEXT = 64
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33)
"""Rows of timed passes: powers of two and one more, where kernels change tiles."""
MIN_STEPS = 20
SERIAL = 0.7
"""Share of a plain step that a further row costs where rows are not verified together."""
PARALLEL = 0.4


def add_pass_costs(
    evidence: Evidence,
    target: LanguageModel,
    draft: LanguageModel | None,
    num_speculative_tokens: int,
    config: ProbeConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Add v(n) of the target over one sequence, and the time of one drafted token.

    Args:
        evidence: takes the facts.
        target: with a free slot and room for the widest pass.
        draft: likewise; None where there is no model behind the drafter.
        num_speculative_tokens: length of the timed chain.
        config: rows, context and time.
        clock: seconds.
    """
    context = config.contexts[0]
    target_cells = [
        ProfileCell(quantity=Quantity.TARGET_PASS, batch=1, context=context, size=rows)
        for rows in config.rows
    ]
    rigs = [rig_of(target, target_cells, context, clock)]
    drafting = ProfileCell(
        quantity=Quantity.DRAFT_CHAIN, batch=1, context=context, size=num_speculative_tokens
    )
    if draft is not None and num_speculative_tokens:
        rigs.append(rig_of(draft, [drafting], context, clock))
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


def rig_of(
    model: LanguageModel, cells: list[ProfileCell], context: int, clock: Callable[[], float]
) -> PassRig:
    """Return the measurement object for the cells of one model at one context."""
    stopwatch = Stopwatch(clock, model.device)
    return PassRig(model, cells, prefixes(model, [context])[context], stopwatch)


def pass_config(max_rows: int, budget_s: float, room: int) -> ProbeConfig | None:
    """Return the settings of pass timing; None if the context has no room for two pass widths."""
    context = min(CONTEXT, room // 2)
    rows = tuple(width for width in WIDTHS if width <= min(max_rows, room - context))
    if context < 1 or len(rows) < 2 or budget_s <= 0.0:
        return None
    return ProbeConfig(
        rows=rows,
        batches=(1,),
        contexts=(context,),
        drafted=(1,),
        max_pass_rows=rows[-1] + 1,
        min_rounds=3,
        budget_s=budget_s,
    )


def add_step_costs(evidence: Evidence, plain: Iterable[TapedRequest]) -> None:
    """Add the time of a plain step, from the third step of each request on."""
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
