"""The last step of the shipped domain draft: distilled to the shipped target by `forerun align`.

Trained on the target's own corpus alone, a draft learns what code looks like; distilled, it learns
what the target says. It is deepened first (`grow.py`): a layer more is a tenth more of a pass that
mostly reads the head. Prompts are those of recipes/paradox, each with the source that follows it:
the target's law is learned there as well as on its own answers. Held-out modules stay held out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from grow import grow

from forerun.models.zoo.catalog import held_out_prompts

PARADOX = Path(__file__).parents[1] / "paradox"
NUM_PROMPTS = 3260
NUM_LAYERS = 4
SETTINGS = (
    *("--max-tokens", "320", "--max-prompt-tokens", "160", "--temperature", "1"),
    *("--num-steps", "5000", "--learning-rate", "3e-3", "--fixed-share", "0.6"),
    *("--tokens-per-step", "2048", "--rows-per-pass", "4"),
    *("--num-evaluations", "8", "--max-prompts", "24", "--no-prediction"),
)


def distil(target: Path, draft: Path, out: Path) -> Path:
    """Align the draft; returns its folder. What is done already is not done again."""
    sys.path.insert(0, str(PARADOX))
    from openings import write

    deeper, prompts, judged = out / "deeper", out / "prompts", out / "held-out.jsonl"
    if not deeper.exists():
        grow(draft, deeper, NUM_LAYERS)
    write(prompts / "library.jsonl", NUM_PROMPTS)
    (prompts / "written.jsonl").write_bytes((PARADOX / "prompts.jsonl").read_bytes())
    records = [{"tag": "held-out modules", "prompt": p.text} for p in held_out_prompts()]
    judged.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    pair = ("--target", str(target), "--draft", str(deeper))
    files = ("--prompts", str(prompts), "--held-out", str(judged), "--out", str(out / "aligned"))
    command = [sys.executable, "-m", "forerun", "align", *pair, *files, *SETTINGS]
    subprocess.run(command, check=True)
    return out / "aligned" / "draft"
