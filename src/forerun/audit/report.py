"""The report of an audit: one JSON object, and a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from forerun.audit.readings import DIRECTIONS
from forerun.audit.run import Audit
from forerun.audit.verdict import AuditVerdict
from forerun.terminal_text import printable

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def spent_in_words(audit: Audit) -> str:
    """Return what the audit has cost."""
    spent, limits = audit.progress.spent, audit.config
    return (
        f"{spent.num_tokens} of {limits.max_tokens} output tokens and {spent.num_requests} of "
        f"{limits.max_requests} requests spent, {audit.progress.elapsed_s:.0f} s"
    )


def report_of(audit: Audit, verdict: AuditVerdict) -> dict[str, object]:
    """Return verdict and figures as JSON values."""
    progress = audit.progress
    return {
        "endpoint": audit.endpoint.name,
        **asdict(verdict),
        "spent": asdict(progress.spent),
        "limits": {"tokens": audit.config.max_tokens, "requests": audit.config.max_requests},
        "alarm_tokens": progress.alarm_tokens,
        "peak_log_e": progress.peak_log_e,
        "elapsed_s": progress.elapsed_s,
        "control": audit.endpoint.control,
        "deviations": {
            arm: [asdict(item) for item in audit.ledger.deviations(arm)]
            for arm in audit.ledger.arms
        },
    }


def page_of(audit: Audit, verdict: AuditVerdict) -> str:
    """Return the report as an HTML page."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        verdict=verdict,
        spent=spent_in_words(audit),
        profiles=(
            ("Deviation by place in an answer", verdict.profile),
            ("Deviation by place in a step", verdict.steps),
        ),
        tables=(
            ("As served", audit.ledger.deviations("served")),
            ("Without speculation", audit.ledger.deviations("control")),
        ),
        names=DIRECTIONS,
    )
