"""`forerun serve`: an OpenAI-compatible HTTP server over one target and its drafts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from forerun.cli.command import Command, Exit, is_flag
from forerun.cli.flags import PairFlags, read_template
from forerun.engine.config import EngineConfig
from forerun.server.config import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from forerun.engine.engine import Engine
    from forerun.engine.thread import AsyncEngine
    from forerun.server.app import Collector
    from forerun.server.guard import ApiKey

KEY_VARIABLE = "FORERUN_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `forerun serve`."""

    pair: PairFlags = field(default_factory=PairFlags)
    server: ServerConfig = field(default_factory=ServerConfig)
    served_model_name: str | None = None
    """Name that requests use for the target; by default the name it was started with."""
    max_batch: int = EngineConfig().max_batch
    """Sequences decoded at once; the others wait."""
    max_waiting: int = 256
    """Sequences that may wait; one more is refused with status 429."""
    chat_template: Path | None = None
    """A file with the Jinja template that renders conversations, in place of the target's own."""
    api_keys: Path | None = None
    """TOML file of keys and their limits, see docs/operating.md; or set FORERUN_API_KEY."""

    collect: Path | None = None
    """Folder for texts of requests with "store": true, to train drafts on; see docs/loop.md."""

    @property
    def model(self) -> str:
        return self.served_model_name or self.pair.target

    def read_keys(self) -> list[ApiKey]:
        from forerun.server.guard import ApiKey, check_address, read_keys

        keys = [] if self.api_keys is None else read_keys(self.api_keys)
        if key := os.environ.get(KEY_VARIABLE):
            keys.append(ApiKey.of("default", key))
        check_address(self.server, keys)
        return keys


def run(options: ServeOptions) -> int:
    """Serve until a signal; returns the exit code."""
    from forerun.server.request_log import log_on_stderr

    with log_on_stderr():
        return run_served(options)


def run_served(options: ServeOptions) -> int:
    """Serve with a log that is set up."""
    from forerun.engine.thread import AsyncEngine

    keys, listener, engine = prepare(options)
    running = AsyncEngine(engine)
    with ExitStack() as stack:
        store = None
        if options.collect is not None:
            from forerun.loop.store import TrafficStore

            store = stack.enter_context(TrafficStore(options.collect, engine.tokenizer.decode))
        serve_app(options, listener, running, make_app(options, running, keys, store))
    return Exit.GOOD


def prepare(options: ServeOptions) -> tuple[list[ApiKey], socket, Engine]:
    """Check the options, open the port and load the models."""
    from forerun.cli.session import load_engine
    from forerun.sampling.kernels import sampling_kernels
    from forerun.server.run import open_socket

    keys, template = options.read_keys(), read_template(options.chat_template)
    listener = open_socket(options.server)  # before weights are read: the port may be in use
    engine = load_engine(
        options.pair,
        max_batch=options.max_batch,
        max_waiting=options.max_waiting,
    )
    if template:
        engine.tokenizer.use_chat_template(template)
    sampling_kernels()  # compiled before the server is ready, not in the first sampled request
    return keys, listener, engine


def make_app(
    options: ServeOptions, running: AsyncEngine, keys: list[ApiKey], store: Collector | None
) -> FastAPI:
    """Build the application with its Diagnosis tab; a store collects texts that may be kept."""
    from forerun.doctor.live import PageDiagnosis
    from forerun.server.app import create_app

    return create_app(running, options.model, options.server, keys, PageDiagnosis(), store)


def serve_app(options: ServeOptions, listener: socket, running: AsyncEngine, app: FastAPI) -> None:
    """Say where the application is served, and serve it until a signal."""
    from forerun.server.run import serve

    engine = running.engine
    _announce(options.model, listener)
    methods = ", ".join(engine.capabilities().methods)
    when = "" if engine.config.controller == "fixed" else " while that is faster"
    print(f"drafts: {methods}{when}" if methods else "no drafts", flush=True)
    serve(app, listener, options.server, running)


def _announce(model: str, listener: socket) -> None:
    """Print the addresses of the API and of the live page."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(
        f"{model} is served at http://{host}:{port}/v1; what speculation does is shown at "
        f"http://{host}:{port}/",
        flush=True,
    )


def rewritten(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments with --model inserted before a first word that is not a flag."""
    if arguments and not is_flag(arguments[0]):
        return ["--model", *arguments]
    return arguments


COMMAND = Command(
    options=ServeOptions,
    run=run,
    description="Serve a target over HTTP, as the OpenAI API does: forerun serve TARGET [flags]",
    lists={"--draft": ",", "--profile": ","},
    rewrite=rewritten,
    usual="target draft k weights threads device max_context max_batch host port api_keys "
    "chat_template tool_format served_model_name",
    examples=(
        "forerun serve zoo:code-40m --draft auto",
        "forerun serve path/to/target --draft path/to/draft --port 8001 --max-batch 16",
    ),
)
