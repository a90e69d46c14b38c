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
    entry = {"model_id": "served", "model_name": MODEL, "api_base": URL, "supports_schema": True}
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
