"""The training objectives by name, and their contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

from forerun.align.config import AlignConfig, ObjectiveConfig, ObjectiveName
from forerun.align.distribution import SparseDistribution, TargetDistribution, dense_probs
from forerun.align.objectives.divergences import (
    forward_kl,
    jensen_shannon,
    likelihood_hybrid,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
)

__all__ = [
    "CrossEntropy",
    "Divergence",
    "ForwardKL",
    "Objective",
    "make_objective",
    "objective_of",
    "suited_objective",
]

Logits = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, " rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy -log q(label), which needs no teacher."""

    name: ObjectiveName = "ce"
    linear: bool = True
    needs_teacher: bool = False

    def losses(
        self,
        draft_logits: Logits,
        distribution: TargetDistribution | None,
        labels: Int64[Tensor, " rows"],
    ) -> PerRow:
        """Return the loss of every row in nats."""
        log_draft = draft_logits.log_softmax(-1)
        return -log_draft.gather(1, labels[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A divergence between the target's and the draft's distribution.

    Attributes:
        function: from the draft's log-probabilities and the target's probabilities to a loss.
    """

    name: ObjectiveName
    function: Callable[[Logits, Logits], PerRow]
    linear: bool = False
    needs_teacher: bool = True

    def losses(
        self,
        draft_logits: Logits,
        distribution: TargetDistribution | None,
        labels: Int64[Tensor, " rows"],
    ) -> PerRow:
        """Return the loss of every row in nats; of total variation, in probability."""
        target_probs = dense_probs(_given(distribution), draft_logits.shape[-1])
        return self.function(draft_logits.log_softmax(-1), target_probs.to(draft_logits.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardKL:
    """KL(p || q), which is linear in p and needs only the ids of a sparse distribution."""

    name: ObjectiveName = "fkl"
    linear: bool = True
    needs_teacher: bool = True

    def losses(
        self,
        draft_logits: Logits,
        distribution: TargetDistribution | None,
        labels: Int64[Tensor, " rows"],
    ) -> PerRow:
        """Return the loss of every row in nats."""
        distribution = _given(distribution)
        log_draft = draft_logits.log_softmax(-1)
        if isinstance(distribution, SparseDistribution):
            return forward_kl(
                log_draft.gather(1, distribution.ids), distribution.shares.to(log_draft.dtype)
            )
        return forward_kl(log_draft, distribution.target_probs.to(log_draft.dtype))


def suited_objective(temperature: float) -> ObjectiveName:
    """Return the objective that "auto" selects at this draft temperature.

    A greedy draft is accepted where its most likely token is the target's, so it learns the
    target's distribution itself (forward KL; for a greedy target that is cross-entropy on its
    choices). A sampled draft is accepted with probability alpha, whose likelihood NLA maximises. In
    benchmarks/align no objective was shown to be better, and a step of JSD, as good, took twice as
    long.
    """
    return "fkl" if temperature == 0 else "nla"


def objective_of(config: AlignConfig) -> Objective:
    """Build the objective of an alignment; "auto" means forward KL for a head, as in EAGLE."""
    chosen = config.objective
    if config.is_attached and chosen.objective == "auto":
        chosen = replace(chosen, objective="fkl")
    return make_objective(chosen, config.draft_temperature)


def make_objective(config: ObjectiveConfig, temperature: float) -> Objective:
    """Build the objective that the settings name.

    Args:
        config: by name, with the name's own parameters.
        temperature: the one the draft is deployed at, which may be its own.
    """
    name = suited_objective(temperature) if config.objective == "auto" else config.objective
    if name == "ce":
        return CrossEntropy()
    if name == "fkl":
        return ForwardKL()
    functions: dict[str, Callable[[Logits, Logits], PerRow]] = {
        "rkl": reverse_kl,
        "jsd": partial(jensen_shannon, beta=config.beta),
        "tv": total_variation,
        "nla": negative_log_acceptance,
        "lk": partial(likelihood_hybrid, eta=config.eta),
    }
    return Divergence(name=name, function=functions[name])


def _given(distribution: TargetDistribution | None) -> TargetDistribution:
    if distribution is None:
        raise ValueError("this objective needs the target's distribution, and no teacher was given")
    return distribution


@runtime_checkable
class Objective(Protocol):
    """The contract of an objective: a loss per row, differentiable in the draft's logits."""

    @property
    def name(self) -> str:
        """Name, as in `ObjectiveName`."""

    @property
    def linear(self) -> bool:
        """Whether the loss is linear in the target's probabilities.

        If it is, tokens sampled from the target estimate it without bias.
        """

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs the target's distribution (cross-entropy needs labels alone)."""

    def losses(
        self,
        draft_logits: Float[Tensor, "rows vocab"],
        distribution: TargetDistribution | None,
        labels: Int64[Tensor, " rows"],
    ) -> Float[Tensor, " rows"]:
        """Return the loss of every row, in nats or in probability.

        Args:
            draft_logits: already divided by the temperature the draft is deployed at.
            distribution: None where `needs_teacher` is False.
            labels: the tokens of the text, which CE alone reads.
        """
