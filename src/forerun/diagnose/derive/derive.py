"""Everything that follows from what was read, in the order in which it follows."""

from __future__ import annotations

from forerun.diagnose.derive.costs import add_costs, add_ratios
from forerun.diagnose.derive.counts import add_rates
from forerun.diagnose.derive.names import add_names
from forerun.diagnose.derive.observations import add_observations
from forerun.diagnose.evidence import Evidence

__all__ = ["derive"]


def derive(evidence: Evidence) -> None:
    """Add what follows; what was read or said stays."""
    add_names(evidence)
    add_rates(evidence)
    add_costs(evidence)
    add_ratios(evidence)
    add_observations(evidence)
