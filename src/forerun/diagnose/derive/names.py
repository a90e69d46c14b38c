"""What the name of a checkpoint says: parameters, experts, quantisation, recurrent layers.

Names are conventions, not measurements; what is known otherwise stays.
"""

from __future__ import annotations

import re

from forerun.diagnose.evidence import Evidence

__all__ = ["add_names"]

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
    """Facts of both names."""
    for side in ("target", "draft"):
        for name in evidence.words(f"{side}_name"):
            add_name(evidence, side, name)


def add_name(evidence: Evidence, side: str, name: str) -> None:
    """Facts of one name."""
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
