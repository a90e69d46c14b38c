"""The paradox of the useless draft, and its way out: `python recipes/paradox/run.py`.

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
from forerun.models.catalog import held_out_prompts

HERE = Path(__file__).parent
OFF_THE_SHELF = "zoo:books-1m"
KS = "1,2,3,4,5"
REFRESH_SHARE = 3
"""A refresh starts from a draft that knows most: a third of the prompts and steps do."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long to train, and where."""

    out: Path = Path("build/paradox")
    """Everything is made here."""
    target: str = "zoo:code-11m"
    """The target, which is updated later."""
    distilled: str | None = None
    """A draft that was distilled for the target before, in place of distilling one here."""
    num_prompts: int = 3260
    """Openings of library functions to learn on, beside the 100 prompts written for the recipe."""
    num_steps: int = 4000
    """Optimiser steps of the distillation; a refresh takes a third."""
    update_steps: int = 40
    """Steps of the fine-tune that updates the target."""
    update_tokens: int = 4096
    """Tokens of such a step."""
    max_tokens: int = 320
    """Longest text of the target to learn and to be judged on."""
    num_evaluations: int = 6
    """Judgements during a training, besides the one before it."""
    num_judged: int = 60
    """Most prompts that a draft is judged on at the end of a training."""
    measure: bool = True
    """Compare speeds when the training is done; without it only train."""
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
        target, refreshed = self.recipe.target, self.out / "refreshed"
        updated = self.out / "updated-target"
        distilled = self.distil()
        self.console.rule("update the target")
        steps = TrainingConfig(
            num_steps=self.recipe.update_steps,
            learning_rate=3e-4,
            tokens_per_step=self.recipe.update_tokens,
        )
        finetune(target, updated, steps, self.console)
        self.align(refreshed, "--target", str(updated), *self.refresh())
        arms = {
            "off-the-shelf": (target, OFF_THE_SHELF),
            "distilled": (target, distilled),
            "stale": (str(updated), distilled),
            "refreshed": (str(updated), str(refreshed / "draft")),
        }
        if not self.recipe.measure:
            return
        for name, (target_name, draft) in arms.items():
            self.bench(name, target_name, draft)
        rows = story_of(self.out)
        (self.out / "story.json").write_text(json.dumps([row.to_dict() for row in rows], indent=1))
        (self.out / "story.md").write_text(table(rows), "utf-8")
        draw(rows, self.out / "story.svg")
        self.console.print(table(rows))

    def distil(self) -> str:
        """Return the distilled draft, made here unless there is one."""
        if self.recipe.distilled is not None:
            return self.recipe.distilled
        folder = self.out / "distilled"
        data = self.data("prompts", self.recipe.num_steps)
        self.align(folder, "--target", self.recipe.target, "--draft", OFF_THE_SHELF, *data)
        return str(folder / "draft")

    def refresh(self) -> list[str]:
        """Return what repairs the draft: an alignment goes on, or begins with the draft given."""
        prompts, num_steps = "refresh-prompts", self.recipe.num_steps // REFRESH_SHARE
        if self.recipe.distilled is not None:
            return ["--draft", self.recipe.distilled, *self.data(prompts, num_steps)]
        return [
            *("--refresh", str(self.out / "distilled")),
            *("--prompts", str(self.out / prompts), "--num-steps", str(num_steps)),
        ]

    def prompts(self) -> None:
        """Prompts to learn on and prompts to judge on."""
        learned, judged = self.out / "prompts", self.out / "held-out.jsonl"
        shipped = held_out_prompts()[: self.recipe.num_judged]
        records = [{"tag": "held-out modules", "prompt": p.text} for p in shipped]
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

    def data(self, prompts: str, num_steps: int) -> list[str]:
        """What the draft learns and is judged on, and how."""
        # The shipped draft was trained to its end; a fresh one begins far from it.
        learning_rate = "5e-3" if self.recipe.distilled is None else "1e-3"
        return [
            *("--prompts", str(self.out / prompts)),
            *("--held-out", str(self.out / "held-out.jsonl")),
            *("--max-tokens", str(self.recipe.max_tokens), "--max-prompt-tokens", "160"),
            *("--temperature", "1", "--temperatures", "0", "1"),
            *("--num-steps", str(num_steps), "--learning-rate", learning_rate),
            # A small draft learns more from many small steps than from few large ones.
            *("--tokens-per-step", "1024", "--rows-per-pass", "2"),
            *("--num-evaluations", str(self.recipe.num_evaluations), "--max-prompts", "24"),
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
