"""Distil a shipped draft to its target by `forerun align`.

Trained on source code alone, a draft learns what code looks like; distilled, it learns what the
target writes. It may be deepened first (`grow.py`). Prompts are those of recipes/paradox, each with
the source that follows it: the target's distribution is learned there as well as on its own
answers. Held-out modules stay held out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from grow import grow

from forerun.models.catalog import held_out_prompts

PARADOX = Path(__file__).parents[1] / "paradox"


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """How much text the draft learns from, and how. The defaults are those of `zoo:code-2m`."""

    num_layers: int = 4
    num_prompts: int = 3260
    max_tokens: int = 320
    num_steps: int = 5000
    learning_rate: str = "3e-3"
    fixed_share: float = 0.6

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `forerun align`."""
        return (
            *("--max-tokens", str(self.max_tokens), "--max-prompt-tokens", "160"),
            *("--temperature", "1", "--temperatures", "0", "1", "--num-steps", str(self.num_steps)),
            *("--learning-rate", self.learning_rate, "--fixed-share", str(self.fixed_share)),
            *("--tokens-per-step", "2048", "--rows-per-pass", "4"),
            *("--num-evaluations", "8", "--max-prompts", "24", "--no-prediction"),
        )


def distil(target: Path, draft: Path, out: Path, config: DistilConfig | None = None) -> Path:
    """Align the draft; returns its folder. A second call continues where the first stopped."""
    sys.path.insert(0, str(PARADOX))
    from openings import write

    config = config or DistilConfig()
    start, prompts, judged = out / "start", out / "prompts", out / "held-out.jsonl"
    if not start.exists():
        deepened(draft, start, config.num_layers)
    write(prompts / "library.jsonl", config.num_prompts)
    (prompts / "written.jsonl").write_bytes((PARADOX / "prompts.jsonl").read_bytes())
    records = [{"tag": "held-out modules", "prompt": p.text} for p in held_out_prompts()]
    judged.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    pair = ("--target", str(target), "--draft", str(start))
    files = ("--prompts", str(prompts), "--held-out", str(judged), "--out", str(out / "aligned"))
    command = [sys.executable, "-m", "forerun", "align", *pair, *files, *config.flags]
    subprocess.run(command, check=True)
    return out / "aligned" / "draft"


def deepened(draft: Path, out: Path, num_layers: int) -> None:
    """Write the draft to start from: with more layers, or as it is."""
    layers = json.loads((draft / "config.json").read_text("utf-8"))["num_hidden_layers"]
    if layers == num_layers:
        shutil.copytree(draft, out, ignore=shutil.ignore_patterns("forerun.json", "*.md"))
    else:
        grow(draft, out, num_layers)
