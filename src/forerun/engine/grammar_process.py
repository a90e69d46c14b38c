"""Trial compilation of grammars in a separate process, limited in time, memory and stack.

llguidance recurses over a grammar without a limit of depth: one with some thousand rules in a chain
overflows the stack, which ends the process. So a grammar is compiled in a child process first. The
child runs this very file and imports no more than llguidance.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_SECONDS = 2
MAX_WALL_SECONDS = 8
MAX_BYTES = 2 << 30
NICENESS = 10
"""Nice value of compilation, so that the engine's threads run first."""
STACK_BYTES = 4 << 20
"""Stack of the trial, smaller than that of any thread that compiles the grammar afterwards."""
MAX_CHARACTERS = 300
"""Most characters of the message on a grammar that cannot be compiled."""

if __name__ != "__main__":
    from forerun.errors import InvalidRequest
    from forerun.models.chat_template import TemplateProcess

    class GrammarProcess(TemplateProcess):
        """A child process that compiles grammars of one vocabulary; it restarts if it dies.

        Args:
            tokenizer: content of tokenizer.json.
            vocab_size: width of the logits.
            ends: tokens that end a text.
        """

        script = Path(__file__).resolve()

        def __init__(self, tokenizer: str, vocab_size: int, ends: Sequence[int]) -> None:
            super().__init__()
            self._vocabulary = {"tokenizer": tokenizer, "n_vocab": vocab_size, "ends": list(ends)}

        def check(self, grammar: str) -> None:
            """Refuse a grammar that cannot be compiled within the limits.

            Raises:
                InvalidRequest: it is malformed, or compiling it ends or delays the child process.
            """
            request: dict[str, Any] = {"grammar": grammar, "max_seconds": MAX_SECONDS}
            with self._lock:
                if not self.is_running:
                    request |= self._vocabulary
                answer = self._ask(json.dumps(request).encode() + b"\n", MAX_WALL_SECONDS)
            if "error" not in answer:
                raise InvalidRequest(
                    "the grammar is too large or too deeply nested to be compiled: simplify it"
                )
            if answer["error"]:
                raise InvalidRequest(f"the grammar cannot be used: {answer['error']}")


def _compile(tokenizer: Any, grammar: str, problems: list[str]) -> None:
    """Append what is wrong with a grammar, in one line; an empty line if nothing is."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
    problems.append(" ".join(str(matcher.get_error() or "").split())[:MAX_CHARACTERS])


def _serve() -> None:
    """Read a JSON request per line from stdin and write what is wrong with its grammar."""
    import math
    import os
    import resource

    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    sys.path[:] = json.loads(sys.stdin.readline())
    threading.stack_size(STACK_BYTES)
    from llguidance import LLTokenizer

    tokenizer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "tokenizer" in request:
            sizes = {"n_vocab": request["n_vocab"], "eos_token": request["ends"]}
            tokenizer = LLTokenizer(request["tokenizer"], **sizes)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(used.ru_utime + used.ru_stime) + request["max_seconds"]
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
        problems: list[str] = []
        worker = threading.Thread(target=_compile, args=(tokenizer, request["grammar"], problems))
        worker.start()
        worker.join()
        if not problems:  # it raised
            break
        print(json.dumps({"error": problems[0]}), flush=True)


if __name__ == "__main__":
    _serve()
