"""Derives the facts that need no attribution from the facts read, in order of dependence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.diagnose.evidence import Evidence, Fact, Value
from forerun.diagnose.rates import add_costs, add_rates, add_ratios

MIN_DRAFTS = 30
"""Fewer drafts say nothing about what is never accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A figure and the thresholds above or below which an observation about it is true.

    Attributes:
        yes: on this side of it the answer is yes.
        no: on this side, no; between the two there is no answer.
    """

    name: str
    figure: str
    yes: float
    no: float

    def answer(self, fact: Fact) -> bool | None:
        """Return the observation if value and interval are clear of the thresholds; else None."""
        low = high = float(fact.value)  # type: ignore[arg-type]  # a number by its kind
        if fact.interval is not None:
            low, high = fact.interval.low, fact.interval.high
        if self.yes > self.no:
            return True if low >= self.yes else False if high <= self.no else None
        return True if high <= self.yes else False if low >= self.no else None


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(name="acceptance_low", figure="alpha_1", yes=0.45, no=0.6),
    Threshold(name="acceptance_fine", figure="alpha_1", yes=0.7, no=0.5),
    Threshold(name="acceptance_dropped", figure="reference_ratio", yes=0.85, no=0.95),
    Threshold(name="acceptance_above_expected", figure="calibration", yes=1.04, no=1.02),
    Threshold(name="slower_than_plain", figure="speedup", yes=0.97, no=1.0),
    Threshold(name="slowed_down", figure="slowdown", yes=1.08, no=1.03),
    Threshold(name="tools_disagree", figure="client_ratio", yes=1.3, no=1.1),
    Threshold(name="slower_with_context", figure="context_growth", yes=1.3, no=1.15),
    Threshold(name="graphs_off", figure="graph_hit_share", yes=0.5, no=0.9),
    Threshold(name="ttft_up", figure="ttft_ratio", yes=1.15, no=1.05),
    Threshold(name="cache_hits_lower", figure="prefix_hit_loss", yes=0.03, no=0.01),
    Threshold(name="memory_pressure", figure="num_preemptions", yes=1.0, no=-1.0),
    Threshold(name="output_repetitive", figure="distinct_4gram_share", yes=0.4, no=0.6),
    Threshold(name="replay_accepts_more", figure="replay_ratio", yes=0.85, no=0.95),
    Threshold(name="distribution_differs", figure="pit_p_value", yes=0.001, no=0.05),
    Threshold(name="output_differs_at_ties", figure="greedy_margin", yes=1.0, no=4.0),
)


def _add_observations(evidence: Evidence) -> None:
    """Add the yes-or-no observations that follow from figures, unless a source reports them."""
    copies = "ngram" in evidence.words("method")
    for threshold in THRESHOLDS:
        if copies and threshold.figure == "alpha_1":
            continue  # how often a text repeats itself is neither high nor low
        fact = evidence.facts.get(threshold.figure)
        if fact is not None and threshold.name not in evidence:
            evidence.note(threshold.name, threshold.answer(fact), f"{fact.name} {fact.value:.3g}")
    _add_unplaced_rate(evidence)
    _add_nothing_accepted(evidence)
    gain = evidence.number("speedup")
    if gain is not None and "no_gain" not in evidence:
        least, most = NO_GAIN
        evidence.note("no_gain", least <= gain <= most, f"speedup {gain:.3f}")
    _add_not_drafted(evidence)
    _add_comparisons(evidence)


def _add_unplaced_rate(evidence: Evidence) -> None:
    """Add whether acceptance is high or low, from a draft acceptance rate at an unknown K."""
    fact, rate = (
        evidence.facts.get("draft_acceptance_rate"),
        evidence.number("draft_acceptance_rate"),
    )
    if fact is None or rate is None or "alpha_1" in evidence:
        return
    if rate >= 0.7 and "acceptance_fine" not in evidence:
        evidence.note("acceptance_fine", True, f"{rate:.0%} of the drafted tokens")
    if rate <= 0.2 and "acceptance_low" not in evidence:
        evidence.note("acceptance_low", True, f"{rate:.0%} of the drafted tokens, K not known")


def _add_nothing_accepted(evidence: Evidence) -> None:
    """Add whether almost nothing is accepted, if enough tokens were drafted to decide it."""
    fact, drafts = evidence.facts.get("draft_acceptance_rate"), evidence.number("num_drafts")
    drafted, tau = evidence.number("num_drafted"), evidence.number("acceptance_length")
    if "acceptance_zero" in evidence:
        return
    if fact is None:
        if tau is not None:
            answer = True if tau <= 1.02 else False if tau >= 1.15 else None
            evidence.note("acceptance_zero", answer, f"tau {tau:.2f}")
        return
    seen = drafts if drafts is not None else drafted
    rate = evidence.number("draft_acceptance_rate") or 0.0
    first = evidence.number("alpha_1") or 0.0
    if rate > 0.05 or first > 0.15:
        evidence.note("acceptance_zero", False, f"{rate:.1%} of the drafted tokens")
    elif rate <= 0.02 and first <= 0.1 and (seen is None or seen >= MIN_DRAFTS):
        evidence.note("acceptance_zero", True, f"{rate:.1%} of the drafted tokens")


NO_GAIN = (0.97, 1.05)
"""Speedups that are neither a gain nor a loss: below 0.97 decoding is `slower_than_plain`, and the
timing of a short run does not show a gain of less than 5%."""


def _add_not_drafted(evidence: Evidence) -> None:
    drafts, steps = evidence.number("num_drafts"), evidence.number("num_steps")
    drafted = evidence.number("num_drafted")
    if "drafts_absent" in evidence:
        return
    if drafts or drafted:
        evidence.note("drafts_absent", False, "drafted tokens are counted")
    elif (drafts == 0 or drafted == 0) and (steps is None or steps >= MIN_DRAFTS):
        evidence.note("drafts_absent", True, "no drafted token is counted")
    elif "acceptance_length" in evidence or "draft_acceptance_rate" in evidence:
        evidence.note("drafts_absent", False, "acceptance was measured")


def _add_comparisons(evidence: Evidence) -> None:
    """Add observations that compare two figures, such as drafting time and step time."""
    plain, idle = evidence.number("tokens_per_s_plain"), evidence.number("tokens_per_s_k0")
    if plain and idle and "slow_without_drafts" not in evidence:
        evidence.note("slow_without_drafts", idle < 0.97 * plain, f"{idle:.3g} of {plain:.3g}/s")
    cycle, draft = evidence.number("cycle_s"), evidence.number("draft_s")
    if cycle and draft is not None and "draft_share_high" not in evidence:
        evidence.note("draft_share_high", draft / cycle > 0.4, f"{draft / cycle:.0%} of a step")
    sizes = evidence.number("target_vocab_size"), evidence.number("draft_vocab_size")
    if sizes[0] and sizes[1] and "vocabularies_differ" not in evidence:
        # Padding to a multiple moves sizes by a few percent; maps that differ, by more.
        apart = abs(sizes[0] - sizes[1]) / max(sizes[0], sizes[1]) > 0.05
        evidence.note(
            "vocabularies_differ", apart or None, f"{sizes[0]:g} and {sizes[1]:g} entries"
        )
    ratio, tau = evidence.number("client_ratio"), evidence.number("acceptance_length")
    if ratio and tau and tau > 1.2 and ratio > 1.1:
        evidence.note(
            "client_ratio_is_tau", abs(ratio / tau - 1) < 0.2, f"{ratio:.2f}, tau {tau:.2f}"
        )
    prompt, output = evidence.number("num_prompt_tokens"), evidence.number("num_output_tokens")
    if prompt and output and "outputs_short" not in evidence:
        evidence.note("outputs_short", output < 64 and prompt > 8 * output, f"{output:g} tokens")


BILLIONS = re.compile(r"(?<![a-zA-Z0-9.])(\d{1,4}(?:\.\d{1,2})?)[bB](?![a-zA-Z0-9])")
MILLIONS = re.compile(r"(?<![a-zA-Z0-9.])(\d{1,4})[mM](?![a-zA-Z0-9])")
ACTIVE = re.compile(r"(?<![a-zA-Z0-9])A(\d{1,3}(?:\.\d{1,2})?)B(?![a-zA-Z0-9])")
EXPERTS = re.compile(r"(?i)\bmoe\b|mixtral|\d+x\d+b|\d+e\b")
QUANTISED = re.compile(
    r"(?i)(?<![a-z0-9])(?:i?q[2-8](?:_[0-9a-z]+)*|fp8|fp4|nvfp4|mxfp4|int[48]|w[48]a(?:8|16)|awq|gptq|"
    r"bnb|[2-8]-?bit)(?![a-z0-9])"
)
RECURRENT = re.compile(r"(?i)mamba|\bssm\b|\bgdn\b|rwkv|jamba|hybrid|delta-?net|recurrent")


def _add_name(evidence: Evidence, side: str, name: str) -> None:
    source = f"name of the {side}: {name}"
    if (size := _billions_of(name)) is not None and f"{side}_parameters" not in evidence:
        evidence.note(f"{side}_parameters", size, source)
    if QUANTISED.search(name) and f"{side}_quantised" not in evidence:
        evidence.note(f"{side}_quantised", True, source)
    if side != "target":
        return
    if (ACTIVE.search(name) or EXPERTS.search(name)) and "target_moe" not in evidence:
        evidence.note("target_moe", True, source)
    if RECURRENT.search(name) and "target_recurrent" not in evidence:
        evidence.note("target_recurrent", True, source)


def _billions_of(name: str) -> float | None:
    """Billions of parameters read per token, from a name; None if it contains no size."""
    for pattern, factor in ((ACTIVE, 1.0), (BILLIONS, 1.0), (MILLIONS, 0.001)):
        if found := pattern.search(name):
            return float(found.group(1)) * factor
    return None


SAMENESS: Mapping[str, tuple[str, ...]] = {
    "target": ("target_hash", "target_name"),
    "draft": ("draft_hash", "draft_name"),
    "engine": ("engine_version",),
    "hardware": ("device",),
}
"""Facts that show whether a part of the setup is the same; the first one both runs have decides."""
DIFFERENCE: Mapping[str, tuple[str, ...]] = {"config": ("k", "method"), "traffic": ("temperature",)}
"""Facts that show a change of a part where they differ, and prove nothing where they are equal."""


def add_changes(evidence: Evidence, before: Evidence) -> None:
    """Add what differs between two runs (`changed`) and what is equal in both (`unchanged`)."""
    given = evidence.words("changed")
    changed: set[str] = set(given)
    same: set[str] = set()
    for part, names in SAMENESS.items():
        pair = _values_of_both(evidence, before, names)
        if pair is not None:
            (changed if pair[0] != pair[1] else same).add(part)
    for part, names in DIFFERENCE.items():
        pairs = [_values_of_both(evidence, before, (name,)) for name in names]
        if any(pair is not None and pair[0] != pair[1] for pair in pairs):
            changed.add(part)
    source = "both runs compared"
    if changed - set(given):
        if given:
            source = f"{evidence.facts['changed'].source}; {source}"
        values = tuple(sorted(changed))
        evidence.facts["changed"] = Fact(name="changed", value=values, source=source)
    if same - changed:
        evidence.note("unchanged", sorted(same - changed), "both runs compared")


def _values_of_both(
    evidence: Evidence, before: Evidence, names: tuple[str, ...]
) -> tuple[Value, Value] | None:
    """Return both runs' values of the first named fact that both have; None without one."""
    for name in names:
        now, then = evidence.facts.get(name), before.facts.get(name)
        if now is not None and then is not None:
            return now.value, then.value
    return None


def derive(evidence: Evidence) -> None:
    """Add all facts that follow without an attribution; facts that were read are not changed."""
    for side in ("target", "draft"):
        for name in evidence.words(f"{side}_name"):
            _add_name(evidence, side, name)
    add_rates(evidence)
    add_costs(evidence)
    add_ratios(evidence)
    _add_observations(evidence)
