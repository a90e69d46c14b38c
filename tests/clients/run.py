"""Runs real client libraries against `forerun serve`, and prints which of them passed.

    make clients                        # all
    make clients ARGS="litellm ai_sdk"  # those whose name contains one of the words

Each client is a script that ends with an error where an outcome is not the expected one. It has its
own environment below build/clients, which `make clients` installs.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "clients"
MODEL, DRAFT = "zoo:code-40m", "zoo:code-2m-for-40m"
TEMPLATE = r"""
{%- for message in messages -%}
{{ '# ' + message['role'] + ': ' + message['content'] + '\n' }}
{%- for call in message.tool_calls or [] %}{{ '# ' + call.function.name + '\n' }}{% endfor %}
{%- endfor %}
{%- if tools %}{{ '# ' + tools | map(attribute='function.name') | join(', ') + '\n' }}{% endif %}"""
"""As in many models' templates, every content is added to a text, and tools are rendered."""
START_S, CLIENT_S = 120, 300
PACKAGES = {
    "openai_python": ("python", "openai"),
    "openai_python 2": ("openai-2", "openai"),
    "langchain_client": ("python", "langchain-openai"),
    "litellm_client": ("openai-2", "litellm"),
    "llama_index_client": ("openai-2", "llama-index-core"),
    "smolagents_client": ("python", "smolagents"),
    "pydantic_ai_client": ("python", "pydantic-ai-slim"),
    "llm_client": ("python", "llm"),
    "openai_agents": ("python", "openai-agents"),
    "lm_eval_client": ("python", "lm-eval"),
    "instructor_client": ("structured", "instructor"),
    "dspy_client": ("structured", "dspy"),
    "outlines_client": ("structured", "outlines"),
    "openai_js": ("node", "openai"),
    "ai_sdk": ("node", "ai"),
}
"""Environment and package of each client; what stands after a space tells two runs apart."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the shipped pair on a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    template = BUILD / "lines.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "forerun", "serve", MODEL, "--draft", DRAFT]
    command += ["--port", str(port), "--chat-template", str(template), "--tool-format", "hermes"]
    process = subprocess.Popen(command)
    try:
        address = f"http://127.0.0.1:{port}"
        ends_s = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"{address}/health")
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > ends_s:
                    raise
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def packages_of(environment: str) -> Path:
    """Return the folder with the packages of an environment."""
    if environment == "node":
        return BUILD / "node" / "node_modules"
    return next((BUILD / environment / "lib").glob("python*/site-packages"))


def version_of(environment: str, package: str) -> str:
    if environment == "node":
        text = (packages_of(environment) / package / "package.json").read_text()
        return re.search(r'"version": "([^"]+)"', text)[1]
    file = {"python": "requirements.txt"}.get(environment, f"requirements-{environment}.txt")
    return re.search(rf"^{package}==(\S+)$", (HERE / file).read_text(), re.M)[1]


def command_of(name: str, environment: str) -> list[str]:
    script = name.split()[0]
    if environment == "node":
        copy = BUILD / "node" / f"{script}.mjs"  # modules are found beside the script
        copy.write_text((HERE / copy.name).read_text())
        return ["node", str(copy)]
    if script == "lm_eval_client":  # it also runs the engine, so that it needs forerun
        return [sys.executable, str(HERE / f"{script}.py")]
    return [str(BUILD / environment / "bin" / "python"), str(HERE / f"{script}.py")]


def passes(name: str, address: str) -> bool:
    environment, _ = PACKAGES[name]
    variables = {
        "CLIENTS_URL": f"{address}/v1",
        "CLIENTS_MODEL": MODEL,
        "CLIENTS_PACKAGES": str(packages_of(environment)),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is asked of other hosts
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command_of(name, environment),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run only clients whose name contains one")
    words = parser.parse_args().words
    chosen = [name for name in PACKAGES if not words or any(word in name for word in words)]
    num_failed = 0
    with served() as address:
        for name in chosen:
            environment, package = PACKAGES[name]
            started_s = time.monotonic()
            passed = passes(name, address)
            num_failed += not passed
            seconds = time.monotonic() - started_s
            version = version_of(environment, package)
            outcome = "passed" if passed else "FAILED"
            print(f"{name:20} {package} {version:12} {outcome} in {seconds:.0f} s", flush=True)
    print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
