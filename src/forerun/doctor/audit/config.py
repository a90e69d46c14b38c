"""Settings of an audit, and the kinds of request it sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.errors import Range, check_ranges

GRAMMAR = "[0-9]{3}-[a-f]{4}"
"""Regular expression that the requests of the kind "grammar" ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request: its sampling parameters and its share of the tokens."""

    name: str
    share: float
    temperature: float = 1.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    has_grammar: bool = False

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the request that differ from a plain sampled one."""
        found: dict[str, object] = {"temperature": self.temperature, "top_p": self.top_p}
        if self.frequency_penalty:
            found["frequency_penalty"] = self.frequency_penalty
        if self.has_grammar:
            found["structured_outputs"] = {"regex": GRAMMAR}
        return found


KINDS = (
    Kind(name="sampled", share=0.5),
    Kind(name="filtered", share=0.2, temperature=0.8, top_p=0.9),
    Kind(name="penalised", share=0.15, frequency_penalty=1.0),
    Kind(name="greedy", share=0.1, temperature=0.0),
    Kind(name="grammar", share=0.05, has_grammar=True),
)
_RANGES = (
    Range("max_tokens", 1, integer=True),
    Range("max_requests", 1, integer=True),
    Range("num_tokens", 2, integer=True),
    Range("num_clients", 1, 64, integer=True),
    Range("false_alarms", 0, 0.5, above_low=True),
    Range("tolerance", 0, 0.5, above_low=True),
    Range("tie_margin", 0, above_low=True),
    Range("control_share", 0, 0.9),
    Range("confirm_tokens", 0, integer=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Limits and error rates of an audit.

    Attributes:
        max_tokens: most output tokens in all; a request that may exceed the rest is not sent.
        max_requests: most requests, refused ones and further tries included.
        num_tokens: most output tokens of one request.
        num_clients: requests at once.
        false_alarms: largest probability of an alarm, at any time, over a server that is within
            the tolerance.
        tolerance: total variation from the reference, at every token, that counts as rounding.
        tie_margin: at temperature 0, a token whose logarithm of the probability is less than this
            below the best one counts as a near tie.
        control_share: of the tokens, kept for the requests without speculation that follow an
            alarm.
        confirm_tokens: asked for after an alarm, of the kind of request that deviates and of the
            first kind, to name the fault; as many follow without speculation.
        kinds: of request.
    """

    max_tokens: int = 20_000
    max_requests: int = 2_000
    num_tokens: int = 48
    num_clients: int = 4
    false_alarms: float = 0.01
    tolerance: float = 0.002
    tie_margin: float = 0.5
    control_share: float = 0.25
    confirm_tokens: int = 2_000
    kinds: tuple[Kind, ...] = field(default=KINDS)

    def __post_init__(self) -> None:
        check_ranges(self, *_RANGES)
