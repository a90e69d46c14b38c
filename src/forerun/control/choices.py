"""What a controller chose over a run, and what it expects of every way to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from forerun.theory.record import StepRecord


@dataclass(slots=True, kw_only=True)
class MethodChoice:
    """The steps that one way of decoding was chosen for, and its expected speed at the end.

    Attributes:
        num_steps: steps of single requests that it was planned for, probes included; plain steps
            in which the controller was not asked count too.
        num_probes: those of them that were made to measure it.
        shape: what it would draft now at its best: "K=4", "15 nodes in 4 levels", or "nothing"
            where no draft of it is expected to be faster than a plain step.
        tokens_per_s: expected of the last batch if all of it were decoded in this way; None
            before costs were measured.
    """

    method: str
    num_steps: int = 0
    num_probes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    shape: str = "nothing"
    tokens_per_s: float | None = None

    def add(self, record: StepRecord) -> None:
        """Count one step of one request."""
        self.num_steps += 1
        self.num_drafted += record.num_drafted
        self.num_accepted += record.num_accepted

    def to_dict(self) -> dict[str, object]:
        """Fields of the JSON output."""
        return asdict(self)

    def __str__(self) -> str:
        probes = f", {self.num_probes} of them probes" if self.num_probes else ""
        text = f"{self.method} {self.num_steps} steps{probes}"
        if self.num_drafted:
            text += f", {self.num_accepted} of {self.num_drafted} drafted tokens accepted"
        if self.tokens_per_s is None:
            return text
        drafts = "" if self.method == "plain" else f" drafting {self.shape}"
        return f"{text}, {self.tokens_per_s:.0f} tokens/s expected{drafts}"


def described(choices: Sequence[MethodChoice]) -> list[str]:
    """Return one line per way of decoding, the most used first."""
    ranked = sorted(choices, key=lambda choice: -choice.num_steps)
    return [f"chosen: {choice}" for choice in ranked]
