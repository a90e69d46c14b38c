"""The verdict of an audit: whether speculation changes the text, which fault it looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, StrictUndefined

from forerun.doctor.audit.alternatives import FAMILIES
from forerun.doctor.audit.ledger import Deviation, Ledger, PlaceDeviation
from forerun.doctor.audit.readings import DIRECTIONS
from forerun.doctor.audit.run import Audit
from forerun.terminal_text import printable

Status = Literal["no_deviation", "deviates", "cannot_judge"]

MEANINGS: Mapping[str, str] = {
    "acceptance": "draft tokens are kept too often: acceptance compares with the wrong "
    "distribution",
    "typical_acceptance": "every draft token of some probability is kept: typical acceptance",
    "residual": "the token after a rejection does not come from the residual distribution",
    "argmax_slot": "a slot that should be sampled takes the most likely token",
    "reused_noise": "the random numbers that drew the draft are used again to accept it",
    "one_sided_filter": "top-p or top-k is applied to one of draft and target alone",
    "threshold": "now and then a token of probability 0 is kept: the comparison accepts equality, "
    "or the random numbers are coarse",
    "relaxed_greedy": "at temperature 0 draft tokens are kept that are not the most likely ones",
    "missing_penalties": "the verification pass leaves out the penalties",
    "wrong_row": "the pass is read one row off",
    "stale_state": "the text fits another context than its own: state of rejected tokens is kept",
    "shared_seeds": "separate requests draw with the same random numbers",
    "grammar": "the grammar does not bind every token: its mask is missing in the pass",
    "unnamed": "the deviation resembles no fault that is known here",
}
"""Description of every family of faults."""
_DENIED = (
    "The text deviates without speculation as much as with it: the reference is another model, "
    "other parameters are in force, or the reported probabilities are not those that are sampled."
)
_LEFT_OUT = (
    "The text deviates by less than {:.0%}, the share of answers whose token ids are unknown. They "
    "are left out, which can explain the deviation."
)
_FAVOURED = math.log(100.0)
"""Log-likelihood ratio from which a text supports an alternative."""
_FEW_TOKENS = 500
_THRESHOLD_SHARE = 0.01
_SIGMAS = 3.0
_BOUND_TOKENS = 1000
_PLACE_TOKENS = 30
_COPIED_SHARE = 0.3
"""Least share of tokens, beyond chance, that repeat an earlier answer if its noise was reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """The outcome in words and figures.

    Attributes:
        status: "no_deviation", "deviates", or "cannot_judge".
        family: of the fault, a key of `MEANINGS`; None without a deviation.
        notes: what could not be examined, and why.
        bound: total variation that was ruled out in the directions tested; None if none was.
        profile: deviation at every place of an answer, of the strongest direction.
    """

    status: Status
    sentence: str
    family: str | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bound: float | None = None
    profile: tuple[PlaceDeviation, ...] = ()
    steps: tuple[PlaceDeviation, ...] = ()


def judge(audit: Audit) -> AuditVerdict:
    """Return the verdict on what an audit has seen until now."""
    notes = _notes(audit)
    if audit.progress.alarm_tokens is None:
        return _without_alarm(audit, notes)
    return _with_alarm(audit, notes)


def _notes(audit: Audit) -> tuple[str, ...]:
    progress, found = audit.progress, []
    found += [
        f"requests of the kind {k!r} are left out: {why}" for k, why in progress.dropped.items()
    ]
    found += [f"{num} answers failed: {why}" for why, num in progress.problems.most_common(3)]
    if progress.num_without_ids:
        found.append(
            f"{progress.num_without_ids} answers without token ids: their tokens are not judged"
        )
    reported = getattr(audit.ledger.reference, "problems", ())
    if reported:
        found.append(f"{len(reported)} answers report impossible probabilities: {reported[0]}")
    if audit.ledger.reference is None:
        found.append("there is no reference: only grammars are checked")
    return tuple(found)


def _without_alarm(audit: Audit, notes: tuple[str, ...]) -> AuditVerdict:
    num_tokens = sum(audit.ledger.arms["served"].num_tokens.values())
    if num_tokens < _FEW_TOKENS:
        return AuditVerdict(
            status="cannot_judge",
            sentence=f"Only {num_tokens} tokens could be judged; it takes {_FEW_TOKENS}.",
            notes=notes,
        )
    bound = audit.ledger.bound(_BOUND_TOKENS)
    if bound is None:
        words = f"No deviation was found, but {num_tokens} tokens bound it little."
    else:
        words = f"No deviation above TV {bound:.3f} with 95%, in every direction tested."
    return AuditVerdict(
        status="no_deviation",
        sentence=words,
        bound=bound,
        notes=notes,
        reasons=(f"{num_tokens} tokens of {audit.endpoint.name} were compared",),
    )


def _with_alarm(audit: Audit, notes: tuple[str, ...]) -> AuditVerdict:
    deviations = audit.ledger.deviations("served")
    first = deviations[0]
    family = family_of(audit.ledger, math.log(20.0))
    cause = "shown" if family == "shared_seeds" else contrast(audit.ledger, first)
    profile = audit.ledger.by_place(first.kind, first.direction, in_step=False)
    steps = audit.ledger.by_place(first.kind, first.direction, in_step=True)
    reasons = (
        f"{DIRECTIONS[first.direction]}, in requests of the kind {first.kind!r}: "
        f"{first.mean:+.3f} ({first.low:+.3f} to {first.high:+.3f}) over {first.num_tokens} tokens",
        f"alarm after {audit.progress.alarm_tokens} tokens, e-value 10^"
        f"{audit.progress.peak_log_e / math.log(10):.1f}",
        *_control_words(audit, first),
    )
    share = 0.0 if first.direction == "grammar" else audit.share_without_ids(first.kind)
    if cause == "denied" or abs(first.mean) <= share:
        sentence = _DENIED if cause == "denied" else _LEFT_OUT.format(share)
        return AuditVerdict(
            status="cannot_judge",
            sentence=sentence,
            reasons=reasons,
            notes=notes,
            profile=tuple(profile),
        )
    where = places_in_words(profile, steps)
    doubt = "" if cause == "shown" else " Whether speculation is the cause is not shown."
    return AuditVerdict(
        status="deviates",
        sentence=f"{where} from the reference: {MEANINGS[family]}.{doubt}",
        family=family,
        reasons=reasons,
        notes=notes,
        profile=tuple(profile),
        steps=tuple(steps),
    )


def _control_words(audit: Audit, first: Deviation) -> tuple[str, ...]:
    for item in audit.ledger.deviations("control"):
        if (item.kind, item.direction) == (first.kind, first.direction):
            return (
                f"without speculation ({audit.endpoint.control}): {item.mean:+.3f} "
                f"({item.low:+.3f} to {item.high:+.3f}) over {item.num_tokens} tokens",
            )
    return ()


def contrast(ledger: Ledger, first: Deviation) -> Literal["shown", "denied", "open"]:
    """Decide, by the requests without speculation, whether speculation causes a deviation."""
    served = ledger.moved("served", first.direction, first.kind)
    control = ledger.moved("control", first.direction, first.kind)
    if len(control) < 2 or not len(served):
        return "open"
    # The last term keeps the error above 0 for a rate of 0 or 1 in the sample.
    error = math.hypot(
        served.std() / math.sqrt(len(served)), control.std() / math.sqrt(len(control))
    ) + 1.0 / (2 * len(control))
    sigmas = abs(served.mean() - control.mean()) / error
    if sigmas >= _SIGMAS and abs(control.mean()) < abs(served.mean()):
        return "shown"
    own = abs(control.mean()) / (control.std() / math.sqrt(len(control)) + 1.0 / (2 * len(control)))
    return "denied" if own >= _SIGMAS else "open"


def family_of(ledger: Ledger, alarm_log_e: float) -> str:
    """Return the family of faults that explains a deviation best."""
    strong = [item for item in ledger.deviations("served") if item.log_e >= alarm_log_e]
    by_direction = {item.direction: item for item in reversed(strong)}
    copied = by_direction.get("copied")
    if copied is not None and copied.mean >= _COPIED_SHARE:
        return "shared_seeds"
    plain = ledger.config.kinds[0].name
    kinds = {item.kind for item in strong}
    if plain in kinds:
        return _likeliest(ledger.likelihoods(plain))
    # Plain sampling does not deviate, so the fault is in what the other kinds add to it.
    if "grammar" in by_direction:
        return "grammar"
    if (excluded := by_direction.get("excluded")) is not None:
        return "threshold" if excluded.mean < _THRESHOLD_SHARE else "one_sided_filter"
    if kinds == {"greedy"}:
        return "relaxed_greedy"
    return _likeliest(ledger.likelihoods(strong[0].kind)) if strong else "unnamed"


def _likeliest(found: Mapping[str, float]) -> str:
    best = max(found, key=lambda name: found[name], default=None)
    return FAMILIES[best] if best is not None and found[best] >= _FAVOURED else "unnamed"


def places_in_words(profile: list[PlaceDeviation], steps: list[PlaceDeviation]) -> str:
    """Return where the text deviates: in which tokens of a step, or from which of an answer on."""
    clear = [place.place + 1 for place in steps if _is_clear(place)]
    if len(steps) > 1 and clear:
        if len(clear) == 1:
            return f"Token {clear[0]} of a step deviates"
        return f"Tokens {clear[0]} to {clear[-1]} of a step deviate"
    if profile and not profile[0].place and not _is_clear(profile[0]):
        return "The text after the first token, which no draft precedes, deviates"
    return "The text, its first tokens included, deviates"


def _is_clear(place: PlaceDeviation) -> bool:
    enough = place.num_tokens >= _PLACE_TOKENS and place.error > 0
    return enough and abs(place.mean) > _SIGMAS * place.error


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
