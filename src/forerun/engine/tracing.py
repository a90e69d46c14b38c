"""Trace records of finished requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

from forerun.engine.results import RequestOutput, sample_key
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json, RequestRecord

__all__ = ["request_records"]


def request_records(
    output: RequestOutput,
    params: SamplingParams,
    tags: tuple[str, ...] = (),
    *,
    with_tokens: bool = False,
) -> list[RequestRecord]:
    """One record per sample of a finished request, named as in its steps.

    Args:
        output: of the request.
        params: it was asked for with.
        tags: its labels.
        with_tokens: whether the ids of its prompt are kept.
    """
    parameters = {item.name: plain(getattr(params, item.name)) for item in fields(params)}
    return [
        RequestRecord(
            request_id=sample_key(output.request_id, completion.index, params.n),
            parameters=parameters,
            tags=tags,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(completion.token_ids),
            ttft_s=completion.ttft_s,
            prefill_s=completion.prefill_s,
            finish_reason=completion.finish_reason,
            prompt_token_ids=output.prompt_token_ids if with_tokens else None,
        )
        for completion in output.completions
    ]


def plain(value: object) -> Json:
    """Convert the value of a parameter to what JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, Collection):
        return [plain(entry) for entry in value]
    return str(value)
