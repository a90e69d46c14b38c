"""Splits the time per token into parts: speedup = tau / kappa, and the gap to the ideal.

In plain decode steps per emitted token. The ideal accepts all K drafted tokens and pays one plain
step: 1 / (K + 1). What is paid is kappa / tau. The difference is, exactly,

    sum over i of (beta_(i-1) - beta_i) (K - i + 1) / (tau (K + 1))    rejected first at position i
    + K c / tau + (v - 1) / tau + o / tau                              drafting, pass, the rest

since K + 1 - tau = sum over i of (1 - beta_i), summed by parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from forerun.diagnose.evidence import Evidence
from forerun.theory.record import Json
from forerun.theory.speedup import constant_survival

TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the time per emitted token.

    Attributes:
        kind: ideal, rejection, draft, verify, overhead or unsplit.
        cost: plain steps per emitted token; a pass cheaper than a plain step is negative.
    """

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
        draft_cost: c; None where kappa is not split.
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
    if tau is None or not k or not 1.0 <= tau <= k + 1 + TOLERANCE:
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
    """Return P(accepted through i) for i = 1..K, scaled so that its sum is tau - 1.

    The measured profile, scaled where its sum is another one because not every step drafted K; the
    constant acceptance of this tau where no profile is known.
    """
    rates = evidence.numbers("acceptance_rate_per_position")[:k]
    alpha = evidence.number("alpha")
    if len(rates) == k and sum(rates) > 0.0:
        factor = (tau - 1.0) / sum(rates)
        scaled = [min(1.0, rate * factor) for rate in rates]
        falling = [min(scaled[: i + 1]) for i in range(k)]
        if abs(sum(falling) - (tau - 1.0)) < 1e-6 * tau:
            return tuple(falling)
    if alpha is not None:
        return constant_survival(alpha, k)
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
        Part(name=f"drafting {k} tokens", kind="draft", cost=k * c / tau),
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
