"""Sampling parameters under the names that servers with the OpenAI API have for them."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

_EXTENSIONS = (
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
)
"""Parameters that are sent only if they are set: some servers accept only the first two."""
_DEFAULTS = SamplingParams()
_UNFILTERED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL_FIELDS: Mapping[str | None, Mapping[str, object]] = {
    "llamacpp": {
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 1 << 16,
        "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
    },
    "forerun": _UNFILTERED,
    "vllm": _UNFILTERED,
    "sglang": _UNFILTERED,
}
"""Request fields, by kind of server, that switch off its default filters and penalties.

llama.cpp has top_k 40 and min_p .05, and filters before it divides by the temperature unless a
request orders its samplers; the others take defaults from the model's generation_config.json.
"""


def sampling_fields(params: SamplingParams, owner: str | None) -> dict[str, object]:
    """Return sampling parameters under the names of the OpenAI API and vLLM, without the seed.

    Args:
        owner: the kind of server (`ModelCard.owned_by`). What is off in the parameters is sent to
            the kinds that have defaults of their own, and left out for others, which may not know
            it.

    Raises:
        InvalidRequest: no protocol has a parameter, or the output has no limit.
    """
    if params.max_tokens is None:
        raise InvalidRequest("max_tokens is not set; servers then stop after 16 tokens: set it")
    if params.bad_token_ids:
        raise InvalidRequest("bad_token_ids cannot be asked of a server; use logit_bias")
    fields: dict[str, object] = {**NEUTRAL_FIELDS.get(owner, {})}
    for name in ("temperature", "top_p", "max_tokens"):
        fields[name] = getattr(params, name)
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    for name in _EXTENSIONS:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            fields[name] = list(value) if isinstance(value, tuple) else value
    if owner == "llamacpp":
        fields["repeat_penalty"] = params.repetition_penalty  # its name for it
    return fields
