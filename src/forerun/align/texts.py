"""Texts of an alignment: prompts for training and judging, responses, and replayed traces.

Of a server's answers tokens are exact where the answer has their ids, which vLLM sends on request
(`return_token_ids`). Any other server sends text, which the target's tokenizer turns into tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import msgspec

from forerun.align.config import DataConfig, Source
from forerun.align.samples import (
    PromptRecord,
    Sample,
    mix,
    prompt_hash,
    read_prompts,
    remove_spaces,
    shortened,
    split,
)
from forerun.align.workspace import OnProgress, exclusive_access, lock_for
from forerun.cache import hash_of
from forerun.client.client import Client, ServerAnswer
from forerun.client.connection import BrokenReply, ClientConfig
from forerun.client.urls import HIDDEN, shown_url
from forerun.engine.engine import Engine
from forerun.engine.http_backend import sampling_fields
from forerun.errors import CacheTooLarge, InvalidRequest, ServerUnavailable
from forerun.measure.judge import EvaluationPrompt
from forerun.models.checkpoint import ModelFiles
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.terminal_text import printable
from forerun.theory.acceptance import first_repeat
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.theory.splitmix import INCREMENT, finalise
from forerun.trace.files import Damage, read_trace

FORMAT = 2
FREE = ("n", "logprobs")
"""Sampling parameters that do not change a response, since each is one sample."""
DEFAULTS = SamplingParams()
"""Values that an origin leaves out, so that its hash stays the same when a parameter is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOrigin:
    """All settings that influence responses; responses made with other settings are not reused."""

    source: Source
    model: str
    tokenizer_hash: str
    params: SamplingParams

    @property
    def header(self) -> str:
        """The origin as one line of JSON, the same for equal origins."""
        params = {
            field.name: value
            for field in fields(self.params)
            if field.name not in FREE
            and (value := getattr(self.params, field.name)) != getattr(DEFAULTS, field.name)
            and value != {}  # a logit_bias that names no token changes nothing
        }
        found = {
            "format": FORMAT,
            "source": self.source,
            "model": self.model,
            "tokenizer_hash": self.tokenizer_hash,
            "params": params,
        }
        plain = json.loads(json.dumps(found, default=dict))  # keys are text before they are sorted
        return json.dumps(plain, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to a prompt."""

    prompt_hash: str
    token_ids: tuple[int, ...]
    finish_reason: str

    def __post_init__(self) -> None:
        """Refuse token ids below 0."""
        if min(self.token_ids, default=0) < 0:
            raise ValueError("its token ids are damaged")


class ResponseStore:
    """File of the responses of one origin, named by the hash of that origin.

    A killed process loses at most the line that it was writing; the next line replaces what is left
    of it. One process at a time writes, see `writing`.
    """

    def __init__(self, folder: Path, origin: ResponseOrigin) -> None:
        self.origin = origin
        self.path = folder / f"{origin.source}-{hash_of(origin.header.encode())}.jsonl"
        self._lock = lock_for(self.path)
        self._responses: dict[str, Response] = {}
        self._num_bytes = 0  # size of the file without an incomplete last line
        self._load()

    def __len__(self) -> int:
        return len(self._responses)

    def missing(self, prompts: Iterable[PromptRecord]) -> list[PromptRecord]:
        return [prompt for prompt in prompts if prompt.prompt_hash not in self._responses]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file's lock during the block, after reading the responses of other processes."""
        with exclusive_access(self._lock, self.path):
            self._load()
            yield

    def add(self, response: Response) -> None:
        """Write a response, unless the store has one to its prompt."""
        if response.prompt_hash in self._responses:
            return
        try:
            if not self._num_bytes:
                self._append(self.origin.header)
            self._append(json.dumps(asdict(response), separators=(",", ":")))
        except OSError as error:
            raise CacheTooLarge(
                f"{self.path} cannot be written: {error.strerror or error}; {len(self)} responses "
                "are kept: make room and run again to go on"
            ) from error
        self._responses[response.prompt_hash] = response

    def samples(self, prompts: Iterable[PromptRecord]) -> list[Sample]:
        """Return prompts with their responses as samples; empty responses are left out."""
        found = ((prompt, self._responses.get(prompt.prompt_hash)) for prompt in prompts)
        return [
            response_sample(prompt, response, self.origin.source)
            for prompt, response in found
            if response is not None and response.token_ids
        ]

    def response(self, prompt_hash: str) -> Response | None:
        """Return one response, None where it is missing."""
        return self._responses.get(prompt_hash)

    def _append(self, line: str) -> None:
        """Append a line after the last complete one; a line that fails to be written is removed."""
        with self.path.open("ab", buffering=0) as file:
            file.truncate(self._num_bytes)
            remaining = memoryview(line.encode() + b"\n")
            num_bytes = self._num_bytes + len(remaining)
            try:
                while remaining:  # a file that is nearly full takes a part, and refuses the next
                    remaining = remaining[file.write(remaining) or 0 :]
            except OSError:
                file.truncate(self._num_bytes)
                raise
        self._num_bytes = num_bytes

    def _load(self) -> None:
        """Read the responses in the complete lines of the file."""
        self._responses = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise InvalidRequest(f"responses cannot be kept in {self.path}: {error}") from error
        self._num_bytes = content.rfind(b"\n") + 1
        header, *lines = content[: self._num_bytes].splitlines() or [b""]
        if header and header != self.origin.header.encode():
            raise InvalidRequest(
                f"{self.path} holds responses of another model or of other parameters; move it away"
            )
        for number, line in enumerate(lines, start=2):
            try:
                response = msgspec.convert(json.loads(line), Response)
            except (msgspec.ValidationError, ValueError, RecursionError):
                logger.warning("%s:%d is damaged; that response is made again", self.path, number)
                continue
            self._responses.setdefault(response.prompt_hash, response)


def response_sample(prompt: PromptRecord, response: Response, source: Source) -> Sample:
    length = len(prompt.prompt_ids)
    return Sample(
        prompt_hash=prompt.prompt_hash,
        token_ids=prompt.prompt_ids + response.token_ids,
        spans=((length, length + len(response.token_ids)),),
        tag=prompt.tag,
        source=source,
    )


SEED_BITS = 63


def write_responses(
    engine: Engine,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    """Generate the responses that the store lacks with an engine.

    Every response has its own seed, from the parameters' seed and its prompt alone: what is
    generated depends neither on the batch nor on where an earlier run was interrupted.
    """
    missing, params = store.missing(prompts), store.origin.params
    num_all = len(prompts)
    waiting = iter(missing)
    asked: dict[str, PromptRecord] = {}
    num_done = num_all - len(missing)
    on_progress(num_done, num_all)
    try:
        while True:
            while len(asked) < engine.config.max_batch and (prompt := next(waiting, None)):
                seed = seed_of(prompt.prompt_hash, params.seed or 0)
                try:
                    own = replace(params, n=1, seed=seed, logprobs=None)
                    asked[engine.add_request(list(prompt.prompt_ids), own)] = prompt
                except InvalidRequest as error:
                    raise InvalidRequest(f"{prompt.where}: {error}") from error
            if not asked:
                return
            for chunk in engine.step():
                if chunk.request_id in asked and chunk.finish_reason is not None:
                    prompt = asked.pop(chunk.request_id)
                    completion = engine.take_output(chunk.request_id).completions[0]
                    store.add(
                        Response(
                            prompt_hash=prompt.prompt_hash,
                            token_ids=completion.token_ids,
                            finish_reason=completion.finish_reason,
                        )
                    )
                    num_done += 1
                    on_progress(num_done, num_all)
    finally:
        for request_id in asked:
            engine.abort(request_id)


def seed_of(prompt_hash: str, seed: int) -> int:
    mixed = finalise(finalise(seed) ^ int(prompt_hash, 16))
    return finalise(mixed + INCREMENT) >> 64 - SEED_BITS


_FINISH_REASONS = ("stop", "length")
_MAX_TOKEN_CHARACTERS = 1024
"""Most characters that one token may stand for; the longest in use are some hundred spaces."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseServer:
    """A server that answers prompts in place of the target; several threads may use it at once."""

    client: Client
    tokenizer: Tokenizer

    def find_owner(self) -> str | None:
        """Return the kind of server; None where it does not say, or does not list the model."""
        try:
            return self.client.find_model().owned_by
        except (InvalidRequest, ServerUnavailable):
            return None

    def respond(
        self, prompt: PromptRecord, params: SamplingParams, owner: str | None = None
    ) -> Response:
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
                sampling_fields(params, owner),
                seed=seed_of(prompt.prompt_hash, params.seed or 0),
                check=partial(_check_answer, params=params),
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"{prompt.where}: {error}") from error
        return Response(
            prompt_hash=prompt.prompt_hash,
            token_ids=tuple(_tokens(answer, params, self.tokenizer)),
            finish_reason=str(answer.finish_reason),
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


def _tokens(answer: ServerAnswer, params: SamplingParams, tokenizer: Tokenizer) -> Sequence[int]:
    text, ids = answer.text or "", answer.token_ids
    if ids is None:
        return _encoded(text, answer, params, tokenizer)
    for token in ids:
        if token not in tokenizer.vocabulary:
            raise InvalidRequest(
                f"the server names the token {printable(token, max_length=40)}, which is not in "
                "the target's vocabulary: it serves a model with another tokenizer"
            )
    # Servers differ in how they write spaces at the ends and characters that are cut off, and a
    # stop string may have been removed.
    if not remove_spaces(tokenizer.decode(ids)).startswith(remove_spaces(text)):
        raise InvalidRequest(
            f"the server's tokens {list(ids[:8])} are not this tokenizer's way to write "
            f"{printable(text, max_length=40)!r}: it serves a model with another tokenizer"
        )
    return ids


def _encoded(
    text: str, answer: ServerAnswer, params: SamplingParams, tokenizer: Tokenizer
) -> Sequence[int]:
    """Tokenise a text, and append the end token if the text must have ended with it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_itself = answer.finish_reason == "stop" and answer.stop_reason is None
    if by_itself and not params.stop and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return ids


def write_responses_from(
    server: ResponseServer,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    params = store.origin.params
    sampling_fields(params, None)  # refuses what no server takes, before any is asked
    missing = store.missing(prompts)
    num_all = len(prompts)
    num_done = num_all - len(missing)
    on_progress(num_done, num_all)
    executor = ThreadPoolExecutor(server.client.config.max_connections)
    owner = server.find_owner() if missing else None
    asked = [executor.submit(server.respond, prompt, params, owner) for prompt in missing]
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


logger = logging.getLogger("forerun.align")

HashOfPrompt = Callable[[Sequence[int]], str]


def replayed(
    path: Path, *, target_hash: str, tokenizer_hash: str, hash_of_prompt: HashOfPrompt = prompt_hash
) -> list[Sample]:
    """Make one sample per traced request, whose learned positions are the rejected ones.

    The rejected position of a step is the one after the accepted ones: the target's own token
    stands there instead of the draft's. Positions after it were never looked at.
    """
    steps: dict[str, list[StepRecord]] = {}
    requests: list[RequestRecord] = []
    for item in read_trace(path):
        if isinstance(item, TraceHeader):
            _check_header(item, path, target_hash, tokenizer_hash)
        elif isinstance(item, StepRecord):
            steps.setdefault(item.request_id, []).append(item)
        elif not isinstance(item, Damage):
            requests.append(item)
    found = [
        build_replay_sample(
            request, sorted(steps[request.request_id], key=lambda step: step.step), hash_of_prompt
        )
        for request in requests
        if request.request_id in steps and request.prompt_token_ids
    ]
    if not found:
        raise InvalidRequest(
            f"the trace {path} has no finished request with the tokens of its prompt and its "
            "steps; write it with --trace-tokens"
        )
    return [sample for sample in found if sample is not None and sample.spans]


def _check_header(header: TraceHeader, path: Path, target_hash: str, tokenizer_hash: str) -> None:
    """Refuse a trace that was recorded with another target or tokenizer (InvalidRequest)."""
    if header.tokenizer_hash != tokenizer_hash:
        raise InvalidRequest(
            f"the trace {path} was written with another tokenizer ({header.tokenizer_hash}, not "
            f"{tokenizer_hash}); its tokens mean something else"
        )
    if header.target_hash != target_hash:
        raise InvalidRequest(
            f"the trace {path} is of another target ({header.target}, {header.target_hash}, not "
            f"{target_hash}); record a trace with this target"
        )


def build_replay_sample(
    request: RequestRecord, steps: list[StepRecord], hash_of_prompt: HashOfPrompt
) -> Sample | None:
    """Make the sample of one traced request; None if some of its steps are missing."""
    assert request.prompt_token_ids is not None
    token_ids = list(request.prompt_token_ids)
    spans: list[tuple[int, int]] = []
    for step in steps:
        if step.token_ids is None or step.context_tokens != len(token_ids):
            return None
        token_ids += step.token_ids
        if step.last_token_source == "recovered":
            spans.append((len(token_ids) - 1, len(token_ids)))
    if len(token_ids) != request.num_prompt_tokens + request.num_output_tokens:
        return None
    return Sample(
        prompt_hash=hash_of_prompt(request.prompt_token_ids),
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        tag="/".join(request.tags),
        source="replay",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """Disjoint prompts for training and for judging."""

    training: tuple[PromptRecord, ...]
    held_out: tuple[PromptRecord, ...]

    @property
    def to_judge(self) -> list[EvaluationPrompt]:
        return [EvaluationPrompt(prompt_ids=p.prompt_ids, tag=p.tag) for p in self.held_out]


def read_prompt_split(config: DataConfig, tokenizer: Tokenizer) -> PromptSplit:
    """Read the prompts and hold some out for judging."""
    found = read_prompts(config.prompts, tokenizer, config.max_prompt_tokens, raw=config.raw)
    if config.held_out is None:
        training, held_out = split(found, config.held_out_share)
        return PromptSplit(training=tuple(training), held_out=tuple(held_out))
    judged = read_prompts(config.held_out, tokenizer, config.max_prompt_tokens, raw=config.raw)
    known = {prompt.prompt_hash for prompt in judged}
    training = [prompt for prompt in found if prompt.prompt_hash not in known]
    if not training:
        raise InvalidRequest(f"every prompt of {config.prompts} is in {config.held_out} as well")
    return PromptSplit(training=tuple(training), held_out=tuple(judged))


FEW_PROMPTS = 20
"""Held-out prompts below which a difference of a tenth in tau is hardly ever shown."""


def warn_of_few_prompts(prompts: PromptSplit) -> None:
    """Warn if there are too few held-out prompts for informative intervals."""
    num_prompts = len(prompts.held_out)
    if num_prompts < FEW_PROMPTS:
        logger.warning(
            "only %d prompts are held out for judging: intervals will be wide, and the choice of "
            "the draft uncertain. Give at least %d, by more prompts, a larger --held-out-share, or "
            "--held-out FILE",
            num_prompts,
            FEW_PROMPTS,
        )


@dataclass(kw_only=True, eq=False)
class TrainingTexts:
    """All training texts of a draft, generated on demand and stored.

    Attributes:
        data: which texts; `sampling` has the parameters of the deployment.
        target: None in processes that wait for the one that generates.
        num_cut: responses of the target that `max_tokens` ended, once there are any.
    """

    data: DataConfig
    sampling: SamplingParams
    prompts: PromptSplit
    target: Engine | None
    target_name: str
    target_hash: str
    tokenizer: Tokenizer
    folder: Path
    num_cut: int = 0

    @property
    def shares(self) -> dict[Source, float]:
        """Share of the learned tokens by source."""
        return self.data.shares

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the responses."""
        temperature = self.data.response_temperature
        if temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=temperature)

    def steady(self, on_progress: OnProgress) -> list[Sample]:
        """Return the texts that do not depend on the draft."""
        found: list[Sample] = []
        if "target" in self.shares:
            found += self._of_target(on_progress)
        if "fixed" in self.shares:
            found += [sample for prompt in self.prompts.training for sample in prompt.brought]
        return found + self._replayed()

    def mixed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Select samples in the configured shares, and add all samples replayed from traces."""
        replays = [sample for sample in samples if sample.source == "replay"]
        return mix(samples, self.shares, seed=0) + replays

    def _of_target(self, on_progress: OnProgress) -> list[Sample]:
        """Return the responses of the target, or of the server that the settings name for it."""
        data, model, server = self.data, self.target_hash, None
        if data.responses_from is not None:
            name = data.responses_model or self.target_name
            if HIDDEN in data.responses_from:
                raise InvalidRequest(
                    f"--responses-from {data.responses_from} was recorded without its secret "
                    "parts: give the whole address"
                )
            config = ClientConfig(
                url=data.responses_from,
                model=name,
                key_variable=data.responses_key_env,
                max_connections=16,
            )
            server = ResponseServer(client=Client(config), tokenizer=self.tokenizer)
            # The model behind the address is not known: another target must not reuse responses.
            model = f"{model} {_recordable_url(data.responses_from)} {name}"
        origin = ResponseOrigin(
            source="target",
            model=model,
            tokenizer_hash=ModelFiles.find(self.target_name).tokenizer_hash,
            params=self.params,
        )
        store, prompts = ResponseStore(self.folder, origin), self.prompts.training
        if self.target is not None:
            with store.writing():
                if server is None:
                    write_responses(self.target, prompts, store, on_progress)
                else:
                    write_responses_from(server, prompts, store, on_progress)
        found = (store.response(prompt.prompt_hash) for prompt in prompts)
        self.num_cut = sum(r is not None and r.finish_reason == "length" for r in found)
        return [_without_loop(sample) for sample in store.samples(prompts)]

    def _replayed(self) -> list[Sample]:
        own_hash = ModelFiles.find(self.target_name).tokenizer_hash
        most, start = self.data.max_prompt_tokens, self.tokenizer.encode("")
        held_out = {prompt.prompt_hash for prompt in self.prompts.held_out}
        found = [
            sample
            for path in self.data.replay
            for sample in replayed(
                path,
                target_hash=self.target_hash,
                tokenizer_hash=own_hash,
                hash_of_prompt=lambda ids: prompt_hash(shortened(ids, start, most)),
            )
        ]
        return [sample for sample in found if sample.prompt_hash not in held_out]


def _recordable_url(url: str) -> str:
    """Return a URL without its secrets; a hash tells those apart that differ in them."""
    shown = shown_url(url)
    return shown if shown == url else f"{shown} {hash_of(url.encode())}"


def _without_loop(sample: Sample) -> Sample:
    """Cut a sample where its response begins to repeat a 32-gram.

    A loop is easy to draft, so learning it does not help with other text.
    """
    (start, end), *others = sample.spans
    if others:
        return sample
    kept = start + first_repeat(sample.token_ids[start:end])
    if kept == end:
        return sample
    return replace(sample, token_ids=sample.token_ids[:kept], spans=((start, kept),))
