"""lm-evaluation-harness: a task over HTTP has the score that it has in process.

Runs in forerun's own environment, for the engine; the harness is found in that of the clients.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.append(os.environ["CLIENTS_PACKAGES"])

import lm_eval
from common import MODEL, URL
from lm_eval.api.model import TemplateLM

from forerun import Engine, SamplingParams
from forerun.models.catalog import zoo_path

QUESTIONS = [
    ("def add(a, b):\n    return", [" a + b", " banana"]),
    ("for i in", [" range(10):", " else 7 import"]),
    ("import", [" os", " def class"]),
    ("if x is not", [" None:", " while:"]),
    ("class Node:\n    def __init__(self", [", value):", " 33 return"]),
    ("try:\n    pass\nexcept", [" ValueError:", " for in"]),
    ("print(", ["x)", "]]]"]),
    ("while", [" True:", " )"]),
]


class InProcess(TemplateLM):
    """The engine without a server, for the likelihoods of continuations."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    @property
    def eot_token_id(self) -> int:
        return min(self.engine.eos_token_ids)

    def tok_encode(self, string: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        return self.engine.tokenizer.encode(string, add_special_tokens=False)

    def _loglikelihood_tokens(self, requests, **_: object) -> list[tuple[float, bool]]:
        found = []
        params = SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0)
        for _, context, continuation in requests:
            (output,) = self.engine.generate([[*context, *continuation]], params)
            scored = output.prompt_logprobs[-len(continuation) :]
            is_greedy = all(entry.top[0][0] == entry.token_id for entry in scored)
            found.append((sum(entry.logprob for entry in scored), is_greedy))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError


def evaluated(model: object, data: str, **arguments: object) -> tuple[float, list[float]]:
    task = {
        "task": "python_continuations",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    result = lm_eval.simple_evaluate(model, tasks=[task], log_samples=True, **arguments)
    (scores,) = result["results"].values()
    (samples,) = result["samples"].values()
    likelihoods = [
        answer[0][0]
        for sample in sorted(samples, key=lambda s: s["doc_id"])
        for answer in sample["resps"]
    ]
    return (scores["acc,none"], scores["acc_norm,none"]), likelihoods


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.jsonl")
        rows = [{"text": t, "choices": c, "answer": 0} for t, c in QUESTIONS]
        data.write_text("\n".join(map(json.dumps, rows)))
        os.environ["HF_DATASETS_CACHE"] = folder
        settings = {
            "model": MODEL,
            "base_url": f"{URL}/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(zoo_path(MODEL)),
            "max_length": 1024,
        }
        over_http = evaluated("local-completions", str(data), model_args=settings)
        in_process = evaluated(InProcess(Engine.load(MODEL)), str(data))
    assert over_http[0] == in_process[0], (over_http, in_process)
    assert 0.0 < over_http[0][0] <= 1.0
    pairs = zip(over_http[1], in_process[1], strict=True)
    assert all(abs(one - other) < 0.02 for one, other in pairs), (over_http, in_process)
    print(f"accuracy {over_http[0][0]:.3f} over HTTP and in process")


main()
