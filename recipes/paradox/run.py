"""The paradox of the useless draft, and its way out: `make paradox`.

A draft from the shelf makes the shipped target slower than plain decoding. Distilled on the text of
the target it makes it faster. The target is updated by a short fine-tune, the draft goes stale, and
a refresh repairs it. Every step is a command that can be run alone; each is left out if its result
is there, so an interrupted recipe goes on.
"""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from finetune import finetune
from openings import write
from rich.console import Console
from story import draw, story_of, table

from forerun.align.config import TrainingConfig
from forerun.models.zoo.catalog import held_out_prompts

HERE = Path(__file__).parent
OFF_THE_SHELF = "zoo:books-1m"
TARGET = "zoo:code-11m"
KS = "1,2,3,4,5"
REFRESH_SHARE = 3
"""A refresh starts from a draft that knows most: a third of the prompts and steps do."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long to train, and where."""

    out: Path = Path("build/paradox")
    """Everything is made here."""
    num_prompts: int = 3260
    """Openings of library functions to learn on, beside the 100 prompts written for the recipe."""
    num_steps: int = 4000
    """Optimiser steps of the distillation; a refresh takes a third."""
    update_steps: int = 40
    """Steps of the fine-tune that updates the target."""
    human_eval: Path | None = None
    """HumanEval.jsonl, or HumanEval.jsonl.gz, to be judged on as well."""
    blocks: int = 40
    """Prompts every comparison measures at each temperature."""
    threads: int = 2
    """Of every command."""


class Story:
    """The steps of the recipe."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self.recipe = recipe
        self.console = console
        self.out = recipe.out

    def run(self) -> None:
        """Do what is not done."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.prompts()
        distilled, refreshed = self.out / "distilled", self.out / "refreshed"
        updated = self.out / "updated-target"
        self.align(distilled, "--target", TARGET, "--draft", OFF_THE_SHELF, *self.data())
        self.console.rule("update the target")
        steps = TrainingConfig(
            num_steps=self.recipe.update_steps, learning_rate=3e-4, tokens_per_step=4096
        )
        finetune(TARGET, updated, steps, self.console)
        self.align(
            refreshed,
            *("--refresh", str(distilled), "--target", str(updated)),
            *("--prompts", str(self.out / "refresh-prompts")),
            *("--num-steps", str(self.recipe.num_steps // REFRESH_SHARE)),
        )
        arms = {
            "off-the-shelf": (TARGET, OFF_THE_SHELF),
            "distilled": (TARGET, str(distilled / "draft")),
            "stale": (str(updated), str(distilled / "draft")),
            "refreshed": (str(updated), str(refreshed / "draft")),
        }
        for name, (target_name, draft) in arms.items():
            self.bench(name, target_name, draft)
        rows = story_of(self.out)
        (self.out / "story.json").write_text(json.dumps([row.to_dict() for row in rows], indent=1))
        (self.out / "story.md").write_text(table(rows), "utf-8")
        draw(rows, self.out / "story.svg")
        self.console.print(table(rows))

    def prompts(self) -> None:
        """Prompts to learn on and prompts to judge on."""
        learned, judged = self.out / "prompts", self.out / "held-out.jsonl"
        records = [{"tag": "held-out modules", "prompt": p.text} for p in held_out_prompts()]
        if self.recipe.human_eval is not None:
            records += human_eval(self.recipe.human_eval)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        if judged.exists():
            if judged.read_text("utf-8") != lines:
                sys.exit(f"{judged} holds other prompts than are asked for: give another --out")
            return
        write(learned / "library.jsonl", self.recipe.num_prompts)
        write(
            self.out / "refresh-prompts" / "library.jsonl",
            self.recipe.num_prompts // REFRESH_SHARE,
        )
        (learned / "written.jsonl").write_bytes((HERE / "prompts.jsonl").read_bytes())
        judged.write_text(lines, "utf-8")

    def data(self) -> list[str]:
        """What the draft learns and is judged on, and how."""
        return [
            *(
                "--prompts",
                str(self.out / "prompts"),
                "--held-out",
                str(self.out / "held-out.jsonl"),
            ),
            *("--max-tokens", "320", "--max-prompt-tokens", "160", "--temperature", "1"),
            *("--num-steps", str(self.recipe.num_steps), "--learning-rate", "5e-3"),
            # A small draft learns more from many small steps than from few large ones.
            *("--tokens-per-step", "1024", "--rows-per-pass", "2"),
            *("--num-evaluations", "6", "--max-prompts", "24"),
            *("--cache-dir", str(self.out / "cache")),
        ]

    def align(self, out: Path, *arguments: str) -> None:
        """One alignment."""
        if not (out / "report.json").exists():
            self.forerun("align", *arguments, "--out", str(out), *self.threads)

    def bench(self, name: str, target: str, draft: str) -> None:
        """Plain decoding against one draft at several K, interleaved."""
        path = self.out / f"bench-{name}.json"
        if path.exists():
            return
        self.forerun(
            *("bench", "--target", target, "--arms", f"{name}={draft}@{KS}"),
            *("--temperatures", "0", "1", "--blocks", str(self.recipe.blocks)),
            *("--json", str(path), *self.threads),
        )

    @property
    def threads(self) -> tuple[str, ...]:
        return "--threads", str(self.recipe.threads)

    def forerun(self, *arguments: str) -> None:
        """Run one command of forerun, and show which."""
        self.console.rule(f"forerun {shlex.join(arguments)}")
        subprocess.run([sys.executable, "-m", "forerun", *arguments], check=True)


def human_eval(path: Path) -> list[dict[str, str]]:
    """The problems of HumanEval.jsonl, or of HumanEval.jsonl.gz as it is handed out."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines if line.strip()]
    return [{"tag": "HumanEval", "prompt": problem["prompt"]} for problem in problems]


if __name__ == "__main__":
    Story(tyro.cli(Recipe, description=__doc__), Console()).run()
