"""An audit over HTTP of zoo:code-40m with its draft, healthy or with a planted fault.

python -m benchmarks.audit.served                  # healthy
python -m benchmarks.audit.served --lenient        # acceptance compares with half the number
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.lab.audited import Rule, lenient, plant
from tests.server.conftest import serving

from forerun.cli.main import main as forerun
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine

TARGET, DRAFT = "zoo:code-40m", "zoo:code-2m-for-40m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = EngineConfig(
        num_speculative_tokens=4, max_context=512, max_batch=4, controller="fixed"
    )
    engine = Engine.load(TARGET, DRAFT, config=config)
    if options.lenient:
        plant(engine, Rule(accepts=lenient))
    with serving(engine) as client:
        flags = ["--reference", TARGET, "--draft", DRAFT, "--tokens", str(options.tokens)]
        flags += ["--out", str(options.out)] if options.out else []
        forerun(["audit", str(client.base_url), *flags])


if __name__ == "__main__":
    main()
