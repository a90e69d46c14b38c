"""Checks requests and creates their sequences."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forerun.control.base import Plan
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.results import TokenStops
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidRequest, PromptTooLong, QueueFull
from forerun.models.base import LanguageModel
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, TokenMask, problem_of_allowed
from forerun.sampling.noise import request_key

if TYPE_CHECKING:
    from forerun.engine.grammar import Grammars

Prompt = str | Seq[int]
Conversation = str | Seq[Mapping[str, Any]]
"""A text, which is one message of a user, or messages with "role" and "content"."""
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_LOGPROBS = 1 << 18
"""Most log-probabilities that the answer to one request may hold. Each takes about a kilobyte until
the answer is sent."""


SLACK = 16
"""Largest factor by which normalisation is taken to shorten a text before it is tokenised."""


class Intake:
    """Checks requests and creates their sequences without changing state, from any thread."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        config: EngineConfig,
        defaults: Mapping[str, float],
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.config = config
        self.defaults = defaults
        self._max_characters: int | None = None

    @property
    def max_context(self) -> int:
        return min(self.config.max_context, self.target.max_context)

    @property
    def max_unfinished(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self.config.max_batch + self.config.max_waiting

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that brings none: those that the model states."""
        values: dict[str, Any] = dict(self.defaults)
        return SamplingParams(**values)

    def check(
        self, prompt: Prompt, params: SamplingParams, mask: TokenMask | None = None
    ) -> list[int]:
        """Check a prompt with its parameters and mask, and return the token ids.

        Raises:
            InvalidRequest: the prompt cannot be continued; the message says why and what to do.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"the parameters are {params!r}; they must be SamplingParams")
        self._check_samples(params.n)
        if self.config.tree is not None and not params.allows_trees:
            raise InvalidRequest(
                f'verification is "{params.verification}", which takes chains only, and the engine '
                f'drafts the tree {self.config.tree}; use "auto", or an engine without a tree'
            )
        self._check_tokens(params)
        self._check_possible(params)
        ids = self._prompt_ids(prompt)
        if (mask := self._mask_of(params, mask)) is not None:
            self._check_mask(mask)
        room = self.max_context - len(ids)
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}; after a prompt of {len(ids)} tokens the "
                f"context has room for {room}: lower it, shorten the prompt or raise max_context"
            )
        return ids

    def _check_tokens(self, params: SamplingParams) -> None:
        vocab_size = self.target.vocab_size
        for name, token in params.named_tokens():
            if token >= vocab_size:
                raise InvalidRequest(f"{name} names token {token}, outside 0..{vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > vocab_size:
                raise InvalidRequest(
                    f"{name} is {number}; the model has {vocab_size} tokens: ask for fewer"
                )

    def _check_possible(self, params: SamplingParams) -> None:
        """Refuse parameters that forbid every token, at all positions or before min_tokens."""
        ends = params.ending_tokens(self.eos_token_ids) if params.min_tokens else frozenset()
        forbidden = ends.union(params.bad_token_ids)
        allowed: Iterable[int] = range(self.target.vocab_size)
        if params.allowed_token_ids is not None:
            allowed = params.allowed_token_ids
        if any(token not in forbidden for token in allowed):
            return
        if not ends:
            raise InvalidRequest(
                f"bad_token_ids names all {self.target.vocab_size} tokens; leave at least one"
            )
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but every token that allowed_token_ids and "
            f"bad_token_ids leave ends the text ({sorted(ends)[:8]}): allow another, set "
            "ignore_eos, or set min_tokens to 0"
        )

    def _mask_of(self, params: SamplingParams, mask: TokenMask | None) -> TokenMask | None:
        """Return the mask of a request: the one it brings, or that of its structured outputs."""
        asked = params.structured_outputs
        if asked is None:
            return mask
        if mask is not None:
            raise InvalidRequest("the request has a mask and structured_outputs; give one of them")
        return self._grammars.mask_of(asked)

    @cached_property
    def _grammars(self) -> Grammars:
        try:
            from forerun.engine.grammar import Grammars
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                f"structured_outputs needs {error.name}: run `pip install 'forerun[serve]'`"
            ) from error
        return Grammars(self.tokenizer, self.target.vocab_size, self.eos_token_ids)

    def _check_mask(self, mask: TokenMask) -> None:
        """Refuse a mask with missing methods, a wrong width, or no allowed first token."""
        if not isinstance(mask, TokenMask):
            raise InvalidRequest(f"the mask is {mask!r}; it needs fork, advance and allowed")
        try:
            allowed = mask.allowed()
        except (Exception, SystemExit) as error:  # a mask is the caller's own code
            raise InvalidRequest(f"the mask raised {error!r} for the first token") from error
        if problem := problem_of_allowed(allowed, self.target.vocab_size):
            raise InvalidRequest(f"the mask {problem}")
        if not bool(allowed.any()):
            raise InvalidRequest("the mask allows no first token; it must allow at least one")

    def _check_samples(self, n: int) -> None:
        if n > self.max_unfinished:
            raise InvalidRequest(
                f"n is {n}, but at most {self.max_unfinished} sequences may run and wait "
                f"(max_batch {self.config.max_batch} and max_waiting {self.config.max_waiting}): "
                "ask for fewer samples, or raise max_waiting"
            )

    def check_answer(self, num_prompt_tokens: Seq[int], params: SamplingParams) -> None:
        """Refuse prompts, by their lengths, whose answer may hold too many log-probabilities."""
        longest = num_tokens = 0
        for num in num_prompt_tokens:
            room = self.max_context - num
            num_new = room if params.max_tokens is None else min(room, params.max_tokens)
            for asked, tokens in ((params.logprobs, num_new), (params.prompt_logprobs, num)):
                if asked is not None:
                    longest = max(longest, tokens)
                    num_tokens += tokens * (1 + asked)
        if num_tokens * params.n > MAX_LOGPROBS:
            raise InvalidRequest(
                f"{len(num_prompt_tokens)} prompts x n = {params.n} x up to {longest} tokens with "
                f"logprobs = {params.logprobs} and prompt_logprobs = {params.prompt_logprobs} are "
                f"{num_tokens * params.n} log-probabilities; an answer may hold {MAX_LOGPROBS}: "
                "send fewer prompts at once, or lower n, max_tokens or the log-probabilities"
            )

    def check_terms(self, terms: RequestTerms | None) -> RequestTerms:
        """Return the scheduling settings of a request after a check, or the default ones."""
        if terms is None:
            return RequestTerms()
        if not isinstance(terms, RequestTerms):
            raise InvalidRequest(
                f"the terms are {terms!r}; give RequestTerms, as in RequestTerms(priority=1)"
            )
        return terms

    def check_open(self, n: int, num_unfinished: int) -> None:
        """Refuse `n` more sequences if too many are running and waiting."""
        if num_unfinished + n > self.max_unfinished:
            raise QueueFull(
                f"{num_unfinished} sequences run and wait, at most {self.max_unfinished} may "
                f"(max_batch {self.config.max_batch} and max_waiting {self.config.max_waiting}), "
                f"so there is no room for {n} more: try again later, or raise max_waiting"
            )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self.check_length(prompt)
            ids = self.tokenizer.encode(prompt)
        else:
            if isinstance(prompt, list):
                self._check_room(len(prompt))  # before its entries are looked at
            ids = _as_ids(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        self._check_room(len(ids))
        outside = next((t for t in ids if not 0 <= t < self.target.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(
                f"prompt token {outside} is outside 0..{self.target.vocab_size - 1}"
            )
        return ids

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self.max_context:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens; the context holds {self.max_context}, "
                "one of them for output: shorten the prompt or raise max_context"
            )

    def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit into the context, before time is spent on its tokens."""
        if self._max_characters is None:
            pieces = self.tokenizer.vocabulary.values()
            self._max_characters = self.max_context * max(map(len, pieces), default=1) * SLACK
        if len(text) > self._max_characters:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters; the context holds {self.max_context} "
                "tokens: shorten the prompt or raise max_context"
            )

    def render(
        self, messages: Conversation, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template.

        Templates get every content as a text: parts are joined, and a missing one is empty. A text
        in place of the messages is one message of a user.

        Raises:
            InvalidRequest: these are no messages, or the template refuses them.
            PromptTooLong: the texts are many times longer than the context.
        """
        given = as_messages(messages)
        self.check_length("".join(message["content"] for message in given))
        text = self.tokenizer.render_chat(given, variables=variables)
        self.check_length(text)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def sequences(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        terms: RequestTerms,
        mask: TokenMask | None = None,
    ) -> list[Sequence]:
        """Create one sequence per sample of a checked request, each with its fork of the mask."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        room = self.max_context - len(ids)
        max_new = room if params.max_tokens is None else min(room, params.max_tokens)
        mask = self._mask_of(params, mask)
        # Log-probabilities of the prompt are of rows that are fed; those of a prefix would not be.
        reads_all = params.prompt_logprobs is not None
        scope = None if reads_all else self.config.scope_of(terms.tenant)
        if scope is None and params.n > 1 and not reads_all:
            scope = os.urandom(8).hex()  # the samples of one request share their prompt in any case
        arrived_at_s = time.monotonic()
        return [
            Sequence(
                request_id=request_id,
                index=index,
                params=params,
                ids=list(ids),
                num_prompt=len(ids),
                noise_key=request_key(seed, index),
                stops=TokenStops(params, self.eos_token_ids, max_new),
                detokenizer=Detokenizer(self.tokenizer),
                history=self._history(params, ids, mask),
                arrived_at_s=arrived_at_s,
                scope=scope,
                rank=(terms.priority, 0),
                ends_at_s=arrived_at_s + (terms.deadline_s or math.inf),
                tags=terms.tags,
                plan=Plan() if terms.speculation == "off" else terms.plan,
            )
            for index in range(params.n)
        ]

    def _history(
        self, params: SamplingParams, ids: list[int], mask: TokenMask | None
    ) -> History | None:
        """Return token counts and mask of a request; None if no logits processor needs them."""
        if mask is None and not params.needs_history:
            return None
        return History.of(
            params,
            ids,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            device=self.target.device,
            mask=None if mask is None else mask.fork(),
        )


def as_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation, each with its content as one text."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages is {messages!r:.200}; it must be a text or a list")
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f'a message is {message!r:.200}; it needs a "role" and a "content"'
            )
        found.append({**message, "content": text_of(message.get("content"))})
    return found


def text_of(content: object) -> str:
    """Return the content of a message as text; raises InvalidRequest for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        fields = part if isinstance(part, Mapping) else {"type": type(part).__name__}
        kind = fields.get("type", "text")
        text = fields.get("text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidRequest(f"content of type {kind!r:.200} is not supported; send texts")
        texts.append(text)
    return "".join(texts)


def as_prompts(prompts: object) -> list[Prompt]:
    """Return prompts as a list; a single text becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise InvalidRequest(f"prompts is {prompts!r}; it must be a text or a list of prompts")
    batch = list(prompts)
    if any(_is_id(prompt) for prompt in batch):
        raise InvalidRequest(
            f"prompts holds token ids ({batch[:8]!r}); it must hold prompts: for one prompt of "
            "token ids put them into a list of their own, as in [[1, 2, 3]]"
        )
    return batch


def params_for(
    batch: Seq[Prompt], params: SamplingParams | Seq[SamplingParams]
) -> Seq[SamplingParams]:
    """Return one set of parameters per prompt."""
    if isinstance(params, SamplingParams):
        return [params] * len(batch)
    if not isinstance(params, Seq):
        raise InvalidRequest(
            f"sampling_params is {params!r}; give SamplingParams, or a list of them"
        )
    if len(params) != len(batch):
        raise InvalidRequest(f"{len(params)} sampling parameters for {len(batch)} prompts")
    return params


def _as_ids(prompt: object) -> list[int]:
    """Return the token ids of a prompt as plain integers."""
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
        raise InvalidRequest(
            f"the prompt is {prompt!r}; it must be a text or a list of token ids"
            f"{_chat_hint(prompt)}"
        )
    tokens = list(prompt)
    wrong = next((token for token in tokens if not _is_id(token)), None)
    if wrong is not None:
        raise InvalidRequest(
            f"the prompt holds {wrong!r}; it must be a text or a list of token ids"
            f"{_chat_hint(wrong)}"
        )
    return [index(token) for token in tokens]


def _chat_hint(value: object) -> str:
    is_message = isinstance(value, Mapping) and "role" in value
    return "; for the messages of a conversation call chat" if is_message else ""


def _is_id(value: object) -> bool:
    """Whether a value is an integer, including those of numpy and torch."""
    try:
        index(value)  # type: ignore[arg-type]  # whether it may be one is the question
    except (TypeError, RuntimeError):
        return False
    return not isinstance(value, bool)
