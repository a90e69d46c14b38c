"""Texts of an alignment: prompts for training and judging, responses, and replayed traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from forerun.align.config import AlignConfig, DataConfig, Source
from forerun.align.progress import OnProgress
from forerun.align.responses import (
    ResponseOrigin,
    ResponseServer,
    ResponseStore,
    draft_writer,
    write_responses,
    write_responses_from,
)
from forerun.align.samples import (
    PromptRecord,
    Sample,
    mix,
    prompt_hash,
    read_prompts,
    shortened,
    split,
)
from forerun.client.client import Client
from forerun.client.config import ClientConfig
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.measure.judged import EvaluationPrompt
from forerun.models.checkpoint import tokenizer_hash
from forerun.models.load import model_folder
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import first_repeat
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import Damage, read_trace

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
        sample_of(
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


def sample_of(
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


NUM_LOGPROBS = 20
"""Asked of a server that teaches: the most the protocol of OpenAI allows."""


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
    found = read_prompts(config.prompts, tokenizer, config.max_prompt_tokens)
    if config.held_out is None:
        training, held_out = split(found, config.held_out_share)
        return PromptSplit(training=tuple(training), held_out=tuple(held_out))
    judged = read_prompts(config.held_out, tokenizer, config.max_prompt_tokens)
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


class TrainingTexts:
    """All training texts of a draft, generated on demand and stored."""

    def __init__(
        self,
        *,
        config: AlignConfig,
        prompts: PromptSplit,
        target: Engine | None,
        target_hash: str,
        tokenizer: Tokenizer,
        folder: Path,
    ) -> None:
        self.config = config
        self.prompts = prompts.training
        self.held_out = frozenset(prompt.prompt_hash for prompt in prompts.held_out)
        self.target = target
        self.target_hash = target_hash
        self.tokenizer = tokenizer
        self.folder = folder

    @property
    def shares(self) -> dict[Source, float]:
        """Share of the learned tokens by source."""
        return self.config.data.shares

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the responses."""
        temperature = self.config.data.response_temperature
        sampling = self.config.sampling
        return sampling if temperature is None else replace(sampling, temperature=temperature)

    def steady(self, on_progress: OnProgress) -> list[Sample]:
        """Return the texts that do not depend on the draft."""
        found: list[Sample] = []
        if "target" in self.shares:
            found += self._of_target(on_progress)
        if "fixed" in self.shares:
            found += [sample for prompt in self.prompts for sample in prompt.brought]
        return found + self._replayed()

    def of_draft(
        self, draft: Path, part: int, num_parts: int, on_progress: OnProgress
    ) -> list[Sample]:
        """Generate the draft's own responses to one part of the prompts."""
        prompts = self.prompts[part % num_parts :: num_parts]
        if self.target is None:
            raise ValueError("only the process that has the target writes responses")
        engine, store = draft_writer(draft, self.target, self.params, self.folder)
        with store.writing():
            write_responses(engine, prompts, store, on_progress)
        return [_without_loop(sample) for sample in store.samples(prompts)]

    def mixed(self, samples: Sequence[Sample], seed: int) -> list[Sample]:
        """Select samples in the configured shares, and add all samples replayed from traces."""
        replays = [sample for sample in samples if sample.source == "replay"]
        return mix(samples, self.shares, seed=seed) + replays

    def _of_target(self, on_progress: OnProgress) -> list[Sample]:
        server = self._server
        store = ResponseStore(self.folder, self._origin(server))
        if self.target is not None:
            write = partial(write_responses, self.target)
            if server is not None:
                client = Client(server)
                answering = ResponseServer(
                    client=client, tokenizer=self.tokenizer, num_logprobs=self._num_logprobs
                )
                write = partial(write_responses_from, answering)
            with store.writing():
                write(self.prompts, store, on_progress)
        return [_without_loop(sample) for sample in store.samples(self.prompts)]

    @property
    def _server(self) -> ClientConfig | None:
        """The server that responds in place of the target, if the settings name one."""
        url = self.config.data.responses_from
        model = self.config.data.responses_model or self.config.target
        return None if url is None else ClientConfig(url=url, model=model, max_connections=16)

    @property
    def _num_logprobs(self) -> int:
        return NUM_LOGPROBS if self.config.teacher.teacher == "top-k" else 0

    def _origin(self, server: ClientConfig | None) -> ResponseOrigin:
        model = self.target_hash
        if server is not None:
            # The model behind the address is not known: another target must not reuse responses.
            model = f"{model} {server.url} {server.model} {self._num_logprobs}"
        folder = model_folder(self.config.target)
        return ResponseOrigin(
            source="target", model=model, tokenizer_hash=tokenizer_hash(folder), params=self.params
        )

    def _replayed(self) -> list[Sample]:
        if not self.config.data.replay:
            return []
        own_hash = tokenizer_hash(model_folder(self.config.target))
        found = [
            sample
            for path in self.config.data.replay
            for sample in replayed(
                path,
                target_hash=self.target_hash,
                tokenizer_hash=own_hash,
                hash_of_prompt=self._hash_of_prompt,
            )
        ]
        return [sample for sample in found if sample.prompt_hash not in self.held_out]

    def _hash_of_prompt(self, prompt_ids: Sequence[int]) -> str:
        most = self.config.data.max_prompt_tokens
        return prompt_hash(shortened(prompt_ids, self.tokenizer.encode(""), most))


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
    tops = sample.top_logprobs
    return replace(
        sample,
        token_ids=sample.token_ids[:kept],
        spans=((start, kept),),
        top_logprobs=None if tops is None else tops[: kept - start],
    )
