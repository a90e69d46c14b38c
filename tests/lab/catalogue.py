"""Every fault and every control."""

from __future__ import annotations

from collections.abc import Mapping

from tests.lab.kinds.alignment import ALIGNMENT
from tests.lab.kinds.controls import CONTROLS
from tests.lab.kinds.cost import COST
from tests.lab.kinds.distribution import DISTRIBUTION
from tests.lab.kinds.heads import HEADS
from tests.lab.kinds.measurement import MEASUREMENT
from tests.lab.kinds.policy import POLICY
from tests.lab.kinds.state import STATE
from tests.lab.setups import Fault

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
