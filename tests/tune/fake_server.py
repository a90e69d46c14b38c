"""A small server with the OpenAI API whose speed, drafting and faults are chosen; a program.

    python fake_server.py [serve MODEL] --port 8000 --step-s 0.01 --k 4 --acceptance 0.7

It takes vLLM's words `serve MODEL`, `--port`, `--host`, `--max-model-len` and
`--speculative-config` (whose `num_speculative_tokens` is K), and imports the standard library
alone.

Speed: a request takes `--request-s`, and every step of its decoding `--step-s` and, for each of the
requests that run and each of their 1 + K tokens, `--token-s`. A step emits 1 + the number of
accepted tokens.

Text: a token's distribution over 16 words is a function of the text before it, so honest servers
agree at temperature 0 whatever their K is, and report the same log-probabilities.

Faults (`--fault NAME` or `--fault NAME=VALUE`, several times):
    slow-start=S      listens after S seconds
    never-ready       does not listen
    loading=S         answers 503 for S seconds
    crash=MESSAGE     prints a message, with words and variables for {all}, and ends with status 1
    killed            kills itself before it listens
    crash-after=N     ends with status 1 in the request after N of them
    hang-after=N      does not answer any request of text after N of them
    ignores-port      listens on another free port, which it prints
    noise=MB          prints megabytes before it listens
    heartbeat=S       prints a line every S seconds
    child             starts a child in a session of its own that ignores SIGTERM, and prints its id
    stubborn          ignores SIGTERM itself
    detached          leaves that child behind and ends with status 0
    wrong-text        keeps some draft tokens that the target rejects
    garbage           sends events that are not JSON
    no-api            answers every GET with a page
    key=KEY           asks for an API key
    longest=N         refuses prompts of more characters
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = [
    f" {word}" for word in "a be see day ear fly go hat ice joy kit low map new old pie".split()
]
UNSUPPORTED = {
    "top_p": 1.0,
    "top_k": (0, -1),
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop": None,
    "response_format": None,
    "structured_outputs": None,
    "guided_regex": None,
}
"""Parameters that are refused unless they are off."""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("child", os.getpid(), flush=True)
time.sleep(600)
"""


def distribution(context: str, temperature: float, purpose: str = "target") -> list[float]:
    """Probabilities of the words after a text."""
    logits = [
        zlib.crc32(f"{purpose} {context[-60:]} {i}".encode()) % 1000 / 200
        for i in range(len(WORDS))
    ]
    if temperature == 0.0:
        return [float(i == logits.index(max(logits))) for i in range(len(WORDS))]
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


class Counters:
    """Totals since the start, under the names of vLLM."""

    def __init__(self, k: int) -> None:
        self.lock = threading.Lock()
        self.running = self.requests = self.prompt = self.generated = 0
        self.drafts = self.drafted = self.accepted = 0
        self.per_position = [0] * k

    def page(self, model: str) -> str:
        label = f'model_name="{model}"'
        lines = [
            f"vllm:num_requests_running{{{label}}} {self.running}",
            f"vllm:request_success_total{{{label}}} {self.requests}",
            f"vllm:prompt_tokens_total{{{label}}} {self.prompt}",
            f"vllm:generation_tokens_total{{{label}}} {self.generated}",
        ]
        if self.per_position:
            prefix = "vllm:spec_decode_num_"
            lines += [
                f"{prefix}drafts_total{{{label}}} {self.drafts}",
                f"{prefix}draft_tokens_total{{{label}}} {self.drafted}",
                f"{prefix}accepted_tokens_total{{{label}}} {self.accepted}",
            ]
            lines += [
                f'{prefix}accepted_tokens_per_pos_total{{{label},position="{i}"}} {n}'
                for i, n in enumerate(self.per_position)
            ]
        return "\n".join([*lines, ""])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    faults: dict[str, str]
    counters: Counters
    started_s = time.monotonic()

    def log_message(self, *arguments: object) -> None:
        pass

    def send(self, body: str, status: int = 200, kind: str = "application/json") -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status: int, message: str) -> None:
        self.send(json.dumps({"error": {"message": message, "type": "error"}}), status)

    def is_refused(self) -> bool:
        key = self.faults.get("key")
        if time.monotonic() - self.started_s < float(self.faults.get("loading", 0)):
            self.refuse(503, "Loading model")
        elif key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            self.refuse(401, "Unauthorized")
        else:
            return False
        return True

    def do_GET(self) -> None:
        if "no-api" in self.faults:
            self.send("<html>It works!</html>", kind="text/html")
        elif self.is_refused():
            pass
        elif self.path == "/v1/models":
            card = {"id": self.options.model, "object": "model", "owned_by": "vllm"}
            self.send(json.dumps({"object": "list", "data": [{**card, "max_model_len": 4096}]}))
        elif self.path == "/metrics":
            with self.counters.lock:
                self.send(self.counters.page(self.options.model), kind="text/plain")
        elif self.path == "/health":
            self.send("")
        elif self.path == "/version":
            self.send('{"version": "0.26.0"}')
        else:
            self.refuse(404, "Not Found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_refused():
            return
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self.refuse(404, "Not Found")
        for name, off in UNSUPPORTED.items():
            value = body.get(name)
            if value is not None and value not in (off if isinstance(off, tuple) else (off,)):
                return self.refuse(400, f"{name} is not supported")
        if len(json.dumps(body)) > int(self.faults.get("longest", 1 << 30)):
            return self.refuse(400, "the maximum context length is 64 tokens, this has 99")
        with self.counters.lock:
            number = self.counters.requests
            self.counters.requests += 1
            self.counters.running += 1
        try:
            if number >= int(self.faults.get("crash-after", 1 << 30)):
                print("RuntimeError: the engine died", flush=True)
                os._exit(1)
            if number >= int(self.faults.get("hang-after", 1 << 30)):
                time.sleep(3600)
            self.answer(body)
        except OSError:  # the client has gone
            self.close_connection = True
        finally:
            with self.counters.lock:
                self.counters.running -= 1

    # ------------------------------------------------------------------------------------ decoding

    def steps(self, context: str, body: dict) -> Iterator[list[int]]:
        """Yield the tokens of one step after the other, at the simulated speed."""
        options, counters, k = self.options, self.counters, self.options.k
        temperature = float(body.get("temperature", 1.0))
        noise = random.Random(body.get("seed"))
        num_left = int(body.get("max_tokens") or 16)
        time.sleep(options.request_s)
        while num_left > 0:
            step: list[int] = []
            num_accepted = 0
            for place in range(k + 1):
                kept_wrongly = False
                if place < k:
                    coin = zlib.crc32(f"coin {place} {context[-60:]}".encode()) % 10_000 / 10_000
                    is_accepted = coin < options.acceptance
                    kept_wrongly = "wrong-text" in self.faults and coin < 0.3
                    num_accepted += is_accepted
                purpose = "draft" if kept_wrongly else "target"
                probs = distribution(context, temperature, purpose)
                step.append(noise.choices(range(len(WORDS)), probs)[0])
                context += WORDS[step[-1]]
                if place == k or not is_accepted:
                    break
            time.sleep(options.step_s + options.token_s * counters.running * (1 + k))
            with counters.lock:
                counters.generated += min(len(step), num_left)
                if k:
                    counters.drafts += 1
                    counters.drafted += k
                    counters.accepted += num_accepted
                    for place in range(num_accepted):
                        counters.per_position[place] += 1
            yield step[:num_left]
            num_left -= len(step)

    def choice(self, context: str, tokens: list[int], body: dict) -> dict:
        """The fields of some tokens after a text, as a completion has them."""
        found: dict = {"index": 0, "text": "".join(WORDS[token] for token in tokens)}
        if body.get("return_token_ids"):
            found["token_ids"] = tokens
        if body.get("logprobs") is not None and self.path == "/v1/completions":
            by_id = body.get("return_tokens_as_token_ids")
            names = [f"token_id:{i}" if by_id else word for i, word in enumerate(WORDS)]
            rows = []
            for token in tokens:
                rows.append([math.log(p) for p in distribution(context, 1.0)])
                context += WORDS[token]
            found["logprobs"] = {
                "tokens": [names[token] for token in tokens],
                "token_logprobs": [row[token] for row, token in zip(rows, tokens, strict=True)],
                "top_logprobs": [dict(zip(names, row, strict=True)) for row in rows],
            }
        return found

    def answer(self, body: dict) -> None:
        is_chat = self.path.endswith("chat/completions")
        prompt = body.get("prompt", "")
        if is_chat:
            prompt = "\n".join(f"{m['role']}: {m['content']}" for m in body["messages"])
        elif not isinstance(prompt, str):
            prompt = "".join(WORDS[token % len(WORDS)] for token in prompt)
        num_prompt = len(prompt.split())
        with self.counters.lock:
            self.counters.prompt += num_prompt
        stream = bool(body.get("stream"))
        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
        text, tokens = "", []
        for step in self.steps(prompt, body):
            part = self.choice(prompt + text, step, body)
            text += part["text"]
            tokens += step
            if stream:
                self.send_event(part, None, is_chat)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(tokens),
            "total_tokens": num_prompt + len(tokens),
        }
        if stream:
            self.send_event({"index": 0, "text": ""}, "length", is_chat)
            self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode())
            self.wfile.write(b"\n\ndata: [DONE]\n\n")
            self.close_connection = True
            return
        whole = {**self.choice(prompt, tokens, body), "finish_reason": "length"}
        if is_chat:
            whole["message"] = {"role": "assistant", "content": whole.pop("text")}
        answer = {"id": "fake", "model": self.options.model, "choices": [whole], "usage": usage}
        self.send("garbage" if "garbage" in self.faults else json.dumps(answer))

    def send_event(self, choice: dict, reason: str | None, is_chat: bool) -> None:
        event = {**choice, "finish_reason": reason}
        if is_chat:
            event["delta"] = {"content": event.pop("text")}
        data = "gar}bage" if "garbage" in self.faults else json.dumps({"choices": [event]})
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="serve MODEL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--speculative-config", default="{}")
    parser.add_argument("--k", type=int)
    parser.add_argument("--api-key", nargs="*")
    parser.add_argument("--acceptance", default="0.7", help="a number, or METHOD=NUMBER,...")
    parser.add_argument("--request-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args(words)
    speculation = json.loads(options.speculative_config)
    method = speculation.get("method", "draft_model")
    if options.k is None:
        options.k = int(speculation.get("num_speculative_tokens", 0))
    rates = dict(pair.split("=") for pair in options.acceptance.split(",") if "=" in pair)
    options.acceptance = float(rates.get(method, 0.0) if rates else options.acceptance)
    options.model = options.words[1] if len(options.words) > 1 else "fake"
    return options


def start_faults(faults: dict[str, str]) -> None:
    """Do what is to go wrong before the server listens."""
    if "stubborn" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "noise" in faults:
        line = "x" * 1023 + "\n"
        for _ in range(int(float(faults["noise"]) * 1024)):
            sys.stdout.write(line)
        print("after the noise", flush=True)
    if "child" in faults or "detached" in faults:
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    if "detached" in faults:
        time.sleep(0.5)
        sys.exit(0)
    if "crash" in faults:
        message = faults["crash"].format(all=f"{sys.argv} {dict(os.environ)}")
        print(f"INFO loading\n{message}", file=sys.stderr, flush=True)
        sys.exit(1)
    if "killed" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if "heartbeat" in faults:
        threading.Thread(target=beat, args=(float(faults["heartbeat"]),), daemon=True).start()
    if "never-ready" in faults:
        print("loading weights for ever", flush=True)
        time.sleep(3600)
    time.sleep(float(faults.get("slow-start", 0)))


def beat(seconds: float) -> None:
    number = 0
    while True:
        number += 1
        print("beat", number, flush=True)
        time.sleep(seconds)


def main() -> None:
    options = read_options()
    faults = {name: value for name, _, value in (fault.partition("=") for fault in options.fault)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    start_faults(faults)
    port = options.port
    if "ignores-port" in faults:
        with socket.socket() as listener:
            listener.bind((options.host, 0))
            port = listener.getsockname()[1]
    Handler.options, Handler.faults, Handler.counters = options, faults, Counters(options.k)
    Handler.started_s = time.monotonic()
    server = Server((options.host, port), Handler)
    print(f"listening on http://{options.host}:{port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
