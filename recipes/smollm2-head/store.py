"""Store a trained EAGLE-3 head in int8 with its card.

    python recipes/smollm2-head/store.py DRAFT OUT

DRAFT is the folder `draft` of an alignment.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from forerun.drafters.eagle3.load import read_eagle3_head, write_eagle3_head
from forerun.models.checkpoint import ModelFiles

TARGET = "zoo:smollm2-135m"
CARD = "forerun.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    num_layers = ModelFiles.open(TARGET).settings["num_hidden_layers"]
    head = read_eagle3_head(options.draft, num_target_layers=num_layers)
    options.out.mkdir(parents=True, exist_ok=True)
    write_eagle3_head(head, options.out, form="int8", target=TARGET)
    shutil.copyfile(options.draft / CARD, options.out / CARD)


if __name__ == "__main__":
    main()
