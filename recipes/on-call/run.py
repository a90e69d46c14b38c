"""On call: a deploy, latency up, most cycles accept nothing or one token.

A pair in service is traced while all is well. Then a deploy takes another draft from the shelf
and raises K. The target still verifies every draft in one pass, and decoding is slower than without
a draft. `forerun diagnose` reads both traces and proposes changes; those that are a matter of flags
are made and measured, interleaved with the incident and with plain decoding.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from story import Cycles, cycles_of, draw, outcomes, table

ARM = "service"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is in service, what is deployed, and how long it is watched."""

    out: Path = Path("build/on-call")
    """Everything is written here."""
    target: str = "zoo:code-40m"
    """In service before and after."""
    draft: str = "zoo:code-2m-for-40m"
    """In service before."""
    k: int = 5
    """K before."""
    deployed: str = "zoo:books-1m"
    """The draft that the deploy brings."""
    deployed_k: int = 10
    """The K that it brings."""
    temperature: float = 1.0
    """Of all requests."""
    blocks: int = 40
    """Requests per measurement, each continued by every arm."""
    threads: int = 2
    """Of every command."""


class Watch:
    """The steps of the recipe."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self.recipe = recipe
        self.console = console
        self.out = recipe.out

    def run(self) -> None:
        """Watch, deploy, diagnose, change, measure."""
        self.out.mkdir(parents=True, exist_ok=True)
        healthy, incident = self.out / "healthy.jsonl", self.out / "incident.jsonl"
        self.serve(healthy, f"{self.recipe.draft}@{self.recipe.k}")
        self.serve(incident, f"{self.recipe.deployed}@{self.recipe.deployed_k}")
        found = self.diagnose(incident, healthy)
        arms = self.arms(found)
        self.measure(arms)
        measured = json.loads((self.out / "measured.json").read_text())["cells"][0]["rows"]
        rows = outcomes(found, measured)
        watched = {"before": cycles_of(healthy), "after": cycles_of(incident)}
        page = "\n".join([*map(Cycles.line, watched.values()), "", table(rows)])
        (self.out / "story.md").write_text(page, "utf-8")
        draw(watched, rows, self.out / "story.svg")
        self.console.print(page)

    def serve(self, trace: Path, arm: str) -> None:
        """Requests served by one set-up, every other one of them plainly, which diagnosis needs."""
        self.forerun(
            *("bench", "--target", self.recipe.target, "--arms", f"{ARM}={arm}"),
            *(*self.requests, "--trace", str(trace)),
        )

    def diagnose(self, incident: Path, healthy: Path) -> dict[str, Any]:
        """The analysis in words, as a page, and as JSON, which is what the rest goes by."""
        arguments = ["diagnose", str(incident), "--before", str(healthy)]
        page = self.out / "report.html"
        words = self.forerun(*arguments, "--html", str(page), allowed=(3,), quiet=True)
        (self.out / "diagnosis.txt").write_text(words, "utf-8")
        self.console.print(words, markup=False, highlight=False, soft_wrap=True)
        answer = self.forerun(*arguments, "--json", allowed=(3,), quiet=True)
        found: dict[str, Any] = json.loads(answer)
        (self.out / "diagnosis.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        return found

    def arms(self, found: Mapping[str, Any]) -> list[str]:
        """The incident, and the likeliest cause's changes that are flags; plain is always there."""
        arms = [f"incident={self.recipe.deployed}@{self.recipe.deployed_k}"]
        for change in found["causes"][0]["remedies"]:
            if change["effect"] == "as_before":
                arms.append(f"as_before={self.recipe.draft}@{self.recipe.k}")
            elif change["effect"] == "best_k":
                k = change["predicted"]["num_speculative_tokens"]
                arms.append(f"best_k={self.recipe.deployed}@{k}")
        return arms

    def measure(self, arms: list[str]) -> None:
        """Every arm on the same requests, one after the other on each."""
        self.forerun(
            *("bench", "--target", self.recipe.target, "--arms", *arms, *self.requests),
            *("--out", str(self.out / "measured.json")),
        )

    @property
    def requests(self) -> tuple[str, ...]:
        return (
            *("--temperatures", f"{self.recipe.temperature:g}"),
            *("--blocks", str(self.recipe.blocks), "--threads", str(self.recipe.threads)),
        )

    def forerun(self, *arguments: str, allowed: tuple[int, ...] = (0,), quiet: bool = False) -> str:
        """Run one command of forerun, and show which; its output, where it is not shown."""
        self.console.rule(f"forerun {shlex.join(arguments)}")
        command = [sys.executable, "-m", "forerun", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, check=False)
        if done.returncode not in allowed:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}")
        return done.stdout.decode() if quiet else ""


if __name__ == "__main__":
    Watch(tyro.cli(Recipe, description=__doc__), Console()).run()
