"""Generates responses with an engine: by the target, or by the draft for the target to score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.response_store import Response, ResponseOrigin, ResponseStore
from forerun.align.progress import OnProgress
from forerun.engine.engine import Engine
from forerun.engine.loading import load_pair_member
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import tokenizer_hash
from forerun.models.load import model_folder
from forerun.models.tokenizers import check_vocabularies
from forerun.provenance import content_hash
from forerun.sampling.config import SamplingParams, draft_params
from forerun.theory.splitmix import INCREMENT, finalise

__all__ = ["draft_writer", "seed_of", "write_responses"]

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

    Args:
        engine: of the store's origin; with a drafter it is faster and the text is the same.
        prompts: to respond to.
        store: gains the responses one by one, as they finish.
        samples_per_prompt: responses per prompt.
        on_progress: progress.

    Raises:
        InvalidRequest: a prompt does not fit into the context; its line is named.
        NumericalError: as `Engine.step`.
        CacheTooLarge: the disk is full; what was written is kept.
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
    """Queue one request and return its id."""
    seed = seed_of(prompt.prompt_hash, index, params.seed or 0)
    own = replace(params, n=1, seed=seed, logprobs=None)
    try:
        return engine.add_request(list(prompt.prompt_ids), own)
    except InvalidRequest as error:
        raise InvalidRequest(f"{prompt.where}: {error}") from error


def finished(engine: Engine, request_id: str, prompt: PromptRecord, index: int) -> Response:
    """Return the response of a finished request."""
    completion = engine.take_output(request_id).completions[0]
    return Response(
        prompt_hash=prompt.prompt_hash,
        index=index,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
    )


def seed_of(prompt_hash: str, index: int, seed: int) -> int:
    """Return the seed of one sample, derived from its prompt, sample index and base seed."""
    mixed = finalise(finalise(seed) ^ int(prompt_hash, 16))
    return finalise(mixed + (index + 1) * INCREMENT) >> 64 - SEED_BITS


def draft_writer(
    draft: str | Path, target: Engine, params: SamplingParams, folder: Path
) -> tuple[Engine, ResponseStore]:
    """Load an engine that decodes with the draft alone, and open the store for its responses.

    They are kept by the draft's weights: a draft that has learned meanwhile writes anew.

    Args:
        draft: folder or name.
        target: the engine of the target: its tokenizer, ends of texts and settings are used.
        params: of the deployment.
        folder: of responses.

    Raises:
        InvalidModel: the draft is missing, damaged or of an unsupported kind.
        IncompatibleDraft: its tokenizer is not the target's.
    """
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
