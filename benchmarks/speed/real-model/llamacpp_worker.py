"""llama.cpp over a GGUF file, behind lines of JSON; runs where llama-cpp-python is installed.

    python llamacpp_worker.py FILE THREADS CONTEXT

Every line on stdin has `ids` and `num_tokens`; the answer has the greedy tokens and the seconds.
The best token is taken with numpy, which is below 1% of a step.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp
import numpy as np


class LlamaCpp:
    """A context of one sequence over a model file."""

    def __init__(self, file: str, num_threads: int, max_context: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = max_context
        params.n_threads = params.n_threads_batch = num_threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.num_ids = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def generate(self, ids: list[int], num_tokens: int) -> list[int]:
        """Return greedy tokens, the end of the text ignored."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        found: list[int] = []
        while len(found) < num_tokens:
            row = (llama_cpp.llama_token * len(ids))(*ids)
            if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(row, len(ids))):
                raise RuntimeError("llama_decode failed")
            logits = llama_cpp.llama_get_logits_ith(self.context, -1)
            best = int(np.ctypeslib.as_array(logits, (self.num_ids,)).argmax())
            found.append(best)
            ids = [best]
        return found


def main() -> None:
    """Answer line by line."""
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = LlamaCpp(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        started_s = time.perf_counter()
        tokens = model.generate(work["ids"], work["num_tokens"])
        seconds = time.perf_counter() - started_s
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
