"""Settings of controllers; torch-free, as all of this package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from forerun.theory.drift import Memory
from forerun.theory.stop_rule import Measure

__all__ = [
    "CONTROLLER_NAMES",
    "BanditConfig",
    "BeliefConfig",
    "ControllerName",
    "GoodputConfig",
    "SafetyConfig",
]

ControllerName = Literal["auto", "fixed", "heuristic", "confidence", "goodput", "bandit"]
CONTROLLER_NAMES: tuple[ControllerName, ...] = get_args(ControllerName)


COST_MEMORY = 0.97
"""Weight that a measured duration keeps after one more."""
DRAFTING_REUSE = 8
"""Most steps that plans are reused for while a request drafts."""
PLAIN_REUSE = 128
"""Most steps that plans are reused for while no request drafts."""
NUM_COLD = 4
"""Plain steps after drafting that find cold caches and are not used to learn plain step times."""
TPOT_TOLERANCE = 0.98
"""Plans are reused while no time target has become tighter than this share of what it was."""
FIRST_PROBES = 0.25
"""Steps that probes may lose, per 8 idle steps at first, when drafting was just given up."""
FOLLOWING = 3
"""Probes that follow at once after one whose token was accepted."""
LARGEST_PROBE_GAP = 100.0
"""Most steps between two probes while no request drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeliefConfig:
    """How acceptance is learnt.

    Attributes:
        request: memory of one request's steps.
        pool: memory of all steps with the same tags and temperature, which new requests begin with.
        prior: P(a drafted token is accepted) before anything was seen; high, so that it is tried.
        strength: observations that the prior is worth to a pool, and the pool to a request.
        most_requests: requests remembered; beyond, the one that came first is forgotten.
    """

    request: Memory = field(default_factory=Memory)
    pool: Memory = field(default_factory=lambda: Memory(slow=0.99, fast=0.9))
    prior: float = 0.7
    strength: float = 4.0
    most_requests: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputConfig:
    """How K is chosen from what is believed.

    Attributes:
        beliefs: how acceptance is learnt.
        switch_margin: gain in tokens per second below which the plans of the last step stay.
        explore: share of the time that may be lost by letting requests draft one node more, or with
            another drafter, than is believed best.
        probe_share: share of the time that may be lost by letting requests that do not draft draft
            a token to see how it fares; what that leaves in caches is not counted.
        stop: what a stop rule inside K looks at, its threshold learnt; None: no such rule.
    """

    beliefs: BeliefConfig = field(default_factory=BeliefConfig)
    switch_margin: float = 0.01
    explore: float = 0.003
    probe_share: float = 0.008
    stop: Measure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyConfig:
    """When speculation is taken to be slower than plain decoding, and what is done about it.

    Attributes:
        probe_share: share of the steps made plain to know how fast plain decoding is.
        num_plain: plain steps without which nothing is judged; the first ones are made in a row.
        num_speculative: speculative steps after which the lower bound of the speedup must be 1 or
            more.
        num_clear: speculative steps after which its upper bound must be.
        memory: weight that a speculative step keeps after one more; over fewer of them the speedup
            is known to ten percent at best, and drafts that pay would be turned off.
        plain_memory: the same of plain steps, of which there are fewer, over more time.
        z: standard errors between the estimate and either bound.
        retry_after: steps without speculation until it is tried again.
        longest_retry: the same after it has failed again and again.
    """

    probe_share: float = 0.01
    num_plain: int = 4
    num_speculative: int = 256
    num_clear: int = 8
    memory: float = 0.998
    plain_memory: float = 0.98
    z: float = 1.645
    retry_after: int = 64
    longest_retry: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditConfig:
    """How configurations are tried.

    Attributes:
        ks: K to choose from.
        memory: weight that a step keeps after one more, of any configuration.
        width: of the confidence bound, in shares of the best rate.
    """

    ks: tuple[int, ...] = (0, 1, 2, 3, 5, 8)
    memory: float = 0.995
    width: float = 0.3
