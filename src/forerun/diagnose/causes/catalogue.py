"""Every cause, in the order of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forerun.diagnose.causes.alignment import ALIGNMENT
from forerun.diagnose.causes.base import Cause, Sign
from forerun.diagnose.causes.cost import COST
from forerun.diagnose.causes.law import LAW
from forerun.diagnose.causes.measurement import MEASUREMENT
from forerun.diagnose.causes.policy import HEALTH, POLICY
from forerun.diagnose.causes.state import STATE

__all__ = ["CAUSES"]

BY_REJECTION = frozenset(
    {
        *(cause.label for cause in ALIGNMENT if cause.label != "low_alignment"),
        *("draft_input_feature_mismatch", "draft_weights_misloaded", "drafter_state_loss"),
        "suboptimal_accept_rule",
    }
)
"""Causes that cost speed through rejected tokens only."""
LITTLE_REJECTED = Sign(fact="gap_share_rejection", ramp=(0.1, 0.2), yes=0.0, no=-4.0)
"""What was measured outweighs what was claimed: if rejections take next to nothing of the loss, no
such cause explains it, whatever is said to have changed."""


def weighed(cause: Cause) -> Cause:
    """The cause with the sign that measured rejections give."""
    if cause.label not in BY_REJECTION:
        return cause
    return replace(cause, signs=(*cause.signs, LITTLE_REJECTED))


CAUSES: Mapping[str, Cause] = {
    cause.label: weighed(cause)
    for cause in (*MEASUREMENT, *ALIGNMENT, *LAW, *STATE, *COST, *POLICY, HEALTH)
}
