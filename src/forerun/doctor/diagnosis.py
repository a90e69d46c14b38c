"""Makes a diagnosis: what evidence implies, attribution, ranked causes, next test and gains."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Literal

import msgspec

from forerun.doctor.attribution import (
    MIN_DRAFTS,
    Attribution,
    Effect,
    Outlook,
    Prediction,
    add_predictions,
    attribute,
    outlook_of,
    predict,
)
from forerun.doctor.evidence import (
    AS_FAST,
    ERROR_LEVEL,
    FACTS,
    SLOWER,
    Evidence,
    Fact,
    Value,
    add_costs,
    add_rates,
    add_ratios,
    alike,
    load_table,
    merge,
)
from forerun.terminal_text import write_count
from forerun.theory.cost import CostTable
from forerun.theory.record import Json


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


THRESHOLDS = msgspec.convert(load_table("derived")["threshold"], tuple[Threshold, ...])
MOST_REPETITIVE = next(each.yes for each in THRESHOLDS if each.name == "output_repetitive")
"""Share of distinct 4-grams up to which text repeats itself."""


def _add_observations(evidence: Evidence) -> None:
    copies = "ngram" in evidence.words("method")
    for threshold in THRESHOLDS:
        if copies and threshold.figure == "alpha_1":
            continue  # acceptance of copies depends on the text, so no value of it is high or low
        fact = evidence.facts.get(threshold.figure)
        is_open = threshold.name not in evidence and threshold.name not in evidence.checks
        if fact is not None and is_open:
            evidence.note(threshold.name, threshold.answer(fact), f"{fact.name} {fact.value:.3g}")
    _add_unplaced_rate(evidence)
    _add_nothing_accepted(evidence)
    gain = evidence.number("speedup")
    if gain is not None and "no_gain" not in evidence:
        is_slower = evidence.flag("slower_than_plain") is True
        evidence.note("no_gain", gain <= NO_GAIN and not is_slower, f"speedup {gain:.3f}")
    _add_not_drafted(evidence)
    _add_comparisons(evidence)


def _add_unplaced_rate(evidence: Evidence) -> None:
    """Add whether acceptance is high or low, from a draft acceptance rate at an unknown K."""
    rate = evidence.number("draft_acceptance_rate")
    if rate is None or "alpha_1" in evidence:
        return
    words = f"{rate:.0%} of the drafted tokens, K not known"
    for name, is_so in (("acceptance_fine", rate >= 0.7), ("acceptance_low", rate <= 0.2)):
        if is_so and name not in evidence:
            evidence.note(name, True, words)


def _add_nothing_accepted(evidence: Evidence) -> None:
    if "acceptance_zero" in evidence:
        return
    rate, tau = evidence.number("draft_acceptance_rate"), evidence.number("acceptance_length")
    if rate is None:
        if tau is not None:
            answer = True if tau <= NOTHING_PAYS else False if tau >= 1.15 else None
            evidence.note("acceptance_zero", answer, f"tau {tau:.2f}")
        return
    drafts = evidence.number("num_drafts")
    seen = evidence.number("num_drafted") if drafts is None else drafts
    first, words = evidence.number("alpha_1") or 0.0, f"{rate:.1%} of the drafted tokens"
    if rate > 0.05 or first > 0.15:
        evidence.note("acceptance_zero", False, words)
    elif rate <= 0.02 and first <= 0.1 and (seen is None or seen >= MIN_DRAFTS):
        evidence.note("acceptance_zero", True, words)


NOTHING_PAYS = 1.05
"""Tokens per step with a draft up to which no K and no price of drafting gives a speedup."""
NO_GAIN = 1.05
"""Speedup up to which there is no gain: the timing of a short run does not show one of 5%."""


def _add_not_drafted(evidence: Evidence) -> None:
    drafts, steps = evidence.number("num_drafts"), evidence.number("num_steps")
    drafted = evidence.number("num_drafted")
    if "drafts_absent" in evidence:
        return
    if drafts or drafted:
        evidence.note("drafts_absent", False, "drafted tokens are counted")
    elif is_switched_off(evidence):
        evidence.note("drafts_absent", False, "the controller chose to decode plainly")
    elif (drafts == 0 or drafted == 0) and (steps is None or steps >= MIN_DRAFTS):
        evidence.note("drafts_absent", True, "no drafted token is counted")
    elif "acceptance_length" in evidence or "draft_acceptance_rate" in evidence:
        evidence.note("drafts_absent", False, "acceptance was measured")


def _add_draft_share(evidence: Evidence) -> None:
    """Add whether drafting takes much of a step, and so much that the step cannot pay.

    The rest of a step, a pass over more rows, takes no less than a plain one: so at a share s of
    drafting, kappa is at least 1 / (1 - s).
    """
    cycle, draft = evidence.number("cycle_s"), evidence.number("draft_s")
    if not cycle or draft is None or not draft <= cycle:
        return
    share, tau = draft / cycle, evidence.number("acceptance_length")
    evidence.note("draft_share", share, "drafting / step time")
    if "draft_share_high" not in evidence:
        evidence.note("draft_share_high", share > 0.4, f"{share:.0%} of a step")
    if not tau or "speedup" in evidence or "slower_than_plain" in evidence:
        return
    steps, drafts = evidence.number("num_steps"), evidence.number("num_drafts")
    plain = max(0.0, steps - drafts) / drafts if steps and drafts else 0.0
    gain = (tau + plain) / (1.0 / max(1e-9, 1.0 - share) + plain)
    if gain <= SLOWER:
        words = f"drafting takes {share:.0%} of a step: at most {gain:.2f} times as fast"
        evidence.note("slower_than_plain", True, words)


def _add_comparisons(evidence: Evidence) -> None:
    plain, idle = evidence.number("tokens_per_s_plain"), evidence.number("tokens_per_s_k0")
    if plain and idle and "slow_without_drafts" not in evidence:
        evidence.note("slow_without_drafts", idle < 0.97 * plain, f"{idle:.3g} of {plain:.3g}/s")
    _add_draft_share(evidence)
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


REFERENCE = {
    "alpha": "reference_alpha",
    "k": "reference_k",
    "speedup": "reference_speedup",
    "acceptance_length": "reference_acceptance_length",
    "draft_acceptance_rate": "reference_acceptance_rate",
    "tokens_per_s": "tokens_per_s_before",
}
"""Names of figures when they are those of the reference run."""


def compare_runs(evidence: Evidence, before: Evidence) -> Evidence:
    """Return the evidence of a run with the figures of an earlier one and what has changed."""
    return merge(_mark_changes(evidence, before), as_reference(before))


def as_reference(evidence: Evidence) -> Evidence:
    """Return the figures of a run under their names as those of the reference run."""
    known, found = merge(evidence), Evidence(readings=evidence.readings)
    add_rates(known)
    add_costs(known)
    for name, reference in REFERENCE.items():
        fact = known.facts.get(name)
        if fact is not None:
            found.add(reference, fact.value, f"before: {fact.source}", fact.interval)
    return found


def _mark_changes(evidence: Evidence, before: Evidence) -> Evidence:
    """Return it with what differs between two runs (`changed`) and what is equal (`unchanged`)."""
    evidence = merge(evidence)
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
    return evidence


def _values_of_both(
    evidence: Evidence, before: Evidence, names: tuple[str, ...]
) -> tuple[Value, Value] | None:
    for name in names:
        now, then = evidence.facts.get(name), before.facts.get(name)
        if now is not None and then is not None:
            return now.value, then.value
    return None


def derive(evidence: Evidence) -> Evidence:
    """Return the evidence with all facts that follow without an attribution; it is not changed."""
    evidence = merge(evidence)
    for side in ("target", "draft"):
        for name in evidence.words(f"{side}_name"):
            _add_name(evidence, side, name)
    add_rates(evidence)
    add_costs(evidence)
    add_ratios(evidence)
    _add_observations(evidence)
    return evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Evidence for or against a cause from one fact, with its weight."""

    fact: Fact
    weight: float

    @property
    def words(self) -> str:
        value = self.fact.value
        if isinstance(value, bool):
            text = self.fact.definition if value else f"{self.fact.definition}: no"
        elif isinstance(value, float | int):
            unit = FACTS[self.fact.name].unit
            text = f"{self.fact.name} {value:.3g}{' ' + unit if unit else ''}"
        else:
            listed = value if isinstance(value, str) else ", ".join(map(str, value))
            text = f"{self.fact.name}: {listed}"
        return f"{text} ({self.fact.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Weight of one kind of fact for one cause, as the log of a likelihood ratio.

    Attributes:
        yes: weight where an observation is yes, or a figure is at or beyond the end of its ramp.
        no: weight where it is no, or at or before the start of the ramp.
        ramp: start and end for a figure, in between linear; the start may be the larger one.
        word: the word that counts as yes, for words.
    """

    fact: str
    yes: float
    no: float = 0.0
    ramp: tuple[float, float] | None = None
    word: str | None = None

    def finding(self, evidence: Evidence) -> Finding | None:
        """Weigh a fact of the evidence; None if the fact is not known."""
        fact = evidence.facts.get(self.fact)
        if fact is None:
            return None
        if self.word is not None:
            weight = self.yes if self.word in evidence.words(self.fact) else self.no
        elif self.ramp is not None:
            weight = self._on_ramp(fact)
        else:
            weight = self.yes if fact.value is True else self.no
        return Finding(fact=fact, weight=weight) if weight else None

    def _on_ramp(self, fact: Fact) -> float:
        assert self.ramp is not None and isinstance(fact.value, float | int)
        points = [float(fact.value)]
        if fact.interval is not None:
            points += [fact.interval.low, fact.interval.high]
        start, end = self.ramp
        places = [min(1.0, max(0.0, (point - start) / (end - start))) for point in points]
        return self.no + (self.yes - self.no) * sum(places) / len(places)

    @property
    def spread(self) -> float:
        """Largest difference that the fact could make to the cause's score."""
        return abs(self.yes - self.no)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    change: str
    price: str
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A possible reason why speculation is slow, wrong, or only appears so.

    Attributes:
        prior: log of how common it is among complaints, against the others.
    """

    label: str
    family: str
    what: str
    why: str
    prior: float = 0.0
    signs: tuple[Sign, ...]
    remedies: tuple[Remedy, ...]


SYMPTOM_WEIGHT = -3.5
"""Weight against health of an observation that a healthy run does not have."""


def _load_causes() -> Iterator[Cause]:
    table = load_table("causes")
    families = msgspec.convert(table["families"], dict[str, tuple[Sign, ...]])
    families["health"] = tuple(Sign(fact=name, yes=SYMPTOM_WEIGHT) for name in table["symptoms"])
    for cause in msgspec.convert(table["cause"], tuple[Cause, ...]):
        yield replace(cause, signs=cause.signs + families.get(cause.family, ()))


CAUSES: Mapping[str, Cause] = {cause.label: cause for cause in _load_causes()}
"""Every cause by its label, in the order of the documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A test that distinguishes causes and that an operator can run.

    Attributes:
        minutes: what it takes a person who has the machine; an order of magnitude.
    """

    name: str
    how: str
    minutes: float
    yields: tuple[str, ...]


EXPERIMENTS = msgspec.convert(load_table("experiments")["experiment"], tuple[Experiment, ...])
"""Every experiment, in the order of the documentation."""


def experiment_for(cause: Cause, evidence: Evidence) -> Experiment | None:
    spreads = {sign.fact: sign.spread for sign in cause.signs if sign.fact not in evidence}
    return best_of(lambda item: sum(spreads.get(fact, 0.0) for fact in item.yields))


def best_experiment(
    weights: Mapping[str, float], causes: Iterable[Cause], evidence: Evidence
) -> Experiment | None:
    """Return the test that distinguishes the causes best for the time it takes."""
    if not weights:
        return None
    signs = {
        cause.label: {sign.fact: sign.yes - sign.no for sign in cause.signs} for cause in causes
    }

    def worth(item: Experiment) -> float:
        total = 0.0
        for fact in item.yields:
            if fact not in evidence:
                moves = [(share, signs[label].get(fact, 0.0)) for label, share in weights.items()]
                mean = sum(share * move for share, move in moves)
                total += sqrt(sum(share * (move - mean) ** 2 for share, move in moves))
        return total

    return best_of(worth)


def best_of(worth: Callable[[Experiment], float]) -> Experiment | None:
    """Return the test with the most information per square root of its time."""
    ranked = [(worth(item) / sqrt(item.minutes), item) for item in EXPERIMENTS]
    value, item = max(ranked, key=lambda pair: pair[0])
    return item if value > 0.0 else None


MIN_SUPPORT = 1.3
"""Evidence for a cause, in nats (nearly a factor of four), below which nothing is said."""
ANY_OTHER = 2.0
"""Log weight of all causes that are not in the list: two nats of evidence leave it even."""
MIN_ALSO = 0.5
"""The same for a cause beside one that is supported: what else it may be is worth naming sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCause:
    """A cause with its score and the evidence for and against it.

    Attributes:
        score: its share of the likelihood of all causes, unlisted ones included.
    """

    cause: Cause
    score: float
    evidence_for: tuple[Finding, ...]
    evidence_against: tuple[Finding, ...]

    @property
    def support(self) -> float:
        return sum(finding.weight for finding in self.evidence_for)

    @property
    def is_supported(self) -> bool:
        return self.reaches(MIN_SUPPORT)

    @property
    def penalty(self) -> float:
        """Nats subtracted from the score of a cause with little evidence in its favour."""
        return 0.0 if self.is_supported else 6.0 if self.reaches(MIN_ALSO) else 12.0

    def reaches(self, support: float) -> bool:
        """Whether support plus a negative prior reaches a threshold and exceeds the opposition."""
        against = -sum(finding.weight for finding in self.evidence_against)
        return self.support + min(0.0, self.cause.prior) >= support and self.support > against


def score_causes(evidence: Evidence, causes: Iterable[Cause]) -> tuple[ScoredCause, ...]:
    """Score every cause, the likeliest first.

    The weights of facts add up as if facts were independent given the cause, which they are not
    quite: scores rank causes, and overstate their probabilities. A cause with little in its favour
    may have little against it either; it is no finding, so its share is cut.
    """
    found = []
    for cause in causes:
        findings = [
            finding for sign in cause.signs if (finding := sign.finding(evidence)) is not None
        ]
        findings.sort(key=lambda finding: -abs(finding.weight))
        found.append((cause.prior + sum(f.weight for f in findings), cause, findings))
    unweighted = [
        ScoredCause(
            cause=cause,
            score=log,
            evidence_for=tuple(f for f in findings if f.weight > 0.0),
            evidence_against=tuple(f for f in findings if f.weight < 0.0),
        )
        for log, cause, findings in found
    ]
    logs = [item.score - item.penalty for item in unweighted]
    highest = max(logs)
    shares = [math.exp(log - highest) for log in logs]
    total = sum(shares) + math.exp(ANY_OTHER - highest)
    scored = [
        replace(item, score=share / total) for item, share in zip(unweighted, shares, strict=True)
    ]
    return tuple(sorted(scored, key=lambda item: -item.score))


Verdict = Literal["healthy", "problem", "inconclusive"]
MAX_CAUSES = 5
LEAST_NAMED = 0.02
"""Score from which on a cause is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    remedy: Remedy
    prediction: Prediction | None

    def to_dict(self) -> dict[str, Json]:
        return {
            "change": self.remedy.change,
            "price": self.remedy.price,
            "effect": self.remedy.effect,
            "predicted": None if self.prediction is None else asdict(self.prediction),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCause:
    scored: ScoredCause
    next_test: Experiment | None
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Json]:
        scored, test = self.scored, self.next_test
        return {
            "label": scored.cause.label,
            "score": scored.score,
            "what": scored.cause.what,
            "why": scored.cause.why,
            **{
                name: [
                    {"fact": f.fact.name, "weight": f.weight, "words": f.words} for f in findings
                ]
                for name, findings in (
                    ("evidence_for", scored.evidence_for),
                    ("evidence_against", scored.evidence_against),
                )
            },
            "next_test": None if test is None else test.how,
            "remedies": [change.to_dict() for change in self.changes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of a diagnosis.

    Attributes:
        attribution: where the time per token goes; None where tau or K is not known.
        causes: likely causes, the likeliest first; empty without enough evidence.
        next_test: the test that tells the likeliest causes apart best for its time.
        evidence: everything it rests on, with what was derived.
    """

    verdict: Verdict
    attribution: Attribution | None
    causes: tuple[RankedCause, ...]
    next_test: Experiment | None
    evidence: Evidence

    @property
    def remark(self) -> str:
        """What is no fault and still changes what the figures are worth; "" where nothing is."""
        share = self.evidence.number("distinct_4gram_share")
        if share is None or share > MOST_REPETITIVE or "output_repetitive" in self.evidence:
            gain, k = (self.evidence.number(name) for name in ("gain_of_higher_k", "k"))
            if self.verdict == "healthy" and gain is not None and gain >= MIN_HINT:
                return f"A K larger than {k:g} may be {gain:.2f} times as fast."
            return ""
        counts = "speedup counts" if "speedup" in self.evidence else "accepted tokens are of"
        return f"The {counts} text that repeats itself: {share:.0%} of its 4-grams are distinct."

    def to_dict(self) -> dict[str, Json]:
        evidence, test = self.evidence, self.next_test
        return {
            "verdict": self.verdict,
            "remark": self.remark,
            "causes": [ranked.to_dict() for ranked in self.causes],
            "next_test": None
            if test is None
            else {"name": test.name, "how": test.how, "minutes": test.minutes},
            "attribution": None if self.attribution is None else self.attribution.to_dict(),
            "evidence": {fact.name: fact.to_dict() for fact in evidence},
            "disagreements": [{"fact": f.name, **f.to_dict()} for f in evidence.disagreements],
            "sources": [reading.to_dict() for reading in evidence.readings],
            "checks": [asdict(check) for check in evidence.checks.values()],
            "supposed": {fact.name: fact.source for fact in evidence.supposed.values()},
        }


_TOLD_OF_REPETITION = frozenset({"output_repetitive", "tokens_per_s_plain"})
"""Facts of a person who complains of text that repeats itself, or compares rates on it."""


def diagnose(evidence: Evidence, costs: CostTable | None = None) -> Diagnosis:
    """Derive facts, attribute the time, score all causes and predict the gains of remedies.

    Every figure of the result is a fact of the evidence: readers add those that a source states,
    `derive`, `_add_gap_shares` and `add_predictions` those that follow.
    """
    evidence = _drop_denied(evidence)
    given, evidence = evidence.facts.keys(), derive(_prefer_measured(evidence))
    evidence.facts.pop("symptom_seen", None)  # follows from the other facts; it is not given
    if _TOLD_OF_REPETITION.isdisjoint(given):  # text that repeats itself is no fault of drafting
        evidence.facts.pop("output_repetitive", None)
    attribution = attribute(evidence)
    outlook: Outlook | None = None
    if attribution is not None:
        _add_gap_shares(evidence, attribution)
        outlook = outlook_of(evidence, attribution, costs)
        add_predictions(evidence, attribution, outlook)
    _add_symptoms(evidence)
    scored = score_causes(evidence, CAUSES.values())
    verdict = verdict_of(scored, evidence, given)
    named = [item for item in scored if item.reaches(MIN_ALSO) and item.score >= LEAST_NAMED]
    if verdict != "inconclusive":
        named = [i for i in named if (i.cause.label == "healthy") == (verdict == "healthy")]
    causes = tuple(
        RankedCause(
            scored=item,
            next_test=experiment_for(item.cause, evidence),
            changes=changes_of(item, evidence, attribution, outlook),
        )
        for item in named[:MAX_CAUSES]
    )
    weights = {item.cause.label: item.score for item in scored}
    return Diagnosis(
        verdict=verdict,
        attribution=attribution,
        causes=causes,
        next_test=best_experiment(weights, CAUSES.values(), evidence),
        evidence=evidence,
    )


def _drop_denied(evidence: Evidence) -> Evidence:
    """Return the evidence without an observed slowdown, or none, that both rates deny."""
    said = evidence.facts.get("slower_than_plain")
    rates = [evidence.number(name) for name in ("tokens_per_s", "tokens_per_s_plain")]
    if said is None or said.sentence or rates[0] is None or not rates[1]:
        return evidence
    speedup = rates[0] / rates[1]
    if not (speedup >= AS_FAST if said.value else speedup < SLOWER):
        return evidence
    found = merge(evidence)
    del found.facts[said.name]
    found.conflicts.append(
        f"slower_than_plain is {'yes' if said.value else 'no'} ({said.source}), but {rates[0]:g} "
        f"tokens/s with and {rates[1]:g} without speculation are {speedup:.2f}x; which is right?"
    )
    return found


def _prefer_measured(evidence: Evidence) -> Evidence:
    """Return the evidence without what was said in words and figures of other sources deny."""
    words = {name: fact for name, fact in evidence.facts.items() if fact.sentence}
    if not words:
        return evidence
    found = merge(evidence)
    for name in words:
        del found.facts[name]
    measured = derive(found)
    for name, fact in words.items():
        known = measured.facts.get(name)
        if known is None or alike(known.value, fact.value):
            found.facts[name] = fact
        else:
            found.disagreements.append(fact)
    return found


def _add_gap_shares(evidence: Evidence, found: Attribution) -> None:
    for kind in ("rejection", "draft", "verify", "overhead"):
        evidence.note(f"gap_share_{kind}", found.share(kind), "attribution of the time per token")


MIN_HINT = 1.1
"""Predicted gain of a larger K from which on a healthy run is told of it."""
NEARLY_ALL = 0.95
"""Share of fully accepted drafts from which on a small K is a fault even where the run gains."""
MIN_SYMPTOM = 1.0
"""Weight of a fact against health, in nats, from which on it is a symptom."""
CHOSEN = ("no_gain", "gain_of_lower_k", "gain_of_higher_k")
"""No symptoms where a controller chooses K, and whether to draft, by its costs."""
HARMLESS = (
    *("acceptance_low", "acceptance_fine", "adaptive_k"),
    *("prefill_share", "outputs_short", "ttft_up"),
)
"""No symptoms where a controller chose plain decoding for most steps."""


def _add_symptoms(evidence: Evidence) -> None:
    """Add whether any fact says that something is wrong, where a fault could have been seen."""
    found = [sign.finding(evidence) for sign in CAUSES["healthy"].signs]
    seen = [f.fact.name for f in found if f is not None and f.weight <= -MIN_SYMPTOM]
    if "off_share" in evidence and evidence.flag("slower_than_plain") is not True:
        is_off = is_switched_off(evidence)
        harmless = CHOSEN + (HARMLESS if is_off else ())
        seen = [name for name in seen if name not in harmless]
    gain, full = evidence.facts.get("speedup"), evidence.number("full_accept_share")
    if gain is not None and full is not None and full < NEARLY_ALL:
        low = gain.interval.low if gain.interval is not None else float(gain.value)  # type: ignore[arg-type]  # a number by its kind
        if low > NO_GAIN:  # more to gain is no fault
            seen = [name for name in seen if name not in ("gain_of_higher_k", "full_accept_share")]
    if seen or list_basis(evidence):
        words = ", ".join(seen) or "no fact speaks against health"
        evidence.note("symptom_seen", bool(seen), words)


MIN_OFF = 0.5
"""Share of decode steps from which on a run is plain, where a controller chose plain decoding."""


def is_switched_off(evidence: Evidence) -> bool:
    return (evidence.number("off_share") or 0.0) >= MIN_OFF


LEAST_FINE = 0.2
"""Lower end of acceptance at position 1 from which on a draft that predicts nothing is excluded."""


def list_basis(evidence: Evidence) -> list[str]:
    """Return the measured figures that could have shown a fault; health rests on these."""
    found = []
    first = evidence.facts.get("alpha_1")
    if first is not None and evidence.flag("acceptance_zero") is not True:
        low = first.interval.low if first.interval is not None else float(first.value)  # type: ignore[arg-type]  # a number by its kind
        if low >= LEAST_FINE or (evidence.number("num_drafts") or 0.0) >= MIN_DRAFTS:
            found.append("acceptance")
    for name, what in (("speedup", "speed"), ("replay_ratio", "replayed acceptance")):
        if name in evidence:
            found.append(what)
    if is_switched_off(evidence):
        found.append("steps that the controller planned without a draft")
    if evidence.checks:
        checks = write_count(len(evidence.checks), "check")
        found.append(f"{checks} at a common error level of {ERROR_LEVEL:.1%}")
    return found


NAMED = 0.4
"""Score from which on a problem is named. In the first runs over held-out complaints (sets 4 to 10)
the first cause was right in 30 of 45 at or above it (0.67, 95% 0.52 to 0.79), in 21 of 52 below."""
CONCLUSIVE = {
    "acceptance_zero": "Almost nothing that is drafted is accepted, so that no K pays ({}).",
    "acceptance_below_expected": "Less is accepted than the verifier's probabilities give ({}).",
    "acceptance_fell_in_run": "Acceptance fell during the run.",
    "requests_accept_nothing": "Some requests accept next to nothing ({}).",
    "later_positions_rejected": "From some position on hardly anything is accepted ({}).",
    "slower_than_plain": "Decoding is slower than without speculation ({}).",
}
"""Observations that are a problem whatever their cause, in a sentence with the figures."""
MIN_SCORE_OF_FEW = 0.6
"""The same where fewer than `MIN_DRAFTS` were counted."""
MIN_TIMED_DRAFTS = 8
"""Drafts below which times show no cost, because the first steps of a process are slower."""


def verdict_of(scored: Sequence[ScoredCause], evidence: Evidence, given: Set[str]) -> Verdict:
    """Return "problem" for a symptom with a cause, "healthy" where one could have been seen.

    Without a cause of enough score a problem is only what is one whatever its cause.

    Args:
        given: names of the facts that were read, not derived.
    """
    if evidence.conflicts:
        return "inconclusive"
    likeliest = _find_likeliest_fault(scored)
    drafts = evidence.number("num_drafts")
    is_timed = drafts is None or not 0 < drafts < MIN_TIMED_DRAFTS
    is_seen = evidence.flag("symptom_seen") or _is_asserted(likeliest, given)
    if is_seen and (is_timed or likeliest.cause.family != "cost"):
        least = MIN_SCORE_OF_FEW if drafts and drafts < MIN_DRAFTS else NAMED
        if likeliest.is_supported and max(likeliest.score, family_score(scored)) >= least:
            return "problem"
        if any(evidence.flag(name) for name in CONCLUSIVE):
            return "problem"
    # Who complains has seen something, even if no symptom was read of the words.
    is_read = not any(reading.unread or "words" in reading.kinds for reading in evidence.readings)
    is_healthy = evidence.flag("symptom_seen") is False and is_read and not is_seen
    return "healthy" if is_healthy and not evidence.doubts else "inconclusive"


def _find_likeliest_fault(scored: Sequence[ScoredCause]) -> ScoredCause:
    """Return the first cause that is not health; health where there is no other."""
    return next((item for item in scored if item.cause.label != "healthy"), scored[0])


NAMED_FAMILIES = ("cost", "alignment")
"""Families whose causes, where none stands out, still say together what is wrong."""


def family_score(scored: Sequence[ScoredCause]) -> float:
    """Return the score of all supported causes of the likeliest one's family; 0 without a name."""
    likeliest = _find_likeliest_fault(scored)
    family = likeliest.cause.family
    alike = [item.score for item in scored if item.is_supported and item.cause.family == family]
    return sum(alike) if family in NAMED_FAMILIES else 0.0


def _is_asserted(item: ScoredCause, given: Set[str]) -> bool:
    """Whether a given observation speaks for a likely cause, whatever health says of it."""
    return item.score >= NAMED / 2.0 and any(
        f.fact.name in given and f.fact.value is True and f.weight > MIN_SUPPORT
        for f in item.evidence_for
    )


OFF = Remedy(
    change="turn speculation off here",
    price="no gain where the draft is good; its memory is free",
    effect="off",
)


def changes_of(
    item: ScoredCause, evidence: Evidence, found: Attribution | None, outlook: Outlook | None
) -> tuple[Change, ...]:
    """Return the remedies of a cause, in descending order of predicted gain.

    Where remedies are predicted to be slower than plain decoding, turning it off takes their place.
    """
    remedies = [*item.cause.remedies]
    predicted = [predict(remedy.effect, evidence, found, outlook) for remedy in remedies]
    slower = [each is not None and each.speedup < 1.0 for each in predicted]
    if any(slower) and not any(remedy.effect == "off" for remedy in remedies):
        remedies.append(OFF)
        predicted.append(predict("off", evidence, found, outlook))
        slower.append(False)
    changes = [
        Change(remedy=remedy, prediction=prediction)
        for remedy, prediction, is_slower in zip(remedies, predicted, slower, strict=True)
        if not is_slower
    ]
    return tuple(
        sorted(changes, key=lambda change: -(change.prediction.gain if change.prediction else 0.0))
    )
