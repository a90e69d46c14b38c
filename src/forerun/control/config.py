"""Settings of controllers; torch-free, like this whole package."""

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

# How costs are learnt from the times of steps. A memory is the weight that an observation keeps
# after one more; 1 / (1 - memory) observations count in all.
COST_MEMORY = 0.97
"""Memory of measured durations where there is no profile."""
STEP_TIME_MEMORY = 0.97
"""Memory of the factors that correct a profile."""
STEP_TIME_STRENGTH = 5.0
"""Steps that the profile is worth against the steps measured at an operating point."""
LARGEST_LOG_SURPRISE = 0.7
"""Largest natural logarithm of measured over expected time that counts; stalls are cut to it."""
CONTEXT_BUCKET = 256
"""Tokens of mean context for which step times are read from the profile once."""
NUM_COLD = 4
"""Plain steps after drafting that find cold caches and are not used to learn plain step times."""
ASSUMED_ROW = 0.05
"""Cost of one more row before any pass was measured, in plain steps."""
ASSUMED_LEVEL = 0.1
"""Cost of one more drafted level before any was measured, in plain steps."""
LINE_STRENGTH = 3.0
"""Measured passes that the line through all passes is worth at one number of rows."""
FIRST_DEPTH = 3
"""Largest K before a draft of that depth was measured; afterwards, one more than was measured."""
LARGEST_RATIO = 2.0
"""A measurement further than this factor from the mean counts as if it were at this factor."""

# For how many steps a decision holds.
DRAFTING_REUSE = 8
"""Most steps that plans are reused for while a request drafts."""
PLAIN_REUSE = 128
"""Most steps that plans are reused for while no request drafts."""
TPOT_TOLERANCE = 0.98
"""Plans are reused while no time target has become tighter than this share of what it was."""
LOGGED_AFTER = 30
"""Plain steps in a row after which the log says that drafting was given up."""

# Probes; losses are in steps.
FIRST_PROBE_LOSS = 0.2
"""Loss that is paid off before the first probe of either kind."""
LEAST_PROBE_LOSS = 0.02
"""Loss that every probe counts for at least."""
LARGEST_PROBE_LOSS = 8.0
"""Loss that a probe beside drafting counts for at most."""
FIRST_PROBES = 0.25
"""Loss that is allowed, per 8 idle steps at first, when drafting was just given up."""
FOLLOWING = 3
"""Probes that follow at once after one whose token was accepted."""
FOLLOWING_LOSS = 2.5
"""Loss above which none follows: a draft may be accepted often and still not pay."""
LARGEST_PROBE_GAP = 100.0
"""Most steps between two probes while no request drafts."""

# The comparison with plain decoding.
FIRST_PLAIN_GAP = 4
"""Speculative steps before plain ones are measured for the first time."""
MAX_SWITCHES = 1000
"""Switches between speculation and plain decoding that are remembered."""

# Acceptance.
MAX_POOLS = 1024
"""Pools that are kept; beyond, the oldest is dropped, since a request may have any tags."""
CALIBRATION_BINS = 12
"""Bins of a draft's confidence between 0 and 1, by each of which acceptance is counted."""

# Trees.
DEEPEST_TREE = 4
"""Most levels of a draft tree that is planned; deeper drafts are planned as chains."""
LATER_RANK = 0.4
"""P(a further child is accepted | those before it are not) before any was drafted."""

# The rules of transformers.
HEURISTIC_UP = 2
"""What K grows by where all drafted tokens were accepted."""
HEURISTIC_DOWN = 1
"""What K shrinks by where one was rejected."""
HEURISTIC_REQUESTS = 4096
"""Requests whose K is remembered; beyond, the first one is forgotten."""
CONFIDENCE_WINDOW = 1024
"""Last tokens from which the threshold on the confidence is learnt."""
CONFIDENCE_LEAST = 5
"""Tokens that leave the threshold as it was set; it is learnt from more of them."""
MISS_WEIGHT = 3.0
"""Cost of not drafting a token that is right, where drafting a wrong one costs 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeliefConfig:
    """Settings of the acceptance estimates.

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
    """Settings of the goodput controller.

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
    """Conditions under which speculation is switched off because plain decoding is faster.

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
    """Settings of the bandit controller.

    Attributes:
        ks: K to choose from.
        memory: weight that a step keeps after one more, of any configuration.
        width: of the confidence bound, in shares of the best rate.
    """

    ks: tuple[int, ...] = (0, 1, 2, 3, 5, 8)
    memory: float = 0.995
    width: float = 0.3
