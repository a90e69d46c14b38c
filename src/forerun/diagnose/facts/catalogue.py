"""Every fact by name: the vocabulary of readers, facts files, flags, probes and rules."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.diagnose.facts.figures import COUNTS, DERIVED, PROBED, SPEEDS, WORKLOAD
from forerun.diagnose.facts.kinds import FactKind
from forerun.diagnose.facts.observations import ACCEPTANCE, COST, OUTPUT, SETUP

__all__ = ["FACTS", "GROUPS"]

GROUPS: Mapping[str, tuple[FactKind, ...]] = {
    "counts": COUNTS,
    "speeds": SPEEDS,
    "workload": WORKLOAD,
    "set-up": SETUP,
    "acceptance": ACCEPTANCE,
    "output": OUTPUT,
    "cost": COST,
    "probe": PROBED,
    "derived": DERIVED,
}
FACTS: Mapping[str, FactKind] = {kind.name: kind for group in GROUPS.values() for kind in group}
