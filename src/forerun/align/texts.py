"""Texts of an alignment: prompts for training and judging, and the target's responses."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import msgspec

from forerun.align.config import DataConfig, Source
from forerun.align.samples import PromptRecord, Sample, data_hash, mix, read_prompts, split
from forerun.align.workspace import OnProgress, exclusive_access, lock_for
from forerun.cache import hash_of
from forerun.engine.engine import Engine
from forerun.errors import CacheTooLarge, InvalidRequest
from forerun.measure.judge import EvaluationPrompt
from forerun.models.checkpoint import ModelFiles
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import first_repeat
from forerun.theory.splitmix import INCREMENT, finalise

logger = logging.getLogger("forerun.align")

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
            Sample(
                prompt_hash=prompt.prompt_hash,
                token_ids=prompt.prompt_ids + response.token_ids,
                spans=((len(prompt.prompt_ids), len(prompt.prompt_ids + response.token_ids)),),
                tag=prompt.tag,
                source=self.origin.source,
            )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """Disjoint prompts for training and for judging."""

    training: tuple[PromptRecord, ...]
    held_out: tuple[PromptRecord, ...]

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the prompts, with the answers they bring and the tags they are judged by."""
        learned = [[prompt.prompt_hash, data_hash(prompt.brought)] for prompt in self.training]
        judged = [[prompt.prompt_hash, prompt.tag] for prompt in self.held_out]
        sides = {"training prompts": learned, "held-out prompts": judged}
        return {side: hash_of(json.dumps(hashes).encode()) for side, hashes in sides.items()}

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
        engine: with the target; None in processes that wait for the one that generates.
        num_cut: responses of the target that `max_tokens` ended, once there are any.
    """

    data: DataConfig
    sampling: SamplingParams
    prompts: PromptSplit
    target: ModelFiles
    engine: Engine | None
    folder: Path
    num_cut: int = 0

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the responses."""
        temperature = self.data.response_temperature
        if temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=temperature)

    def read(self, on_progress: OnProgress) -> list[Sample]:
        """Return the responses of the target and those of the records, where they have a share."""
        found: list[Sample] = []
        if "target" in self.data.shares:
            found += self._read_responses(on_progress)
        if "fixed" in self.data.shares:
            found += [sample for prompt in self.prompts.training for sample in prompt.brought]
        return found

    def mixed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Select samples in the configured shares."""
        return mix(samples, self.data.shares, seed=0)

    def _read_responses(self, on_progress: OnProgress) -> list[Sample]:
        origin = ResponseOrigin(
            source="target",
            model=self.target.content_hash,
            tokenizer_hash=self.target.tokenizer_hash,
            params=self.params,
        )
        store, prompts = ResponseStore(self.folder, origin), self.prompts.training
        if self.engine is not None:
            with store.writing():
                write_responses(self.engine, prompts, store, on_progress)
        found = (store.response(prompt.prompt_hash) for prompt in prompts)
        self.num_cut = sum(r is not None and r.finish_reason == "length" for r in found)
        return [_cut_loop(sample) for sample in store.samples(prompts)]


def _cut_loop(sample: Sample) -> Sample:
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
