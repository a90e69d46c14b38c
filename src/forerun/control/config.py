"""Names of the controllers and settings of the goodput controller; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from forerun.errors import InvalidRequest

ControllerName = Literal["auto", "fixed"]
CONTROLLER_NAMES: tuple[ControllerName, ...] = get_args(ControllerName)


def check_name(name: str) -> None:
    """Refuse a name that no controller has."""
    if name not in CONTROLLER_NAMES:
        raise InvalidRequest(f"controller {name!r} is unknown; use {', '.join(CONTROLLER_NAMES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputConfig:
    """Settings of the goodput controller, which are all its tuning constants.

    A memory is the weight that an observation keeps after one more; 1 / (1 - memory) observations
    count in all.

    Attributes:
        prior: P(a drafted token is accepted) before any was drafted; high, so that drafts are
            tried.
        strength: drafted tokens that this prior counts for in the estimate of similar requests.
        similar_strength: drafted tokens that the estimate of similar requests counts for in the
            estimate of one request.
        memory: memory of accepted and rejected tokens and of step times.
        assumed_row: cost of one more row of a target pass in plain steps, before it is measured.
        assumed_level: cost of one more drafted level in plain steps, before it is measured.
        cost_strength: measured steps that profiled or assumed proportions of costs count for.
        largest_ratio: most that one measured step counts for, as a multiple of its expected time.
        first_plain: plain steps at the beginning where no profile has their cost.
        num_cold: plain steps after drafting that are slow because of cold caches.
        reuse: most steps for which plans are reused while a request drafts.
        probe_share: share of the time that may be lost by steps made to update an estimate.
        reading_share: share of the expected time of requests that drafters without any measured
            acceptance may take to read prompts.
        assumed_output: output tokens expected of a request while none has ended.
    """

    prior: float = 0.7
    strength: float = 4.0
    similar_strength: float = 8.0
    memory: float = 0.99
    assumed_row: float = 0.05
    assumed_level: float = 0.1
    cost_strength: float = 2.0
    largest_ratio: float = 2.0
    first_plain: int = 6
    num_cold: int = 4
    reuse: int = 8
    probe_share: float = 0.006
    reading_share: float = 0.02
    assumed_output: float = 256.0
