"""Runs vLLM with a speculative configuration behind a proxy that adds the live page."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from forerun.bounded_documents import parse_json
from forerun.bounded_read import read_bytes
from forerun.client.config import ClientConfig
from forerun.client.connection import Connection
from forerun.client.forwarding import Forwarder
from forerun.drafters.config import parse_drafter
from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable
from forerun.models.catalog import PREFIX, zoo_path
from forerun.server.bodies import parsed
from forerun.server.config import ServerConfig
from forerun.server.errors import error_response, response_for
from forerun.server.guard import Guard
from forerun.server.keys import ApiKey, Keyring
from forerun.server.live_page import page_router
from forerun.server.vllm_view import VllmView

DEFAULT_K = 4
UNNAMED_DRAFT = "draft"
"""Name in a plan of a draft that was described by its size alone."""
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0


def vllm_name(model: str) -> str:
    """Return the name or folder under which vLLM can load a model."""
    return str(zoo_path(model)) if model.startswith(PREFIX) else model


def speculative_config(
    draft: str | None, num_speculative_tokens: int | None, recommended: Path | None = None
) -> dict[str, object]:
    """Return vLLM's `--speculative-config`; empty for decoding without a draft.

    An aligned draft has the settings that its alignment found best in `serving/vllm.json`.

    Args:
        draft: folder or name of a draft model, "suffix", "ngram", or None.
        num_speculative_tokens: K; None takes that of the recommendation or the alignment, or 4.
        recommended: file with a configuration: what an alignment exported, what `forerun plan
            --json` printed, or a speculative configuration of vLLM itself.

    Raises:
        InvalidRequest: the settings of an alignment cannot be read, the file holds none, or vLLM
            has no such drafter.
    """
    if num_speculative_tokens == 0:
        return {}
    k = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    if recommended is not None:
        return _chosen_in(recommended, draft, k)
    if draft is None:
        return {}
    if draft in ("suffix", "ngram"):
        return {"method": draft, "num_speculative_tokens": DEFAULT_K} | k
    if parse_drafter(draft) is not None:
        raise InvalidRequest(f"vLLM has no drafter {draft!r}: use a draft model, suffix or ngram")
    model = vllm_name(draft)
    path = Path(model) / "serving" / "vllm.json"
    if path.is_file():
        return _chosen_in(path, model, k)
    return {"method": "draft_model", "model": model, "num_speculative_tokens": DEFAULT_K} | k


def _chosen_in(path: Path, draft: str | None, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the speculative configuration of a file with changes; empty for plain decoding."""
    content = parse_json(read_bytes(path), path.name)
    settings = content if isinstance(content, dict) else {}
    if isinstance(best := settings.get("best"), dict):
        return planned(path, best, draft, changes)
    if "num_speculative_tokens" in settings:
        return settings | dict(changes)
    found = settings.get("speculative_config", {})
    if "model" not in settings or not isinstance(found, dict):
        raise InvalidRequest(
            f"{path} has no speculative_config that is an object: give the serving/vllm.json of an "
            "alignment, the output of forerun plan --json, or a configuration of vLLM"
        )
    return found | dict(changes) if found else {}


def planned(
    path: Path, best: Mapping[str, object], draft: str | None, changes: Mapping[str, object]
) -> dict[str, object]:
    """Return the speculative configuration of the best option of a plan."""
    name, k = best.get("draft"), best.get("num_speculative_tokens")
    if not isinstance(k, int) or not isinstance(name, str | None):
        raise InvalidRequest(
            f"{path} is no plan: its best option lacks a draft or a K; give the output of forerun "
            "plan --json"
        )
    if name is None or k == 0:
        return {}
    if best.get("tree") is not None:
        raise InvalidRequest(
            f"{path} recommends a tree, and vLLM drafts chains: plan without --sibling-acceptance"
        )
    if draft is None and name == UNNAMED_DRAFT:
        raise InvalidRequest(f"{path} does not name the draft that it is about: give --draft")
    return speculative_config(draft or name, k) | dict(changes)


@contextmanager
def vllm_running(
    target: str,
    speculative: Mapping[str, object],
    *,
    program: str = "vllm",
    arguments: Sequence[str] = (),
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[str]:
    """Run vLLM on a free local port and yield its address; it is ended with the block.

    `arguments` are further options of `vllm serve`.

    Raises:
        InvalidRequest: there is no such program.
        ServerUnavailable: it ended, or is not ready in time.
    """
    found = shutil.which(program)
    if found is None:
        raise InvalidRequest(f"there is no program {program!r}: install vLLM, or give --vllm PATH")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [found, "serve", target, "--host", "127.0.0.1", "--port", str(port)]
    if speculative:
        command += ["--speculative-config", json.dumps(dict(speculative))]
    # In a session of its own, so that a key press in the terminal reaches it through us alone.
    process = subprocess.Popen([*command, *arguments], start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(address, process, timeout_s)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(address: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until the server's health check succeeds."""
    ends_s = time.monotonic() + timeout_s
    connection = Connection(ClientConfig(url=address))
    try:
        while time.monotonic() < ends_s:
            if (code := process.poll()) is not None:
                raise ServerUnavailable(f"vLLM ended with code {code} before it was ready")
            with suppress(InvalidRequest, ServerUnavailable):
                connection.get(f"{address}/health", 5.0)
                return
            time.sleep(0.2)
    finally:
        connection.close()
    raise ServerUnavailable(f"vLLM was not ready after {timeout_s:.0f} s")


def create_proxy(
    address: str,
    *,
    target: str,
    methods: Sequence[str],
    config: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
) -> FastAPI:
    """Return an application that passes requests on to vLLM and shows its metrics on the live page.

    Without `keys` none is needed.
    """
    config = config or ServerConfig()
    reader = Connection(ClientConfig(url=address))
    forwarder = Forwarder(address)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await forwarder.close()
        reader.close()

    app = FastAPI(title="forerun", lifespan=lifespan, docs_url=None, redoc_url=None)
    keyring = Keyring(keys, config.max_requests)
    app.add_middleware(Guard, config=config, keyring=keyring, count=_ignore_status)

    def get(path: str) -> bytes:
        return reader.get(address + path, 5.0)

    view = VllmView(get, target=target, methods=methods, version=_version(get))
    app.include_router(page_router(view))

    app.add_exception_handler(ForerunError, response_for)

    @app.api_route("/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def pass_on(path: str, request: Request) -> Response:
        body, key = await request.body(), request.state.key
        if request.method == "POST" and key.sha256 is not None:
            await run_in_threadpool(check_limits, key, request.scope["path"], body)
        return await _passed_on(forwarder, request, body)

    return app


def _version(get: Callable[[str], bytes]) -> str:
    """Return the version that a vLLM server reports; empty if it reports none."""
    try:
        return str(parse_json(get("/version"), "the version")["version"])
    except (ForerunError, KeyError, TypeError):
        return ""


DEFAULT_MAX_TOKENS: Mapping[str, int | None] = MappingProxyType(
    {
        "/v1/completions": 16,
        "/v1/chat/completions": None,
        "/v1/responses": None,
        "/v1/messages": None,
    }
)
"""Routes of vLLM that generate text, with what it takes where a body has no limit of tokens; None:
the rest of the context."""
WITHOUT_OUTPUT = frozenset(
    {"/tokenize", "/detokenize", "/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"}
)
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def check_limits(key: ApiKey, path: str, content: bytes) -> None:
    """Refuse a request to vLLM that exceeds the limits of its key; raises InvalidRequest.

    vLLM converts numbers that are written as texts; they are refused here, so that what is checked
    is what vLLM uses. `path` is decoded, as vLLM reads it.
    """
    if path in WITHOUT_OUTPUT:
        return
    if path not in DEFAULT_MAX_TOKENS:
        raise InvalidRequest(
            f"a request with a key cannot use {path!r:.200}, whose output forerun does not know to "
            f"limit; there are {', '.join(DEFAULT_MAX_TOKENS)}"
        )
    body = parsed(content)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in ("priority", "n", "best_of", *LENGTHS):
        if body.get(name) is not None and type(body[name]) is not int:
            raise InvalidRequest(f"{name} is {body[name]!r:.200}; it must be an integer")
    lengths = [body[name] for name in LENGTHS if body.get(name) is not None]
    default = None if "max_tokens" in body else DEFAULT_MAX_TOKENS[path]
    num_prompts = max(1, sum(_num_prompts(body.get(name)) for name in ("prompt", "prompt_embeds")))
    num_choices = num_prompts * max(1, body.get("n") or 1, body.get("best_of") or 1)
    key.check(body.get("priority") or 0, num_choices, max(lengths, default=default))


def _num_prompts(prompt: object) -> int:
    """Return the number of prompts in a field of a completion: one for a list of token ids."""
    if not isinstance(prompt, list) or not prompt:
        return int(bool(prompt))
    return 1 if type(prompt[0]) is int else len(prompt)


async def _passed_on(forwarder: Forwarder, request: Request, body: bytes) -> Response:
    """Forward a request to vLLM and stream its response."""
    # The bytes of the path as they came: a path such as //host/ must not name another server.
    query = b"?" + request.scope["query_string"] if request.scope["query_string"] else b""
    path = request.scope["raw_path"] + query
    try:
        reply = await forwarder.send(request.method, path, request.headers.items(), body)
    except ServerUnavailable as error:
        return error_response(f"vLLM does not answer: {error}", 503)
    return StreamingResponse(reply.chunks, status_code=reply.status, headers=reply.headers)


def _ignore_status(status: int) -> None:
    """Do nothing: vLLM counts its own responses."""
