"""The target as its own draft: what it proposes is its own law, so nothing may be rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.diagnose.evidence import Evidence
from forerun.drafters.self_draft import SelfDraft
from forerun.engine.engine import Engine
from forerun.models.base import LayeredModel
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import wilson_interval

__all__ = ["add_self_draft", "drafting_for_itself"]


def drafting_for_itself(engine: Engine) -> Engine | None:
    """The engine with all of the target's own layers as drafter; None where it has no layers.

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
    """The share of drafted tokens that is accepted, half of the prompts greedily.

    Args:
        evidence: takes the fact.
        engine: whose draft is its target.
        prompts: token ids.
        params: one per prompt.
        num_tokens: most output tokens of each.
    """
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
