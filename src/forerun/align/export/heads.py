"""Settings for running a head on the target's hidden states in vLLM and SGLang.

The fields were read in vLLM 0.32 and in the SGLang documentation of 2026. transformers has no
drafting with such heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from forerun.align.config import Export
from forerun.align.export.engines import (
    ENGINES,
    EngineSettings,
    Serving,
    sglang_settings,
    vllm_settings,
)
from forerun.align.teachers.target import load_target
from forerun.drafters.eagle3.checkpoint import read_eagle3_head, write_eagle3_head
from forerun.drafters.medusa.checkpoint import VLLM_NOTE, read_medusa, write_medusa_vllm

__all__ = ["HEAD_ENGINES", "RAW_FOLDER", "VLLM_FOLDER", "engines_of", "write_forms"]

RAW_FOLDER = "sglang"
"""Folder inside `serving/` with the head in the form of SGLang and EAGLE's own code."""
VLLM_FOLDER = "vllm"
"""Folder inside `serving/` with Medusa heads in the form of vLLM."""


def engines_of(engines: Sequence[Export], serving: Serving) -> list[EngineSettings]:
    """Return the settings of every engine that can serve the target with its draft."""
    known = ENGINES if serving.method == "draft_model" else HEAD_ENGINES[serving.method]
    return [known[engine](serving) for engine in dict.fromkeys(engines) if engine in known]


def vllm_eagle3(serving: Serving) -> EngineSettings:
    """Return vLLM's settings for an EAGLE-3 head, whose folder has the form that vLLM reads."""
    return vllm_settings(
        serving,
        draft=serving.draft,
        method="eagle3",
        notes=("The head shares the target's embedding; its own file holds everything else.",),
        source="https://docs.vllm.ai/en/latest/features/speculative_decoding/eagle/",
    )


def sglang_eagle3(serving: Serving) -> EngineSettings:
    """Return SGLang's settings for an EAGLE-3 head; a chain is a tree with one branch there."""
    return sglang_settings(
        serving,
        draft=serving.draft / "serving" / RAW_FOLDER,
        algorithm="EAGLE3",
        notes=(f"The head is written again for SGLang, in serving/{RAW_FOLDER}.",),
    )


def vllm_medusa(serving: Serving) -> EngineSettings:
    """Return vLLM's settings for Medusa heads, which are also saved in the form that vLLM reads."""
    return vllm_settings(
        serving,
        draft=serving.draft / "serving" / VLLM_FOLDER,
        method="medusa",
        notes=(f"{VLLM_NOTE}.",),
        source="https://docs.vllm.ai/en/latest/features/speculative_decoding/",
    )


HEAD_ENGINES: Mapping[str, Mapping[Export, Callable[[Serving], EngineSettings]]] = MappingProxyType(
    {"eagle3": {"vllm": vllm_eagle3, "sglang": sglang_eagle3}, "medusa": {"vllm": vllm_medusa}}
)


def write_forms(engines: Sequence[str], serving: Serving) -> None:
    """Save the head also in the formats of the engines that cannot read its folder.

    Args:
        engines: by name.
        serving: the pair.

    Raises:
        InvalidModel: the head cannot be read.
    """
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
