"""Makes training samples from traces, at the positions where a served draft was rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.align.data.sample import Sample, prompt_hash
from forerun.errors import InvalidRequest
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import read_trace
from forerun.trace.schema import Damage

__all__ = ["replayed"]

HashOfPrompt = Callable[[Sequence[int]], str]


def replayed(
    path: Path, *, target_hash: str, tokenizer_hash: str, hash_of_prompt: HashOfPrompt = prompt_hash
) -> list[Sample]:
    """Make one sample per traced request, whose learned positions are the rejected ones.

    The rejected position of a step is the one after the accepted ones: the target's own token
    stands there instead of the draft's. Positions after it were never looked at.

    Args:
        path: a trace with token ids (`--trace-tokens`); damaged parts of it are passed over.
        target_hash: of the target's weights.
        tokenizer_hash: of its tokenizer.
        hash_of_prompt: what prompts go by.

    Raises:
        InvalidTrace: the trace cannot be read.
        InvalidRequest: it is of another target or tokenizer, or kept no tokens.
    """
    steps: dict[str, list[StepRecord]] = {}
    requests: list[RequestRecord] = []
    for item in read_trace(path):
        if isinstance(item, TraceHeader):
            check_header(item, path, target_hash, tokenizer_hash)
        elif isinstance(item, StepRecord):
            steps.setdefault(item.request_id, []).append(item)
        elif not isinstance(item, Damage):
            requests.append(item)
    found = [
        sample_of(
            request,
            sorted(steps[request.request_id], key=lambda step: step.step),
            hash_of_prompt,
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


def check_header(header: TraceHeader, path: Path, target_hash: str, tokenizer_hash: str) -> None:
    """Refuse a trace that was recorded with another target or tokenizer.

    Raises:
        InvalidRequest: it is.
    """
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
