"""Audits the setting that is about to be recommended: does speculation change the text?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.doctor.audit.config import AuditConfig
from forerun.doctor.audit.prepare import AuditSource, prepare_audit
from forerun.doctor.audit.verdict import judge
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.tune.arms import Arm
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


_LEAST_CLIENTS, _MOST_CLIENTS = 8, 64
"""Requests at once in an audit, where some are sent together."""


def check_tokens(num_tokens: int) -> None:
    """Raise InvalidRequest where so many output tokens can never suffice for a verdict."""
    try:
        AuditConfig(max_tokens=num_tokens).check_enough()
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("--tokens", "--audit-tokens")) from error


def check_text(
    arm: Arm,
    baseline: Arm | None,
    num_tokens: int,
    *,
    num_clients: int,
    prompts: Path | None,
    notify: Notify,
) -> ExactnessCheck:
    """Audit a server beside one that decodes plainly, with at most so many output tokens.

    Args:
        baseline: a running server of the same model without speculation; None compares with what
            the server itself says of its text.
    """
    reference = None if baseline is None else baseline.url
    source = AuditSource(url=arm.url, reference=reference, prompts=prompts)
    config = AuditConfig(
        max_tokens=num_tokens, num_clients=min(_MOST_CLIENTS, max(_LEAST_CLIENTS, num_clients))
    )
    try:
        with ExitStack() as stack:
            audit = prepare_audit(source, config, stack)
            audit.run(
                lambda what, done: notify(f"{arm.name}: audit, {done:.0f} of {num_tokens} tokens")
            )
            verdict = judge(audit)
    except (InvalidRequest, ServerUnavailable) as error:
        return ExactnessCheck(status="cannot_judge", sentence=str(error))
    return ExactnessCheck(
        status=verdict.status,
        sentence=verdict.sentence,
        num_tokens=audit.progress.spent.num_tokens,
        bound=verdict.bound,
        has_alarm=audit.progress.alarm_tokens is not None,
    )
