"""Derives all facts that follow from the facts that were read, in the order of dependence."""

from __future__ import annotations

import re
from collections.abc import Mapping

from forerun.diagnose.derive.costs import add_costs, add_ratios
from forerun.diagnose.derive.counts import add_rates
from forerun.diagnose.derive.observations import add_observations
from forerun.diagnose.evidence import Evidence, Fact, Value

__all__ = ["add_changes", "add_names", "derive"]


BILLIONS = re.compile(r"(?<![a-zA-Z0-9.])(\d{1,4}(?:\.\d{1,2})?)[bB](?![a-zA-Z0-9])")
MILLIONS = re.compile(r"(?<![a-zA-Z0-9.])(\d{1,4})[mM](?![a-zA-Z0-9])")
ACTIVE = re.compile(r"(?<![a-zA-Z0-9])A(\d{1,3}(?:\.\d{1,2})?)B(?![a-zA-Z0-9])")
EXPERTS = re.compile(r"(?i)\bmoe\b|mixtral|\d+x\d+b|\d+e\b")
QUANTISED = re.compile(
    r"(?i)(?<![a-z0-9])(?:i?q[2-8](?:_[0-9a-z]+)*|fp8|fp4|nvfp4|mxfp4|int[48]|w[48]a(?:8|16)|awq|gptq|"
    r"bnb|[2-8]-?bit)(?![a-z0-9])"
)
RECURRENT = re.compile(r"(?i)mamba|\bssm\b|\bgdn\b|rwkv|jamba|hybrid|delta-?net|recurrent")


def add_names(evidence: Evidence) -> None:
    """Add what the names of target and draft imply."""
    for side in ("target", "draft"):
        for name in evidence.words(f"{side}_name"):
            add_name(evidence, side, name)


def add_name(evidence: Evidence, side: str, name: str) -> None:
    """Add what the name of one checkpoint implies."""
    source = f"name of the {side}: {name}"
    if (size := billions_of(name)) is not None and f"{side}_parameters" not in evidence:
        evidence.conclude(f"{side}_parameters", size, source)
    if QUANTISED.search(name) and f"{side}_quantised" not in evidence:
        evidence.conclude(f"{side}_quantised", True, source)
    if side != "target":
        return
    if (ACTIVE.search(name) or EXPERTS.search(name)) and "target_moe" not in evidence:
        evidence.conclude("target_moe", True, source)
    if RECURRENT.search(name) and "target_recurrent" not in evidence:
        evidence.conclude("target_recurrent", True, source)


def billions_of(name: str) -> float | None:
    """Parameters read per token, active ones where experts are named; None without a size."""
    for pattern, factor in ((ACTIVE, 1.0), (BILLIONS, 1.0), (MILLIONS, 0.001)):
        if found := pattern.search(name):
            return float(found.group(1)) * factor
    return None


SAMENESS: Mapping[str, tuple[str, ...]] = {
    "target": ("target_hash", "target_name"),
    "draft": ("draft_hash", "draft_name"),
    "engine": ("engine_version",),
    "hardware": ("device",),
}
"""What decides whether something is the same, the better witness first."""
DIFFERENCE: Mapping[str, tuple[str, ...]] = {
    "config": ("k", "method"),
    "traffic": ("temperature",),
}
"""What shows a change, and would not show every one."""


def add_changes(evidence: Evidence, before: Evidence) -> None:
    """Compare two runs: `changed`, together with what the user gave, and `unchanged`.

    Args:
        evidence: of today; what is found is added to it.
        before: of the run it is compared with.
    """
    said = evidence.words("changed")
    changed: set[str] = set(said)
    same: set[str] = set()
    for name, witnesses in SAMENESS.items():
        pair = both(evidence, before, witnesses)
        if pair is not None:
            (changed if pair[0] != pair[1] else same).add(name)
    for name, witnesses in DIFFERENCE.items():
        pairs = [both(evidence, before, (witness,)) for witness in witnesses]
        if any(pair is not None and pair[0] != pair[1] for pair in pairs):
            changed.add(name)
    source = "both runs compared"
    if changed - set(said):
        if said:
            source = f"{evidence.facts['changed'].source}; {source}"
        values = tuple(sorted(changed))
        evidence.facts["changed"] = Fact(name="changed", value=values, source=source)
    if same - changed:
        evidence.conclude("unchanged", sorted(same - changed), "both runs compared")


def both(
    evidence: Evidence, before: Evidence, witnesses: tuple[str, ...]
) -> tuple[Value, Value] | None:
    """Return the values of the first of some facts that both runs have."""
    for witness in witnesses:
        now, then = evidence.facts.get(witness), before.facts.get(witness)
        if now is not None and then is not None:
            return now.value, then.value
    return None


def derive(evidence: Evidence) -> None:
    """Add all facts that follow from others; facts that were read are not changed."""
    add_names(evidence)
    add_rates(evidence)
    add_costs(evidence)
    add_ratios(evidence)
    add_observations(evidence)
