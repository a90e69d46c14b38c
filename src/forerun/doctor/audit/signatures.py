"""Names a fault by what deviates, where it deviates, and which alternative fits best."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from forerun.doctor.audit.alternatives import FAMILIES
from forerun.doctor.audit.ledger import EVERYTHING, FEW, Deviation, Ledger, Moments
from forerun.doctor.audit.readings import DIRECTIONS

_FAVOURED = log(100.0)
"""Log-likelihood ratio from which a text supports an alternative, and one prevails over another."""
_STRONG_LOG_E = log(2000.0)
"""Of one bet among hundreds: a smaller one is seen somewhere by chance."""
_COPIED_SHARE = 0.3
"""Least share of tokens, beyond chance, that repeat an earlier answer if its noise was reused."""
_THRESHOLD_SHARE = 0.01
_FAR_SHARE = 0.15
"""Least share of excluded tokens that a few bits do not explain."""
_CACHED = ("setting again", "setting continued", "setting aborted")


SIGNATURES = (
    ("shared_seeds", "copied", ""),
    ("text", "text", "copied ending"),
    ("ending", "ending", "copied"),
    ("ending", "ends-first", "copied ending text"),
    ("grammar", "grammar", "plain filtered counted copied"),
    ("relaxed_greedy", "greedy", "plain filtered counted grammar copied"),
    ("threshold", "excluded-seldom excluded-far", "plain counted copied full-only"),
    (
        "one_sided_filter",
        "filtered excluded-far",
        "plain counted excluded-seldom copied full-only",
    ),
    ("numerics", "filtered", "excluded-far favoured copied full-only cached-only"),
    ("missing_penalties", "counted", "plain copied full-only"),
    ("bonus", "full-only", "copied ends-first"),
    ("stale_state", "cached-only", "copied full-only ends-first"),
)
"""Family, facts that it shows and facts that it lacks; where none fits, likelihoods decide."""


def name_family(ledger: Ledger) -> str:
    """Return the family of faults that explains a deviation; "unnamed" if two do or none does."""
    facts = find_facts(ledger)
    fitting = {
        family
        for family, shows, lacks in SIGNATURES
        if facts.issuperset(shows.split()) and facts.isdisjoint(lacks.split())
    }
    if len(fitting) == 1:
        return fitting.pop()
    if fitting:
        return "unnamed"
    return _favour(ledger)


def _favour(ledger: Ledger) -> str:
    """Return the family whose alternative fits best the plain text that deviates most."""
    plain = {f"kind {kind.name}" for kind in ledger.config.kinds if kind.is_plain}
    first = (item.group for item in ledger.deviations("served") if item.group in plain)
    group = next(first, None)
    return "unnamed" if group is None else _likeliest(ledger.likelihoods(group))


def _count(ledger: Ledger, direction: str) -> float:
    return ledger.moved("served", direction).total


def find_facts(ledger: Ledger) -> frozenset[str]:
    """Return what deviates, and where it does."""
    everything, kinds = ledger.deviations("served"), ledger.config.kinds
    least = min(_STRONG_LOG_E, 0.7 * everything[0].log_e)
    strong = [item for item in everything if item.log_e >= least]
    of_rows = [item for item in strong if DIRECTIONS[item.direction].kind != "answer"]
    groups = {item.group for item in of_rows if item.direction != "ends"}
    deviating = [kind for kind in kinds if f"kind {kind.name}" in groups]
    by_direction = {item.direction: item for item in reversed(strong)}
    facts = {
        "copied": "copied" in by_direction and by_direction["copied"].mean >= _COPIED_SHARE,
        **{name: name in by_direction for name in ("grammar", "ending", "text")},
        "ends-first": strong[0].direction == "ends",
        "greedy": any(kind.temperature == 0.0 for kind in deviating),
        "plain": any(kind.is_plain for kind in deviating),
        "filtered": any(kind.is_filtered for kind in deviating),
        "counted": any(kind.is_counted for kind in deviating),
        "excluded-seldom": 0 < ledger.moved("served", "excluded").mean < _THRESHOLD_SHARE,
        "excluded-far": _count(ledger, "excluded_by_far") > _FAR_SHARE * _count(ledger, "excluded"),
        "favoured": _favour(ledger) != "unnamed",
        "full-only": _is_only_in(ledger, of_rows, "step full"),
        "cached-only": any(_is_only_in(ledger, of_rows, group) for group in _CACHED),
    }
    return frozenset(name for name, is_seen in facts.items() if is_seen)


def _is_only_in(ledger: Ledger, strong: list[Deviation], group: str) -> bool:
    """Whether the strongest deviation is one of this group of tokens, and of no others."""
    if not strong:
        return False
    direction = strong[0].direction
    here = ledger.moved("served", direction, group)
    everywhere = ledger.moved("served", direction, EVERYTHING)
    elsewhere = Moments(
        num=everywhere.num - here.num,
        total=everywhere.total - here.total,
        squares=everywhere.squares - here.squares,
    )
    return here.is_clear and elsewhere.num >= FEW and not elsewhere.is_clear


def _likeliest(found: Mapping[str, float]) -> str:
    """Return the family of the likeliest alternative; "unnamed" if another is nearly as likely."""
    best: dict[str, float] = {}
    for name, value in found.items():
        best[FAMILIES[name]] = max(value, best.get(FAMILIES[name], value))
    ordered = sorted(best, key=lambda family: -best[family])
    if not ordered or best[ordered[0]] < _FAVOURED:
        return "unnamed"
    return ordered[0]
