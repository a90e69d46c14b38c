"""Settings of an audit, and the kinds of request it sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forerun.doctor.audit.records import Question, Setting
from forerun.errors import InvalidRequest, Range, check_ranges
from forerun.measure.request_fields import sampling_fields
from forerun.sampling.config import SamplingParams

GRAMMAR = "[0-9]{3}-[a-f]{4}"
"""Regular expression that the requests of the kind "grammar" ask for."""
_MOST_BIASED = 32
FEW_TOKENS = 500
"""Fewest tokens that a verdict without an alarm rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request: its sampling parameters and its share of the tokens.

    Attributes:
        prompt_bias: logit bias of the tokens of the prompt.
        is_seeded: whether every request has a seed of its own.
        has_stop: whether the request has a stop string that earlier texts contain.
        is_chat: sent as a conversation.
    """

    name: str
    share: float
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_bias: float = 0.0
    is_seeded: bool = False
    has_stop: bool = False
    has_grammar: bool = False
    is_chat: bool = False

    @property
    def is_filtered(self) -> bool:
        """Whether the parameters exclude tokens."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def is_plain(self) -> bool:
        """Whether a token follows the model's own distribution, at some temperature."""
        is_changed = self.is_filtered or self.is_counted or self.has_grammar
        return self.temperature > 0.0 and not (is_changed or self.has_stop)

    @property
    def is_counted(self) -> bool:
        """Whether the parameters make single tokens likelier or less likely."""
        return self.counts_tokens or self.prompt_bias != 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether the parameters depend on the tokens before."""
        return self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def params_for(self, question: Question) -> SamplingParams:
        """Return the sampling parameters of a question, its grammar left out."""
        bias = None
        if self.prompt_bias and not isinstance(question.prompt, str):
            bias = dict.fromkeys(sorted({*question.prompt})[:_MOST_BIASED], self.prompt_bias)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=bias,
            seed=question.group + 1 if self.is_seeded else None,
            stop=(question.stop,) if question.stop else (),
            max_tokens=question.num_tokens,
        )

    def fields_for(self, question: Question, owner: str | None) -> Mapping[str, object]:
        """Return the fields of a request to a server of this kind."""
        params = self.params_for(question)
        found = sampling_fields(params, owner)
        if params.seed is not None:
            found["seed"] = params.seed
        if self.has_grammar:
            found["structured_outputs"] = {"regex": GRAMMAR}
        return found


KINDS = (
    Kind(name="sampled", share=0.32),
    Kind(name="filtered", share=0.11, temperature=0.8, top_p=0.9),
    Kind(name="penalised", share=0.1, frequency_penalty=1.0),
    Kind(name="greedy", share=0.1, temperature=0.0),
    Kind(name="top_k", share=0.06, temperature=1.2, top_k=8),
    Kind(name="min_p", share=0.05, min_p=0.1),
    Kind(name="repetition", share=0.05, repetition_penalty=1.3),
    Kind(name="biased", share=0.05, prompt_bias=-3.0),
    Kind(name="seeded", share=0.05, is_seeded=True),
    Kind(name="chat", share=0.04, is_chat=True),
    Kind(name="grammar", share=0.04, has_grammar=True),
    Kind(name="stopped", share=0.03, has_stop=True),
)
TRAFFIC = "temperature top_p top_k min_p frequency_penalty repetition_penalty".split()
"""Fields of a request that make it one of another kind."""
_MOST_KINDS = 8


def kinds_of(requests: Iterable[Mapping[str, object]]) -> tuple[Kind, ...]:
    """Return the kinds of some requests, the most frequent first; `KINDS` if none has parameters.

    Raises InvalidRequest where a parameter is no number.
    """
    counts = Counter(
        tuple((name, row[name]) for name in TRAFFIC if row.get(name) is not None)
        for row in requests
    )
    if not any(counts):
        return KINDS
    found = []
    for fields, count in counts.most_common(_MOST_KINDS):
        name = ", ".join(f"{field} {value}" for field, value in fields) or "no parameters"
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for _, v in fields):
            raise InvalidRequest(f"a request has {name!r:.100}; parameters must be numbers")
        kind = Kind(name=name, share=count / counts.total(), **dict(fields))  # type: ignore[arg-type]
        kind.params_for(Question(arm="served", kind=name, prompt=(), num_tokens=1, group=0))
        found.append(kind)
    return tuple(found)


ROUNDS: tuple[Setting, ...] = (
    *("alone", "together", "alone", "together", "again"),
    *("alone", "aborted", "alone", "continued", "long"),
)
"""Rounds of requests, over and over; "again" repeats the round "together" before the last."""
_RANGES = (
    Range("max_tokens", 1, integer=True),
    Range("max_requests", 1, integer=True),
    Range("num_tokens", 2, integer=True),
    Range("longest", 2, integer=True),
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
        max_seconds: after so long no more is asked; one answer may take a quarter of it.
        num_tokens: most output tokens of most requests.
        longest: most output tokens of the longest requests, a fortieth of all at most.
        num_clients: requests at once, in rounds with many.
        false_alarms: largest probability of an alarm, at any time, over a server that is within
            the tolerance.
        tolerance: total variation from the reference, at every token, that counts as rounding.
        tie_margin: at temperature 0, a token whose logarithm of the probability is less than this
            below the best one counts as a near tie.
        control_share: of the tokens, kept for the requests without speculation that follow an
            alarm.
        confirm_tokens: asked for without speculation after an alarm, and as many again with it.
        kinds: of request.
    """

    max_tokens: int = 20_000
    max_requests: int = 2_000
    max_seconds: float = math.inf
    num_tokens: int = 48
    longest: int = 512
    num_clients: int = 8
    false_alarms: float = 0.01
    tolerance: float = 0.002
    tie_margin: float = 0.5
    control_share: float = 0.25
    confirm_tokens: int = 2_000
    kinds: tuple[Kind, ...] = field(default=KINDS)

    def __post_init__(self) -> None:
        check_ranges(self, *_RANGES)

    @property
    def kept_tokens(self) -> int:
        """Output tokens that only what follows an alarm may take."""
        return int(self.control_share * self.max_tokens)

    def check_enough(self, flag: str = "--tokens") -> None:
        """Raise InvalidRequest, which names the flag, where the tokens can never suffice."""
        least = math.ceil((FEW_TOKENS + self.num_tokens) / (1.0 - self.control_share))
        if self.max_tokens < least:
            raise InvalidRequest(
                f"{flag} {self.max_tokens} is too few: {FEW_TOKENS} have to be judged, and "
                f"{self.control_share:.0%} of them are kept for what follows an alarm; give "
                f"{least} or more"
            )

    def size_of(self, setting: Setting) -> int:
        """Return the most output tokens of one request in such a round."""
        longest = max(self.num_tokens, min(self.longest, self.max_tokens // 40))
        sizes = {"long": longest, "alone": max(self.num_tokens, longest // 2)}
        return sizes.get(setting, self.num_tokens)
