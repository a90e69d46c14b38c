"""What speculation did to one request: as a line for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.summary import drafting_only
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord

__all__ = ["Figures", "rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts and times of one request, all its samples together.

    Attributes:
        num_prompt_tokens: prompt length.
        num_tokens: emitted tokens.
        total_s: from the request to the last token.
        ttft_s: from the request to the first token; None where there was none.
        acceptance: counts over the steps that drafted.
    """

    num_prompt_tokens: int
    num_tokens: int
    total_s: float
    ttft_s: float | None
    acceptance: AcceptanceCounts

    @classmethod
    def of(
        cls,
        records: Sequence[StepRecord],
        *,
        num_prompt_tokens: int,
        total_s: float,
        ttft_s: float | None,
    ) -> Figures:
        """From the steps so far; works for an interrupted request too."""
        return cls(
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=sum(record.num_emitted for record in records),
            total_s=total_s,
            ttft_s=ttft_s,
            acceptance=drafting_only(AcceptanceCounts.from_records(records)),
        )

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over wall time, prefill included."""
        return self.num_tokens / self.total_s if self.total_s > 0 else 0.0

    @property
    def line(self) -> str:
        """For people."""
        parts = [f"{self.num_tokens} tokens in {self.total_s:.2f} s ({self.tokens_per_s:.1f}/s)"]
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s:.2f} s")
        counts = self.acceptance
        if counts.acceptance_length is not None:
            parts.append(f"{counts.acceptance_length:.2f} tokens per step")
            per_position = rates(counts.acceptance_rate_per_position)
            parts.append(f"accepted per position {per_position} of {counts.num_steps} steps")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        counts = self.acceptance
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "total_s": self.total_s,
            "ttft_s": self.ttft_s,
            "tokens_per_s": self.tokens_per_s,
            "num_steps": counts.num_steps,
            "num_drafted": counts.num_drafted,
            "num_accepted": counts.num_accepted,
            "draft_acceptance_rate": counts.draft_acceptance_rate,
            "acceptance_length": counts.acceptance_length,
            "acceptance_rate_per_position": list(counts.acceptance_rate_per_position),
            "drafted_per_position": list(counts.drafted_per_position),
        }


def rates(values: Sequence[float], most: int = 6) -> str:
    """Shares as ".81 .62 .5", the first few."""
    shown = [f"{value:.2f}".removeprefix("0") for value in values[:most]]
    return " ".join([*shown, *(["…"] if len(values) > most else [])])
