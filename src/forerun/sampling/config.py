"""The sampling parameters of a request and the verifier they imply; torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, get_args

from forerun.errors import InvalidRequest, Range, check_ranges


class Choice(StrEnum):
    """Method by which the nodes of a proposal were chosen."""

    DETERMINISTIC = "deterministic"
    """A function of committed tokens alone: argmax, top-k, n-gram."""
    SAMPLED = "sampled"
    """Drawn from `draft_probs` with noise independent of the target's draws."""
    COUPLED = "coupled"
    """Drawn from the draft with the target's own position-keyed noise."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Sampled; siblings were drawn one after the other from the same row, each without those before
    it, and are numbered in that order."""

    @property
    def is_drawn(self) -> bool:
        """Whether verification needs the distributions that tokens were drawn from."""
        return self in (Choice.SAMPLED, Choice.WITHOUT_REPLACEMENT)


class TokenSource(StrEnum):
    """Origin of an emitted token."""

    ACCEPTED = "accepted"
    """A draft token that was accepted."""
    RECOVERED = "recovered"
    """The target's own, after a draft token was rejected."""
    BONUS = "bonus"
    """The target's own, after all draft tokens were accepted."""
    PLAIN = "plain"
    """The target's own, in a step that drafted nothing."""


MAX_BIAS = 100.0
"""Largest logit bias, as in the OpenAI API; it outweighs the logits of any model in use."""


def as_tuple(name: str, values: object) -> tuple[Any, ...]:
    """Convert a list from a caller or from JSON to a tuple without checking its entries."""
    if values is None:
        return ()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return tuple(values)
    raise InvalidRequest(f"{name} is {values!r}; it must be a list")


def _as_bias(bias: object) -> dict[int, float]:
    """Convert a logit bias to token ids and floats in range; JSON keys may be strings."""
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias is {bias!r}; it must map token ids to numbers")
    converted: dict[int, float] = {}
    for key, number in bias.items():
        token = _as_token(key)
        if token is None or not isinstance(number, int | float) or isinstance(number, bool):
            raise InvalidRequest(
                f"logit_bias[{key!r}] is {number!r}; it must map token ids to numbers"
            )
        if token in converted:
            raise InvalidRequest(f"logit_bias names token {token} twice; give one number for it")
        if not abs(number) <= MAX_BIAS:  # NaN is not
            raise InvalidRequest(
                f"logit_bias[{token}] is {number}; it must be from {-MAX_BIAS:g} to {MAX_BIAS:g} "
                "(to forbid a token, name it in bad_token_ids)"
            )
        converted[token] = float(number)
    return converted


def _as_token(key: object) -> int | None:
    """Convert a key to a token id; keys from JSON are strings."""
    try:
        key = int(key) if isinstance(key, str) else key
    except ValueError:
        return None
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def shortened(values: tuple[Any, ...]) -> str:
    """Return a list as text for a message, cut after eight entries."""
    shown = repr(values[:8])
    return shown if len(values) <= 8 else f"{shown[:-1]}, ... {len(values)} in all)"


MAX_GRAMMAR_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {"json": 1 << 18, "regex": 8192, "choice": 1 << 20, "grammar": 1 << 16}
)
"""Most characters of a constraint, by its kind. A regular expression of 40,000 characters took 11 s
and 1.5 GiB to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the text: a JSON schema, a regular expression, a choice or a grammar.

    Exactly one field is given; the names are those of vLLM.

    Attributes:
        json: a JSON schema, as an object or as JSON text; kept as text.
        regex: a regular expression.
        choice: texts, of which the output is one.
        grammar: a grammar in the Lark dialect of llguidance.

    Raises:
        InvalidRequest: none or several fields are given, or one is malformed or too long.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Convert the schema to text and the choices to a tuple; check types and lengths."""
        given = [name for name in MAX_GRAMMAR_CHARACTERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs needs exactly one of json, regex, choice and grammar; it has "
                + (", ".join(given) or "none")
            )
        (name,) = given
        if name == "json":
            object.__setattr__(self, "json", _as_schema(self.json))
        elif name == "choice":
            object.__setattr__(self, "choice", as_tuple("structured_outputs.choice", self.choice))
        value = getattr(self, name)
        texts = value if name == "choice" else (value,)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"structured_outputs.{name} is {value!r:.200}; it must be text")
        _check_grammar_length(f"structured_outputs.{name}", name, sum(map(len, texts)))

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """Build the constraint from an object with these fields, or from the JSON text of one.

        Raises InvalidRequest where it is no such object.
        """
        if isinstance(value, StructuredOutputs):
            return value
        known = MAX_GRAMMAR_CHARACTERS.keys()
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, Mapping) or not value.keys() <= known:
            raise InvalidRequest(
                f"structured_outputs is {value!r:.200}; it must be an object with one of "
                + ", ".join(known)
            )
        return cls(**{name: form for name, form in value.items() if form is not None})


def _as_schema(schema: object) -> str:
    """Return a JSON schema as text, once its regular expressions are known not to be too long."""
    name = "structured_outputs.json"
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_grammar_length(name, "json", len(text))
        values: list[Any] = [json.loads(text)]
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{name} is no JSON schema: {error!s:.200}") from error
    num_characters = 0
    while values:
        value = values.pop()
        if isinstance(value, dict):
            patterns = [value.get("pattern"), *(value.get("patternProperties") or ())]
            num_characters += sum(len(each) for each in patterns if isinstance(each, str))
            values += value.values()
        elif isinstance(value, list):
            values += value
    _check_grammar_length(f"the regular expressions in {name}", "regex", num_characters)
    return text


def _check_grammar_length(name: str, kind: str, num_characters: int) -> None:
    most = MAX_GRAMMAR_CHARACTERS[kind]
    if num_characters > most:
        raise InvalidRequest(f"{name}: {num_characters} characters; at most {most} are compiled")


Verification = Literal["auto", "walk", "coupled", "block", "token", "traversal"]
Method = Literal["walk", "coupled", "block", "token", "traversal"]

MIN_TEMPERATURE = 1e-5
"""Below it the distribution is greedy for all practical logits, and dividing may overflow fp32."""
MAX_SCALE = 1e5
"""Largest factor or divisor of logits: beyond it the distribution is flat, or fp32 overflows."""
MAX_COUNT = 2**31 - 1
"""Counts are stored as 32-bit integers."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
"""Every token of the output is compared with every stop string."""

RANGES = (
    Range("temperature", 0, MAX_SCALE),
    Range("top_p", 0, 1, above_low=True),
    Range("top_k", -1, MAX_COUNT, integer=True),
    Range("min_p", 0, 1),
    Range("repetition_penalty", 1 / MAX_SCALE, MAX_SCALE),
    Range("presence_penalty", -2, 2),
    Range("frequency_penalty", -2, 2),
    Range("seed", -math.inf, integer=True, optional=True),
    Range("max_tokens", 1, MAX_COUNT, integer=True, optional=True),
    Range("min_tokens", 0, MAX_COUNT, integer=True),
    Range("logprobs", 0, MAX_COUNT, integer=True, optional=True),
    Range("prompt_logprobs", 0, MAX_COUNT, integer=True, optional=True),
    Range("n", 1, MAX_COUNT, integer=True),
    Range("draft_temperature", 0, MAX_SCALE, optional=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that decide how the tokens of one request are chosen.

    Names and meanings are those of the OpenAI API and vLLM. Processors act in this order: allowed
    tokens, logit bias, bad tokens, min_tokens, repetition, frequency and presence penalty,
    temperature, min_p, top_k, top_p.

    Attributes:
        temperature: 0 is greedy (lowest id on ties).
        top_p: smallest set of most likely tokens with this mass; 1 is off.
        top_k: the k most likely tokens, ties kept; 0 or -1 is off.
        min_p: only tokens at least this share of the most likely one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
            output.
        presence_penalty: subtracted from logits of tokens in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the logits of these ids, each from -100 to 100.
        allowed_token_ids: only these ids; None allows all.
        bad_token_ids: never these ids.
        seed: makes the output reproducible; None takes fresh noise.
        max_tokens: most output tokens; None goes to the end of the context.
        min_tokens: no end-of-sequence, stop token or stop string before this many output tokens.
        stop: strings that end the text, or one such string; at most 64 of at most 1,024 characters.
        include_stop_str_in_output: leave the stop string, or the stop token's text, in the text.
        stop_token_ids: ids that end the text.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: also report this many most likely tokens per position, before any processing.
        prompt_logprobs: the same for the tokens of the prompt, which is then read whole: nothing of
            it is taken from the KV cache.
        n: samples per prompt.
        structured_outputs: a form that the text has to follow: `StructuredOutputs`, or an object
            with its fields.
        verification: "auto" chooses the best exact verifier, see `resolve_verification`.
        draft_temperature: temperature of the draft alone; None uses the request's. Speed only.

    Raises:
        InvalidRequest: a value is outside its range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured_outputs: StructuredOutputs | None = None
    verification: Verification = "auto"
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        """Convert collections to their declared types, then refuse unsupported values."""
        self._normalise()
        check_ranges(self, *RANGES)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {value!r}; it must be True or False")
        self._check_temperatures()
        self._check_tokens()
        self._check_stops()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, "
                f"{self.max_tokens}: lower it or raise max_tokens"
            )
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            raise InvalidRequest(
                "a grammar decides where the text ends, so min_tokens and ignore_eos cannot be "
                "used with structured_outputs"
            )
        if self.verification not in get_args(Verification):
            raise InvalidRequest(
                f"verification is {self.verification!r}; it must be one of "
                + ", ".join(get_args(Verification))
            )

    def _normalise(self) -> None:
        """Convert JSON values (lists, nulls, string keys, one stop string) to field types."""

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the one place a frozen instance is written

        stop: object = self.stop
        put("stop", (stop,) if isinstance(stop, str) else as_tuple("stop", stop))
        for name in ("stop_token_ids", "bad_token_ids"):
            put(name, as_tuple(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            put("logit_bias", _as_bias(self.logit_bias))
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputs.of(self.structured_outputs))

    def _check_temperatures(self) -> None:
        for name in ("temperature", "draft_temperature"):
            value = getattr(self, name)
            if value is not None and 0 < value < MIN_TEMPERATURE:
                raise InvalidRequest(
                    f"{name} is {value!r}; it must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"
                )

    def _check_tokens(self) -> None:
        named: Iterator[tuple[str, object]] = self.named_tokens()
        for name, token in named:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise InvalidRequest(f"{name} names {token!r}; token ids are integers from 0 up")
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty, which leaves no token possible; name at least one, or "
                "leave it None to allow all"
            )
        if set(self.allowed_token_ids) <= set(self.bad_token_ids):
            raise InvalidRequest(
                f"allowed_token_ids is {shortened(self.allowed_token_ids)}, all of them in "
                "bad_token_ids, which leaves no token possible; allow one that is not, or take one "
                "out of bad_token_ids"
            )

    def _check_stops(self) -> None:
        stops: tuple[object, ...] = self.stop
        if not all(isinstance(text, str) and text for text in stops):
            raise InvalidRequest(f"stop is {shortened(self.stop)}; it must hold non-empty strings")
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(
                f"stop holds {len(self.stop)} strings; it may hold {MAX_STOPS}: shorten the list, "
                "or use stop_token_ids, which may hold any number"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop holds a string of {longest} characters; {MAX_STOP_CHARACTERS} are the most: "
                "its end, or a part of it, stops the text just as well"
            )

    def named_tokens(self) -> Iterator[tuple[str, int]]:
        """Every token id that a parameter contains, with the parameter's name."""
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                yield name, token

    @property
    def allows_trees(self) -> bool:
        """Whether the selected verification method accepts trees of any drafter."""
        return self.verification not in ("block", "token")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens occurred before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def heeded_eos(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Return the model's end-of-text ids, or none if the request ignores them."""
        return frozenset() if self.ignore_eos else frozenset(eos_token_ids)

    def ending_tokens(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Return every token that ends the text once min_tokens are emitted."""
        return self.heeded_eos(eos_token_ids).union(self.stop_token_ids)

    @property
    def needs_history(self) -> bool:
        """Whether logits processing needs a `History`: for penalties, masks or min_tokens."""
        return (
            self.has_penalties
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or bool(self.bad_token_ids)
            or self.min_tokens > 0
        )

    @property
    def has_processors(self) -> bool:
        """Whether any parameter except the temperature changes the distribution."""
        return self.needs_history or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def draft_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters that drafts sample with: the request's, at `draft_temperature` if set.

    A greedy request is drafted greedily whatever `draft_temperature` says: one guess is right, and
    the most likely token is the best bet for it.
    """
    if params.draft_temperature is None or params.greedy:
        return params
    return replace(params, temperature=params.draft_temperature)


def resolve_verification(
    params: SamplingParams, choice: Choice, *, is_chain: bool = True
) -> Method:
    """Return the verification method for a proposal whose nodes were chosen by `choice`.

    Before drafting, the engine passes `Choice.SAMPLED`: for "coupled" the draft is drawn with the
    target's noise. Every method is exact; they differ in acceptance and in what a seed fixes. A
    deterministic proposal or a greedy target is walked: for the first the walk is optimal, for the
    second every rule is an exact match. So is a tree whose siblings were drawn independently. On a
    chain "traversal" is "block".

    Args:
        choice: how the nodes are (or will be) chosen.

    Raises:
        InvalidRequest: a verifier was asked for a proposal it is not exact for.
    """
    asked = params.verification
    if choice is Choice.DETERMINISTIC or params.greedy:
        return "walk"
    if asked == "auto":
        if choice is Choice.COUPLED or params.seed is not None:
            return "coupled"
        if is_chain:
            return "block"
        return "traversal" if choice is Choice.WITHOUT_REPLACEMENT else "walk"
    if asked in ("block", "token", "traversal"):
        _check_exact_for(asked, choice, is_chain=is_chain)
    return "block" if is_chain and asked == "traversal" else asked


def _check_exact_for(asked: Verification, choice: Choice, *, is_chain: bool) -> None:
    """Refuse a verification method that is not exact for a proposal's choice of nodes."""
    if choice is Choice.COUPLED:
        reason = "a draft that shares the target's noise"
    elif is_chain or (asked == "traversal" and choice is Choice.WITHOUT_REPLACEMENT):
        return
    else:
        reason = f"a tree of {choice.value} tokens" if asked == "traversal" else "a tree"
    raise InvalidRequest(
        f'verification is "{asked}", which is not exact for {reason}; use "auto" or "walk"'
    )
