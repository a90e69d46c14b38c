"""Responses from an OpenAI-compatible server.

Tokens are exact where the answer has their ids: vLLM sends them on request (`return_token_ids`,
`return_tokens_as_token_ids`), llama.cpp beside log-probabilities. Any other server sends text,
which the target's tokenizer turns into tokens; its log-probabilities are not used, because several
tokens may have the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.responses import Response, ResponseStore, seed_of
from forerun.align.data.sample import TopLogprobs
from forerun.align.progress import OnProgress
from forerun.client.answers import ServerAnswer
from forerun.client.client import Client
from forerun.client.connection import BrokenReply
from forerun.engine.http_backend import sampling_fields
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.terminal_text import printable

_FINISH_REASONS = ("stop", "length")
_MAX_TOKEN_CHARACTERS = 1024
"""Of one token, generously: the longest in use are runs of some hundred spaces."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseServer:
    """A server that answers prompts in place of the target; several threads may use it at once.

    Attributes:
        num_logprobs: most likely tokens to report with every token, 0 for none.
    """

    client: Client
    tokenizer: Tokenizer
    num_logprobs: int = 0

    def respond(self, prompt: PromptRecord, index: int, params: SamplingParams) -> Response:
        """Request one response from the server, with retries.

        An address that ends in /chat/completions is asked to answer the conversation, through the
        server's own template; any other is asked to complete the tokens.
        """
        is_chat = self.client.config.is_chat
        if is_chat and not prompt.messages:
            raise InvalidRequest(
                f"{prompt.where} is no conversation; /chat/completions takes nothing else: give "
                "the server's address without it"
            )
        ask = (
            partial(self.client.chat, prompt.messages)
            if is_chat
            else partial(self.client.complete, prompt.prompt_ids)
        )
        try:
            answer = ask(
                sampling_fields(params),
                logprobs=self.num_logprobs or None,
                seed=seed_of(prompt.prompt_hash, index, params.seed or 0),
                check=partial(_check_answer, params=params),
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"{prompt.where}: {error}") from error
        token_ids, tops = _tokens(answer, params, self.tokenizer)
        return Response(
            prompt_hash=prompt.prompt_hash,
            index=index,
            token_ids=tuple(token_ids),
            finish_reason=str(answer.finish_reason),
            top_logprobs=tops if tops and len(tops) == len(token_ids) and all(tops) else None,
        )


def _check_answer(answer: ServerAnswer, params: SamplingParams) -> None:
    """Refuse an answer without a response, or one that is too long (BrokenReply)."""
    text, reason = answer.text, answer.finish_reason
    if text is None or reason not in _FINISH_REASONS:
        raise BrokenReply(f"a response of {text!r:.60} that ended by {reason!r:.60}")
    num_tokens, most = len(answer.token_ids or ()), params.max_tokens or 0
    if len(text) > _MAX_TOKEN_CHARACTERS * (most + 1) or num_tokens > 2 * most + 16:
        raise BrokenReply(
            f"a response of {len(text)} characters and {num_tokens or 'unknown'} tokens, where "
            f"{most} tokens were asked for"
        )


def _tokens(
    answer: ServerAnswer, params: SamplingParams, tokenizer: Tokenizer
) -> tuple[Sequence[int], TopLogprobs | None]:
    text, positions = answer.text or "", answer.logprobs
    ids = answer.token_ids
    tops = None if positions is None else [_ranked(position.top) for position in positions]
    if ids is None and positions is not None:
        named = [position.token_id for position in positions]
        ids = tuple(token for token in named if token is not None)
        ids = ids if len(ids) == len(named) else None
    if ids is None:
        return _encoded(text, answer, params, tokenizer), None
    for token in (*ids, *(token for top in tops or () for token, _ in top or ())):
        if token not in tokenizer.vocabulary:
            raise InvalidRequest(
                f"the server names the token {printable(token, max_length=40)}, which is not in "
                "the target's vocabulary: it serves a model with another tokenizer"
            )
    # Servers differ in how they write spaces at the ends and characters that are cut off, and a
    # stop string may have been removed.
    if not _squeezed(tokenizer.decode(ids)).startswith(_squeezed(text)):
        raise InvalidRequest(
            f"the server's tokens {list(ids[:8])} are not this tokenizer's way to write "
            f"{printable(text, max_length=40)!r}: it serves a model with another tokenizer"
        )
    known = [top for top in tops or () if top is not None]
    return ids, tuple(known) if tops is not None and len(known) == len(tops) else None


def _ranked(
    top: Sequence[tuple[str, int | None, float]],
) -> tuple[tuple[int, float], ...] | None:
    """Return unique token ids with log-probabilities, the most likely first; None without ids."""
    found = {token: value for _, token, value in top if token is not None}
    if any(token is None for _, token, _ in top):
        return None
    return tuple(sorted(found.items(), key=lambda pair: -pair[1]))


def _encoded(
    text: str, answer: ServerAnswer, params: SamplingParams, tokenizer: Tokenizer
) -> Sequence[int]:
    """Tokenise a text, and append the end token if the text must have ended with it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_itself = answer.finish_reason == "stop" and answer.stop_reason is None
    if by_itself and not params.stop and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return ids


def _squeezed(text: str) -> str:
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


def write_responses_from(
    server: ResponseServer,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    *,
    samples_per_prompt: int = 1,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    params = store.origin.params
    sampling_fields(params)  # refuses what no server takes, before any is asked
    missing = store.missing(prompts, samples_per_prompt)
    num_all = len(prompts) * samples_per_prompt
    num_done = num_all - len(missing)
    on_progress(num_done, num_all)
    executor = ThreadPoolExecutor(server.client.config.max_connections)
    asked = [executor.submit(server.respond, *job, params) for job in missing]
    try:
        for response in as_completed(asked):
            store.add(response.result())
            num_done += 1
            on_progress(num_done, num_all)
    except (InvalidRequest, ServerUnavailable, KeyboardInterrupt) as error:
        for finished in asked:
            if finished.done() and not finished.cancelled() and finished.exception() is None:
                store.add(finished.result())
        kept = f"{len(store)} responses are kept in {store.path}: run again to go on"
        if isinstance(error, KeyboardInterrupt):
            raise
        raise type(error)(f"{error}; {kept}") from error
    finally:
        server.client.connection.closing.set()
        executor.shutdown(wait=False, cancel_futures=True)
