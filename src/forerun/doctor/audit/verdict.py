"""The verdict of an audit: whether speculation changes the text, which fault it looks like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from forerun.doctor.audit.config import FEW_TOKENS, ROUNDS
from forerun.doctor.audit.endpoint import MOST_REQUESTS
from forerun.doctor.audit.ledger import (
    EVERYTHING,
    SIGMAS,
    Deviation,
    Moments,
    mean_interval,
)
from forerun.doctor.audit.readings import DIRECTIONS
from forerun.doctor.audit.run import Audit
from forerun.doctor.audit.signatures import name_family
from forerun.terminal_text import write_count

Status = Literal["no_deviation", "deviates", "cannot_judge"]

MEANINGS: Mapping[str, str] = {
    "acceptance": "draft tokens are kept too often: acceptance compares with the wrong "
    "distribution",
    "typical_acceptance": "every draft token of some probability is kept: typical acceptance",
    "residual": "the token after a rejection does not come from the residual distribution",
    "argmax_slot": "a slot that should be sampled takes the most likely token",
    "reused_noise": "the random numbers that drew the draft are used again to accept it",
    "one_sided_filter": "top-p, top-k or min-p is applied to only one of draft and target",
    "threshold": "now and then a token of probability 0 is kept: the comparison accepts equality, "
    "or the random numbers are coarse",
    "relaxed_greedy": "at temperature 0 draft tokens are kept that are not the most likely ones",
    "missing_penalties": "the verification pass leaves out penalties or the logit bias",
    "wrong_row": "the pass is read one row off",
    "stale_state": "the text fits another context than its own: state of rejected tokens is kept",
    "shared_seeds": "separate requests draw with the same random numbers",
    "grammar": "the grammar does not bind every token: its mask is missing in the pass",
    "ending": "texts end too late or too early",
    "text": "texts are not those of their token ids",
    "bonus": "the token after a whole accepted draft comes from another distribution",
    "numerics": "the verification pass computes other probabilities than a plain pass: rounding, "
    "fewer bits, or another kernel",
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
_FEW_OF_GROUP, _FEW_ANSWERS = 100, 5
_LEAST_DRAFTED, _LEAST_SHARE = 30, 0.02
"""Draft tokens that must be verified, and their share of the output, to judge speculation."""
_BY_ANSWER = ("kind grammar", "kind stopped")
_GROUPS = {
    "all": "all requests",
    "clients 1": "requests with one client",
    "setting alone": "requests sent alone",
    "setting together": "requests sent with others",
    "setting again": "prompts that were sent before",
    "setting continued": "prompts that go on with an answer",
    "setting aborted": "requests beside some that are cut off",
    "setting long": "long answers",
    "route whole": "answers that are not streamed",
    "place beyond 64": "tokens beyond the 64th",
    "step first": "the first token of a step",
    "step later": "the later tokens of a step",
    "step full": "the token after a whole draft that was accepted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """The outcome in words and figures.

    Attributes:
        status: "no_deviation", "deviates", or "cannot_judge".
        family: of the fault, a key of `MEANINGS`; None without a deviation.
        notes: what could not be examined, and why.
        bound: total variation that was ruled out over all tokens; None if none was.
        bounds: the same by group of tokens, where there are enough.
        untested: kinds and circumstances of requests of which the audit can say nothing.
        profile: deviation at every place of an answer, of the strongest direction.
    """

    status: Status
    sentence: str
    family: str | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bound: float | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    untested: tuple[str, ...] = ()
    profile: Mapping[int, Moments] = field(default_factory=dict)
    steps: Mapping[int, Moments] = field(default_factory=dict)


def judge(audit: Audit) -> AuditVerdict:
    """Return the verdict on what an audit has seen until now."""
    notes, untested = _notes(audit), untested_in_words(audit)
    if audit.progress.alarm_tokens is None:
        return _without_alarm(audit, notes, untested)
    return _with_alarm(audit, notes, untested)


def _notes(audit: Audit) -> tuple[str, ...]:
    progress, found = audit.progress, []
    found += [
        f"requests of the kind {k!r} are left out: {why}" for k, why in progress.dropped.items()
    ]
    most_common = progress.problems.most_common(3)
    found += [f"{write_count(num, 'answer')} failed: {why}" for why, num in most_common]
    if progress.num_without_ids:
        found.append(
            f"{write_count(progress.num_without_ids, 'answer')} without token ids, whose tokens "
            "are not judged"
        )
    reported = getattr(audit.ledger.reference, "problems", ())
    if reported:
        num = write_count(len(reported), "answer")
        found.append(f"impossible probabilities in {num}: {reported[0]}")
    if audit.ledger.reference is None:
        found.append("there is no reference: only the form of texts is checked")
    return tuple(found)


def untested_in_words(audit: Audit) -> tuple[str, ...]:
    """Return the kinds and circumstances of requests of which the audit can say nothing."""
    served, config = audit.ledger.arms["served"], audit.config
    kinds = [f"kind {kind.name}" for kind in config.kinds]
    groups = [*kinds, *(f"setting {name}" for name in dict.fromkeys(ROUNDS))]
    groups += ["route whole", "place beyond 64"]
    found = [
        f"{_describe(group)} ({served.num_tokens[group]} values)"
        for group in dict.fromkeys(groups)
        if served.num_tokens[group] < (_FEW_ANSWERS if group in _BY_ANSWER else _FEW_OF_GROUP)
    ]
    clients = ("clients 1", f"clients {config.num_clients}")
    found += [
        f"{_describe(group)} (nothing was speculated there)"
        for group in find_unspeculated(audit, (*kinds, *clients))
    ]
    tested = {name for _, name, _ in served.bets}
    missing = [each.untested for name, each in DIRECTIONS.items() if name not in tested]
    return (*found, *filter(None, missing))


def find_unspeculated(audit: Audit, groups: Iterable[str]) -> list[str]:
    """Return the groups with enough tokens of which too few were speculated to judge that."""
    served = audit.ledger.arms["served"]
    return [
        group
        for group in groups
        if served.num_answered[group] >= _FEW_OF_GROUP and not is_speculated(audit, group)
    ]


def is_speculated(audit: Audit, group: str) -> bool:
    """Whether enough draft tokens were verified in the answers of a group to judge speculation."""
    served = audit.ledger.arms["served"]
    least = max(_LEAST_DRAFTED, _LEAST_SHARE * served.num_answered[group])
    return served.num_drafted[group] >= least


def _speculation_in_words(audit: Audit) -> str:
    served = audit.ledger.arms["served"]
    if not served.num_answered["all"]:
        return "nothing that the server sends shows whether it speculates"
    return (
        f"{served.num_drafted['all']} draft tokens were verified for "
        f"{served.num_answered['all']} output tokens"
    )


def _suggest_limit(audit: Audit, num_tokens: int) -> str:
    """Return which limit to raise, where one ended the audit before enough was judged."""
    config, spent = audit.config, audit.progress.spent
    factor = 1.2 * FEW_TOKENS / max(1, num_tokens)
    if num_tokens and spent.num_tokens + config.num_tokens > config.max_tokens - config.kept_tokens:
        return f": rerun with --tokens {math.ceil(factor * config.max_tokens)}"
    if num_tokens and spent.num_requests + MOST_REQUESTS > config.max_requests:
        return f": rerun with --requests {math.ceil(factor * config.max_requests)}"
    return ""


def _without_alarm(audit: Audit, notes: tuple[str, ...], untested: tuple[str, ...]) -> AuditVerdict:
    served = audit.ledger.arms["served"]
    num_tokens = served.num_tokens["all"]
    problem = None
    if num_tokens < FEW_TOKENS:
        problem = f"Only {num_tokens} tokens could be judged; it takes {FEW_TOKENS}"
        problem += f"{_suggest_limit(audit, num_tokens)}."
    elif not is_speculated(audit, "all"):
        problem = f"Cannot judge speculation: {_speculation_in_words(audit)}."
    elif found := find_unspeculated(audit, ("clients 1", f"clients {audit.config.num_clients}")):
        number = found[0].removeprefix("clients ")
        problem = f"Cannot judge all of it: with {number} clients at once nothing was speculated."
    bounds = {
        group: bound
        for group, bound in audit.ledger.bounds().items()
        if served.num_tokens[group] >= _FEW_OF_GROUP
    }
    kinds = {
        group: bound
        for group, bound in bounds.items()
        if group.startswith("kind ") and is_speculated(audit, group)
    }
    worst = max(kinds, key=lambda group: kinds[group], default=None)
    words = "No deviation was found."
    if worst is not None:
        words = (
            f"No deviation above TV {bounds['all']:.3f} over all tokens, or {kinds[worst]:.3f} in "
            f"one kind of request ({worst.removeprefix('kind ')}), with about 95% confidence."
        )
    if untested:
        words += f" {len(untested)} kinds or circumstances were not tested."
    return AuditVerdict(
        status="no_deviation" if problem is None else "cannot_judge",
        sentence=problem or words,
        bound=bounds.get(EVERYTHING) if problem is None else None,
        bounds=bounds,
        notes=notes,
        untested=untested,
        reasons=(
            f"{num_tokens} tokens of {audit.endpoint.name} were compared",
            _speculation_in_words(audit),
            *audit.describe_sizes(),
        ),
    )


def _with_alarm(audit: Audit, notes: tuple[str, ...], untested: tuple[str, ...]) -> AuditVerdict:
    first = audit.ledger.deviations("served")[0]
    family = name_family(audit.ledger)
    cause = "shown" if family == "shared_seeds" else decide_cause(*_select_moments(audit, first))
    profile = audit.ledger.by_place(first.group, first.direction, in_step=False)
    steps = audit.ledger.by_place(first.group, first.direction, in_step=True)
    reasons = (
        f"{DIRECTIONS[first.direction].words}, in {_describe(first.group)}: "
        f"{first.mean:+.3f} ({first.low:+.3f} to {first.high:+.3f}) over {first.num_tokens} values",
        f"alarm after {audit.progress.alarm_tokens} tokens, e-value 10^"
        f"{audit.progress.peak_log_e / math.log(10):.1f}",
        *_control_words(audit, first),
        _speculation_in_words(audit),
    )
    needs_ids = first.direction == "copied" or DIRECTIONS[first.direction].kind != "answer"
    share = audit.share_without_ids(first.group) if needs_ids else 0.0
    problem = None
    if cause == "denied":
        problem = _DENIED
    elif abs(first.mean) <= share:
        problem = _LEFT_OUT.format(share)
    elif cause != "shown" and not is_speculated(audit, "all"):
        problem = f"The text deviates, but {_speculation_in_words(audit)}."
    where = places_in_words(profile, steps)
    doubt = "" if cause == "shown" else " Whether speculation is the cause is not shown."
    return AuditVerdict(
        status="deviates" if problem is None else "cannot_judge",
        sentence=problem or f"{where} from the reference: {MEANINGS[family]}.{doubt}",
        family=family if problem is None else None,
        reasons=reasons,
        notes=notes,
        untested=untested,
        profile=profile,
        steps=steps,
    )


def _describe(group: str) -> str:
    """Return a group of tokens in words."""
    return _GROUPS.get(group) or f"requests of the {group}"


def _select_moments(audit: Audit, first: Deviation) -> tuple[Moments, Moments]:
    """Return the served and the control values that show whether speculation is the cause."""
    ledger = audit.ledger
    served = ledger.moved("served", first.direction, first.group)
    # Text without speculation has no later tokens of a step.
    group = EVERYTHING if first.group.startswith("step ") else first.group
    if first.group == EVERYTHING or group == EVERYTHING:
        group = f"kind {audit.alarmed_kind(first).name}"
        served = ledger.moved("served", first.direction, group)
    return served, ledger.moved("control", first.direction, group)


def _control_words(audit: Audit, first: Deviation) -> tuple[str, ...]:
    _, control = _select_moments(audit, first)
    if not control.num:
        return ()
    low, high = mean_interval(control, 0.05)
    return (
        f"without speculation ({audit.endpoint.control}): {control.mean:+.3f} "
        f"({low:+.3f} to {high:+.3f}) over {control.num} values",
    )


def decide_cause(served: Moments, control: Moments) -> Literal["shown", "denied", "open"]:
    """Decide whether values without speculation move as little as they should."""
    if control.num < 2 or not served.num:
        return "open"
    error = math.hypot(served.spread / math.sqrt(served.num), control.error)
    sigmas = abs(served.mean - control.mean) / error
    if sigmas >= SIGMAS and abs(control.mean) < abs(served.mean):
        return "shown"
    return "denied" if abs(control.mean) / control.error >= SIGMAS else "open"


def places_in_words(profile: Mapping[int, Moments], steps: Mapping[int, Moments]) -> str:
    """Return where the text deviates: in which tokens of a step, or from which of an answer on."""
    clear = [place + 1 for place, moved in steps.items() if moved.is_clear]
    if len(steps) > 1 and clear:
        if len(clear) == 1:
            return f"Token {clear[0]} of a step deviates"
        return f"Tokens {clear[0]} to {clear[-1]} of a step deviate"
    if 0 in profile and not profile[0].is_clear:
        return "The text after the first token, which no draft precedes, deviates"
    return "The text, its first tokens included, deviates"


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
        **{name: _list_places(getattr(verdict, name)) for name in ("profile", "steps")},
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


def _list_places(places: Mapping[int, Moments]) -> list[dict[str, float]]:
    return [
        {"place": place, "num_tokens": moved.num, "mean": moved.mean, "error": moved.error}
        for place, moved in places.items()
    ]
