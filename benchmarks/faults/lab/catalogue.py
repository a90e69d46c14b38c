"""Every fault and every control."""

from __future__ import annotations

from collections.abc import Mapping

from lab.kinds.alignment import ALIGNMENT
from lab.kinds.controls import CONTROLS
from lab.kinds.cost import COST
from lab.kinds.distribution import DISTRIBUTION
from lab.kinds.heads import HEADS
from lab.kinds.measurement import MEASUREMENT
from lab.kinds.policy import POLICY
from lab.kinds.state import STATE
from lab.setups import Fault

__all__ = ["FAULTS"]

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        *MEASUREMENT,
        *ALIGNMENT,
        *DISTRIBUTION,
        *STATE,
        *COST,
        *POLICY,
        *HEADS,
        *CONTROLS,
    )
}
