"""Entry point of `python -m forerun`, which runs the command `forerun`."""

from __future__ import annotations

import sys

from forerun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
