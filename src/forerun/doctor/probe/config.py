"""Settings of a probe; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import Range, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceConfig:
    """Settings of a probe: how many requests are generated and how long passes are timed.

    Attributes:
        num_prompts: prompts used, evenly from all that are given.
        num_tokens: most output tokens of each, once greedily and once sampled.
        num_self_prompts: prompts on which the target drafts for itself; 0 leaves that out.
        num_self_tokens: most output tokens of each of those.
        max_rows: widest pass that is timed, over one sequence; 0 times nothing.
        costs_s: seconds spent on timing passes.
        seed: of every sampled request and of the randomised transform.
    """

    num_prompts: int = 32
    num_tokens: int = 96
    num_self_prompts: int = 8
    num_self_tokens: int = 32
    max_rows: int = 17
    costs_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "num_tokens": 2, "num_self_tokens": 2}
        least |= dict.fromkeys(("num_self_prompts", "max_rows", "costs_s"), 0)
        check_ranges(self, *(Range(name, low) for name, low in least.items()))


QUICK = EvidenceConfig(
    num_prompts=16, num_tokens=64, num_self_prompts=4, num_self_tokens=24, costs_s=0.3
)
"""Settings of `--quick`: two to four seconds on a pair as small as the shipped one."""
