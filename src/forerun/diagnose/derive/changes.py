"""What two runs have in common and what was changed between them, as far as both say it."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.diagnose.evidence import Evidence, Fact, Value

__all__ = ["add_changes"]

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
    """Compare two runs: `changed`, together with what somebody said, and `unchanged`.

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
    """The values of the first witness that both runs know."""
    for witness in witnesses:
        now, then = evidence.facts.get(witness), before.facts.get(witness)
        if now is not None and then is not None:
            return now.value, then.value
    return None
