"""Audits the setting that is about to be recommended: does speculation change the text?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from forerun.doctor.audit.config import AuditConfig
from forerun.doctor.audit.prepare import AuditSource, prepare_audit
from forerun.doctor.audit.verdict import judge
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.tune.arms import Arm
from forerun.tune.config import TuneConfig
from forerun.tune.fleet import Notify

Status = Literal["no_deviation", "deviates", "cannot_judge", "not_audited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessCheck:
    """What an audit says of one arm.

    Attributes:
        status: "not_audited" where no audit was wanted.
        sentence: the verdict in words.
        num_tokens: output tokens that were read.
        bound: total variation from the reference that was ruled out; None if none was.
        has_alarm: whether its text deviates, by speculation or otherwise.
    """

    status: Status
    sentence: str
    num_tokens: int = 0
    bound: float | None = None
    has_alarm: bool = False


TOO_SHORT = "the time for the audit was over: give more --minutes"
_LEAST_CLIENTS, _MOST_CLIENTS = 8, 64
"""Requests at once in an audit, where some are sent together."""


def check_text(
    arm: Arm,
    baseline: Arm | None,
    config: TuneConfig,
    max_seconds: float,
    notify: Notify,
) -> ExactnessCheck:
    """Audit a server beside one that decodes plainly, with at most the tokens of the settings.

    Args:
        baseline: a running server of the same model without speculation; None compares with what
            the server itself says of its text.
    """
    num_tokens, num_clients = config.audit_tokens, max(load.clients for load in config.loads)
    reference = None if baseline is None else baseline.url
    source = AuditSource(url=arm.url, reference=reference, prompts=config.prompts)
    limits = AuditConfig(
        max_tokens=num_tokens,
        max_seconds=max_seconds,
        num_clients=min(_MOST_CLIENTS, max(_LEAST_CLIENTS, num_clients)),
    )
    try:
        with ExitStack() as stack:
            audit = prepare_audit(source, limits, stack)
            audit.run(
                lambda what, done: notify(f"{arm.name}: audit, {done:.0f} of {num_tokens} tokens")
            )
            verdict = judge(audit)
    except (InvalidRequest, ServerUnavailable) as error:
        return ExactnessCheck(status="cannot_judge", sentence=str(error))
    is_late = verdict.status == "cannot_judge" and audit.progress.elapsed_s >= max_seconds
    return ExactnessCheck(
        status=verdict.status,
        sentence=TOO_SHORT if is_late else verdict.sentence.replace("--tokens", "--audit-tokens"),
        num_tokens=audit.progress.spent.num_tokens,
        bound=verdict.bound,
        has_alarm=audit.progress.alarm_tokens is not None,
    )
