"""Cost of reading a prompt: passes over tokens of which only the last one needs logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from forerun.theory.cost_line import CostReading, interpolate, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingCost:
    """Seconds of passes that read a prompt, by number of tokens and for both models.

    A verify pass of as many rows takes longer, for it yields logits at every row. Between
    measurements everything is linear; beyond the most tokens the last slope goes on.

    Attributes:
        tokens: measured numbers of tokens, ascending from 1.
        target_s: a pass of the target, per number.
        draft_s: a pass of the draft, per number.
    """

    tokens: tuple[int, ...]
    target_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    _target: tuple[CostReading, ...] = field(init=False, repr=False, compare=False)
    _draft: tuple[CostReading, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse unequal lengths, unordered numbers and impossible times."""
        if not self.tokens or self.tokens[0] != 1 or any(b <= a for a, b in pairwise(self.tokens)):
            raise ValueError(f"tokens is {list(self.tokens)}; it must ascend from 1")
        for name in ("target_s", "draft_s"):
            times = getattr(self, name)
            if len(times) != len(self.tokens):
                raise ValueError(f"{name} has {len(times)} entries for {len(self.tokens)} numbers")
            if not all(0.0 <= seconds < math.inf for seconds in times):
                raise ValueError(f"{name} is {list(times)}; times are finite and 0 or more")
        object.__setattr__(self, "_target", tuple(map(CostReading, self.target_s)))
        object.__setattr__(self, "_draft", tuple(map(CostReading, self.draft_s)))

    def target_pass_s(self, num_tokens: int) -> float:
        """Return the seconds of a target pass that only reads a prompt."""
        return interpolate(self.tokens, self._target, num_tokens).s

    def target_more_s(self, num_tokens: int) -> float:
        """Return the seconds that reading adds to a target pass with other rows."""
        return max(0.0, self.target_pass_s(num_tokens) - self.target_s[0])

    def draft_more_s(self, num_tokens: int) -> float:
        """Return the seconds that reading these tokens adds to drafting."""
        read_s = interpolate(self.tokens, self._draft, num_tokens).s
        return max(0.0, read_s - self.draft_s[0])

    def to_dict(self) -> dict[str, object]:
        """Return the fields by name, ready for JSON."""
        return {"tokens": self.tokens, "target_s": self.target_s, "draft_s": self.draft_s}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ReadingCost:
        """Return the object that `to_dict` wrote; sequences may be tuples or lists.

        Raises:
            ValueError: a field is missing, unknown or not of numbers, or a value is impossible.
        """
        names = ("draft_s", "target_s", "tokens")
        if values.keys() != set(names):
            raise ValueError(f"a reading cost has {', '.join(names)}; this one {', '.join(values)}")
        found = {name: numbers(name, values[name]) for name in names}
        return cls(
            tokens=tuple(map(int, found["tokens"])),
            target_s=found["target_s"],
            draft_s=found["draft_s"],
        )
