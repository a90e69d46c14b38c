"""Every cause, in the order of the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.diagnose.causes.alignment import ALIGNMENT
from forerun.diagnose.causes.base import Cause
from forerun.diagnose.causes.cost import COST
from forerun.diagnose.causes.law import LAW
from forerun.diagnose.causes.measurement import MEASUREMENT
from forerun.diagnose.causes.policy import HEALTH, POLICY
from forerun.diagnose.causes.state import STATE

__all__ = ["CAUSES"]

CAUSES: Mapping[str, Cause] = {
    cause.label: cause for cause in (*MEASUREMENT, *ALIGNMENT, *LAW, *STATE, *COST, *POLICY, HEALTH)
}
