"""`forerun serve`: an OpenAI-compatible HTTP server over one target and its drafts."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Literal

from forerun.cli.command import Command, Exit, is_flag
from forerun.cli.flags import PairFlags, read_template
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest
from forerun.server.config import ServerConfig
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
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
    engine: Literal["forerun", "vllm"] = "forerun"
    """What decodes. vllm: vLLM is started with the speculative configuration of the draft, which is
    that of its alignment where it has one, and its metrics are shown on the live page."""
    chat_template: Path | None = None
    """A file with the Jinja template that renders conversations, in place of the target's own."""
    speculative_config: Path | None = None
    """For --engine vllm, a JSON file with the configuration: the serving/vllm.json of an alignment,
    what `forerun plan --json` printed, or vLLM's own. --draft replaces the draft of a plan, and --k
    the number of tokens."""
    vllm: str = "vllm"
    """The vllm program, for --engine vllm."""
    vllm_args: str = ""
    """Further options of `vllm serve`, in one text: "--dtype bfloat16 --max-num-seqs 8"."""
    api_keys: Path | None = None
    """TOML file of keys and their limits, see docs/serving.md; or set FORERUN_API_KEY."""

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

    with log_on_stderr(options.server.log_format):
        return run_served(options)


def run_served(options: ServeOptions) -> int:
    """Serve with a log that is set up."""
    if options.engine == "vllm":
        return run_vllm(options)
    if options.speculative_config is not None:
        raise InvalidRequest("--speculative-config is for --engine vllm; give --draft and --k")
    if options.vllm_args:
        raise InvalidRequest("--vllm-args is for --engine vllm, and changes nothing here")
    from forerun.cli.session import load_engine
    from forerun.doctor.live import PageDiagnosis
    from forerun.engine.thread import AsyncEngine
    from forerun.server.app import create_app
    from forerun.server.run import open_socket, serve

    keys, template = options.read_keys(), read_template(options.chat_template)
    listener = open_socket(options.server)  # before weights are read: the port may be in use
    engine = load_engine(
        options.pair,
        max_batch=options.max_batch,
        max_waiting=options.max_waiting,
    )
    if template:
        engine.tokenizer.use_chat_template(template)
    running = AsyncEngine(engine)
    app = create_app(running, options.model, options.server, keys, PageDiagnosis())
    _announce(options.model, listener)
    methods = ", ".join(engine.capabilities().methods)
    print(f"drafts: {methods} while that is faster" if methods else "no drafts", flush=True)
    serve(app, listener, options.server, running)
    return Exit.GOOD


def run_vllm(options: ServeOptions) -> int:
    """Start vLLM and serve it until a signal; returns the exit code."""
    if options.chat_template is not None:
        template = shell_command("--chat-template {file}", file=options.chat_template)
        raise InvalidRequest(
            "--chat-template is for --engine forerun; give vLLM its own with "
            f"--vllm-args {shlex.quote(template)}"
        )
    from forerun.doctor.live import VllmView
    from forerun.server.run import open_socket, serve
    from forerun.server.vllm import (
        create_proxy,
        fetch,
        speculative_config,
        vllm_name,
        vllm_running,
    )

    keys, target = options.read_keys(), vllm_name(options.pair.target)
    drafts = options.pair.draft_names if options.pair.draft else ()
    if len(drafts) > 1:
        raise InvalidRequest(f"--engine vllm takes one --draft, not {', '.join(drafts)}")
    k = options.pair.k
    found = speculative_config(
        drafts[0] if drafts else None,
        None if k == EngineConfig().num_speculative_tokens else k,
        options.speculative_config,
    )
    print(
        f"speculative configuration of vLLM: {json.dumps(found) if found else 'none'}", flush=True
    )
    listener = open_socket(options.server)
    # So that vLLM is ended too; `nohup` has SIGHUP ignored.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.GOOD))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    arguments = ["--served-model-name", options.model, *shlex.split(options.vllm_args)]
    with vllm_running(target, found, program=options.vllm, arguments=arguments) as vllm:
        methods = [str(found.get("method", "draft"))] if found else []
        proxy = create_proxy(
            vllm.address,
            VllmView(partial(fetch, vllm.address), target=options.model, methods=methods),
            config=options.server,
            keys=keys,
            is_ready=lambda: vllm.is_ready,
        )
        vllm.supervise(partial(_announce, options.model, listener))
        serve(proxy, listener, options.server, vllm)
    return Exit.GOOD


def _announce(model: str, listener: socket) -> None:
    """Print the addresses of the API and of the live page."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(
        f"{model} is served at http://{host}:{port}/v1; what speculation does is shown at "
        f"http://{host}:{port}/",
        flush=True,
    )


VLLM_ARGUMENTS = "--vllm-args"


def rewritten(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments with --model inserted before a first word that is not a flag."""
    found = list(arguments)
    if found and not is_flag(found[0]):
        found.insert(0, "--model")
    if VLLM_ARGUMENTS in found[:-1]:
        at = found.index(VLLM_ARGUMENTS)
        found[at : at + 2] = [f"{VLLM_ARGUMENTS}={found[at + 1]}"]
    return found


COMMAND = Command(
    options=ServeOptions,
    run=run,
    description="Serve a target over HTTP, as the OpenAI API does: forerun serve TARGET [flags]",
    lists={"--draft": ",", "--profile": ","},
    rewrite=rewritten,
    examples=(
        "forerun serve zoo:code-40m --draft auto",
        "forerun serve path/to/target --draft path/to/draft --port 8001 --max-batch 16",
        "forerun serve path/to/target --draft path/to/draft --engine vllm",
    ),
)
