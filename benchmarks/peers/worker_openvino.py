"""OpenVINO GenAI behind the protocol; runs in the environment of `peers-openvino`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import PLAIN, SPECULATIVE, Setup, conversion_name, serve, versions_of

CACHE_GIB = 1


class OpenVino:
    """Its pipeline with paged attention and continuous batching, the only one that drafts."""

    def __init__(self, setup: Setup) -> None:
        target = converted(Path(setup.target), Path(setup.scratch))
        draft = converted(Path(setup.draft), Path(setup.scratch))
        properties = {"INFERENCE_NUM_THREADS": setup.threads}
        self.pipelines = {}
        for arm in setup.arms:
            extra = (
                {}
                if arm == PLAIN
                else {"draft_model": genai.draft_model(draft, "CPU", **properties)}
            )
            self.pipelines[arm] = genai.ContinuousBatchingPipeline(
                target,
                scheduler_config=scheduler(setup),
                device="CPU",
                properties=properties | extra,
            )
        self.settings = (
            f"{setup.threads} threads, ContinuousBatchingPipeline, "
            f"prefix cache off, fp16 weights, its default precision (bf16 where the CPU has it)"
        )

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("openvino-genai", "openvino", "optimum-intel", "transformers")

    def generate(
        self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.ignore_eos = True
        settings.apply_chat_template = False
        if k:
            settings.num_assistant_tokens = k
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self.pipelines[SPECULATIVE if k else PLAIN].generate(
            inputs, [settings] * len(inputs)
        )
        return [list(result.m_generation_ids[0]) for result in results]


def scheduler(setup: Setup) -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.cache_size = CACHE_GIB
    config.max_num_seqs = setup.max_batch
    config.dynamic_split_fuse = False
    config.enable_prefix_caching = False
    return config


def converted(model: Path, scratch: Path) -> Path:
    """The model in OpenVINO's format, made once."""
    folder = scratch / "openvino" / conversion_name(model)
    if not (folder / "openvino_tokenizer.xml").exists():
        tool = Path(sys.executable).parent / "optimum-cli"
        command = [tool, "export", "openvino", "-m", model, "--weight-format", "fp16"]
        command += ["--task", "text-generation-with-past", folder]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    return folder


if __name__ == "__main__":
    serve(OpenVino)
