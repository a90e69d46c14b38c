"""Runs schemathesis against a tiny server: `python -m tests.server.described [ST FLAGS]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.conftest import serving, tiny_engine

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,missing_required_header"
)


def main() -> int:
    """Return the exit code of schemathesis."""
    command = [str(Path(sys.executable).with_name("st")), "run", "--checks", CHECKS]
    with serving(tiny_engine()) as client:
        return subprocess.run(
            [*command, *sys.argv[1:], f"{client.base_url}/openapi.json"], check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
