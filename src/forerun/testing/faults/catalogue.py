"""Every fault and every control."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.testing.faults.kinds.alignment import ALIGNMENT
from forerun.testing.faults.kinds.controls import CONTROLS
from forerun.testing.faults.kinds.cost import COST
from forerun.testing.faults.kinds.law import LAW
from forerun.testing.faults.kinds.measurement import MEASUREMENT
from forerun.testing.faults.kinds.policy import POLICY
from forerun.testing.faults.kinds.state import STATE
from forerun.testing.faults.scene import Fault

__all__ = ["FAULTS"]

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (*MEASUREMENT, *ALIGNMENT, *LAW, *STATE, *COST, *POLICY, *CONTROLS)
}
