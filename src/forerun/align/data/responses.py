"""Responses that an engine generates, stored one per line as they finish so that none is lost.

They are written by the target, or by the draft for the target to score.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import msgspec

from forerun.align.config import Source
from forerun.align.data.prompts import PromptRecord
from forerun.align.data.sample import Sample, TopLogprobs
from forerun.align.progress import OnProgress
from forerun.align.workspace import exclusive_access, lock_for
from forerun.cache import hash_of
from forerun.engine.engine import Engine
from forerun.engine.loading import load_pair_member
from forerun.errors import CacheTooLarge, InvalidRequest
from forerun.models.checkpoint import tokenizer_hash
from forerun.models.load import model_folder
from forerun.models.tokenizers import check_vocabularies
from forerun.provenance import content_hash
from forerun.sampling.config import SamplingParams, draft_params
from forerun.theory.splitmix import INCREMENT, finalise

logger = logging.getLogger("forerun.align")

FORMAT = 2
FREE = ("n", "logprobs")
"""Parameters that decide nothing: every response is a single sample."""
DEFAULTS = SamplingParams()
"""Left out of an origin, so that a new parameter does not make an old origin another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOrigin:
    """All settings that influence responses; responses made with other settings are not reused.

    Attributes:
        model: content hash of its weights, or address and name where a server has it.
    """

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
    """One response to a prompt.

    Attributes:
        token_ids: of the response, the token that ended it included.
        top_logprobs: of every token, where a server offers them.
    """

    prompt_hash: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    top_logprobs: TopLogprobs | None = None

    def __post_init__(self) -> None:
        """Refuse token ids below 0, and log-probabilities of other than all tokens."""
        tops = self.top_logprobs
        if min(self.token_ids, default=0) < 0 or (
            tops is not None and len(tops) != len(self.token_ids)
        ):
            raise ValueError("its token ids or its log-probabilities are damaged")

    @property
    def key(self) -> tuple[str, int]:
        """Prompt hash and sample index, which identify a response in the store."""
        return self.prompt_hash, self.index


class ResponseStore:
    """File of the responses of one origin, named by the hash of that origin.

    Lines are written whole, so a killed process loses at most the one it was writing;
    what is left of that is removed by the next. One process at a time writes, see `writing`.
    """

    def __init__(self, folder: Path, origin: ResponseOrigin) -> None:
        self.origin = origin
        self._header = origin.header
        self.path = folder / f"{origin.source}-{hash_of(self._header.encode())}.jsonl"
        self._responses: dict[tuple[str, int], Response] = {}
        self._lock = lock_for(self.path)
        self._load()

    def __len__(self) -> int:
        return len(self._responses)

    def missing(
        self, prompts: Iterable[PromptRecord], samples_per_prompt: int
    ) -> list[tuple[PromptRecord, int]]:
        """Return the prompts and sample indices without a response, lowest sample indices first."""
        return [
            (prompt, index)
            for index in range(samples_per_prompt)
            for prompt in prompts
            if (prompt.prompt_hash, index) not in self._responses
        ]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file's lock during the block, after reading the responses of other processes."""
        with exclusive_access(self._lock, self.path):
            self._load()
            yield

    def add(self, response: Response) -> None:
        """Write a response, unless the store has one with the same key."""
        if response.key in self._responses:
            return
        try:
            self._append(json.dumps(asdict(response), separators=(",", ":")))
        except OSError as error:
            raise CacheTooLarge(
                f"{self.path} cannot be written: {error.strerror or error}; {len(self)} responses "
                "are kept: make room and run again to go on"
            ) from error
        self._responses[response.key] = response

    def samples(self, prompts: Iterable[PromptRecord], samples_per_prompt: int) -> list[Sample]:
        """Return prompts with their responses as samples; empty responses are left out."""
        found = (
            (prompt, self._responses.get((prompt.prompt_hash, index)))
            for prompt in prompts
            for index in range(samples_per_prompt)
        )
        return [
            sample_of(prompt, response, self.origin.source)
            for prompt, response in found
            if response is not None and response.token_ids
        ]

    def response(self, prompt_hash: str, index: int) -> Response | None:
        """Return one response, None where it is missing."""
        return self._responses.get((prompt_hash, index))

    def _append(self, line: str) -> None:
        """Append a line; if that fails, restore the length of the file."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            remaining = memoryview(line.encode() + b"\n")
            try:
                while remaining:  # a file that is nearly full takes a part, and refuses the next
                    remaining = remaining[file.write(remaining) or 0 :]
            except OSError:
                os.truncate(self.path, end)
                raise

    def _load(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._whole()
        except OSError as error:
            raise InvalidRequest(f"responses cannot be kept in {self.path}: {error}") from error
        first, *lines = whole.splitlines()
        if first.decode(errors="replace") != self._header:
            raise InvalidRequest(
                f"{self.path} holds responses of another model or of other parameters; move it away"
            )
        for number, line in enumerate(lines, start=2):
            self._take(line, number)

    def _whole(self) -> bytes:
        """Return the lines of the file after repairing an incomplete last line or header."""
        content = self._content()
        if content.endswith(b"\n"):
            return content
        with exclusive_access(self._lock, self.path):
            content = self._content()  # the process that wrote it has ended
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(self.path, len(whole))
            if not whole:
                self._append(self._header)
            return whole or self._content()

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _take(self, line: bytes, number: int) -> None:
        try:
            response = msgspec.convert(json.loads(line), Response)
        except (msgspec.ValidationError, ValueError, RecursionError):
            logger.warning("%s:%d is damaged; that response is made again", self.path, number)
            return
        self._responses.setdefault(response.key, response)


def sample_of(prompt: PromptRecord, response: Response, source: Source) -> Sample:
    length = len(prompt.prompt_ids)
    return Sample(
        prompt_hash=prompt.prompt_hash,
        token_ids=prompt.prompt_ids + response.token_ids,
        spans=((length, length + len(response.token_ids)),),
        tag=prompt.tag,
        source=source,
        top_logprobs=response.top_logprobs,
    )


SEED_BITS = 63


def write_responses(
    engine: Engine,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    *,
    samples_per_prompt: int = 1,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    """Generate the responses that the store lacks with an engine.

    Every sample has its own seed, from the parameters' seed, its prompt and its index alone: what
    is generated depends neither on the batch nor on where an earlier run was interrupted.
    """
    missing = store.missing(prompts, samples_per_prompt)
    num_all = len(prompts) * samples_per_prompt
    waiting = iter(missing)
    asked: dict[str, tuple[PromptRecord, int]] = {}
    num_done = num_all - len(missing)
    on_progress(num_done, num_all)
    try:
        while True:
            while len(asked) < engine.config.max_batch and (job := next(waiting, None)):
                asked[ask(engine, *job, store.origin.params)] = job
            if not asked:
                return
            for chunk in engine.step():
                if chunk.request_id in asked and chunk.finish_reason is not None:
                    store.add(finished(engine, chunk.request_id, *asked.pop(chunk.request_id)))
                    num_done += 1
                    on_progress(num_done, num_all)
    finally:
        for request_id in asked:
            engine.abort(request_id)


def ask(engine: Engine, prompt: PromptRecord, index: int, params: SamplingParams) -> str:
    seed = seed_of(prompt.prompt_hash, index, params.seed or 0)
    own = replace(params, n=1, seed=seed, logprobs=None)
    try:
        return engine.add_request(list(prompt.prompt_ids), own)
    except InvalidRequest as error:
        raise InvalidRequest(f"{prompt.where}: {error}") from error


def finished(engine: Engine, request_id: str, prompt: PromptRecord, index: int) -> Response:
    completion = engine.take_output(request_id).completions[0]
    return Response(
        prompt_hash=prompt.prompt_hash,
        index=index,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
    )


def seed_of(prompt_hash: str, index: int, seed: int) -> int:
    mixed = finalise(finalise(seed) ^ int(prompt_hash, 16))
    return finalise(mixed + (index + 1) * INCREMENT) >> 64 - SEED_BITS


def draft_writer(
    draft: str | Path, target: Engine, params: SamplingParams, folder: Path
) -> tuple[Engine, ResponseStore]:
    """Load an engine that decodes with the draft alone, and open the store for its responses."""
    config = replace(target.config, num_speculative_tokens=0)
    model, tokenizer = load_pair_member(
        draft, dtype="auto", device=str(target.target.device), config=config
    )
    check_vocabularies(target.tokenizer, tokenizer)
    # Ids beyond the target's own are padding, which the target cannot score.
    padding = tuple(range(target.target.vocab_size, model.vocab_size))
    own = draft_params(params)
    origin = ResponseOrigin(
        source="draft",
        model=content_hash(str(draft)),
        tokenizer_hash=tokenizer_hash(model_folder(draft)),
        params=replace(own, bad_token_ids=own.bad_token_ids + padding),
    )
    engine = Engine(
        target=model,
        tokenizer=target.tokenizer,
        config=config,
        eos_token_ids=target.eos_token_ids,
    )
    return engine, ResponseStore(folder, origin)
