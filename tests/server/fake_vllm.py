#!/usr/bin/env python3
"""A program with the arguments, answers and metrics of `vllm serve`, for tests of the proxy."""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKENS = ("one", " two", " three", " four")
served = {"requests": 0, "left": 0}
released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(metrics(served["requests"]), "text/plain")
        elif self.path == "/version":
            self.answer(json.dumps({"version": "0.0.fake"}))
        elif self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": options.served_model_name}]}))
        elif self.path == "/left":
            self.answer(json.dumps(served["left"]))
        elif self.path == "/release":
            released.set()
            self.answer("")
        else:
            self.answer("", status=200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served["requests"] += 1
        if body.get("prompt") == "wait":
            return self.wait()
        if body.get("prompt") == "break off":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            return None
        if not body.get("stream"):
            choice = {"index": 0, "text": "".join(TOKENS), "finish_reason": "length"}
            found = {"choices": [choice], "authorization": self.headers.get("Authorization")}
            return self.answer(json.dumps(found))
        choices = [{"choices": [{"index": 0, "text": token}]} for token in TOKENS]
        events = "".join(f"data: {json.dumps(choice)}\n\n" for choice in choices)
        return self.answer(events + "data: [DONE]\n\n", "text/event-stream")

    def wait(self) -> None:
        """Answer when released, or count a client that leaves."""
        while not released.is_set():
            can_read = select.select([self.connection], [], [], 0.05)[0]
            if can_read and not self.connection.recv(1, socket.MSG_PEEK):
                served["left"] += 1
                return
        self.answer("{}")

    def answer(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


def metrics(n: int) -> str:
    """Every request makes 100 drafts of K tokens, of which 60 and 40 are accepted."""
    name = "vllm:spec_decode_num"
    lines = [
        f"vllm:generation_tokens_total {200 * n}",
        "vllm:num_requests_running 1",
        "vllm:num_requests_waiting 2",
        "vllm:kv_cache_usage_perc 0.25",
        f"{name}_drafts_total {100 * n}",
        f"{name}_draft_tokens_total {100 * n * options.k}",
        f"{name}_accepted_tokens_total {100 * n}",
        f'{name}_accepted_tokens_per_pos_total{{position="0"}} {60 * n}',
        f'{name}_accepted_tokens_per_pos_total{{position="1"}} {40 * n}',
    ]
    return "\n".join(lines) + "\n"


parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("target")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name", default="m")
parser.add_argument("--max-num-seqs", type=int)
parser.add_argument("--speculative-config", type=json.loads, default={})
options = parser.parse_args()
if options.target == "broken":
    sys.exit(3)
if options.target == "loading":
    time.sleep(3600)
if options.target == "dying":
    threading.Thread(target=lambda: (released.wait(), os._exit(5)), daemon=True).start()
options.k = options.speculative_config.get("num_speculative_tokens", 0)
ThreadingHTTPServer.request_queue_size = 512
ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
