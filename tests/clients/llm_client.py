"""The `llm` command: a prompt, a stream, and an answer by a schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, PROMPT, URL, City

with tempfile.TemporaryDirectory() as folder:
    entry = {
        "model_id": "served",
        "model_name": MODEL,
        "api_base": URL,
        "supports_schema": True,
        "supports_tools": True,
    }
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
    environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", "prompt", PROMPT, "-m", "served", *arguments]
        options = ["-o", "temperature", "0", "-o", "max_tokens", "200"]
        done = subprocess.run(
            [*command, *options], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = run("--no-stream")
    assert whole.strip()
    assert run() == whole
    City.model_validate_json(run("--schema", json.dumps(City.model_json_schema())))

    os.environ["LLM_USER_PATH"] = folder
    import llm
    from llm.parts import ToolCallPart, ToolResultPart, assistant, tool_message, user

    def look_up(name: str) -> str:
        """Look a city up."""
        return "found"

    call = ToolCallPart(name="look_up", arguments={"name": "Rome"}, tool_call_id="call-1")
    result = ToolResultPart(name="look_up", output="found", tool_call_id="call-1")
    history = [user(PROMPT), assistant(call), tool_message(result)]
    model = llm.get_model("served")
    answer = model.prompt(messages=history, tools=[look_up], key="none", max_tokens=20)
    assert answer.text()
