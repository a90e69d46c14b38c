"""Splits the time per token into parts: speedup = tau / kappa, and the gap to the ideal.

In plain decode steps per emitted token. The ideal accepts all K drafted tokens and pays one plain
step: 1 / (K + 1). What is paid is kappa / tau. The difference is, exactly,

    sum over i of (beta_(i-1) - beta_i) (K - i + 1) / (tau (K + 1))    rejected first at position i
    + K c / tau + (v - 1) / tau + o / tau                              drafting, pass, the rest

since K + 1 - tau = sum over i of (1 - beta_i), summed by parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal

from forerun.doctor.evidence import Evidence
from forerun.terminal_text import write_count
from forerun.theory.cost import CostTable
from forerun.theory.record import Json
from forerun.theory.speedup import best_k, constant_acceptance_length, constant_survival

TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    kind: str
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """The speedup if one part of the cost were ideal and everything else unchanged."""

    name: str
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Split of the time per token into parts, based on speedup = tau / kappa.

    Attributes:
        cycle_cost: kappa; None where no plain step is known to compare with.
        parts: the waterfall from the ideal to what is paid; without kappa, its tokens' side only.
        prefill_share: of the requests' time; None where not known.
    """

    num_speculative_tokens: int
    acceptance_length: float
    cycle_cost: float | None
    draft_cost: float | None
    verify_cost: float | None
    overhead: float | None
    parts: tuple[Part, ...]
    counterfactuals: tuple[Counterfactual, ...]
    prefill_share: float | None

    @property
    def speedup(self) -> float | None:
        return None if self.cycle_cost is None else self.acceptance_length / self.cycle_cost

    @property
    def step_cost_per_token(self) -> float:
        return sum(part.cost for part in self.parts)

    def share(self, kind: str) -> float | None:
        """Return the share of one kind of part in the gap; None if it is not known separately."""
        if self.cycle_cost is None or (kind != "rejection" and self.draft_cost is None):
            return None
        gap = self.cycle_cost / self.acceptance_length - self.parts[0].cost
        cost = sum(part.cost for part in self.parts if part.kind == kind)
        return min(1.0, max(0.0, cost / gap)) if gap > TOLERANCE else 0.0

    def to_dict(self) -> dict[str, Json]:
        values = asdict(self) | {"speedup": self.speedup}
        del values["parts"]
        values["waterfall"] = [
            {"name": part.name, "kind": part.kind, "plain_steps_per_token": part.cost}
            for part in self.parts
        ]
        return values


def attribute(evidence: Evidence) -> Attribution | None:
    """Compute the attribution; None if tau or K is unknown or the facts are inconsistent."""
    tau, k = evidence.number("acceptance_length"), evidence.number("k")
    if tau is None or k is None or k < 1.0 or not 1.0 <= tau <= k + 1 + TOLERANCE:
        return None
    kappa = evidence.number("cycle_cost")
    c, v, o = (evidence.number(name) for name in ("draft_cost", "verify_cost", "overhead"))
    if kappa is None or c is None or v is None or k * c + v > kappa * 1.02:
        c = v = o = None
    else:
        o = kappa - k * c - v  # whatever was measured apart, the parts must add up
    survival = survival_of(evidence, int(k), tau)
    parts = [Part(name="ideal: all accepted for one plain step", kind="ideal", cost=1 / (k + 1))]
    parts += _rejection_parts(survival, int(k), tau)
    parts += _cost_parts(tau, int(k), kappa, (c, v, o))
    return Attribution(
        num_speculative_tokens=int(k),
        acceptance_length=tau,
        cycle_cost=kappa,
        draft_cost=c,
        verify_cost=v,
        overhead=o,
        parts=tuple(parts),
        counterfactuals=counterfactuals(tau, int(k), kappa, (c, v, o)),
        prefill_share=evidence.number("prefill_share"),
    )


def survival_of(evidence: Evidence, k: int, tau: float) -> tuple[float, ...]:
    """Return P(accepted through i) for i = 1..K, scaled so that its sum is tau - 1."""
    rates = evidence.numbers("acceptance_rate_per_position")[:k]
    alpha = evidence.number("alpha")
    shapes = []
    if len(rates) == k:
        # Where K varies, rates may rise: few steps draft that far, and their tokens are easy.
        shapes.append(tuple(min(rates[: i + 1]) for i in range(k)))
    if alpha is not None:
        shapes.append(constant_survival(alpha, k))
    for shape in shapes:
        if sum(shape) > 0.0 and (factor := (tau - 1.0) / sum(shape)) * shape[0] <= 1.0:
            return tuple(rate * factor for rate in shape)
    return ((tau - 1.0) / k,) * k


def _rejection_parts(survival: Sequence[float], k: int, tau: float) -> list[Part]:
    """Return the cost of rejections by position: one at i loses the K - i + 1 tokens from i on."""
    return [
        Part(
            name=f"rejected at position {i}",
            kind="rejection",
            cost=(before - after) * (k - i + 1) / (tau * (k + 1)),
        )
        for i, (before, after) in enumerate(pairwise((1.0, *survival)), start=1)
    ]


Costs = tuple[float | None, float | None, float | None]


def _cost_parts(tau: float, k: int, kappa: float | None, costs: Costs) -> list[Part]:
    """Return the cost of drafting, pass and rest; one part where they are not known separately."""
    c, v, o = costs
    if kappa is None:
        return []
    if c is None or v is None or o is None:
        what = "drafting, pass above a plain step, overhead (not measured apart)"
        return [Part(name=what, kind="unsplit", cost=(kappa - 1.0) / tau)]
    return [
        Part(name=f"drafting {write_count(k, 'token')}", kind="draft", cost=k * c / tau),
        Part(name="target pass above one plain step", kind="verify", cost=(v - 1.0) / tau),
        Part(name="everything else in a step", kind="overhead", cost=o / tau),
    ]


def counterfactuals(
    tau: float, k: int, kappa: float | None, costs: Costs
) -> tuple[Counterfactual, ...]:
    """Return the speedups that each part of the cost would allow if it were ideal."""
    if kappa is None:
        return ()
    found = [Counterfactual(name="every drafted token were accepted", speedup=(k + 1) / kappa)]
    c, v, o = costs
    if c is None or v is None or o is None:
        found.append(Counterfactual(name="a step cost one plain step", speedup=tau))
    else:
        for name, saved in (
            ("drafting were free", k * c),
            ("the pass cost one plain step", max(0.0, v - 1.0)),
            ("there were no overhead", max(0.0, o)),
        ):
            if kappa - saved > TOLERANCE:
                found.append(Counterfactual(name=name, speedup=tau / (kappa - saved)))
    return tuple(sorted(found, key=lambda other: -other.speedup))


MAX_K = 16
Effect = Literal[
    "best_k",
    "off",
    "reference_acceptance",
    "as_before",
    "fewer_rejections",
    "cheaper_draft",
    "parallel_verify",
    "no_overhead",
    "all_accepted",
    "none",
]
"""Effect of a remedy on tokens per step or on the cost of a step."""

TYPICAL_DRAFT_COST = {"ngram": 0.005, "eagle": 0.05, "mtp": 0.06, "block": 0.03}
DEFAULT_DRAFT_COST = 0.1
TYPICAL_VERIFY_SLOPE = 0.03
TYPICAL_OVERHEAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Model for predictions: acceptance by position, and step costs at any K.

    Attributes:
        survival: P(accepted through i), beyond the drafted K by its last conditional acceptance.
        verify_slope: what one more row adds to the pass.
    """

    survival: tuple[float, ...]
    draft_cost: float
    verify_slope: float
    overhead: float
    basis: str
    table: CostTable | None = None
    batch: int = 1
    context: int = 0

    def cycle_cost(self, k: int) -> float:
        if self.table is not None:
            return self.table.cycle_cost(k, self.context, self.batch)
        return k * self.draft_cost + 1.0 + k * self.verify_slope + self.overhead

    def acceptance_length(self, k: int) -> float:
        return 1.0 + sum(self.survival[:k])

    def speedup(self, k: int) -> float:
        return self.acceptance_length(k) / self.cycle_cost(k) if k else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    speedup: float
    gain: float
    basis: str
    num_speculative_tokens: int | None = None


def outlook_of(evidence: Evidence, found: Attribution, table: CostTable | None = None) -> Outlook:
    """Build the prediction model from measured costs; typical costs replace unknown ones."""
    k, tau = found.num_speculative_tokens, found.acceptance_length
    c, v, o = found.draft_cost, found.verify_cost, found.overhead
    batch, context = evidence.number("batch"), evidence.number("context_tokens")
    if c is not None and v is not None and o is not None:
        slope, basis = max(0.0, v - 1.0) / k, "costs measured in steps"
        o = o + min(0.0, v - 1.0)
    else:
        c = _typical_draft_cost(evidence)
        slope, o = TYPICAL_VERIFY_SLOPE, TYPICAL_OVERHEAD
        basis = f"assumed costs c = {c:.3g}, {slope:g} per row, o = {o:g}"
        if found.cycle_cost is not None:
            share = (found.cycle_cost - 1.0) / (k * c + k * slope + o)
            c, slope, o = max(0.0, share) * c, max(0.0, share) * slope, max(0.0, share) * o
            basis = "kappa measured, split as is typical"
    return Outlook(
        survival=longer(survival_of(evidence, k, tau), MAX_K),
        draft_cost=c,
        verify_slope=slope,
        overhead=o,
        basis="cost table" if table is not None else basis,
        table=table,
        batch=max(1, round(batch or 1)),
        context=round(context or 0),
    )


def _typical_draft_cost(evidence: Evidence) -> float:
    if (ratio := evidence.number("draft_size_ratio")) is not None:
        return max(0.01, ratio)
    kinds = evidence.words("method")
    return TYPICAL_DRAFT_COST.get(kinds[0] if kinds else "", DEFAULT_DRAFT_COST)


def longer(survival: tuple[float, ...], k: int) -> tuple[float, ...]:
    """Extend survival to K positions with the last known conditional acceptance."""
    found = list(survival)
    before = found[-2] if len(found) > 1 else 1.0
    last = found[-1] / before if before > 0.0 else 0.0
    while len(found) < k:
        found.append(found[-1] * last)
    return tuple(found)


def add_predictions(evidence: Evidence, found: Attribution, outlook: Outlook) -> None:
    """Add the best K at these costs, and the gains from a smaller and from a larger K."""
    if "tree_nodes" in evidence:  # costs of a chain at other K do not follow from those of trees
        return
    if outlook.table is None and (found.draft_cost is None or _has_few_drafts(evidence)):
        return
    now = outlook.speedup(found.num_speculative_tokens)
    source = f"acceptance profile and {outlook.basis}"
    best = best_k(outlook.survival, outlook.cycle_cost)
    evidence.note("best_k", best.num_speculative_tokens, source)
    evidence.note("gain_of_best_k", best.speedup / now, source)
    k = found.num_speculative_tokens
    lower = max((outlook.speedup(i) for i in range(1, min(k, MAX_K + 1))), default=now)
    higher = max((outlook.speedup(i) for i in range(k + 1, MAX_K + 1)), default=now)
    evidence.note("speedup_of_best_k", max(lower, now, higher), source)
    evidence.note("gain_of_lower_k", lower / now, source)
    if "ngram" not in evidence.words("method"):  # a longer copy is not there because K is larger
        evidence.note("gain_of_higher_k", higher / now, source)


MIN_DRAFTS = 30
"""Drafts below which neither costs nor acceptance say what another K would give."""


def _has_few_drafts(evidence: Evidence) -> bool:
    drafts = evidence.number("num_drafts")
    return drafts is not None and drafts < MIN_DRAFTS


def predict(
    effect: Effect, evidence: Evidence, found: Attribution | None, outlook: Outlook | None
) -> Prediction | None:
    """Predict the speedup after a remedy; None if tau is unknown or speed is not affected."""
    if found is None or outlook is None or effect == "none":
        return None
    if effect == "best_k" and "tree_nodes" in evidence:
        return None
    after = EFFECTS[effect](evidence, found, outlook)
    if after is None:
        return None
    now = found.speedup or outlook.speedup(found.num_speculative_tokens)
    measured = effect == "as_before" and "reference_speedup" in evidence
    return Prediction(
        speedup=after,
        gain=after / now,
        basis="measured before" if measured else outlook.basis,
        num_speculative_tokens=_best_drafting_k(outlook) if effect == "best_k" else None,
    )


Rule = Callable[[Evidence, Attribution, Outlook], float | None]


def _best_drafting_k(outlook: Outlook) -> int:
    return max(range(1, MAX_K + 1), key=outlook.speedup)


def _with_reference(evidence: Evidence, found: Attribution, outlook: Outlook) -> float | None:
    """Predict the speedup with the reference run's tau, at the current cost of its K."""
    k = int(evidence.number("reference_k") or found.num_speculative_tokens)
    rate = evidence.number("reference_acceptance_rate")
    tau = evidence.number("reference_acceptance_length") or (1 + rate * k if rate else None)
    if tau is None:
        return None
    same = k == found.num_speculative_tokens
    return tau / (_kappa_now(found, outlook) if same else outlook.cycle_cost(k))


def _as_before(evidence: Evidence, found: Attribution, outlook: Outlook) -> float | None:
    known = evidence.number("reference_speedup")
    return _with_reference(evidence, found, outlook) if known is None else known


def _halved_rejections(evidence: Evidence, found: Attribution, outlook: Outlook) -> float | None:
    """Predict the speedup with the reference's tau, or with half the rejections without one."""
    if (known := _with_reference(evidence, found, outlook)) is not None:
        return known
    alpha, k = evidence.number("alpha"), found.num_speculative_tokens
    if alpha is None:
        return None
    return constant_acceptance_length((1.0 + alpha) / 2.0, k) / _kappa_now(found, outlook)


def _kappa_now(found: Attribution, outlook: Outlook) -> float:
    return found.cycle_cost or outlook.cycle_cost(found.num_speculative_tokens)


def less(saved: Callable[[int, Outlook], float]) -> Rule:
    """Return a rule that predicts the speedup after `saved` is subtracted from the step cost."""

    def rule(evidence: Evidence, found: Attribution, outlook: Outlook) -> float | None:
        k = found.num_speculative_tokens
        cost = _kappa_now(found, outlook) - saved(k, outlook)
        return found.acceptance_length / cost if cost > 0.0 else None

    return rule


EFFECTS: dict[Effect, Rule] = {
    "best_k": lambda evidence, found, outlook: outlook.speedup(_best_drafting_k(outlook)),
    "off": lambda evidence, found, outlook: 1.0,
    "reference_acceptance": _with_reference,
    "as_before": _as_before,
    "fewer_rejections": _halved_rejections,
    "cheaper_draft": less(lambda k, outlook: k * outlook.draft_cost / 2.0),
    "parallel_verify": less(
        lambda k, outlook: k * max(0.0, outlook.verify_slope - TYPICAL_VERIFY_SLOPE)
    ),
    "no_overhead": less(lambda k, outlook: max(0.0, outlook.overhead)),
    "all_accepted": lambda evidence, found, outlook: (
        (found.num_speculative_tokens + 1) / _kappa_now(found, outlook)
    ),
}
