"""Provenance of measurements: code, machine, package versions, models and date."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import forerun
from forerun.drafters.config import parse_drafter
from forerun.models.checkpoint import ModelFiles
from forerun.theory.record import TraceHeader

PACKAGES = ("torch", "transformers")
GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Code, machine, versions and models of a measurement, as needed to repeat it.

    Attributes:
        commit: of the checkout the code runs from, "+changes" after it where files differ; None
            outside a checkout.
        num_threads: threads that carried the passes.
    """

    version: str
    commit: str | None
    machine: str
    cpu: str
    num_cores: int
    num_threads: int
    packages: dict[str, str]
    models: dict[str, str]
    date: str

    @property
    def line(self) -> str:
        """Return the provenance as one line of text."""
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        commit = f", commit {self.commit[:12]}" if self.commit else ""
        machine = f"{self.cpu} x{self.num_cores}, threads {self.num_threads}"
        return f"forerun {self.version}{commit}, {packages}, {machine}, {self.date}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def collect(models: Mapping[str, str], num_threads: int | None = None) -> Provenance:
    """Collect the provenance of a measurement in this process.

    `models` has content hashes by name, `num_threads` those of a runner with its own; None:
    torch's.
    """
    return Provenance(
        version=forerun.__version__,
        commit=commit_of(Path(__file__)),
        machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        cpu=read_cpu_model(),
        num_cores=num_cores(),
        num_threads=num_threads or torch.get_num_threads(),
        packages={name: version_of(name) for name in PACKAGES},
        models=dict(models),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def trace_header(
    target: str, draft: str | None, device: str, controller: str | None = None
) -> TraceHeader:
    """Return the header of a trace written by this process; weight files are read for hashes."""
    return TraceHeader(
        target=target,
        target_hash=content_hash(target),
        draft=draft,
        draft_hash=content_hash(draft) if draft and parse_drafter(draft) is None else None,
        tokenizer_hash=ModelFiles.find(target).tokenizer_hash,
        device=device,
        versions={
            "python": platform.python_version(),
            **{name: version_of(name) for name in ("forerun", *PACKAGES)},
        },
        controller=controller,
    )


def content_hash(model: str) -> str:
    """Return the hash of a model's weight files, by model name or folder."""
    return ModelFiles.find(model).content_hash


def version_of(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def num_cores() -> int:
    """Return the number of cores on which this process is allowed to run."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor model that the operating system reports."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def commit_of(source: Path) -> str | None:
    """Return the commit of the checkout that contains `source`, marked if files were changed."""
    # An installed copy may lie inside another project's checkout: only a tracked file counts.
    if git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = git(source.parent, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changes else commit


def git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder and return its output; None if git is missing or fails."""
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
