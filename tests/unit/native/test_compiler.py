"""Compiling the kernels: with compilers that fail, caches that lie, and interruptions.

The compilers here are scripts that stand for g++: the real kernels are compiled once, in conftest,
and copied by the script that is to succeed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cache import cache_folder, find_cached, hash_of
from forerun.errors import RunnerUnavailable
from forerun.native import library as compiler
from forerun.native.library import compile_to, compiled_kernels, find_compiler, fingerprint

VERSION = 'if [ "$1" = --version ]; then echo "imaginary 1.0"; exit; fi\n'
WriteCompiler = Callable[..., Path]


@pytest.fixture(scope="module")
def library() -> Path:
    """The kernels as conftest compiled them."""
    kept = find_cached(cache_folder(), f"kernels-{fingerprint(find_compiler())}", ".so")
    if kept is None:
        pytest.skip("no C++ compiler here")
    return kept


@pytest.fixture
def write_compiler(tmp_path, monkeypatch) -> WriteCompiler:
    """Makes a shell script the compiler; notes every compilation in a file beside it."""

    def write(body: str, name: str = "imaginary-c++") -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{VERSION}echo compiled >> {path}.log\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return write


def copying(library: Path) -> str:
    """A compiler that succeeds: the last argument is the output."""
    return f'for out; do :; done; cp "{library}" "$out"'


def num_compilations(path: Path) -> int:
    log = Path(f"{path}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def forget() -> None:
    """As a new process."""
    compiler._load.cache_clear()


@pytest.fixture(autouse=True)
def new_process():
    forget()
    yield
    forget()


def test_the_compiler_asked_for_comes_first(tmp_path):
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert find_compiler({"CXX": str(script)}) == str(script)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunnerUnavailable, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        compiled_kernels(tmp_path)


def test_a_compiler_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/no/such/c++")
    with pytest.raises(RunnerUnavailable, match=r"no C\+\+ compiler \(/no/such/c\+\+\).*set CXX"):
        compiled_kernels(tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('echo "first" >&2; echo "error: no C++17" >&2; exit 1', r"kernels: error: no C\+\+17"),
        ("exit 3", "kernels: exit code 3"),
        ("kill -9 $$", "kernels: exit code -9"),
        ("kill -SEGV $$", "kernels: exit code -11"),
        ("printf 'caf\\351' >&2; exit 1", "kernels: caf\ufffd"),
        ("exit 0", r"imaginary-c\+\+ made cannot be loaded"),
        ('for out; do :; done; echo garbage > "$out"', "made cannot be loaded"),
    ],
)
def test_a_compiler_that_fails(write_compiler, tmp_path, body, message):
    path = write_compiler(body)
    for _ in range(2):
        with pytest.raises(RunnerUnavailable, match=message):
            compiled_kernels(tmp_path / "cache")
    assert num_compilations(path) == 2
    assert not list(tmp_path.glob("cache/*"))


def test_a_library_of_something_else_is_refused(write_compiler, tmp_path, library):
    """It opens, but has none of our functions."""
    other = next(Path(sys.base_prefix).glob("lib/python3*/lib-dynload/*.so"), None)
    if other is None:
        pytest.skip("this Python has no extension modules in files")
    write_compiler(copying(other))
    with pytest.raises(RunnerUnavailable, match="cannot be loaded"):
        compiled_kernels(tmp_path / "cache")


def test_a_file_that_is_no_program(write_compiler, tmp_path):
    path = write_compiler("")
    path.write_bytes(b"\x7fELF and no more")
    with pytest.raises(RunnerUnavailable, match="cannot be run"):
        compiled_kernels(tmp_path)


def test_compiled_once_for_all_processes(write_compiler, tmp_path, library, caplog):
    path = write_compiler(copying(library))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            forget()
            assert compiled_kernels(tmp_path / "cache").forerun_interface() != 0
    assert num_compilations(path) == 1
    first, second = caplog.messages
    assert first.startswith(f"compiling the CPU kernels with {path}")
    assert second.startswith("compiled the CPU kernels in ")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 5000, -4096, -1], ids=str)
def test_a_truncated_library_is_not_loaded(write_compiler, tmp_path, library, num_bytes):
    """Some of these would be opened, and kill the process when they are used."""
    path = write_compiler(copying(library))
    compiled_kernels(tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:num_bytes])
    forget()
    assert compiled_kernels(tmp_path / "cache").forerun_interface() != 0
    assert num_compilations(path) == 2
    assert kept.read_bytes() == library.read_bytes()


def test_garbage_and_changed_bytes_are_not_loaded(write_compiler, tmp_path, library):
    path = write_compiler(copying(library))
    compiled_kernels(tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"garbage", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        kept.write_bytes(damaged)
        forget()
        compiled_kernels(tmp_path / "cache")
        assert kept.read_bytes() == whole
    assert num_compilations(path) == 3


def test_a_whole_file_that_no_longer_opens_is_compiled_again(
    write_compiler, tmp_path, library, caplog
):
    """What it was linked to may have gone."""
    path = write_compiler(copying(library))
    stem = f"kernels-{fingerprint(str(path))}"
    compiler.write_cached(tmp_path / "cache", stem, ".so", b"no library")
    assert compiled_kernels(tmp_path / "cache").forerun_interface() != 0
    assert "cannot be loaded" in caplog.messages[0]
    assert num_compilations(path) == 1


def test_libraries_of_other_makings_are_left_alone(write_compiler, tmp_path, library, monkeypatch):
    folder = tmp_path / "cache"
    compilers = [write_compiler(copying(library), name) for name in ("one", "two")]
    for path in compilers:
        monkeypatch.setenv("CXX", str(path))
        compiled_kernels(folder)
    assert [num_compilations(path) for path in compilers] == [1, 1]
    monkeypatch.setattr(compiler, "processor", lambda: "another")
    forget()
    compiled_kernels(folder)
    assert [num_compilations(path) for path in compilers] == [1, 2]
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("part", ["version", "flags", "source", "platform"])
def test_the_fingerprint_knows_all_that_goes_in(write_compiler, tmp_path, monkeypatch, part):
    path = write_compiler("")
    before = fingerprint(str(path))
    assert fingerprint(str(path)) == before
    if part == "version":
        path.write_text(path.read_text().replace("1.0", "1.1"))
    elif part == "flags":
        monkeypatch.setattr(compiler, "FLAGS", ("-O0",))
    elif part == "platform":
        monkeypatch.setattr("platform.platform", lambda: "Plan9")
    else:
        sources = tmp_path / "kernels"
        sources.mkdir()
        for file in compiler.SOURCES.iterdir():
            (sources / file.name).write_bytes(file.read_bytes())
        monkeypatch.setattr(compiler, "SOURCES", sources)
        assert fingerprint(str(path)) == before
        with (sources / "pass.h").open("a") as file:
            file.write("// changed\n")
    assert fingerprint(str(path)) != before


def test_a_cache_that_cannot_be_written_works_with_one_warning(
    write_compiler, tmp_path, library, caplog
):
    """A file where the folder should be: read-only folders do not stop root."""
    path = write_compiler(copying(library))
    folder = tmp_path / "file" / "cache"
    folder.parent.write_text("")
    for _ in range(3):
        assert compiled_kernels(folder).forerun_interface() != 0
    (message,) = (r.message for r in caplog.records if r.levelno >= logging.WARNING)
    assert f"cannot be kept in {folder}" in message
    assert "set FORERUN_CACHE" in message
    assert num_compilations(path) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_cache_works_with_one_warning(write_compiler, tmp_path, library, caplog):
    write_compiler(copying(library))
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    assert compiled_kernels(folder).forerun_interface() != 0
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_read_only_cache_that_has_the_library_is_used_in_silence(
    write_compiler, tmp_path, library, caplog
):
    path = write_compiler(copying(library))
    compiled_kernels(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o500)
    forget()
    compiled_kernels(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o700)
    assert num_compilations(path) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_folder_to_compile_in(write_compiler, tmp_path, monkeypatch):
    write_compiler("exit 0")

    def refuse(prefix):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(RunnerUnavailable, match="no folder to compile the CPU kernels in: No usab"):
        compiled_kernels(tmp_path / "cache")


LOADS = """
import logging, sys
from pathlib import Path
from forerun.native.library import compiled_kernels
logging.basicConfig(level=logging.INFO)
assert compiled_kernels(Path(sys.argv[1])).forerun_interface() != 0
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", LOADS, str(folder)], stderr=subprocess.PIPE, start_new_session=True
    )


def wait_for(path: Path) -> None:
    for _ in range(30_000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


def test_of_two_processes_at_once_the_second_waits_for_the_first(write_compiler, tmp_path, library):
    """The compiler ends when the second process has said what it does."""
    body = f'while [ ! -e "{tmp_path}/second" ]; do sleep 0.01; done; '
    path = write_compiler(f'{body}touch "{tmp_path}/ended"; {copying(library)}')
    first = start(tmp_path / "cache")
    wait_for(Path(f"{path}.log"))
    second = start(tmp_path / "cache")
    assert second.stderr is not None
    said = b""
    while b"the CPU kernels" not in said:  # "waiting for ...", or "compiling ..."
        said = second.stderr.readline()
    (tmp_path / "second").touch()
    for process in (first, second):
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert num_compilations(path) == 1
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.read_bytes() == library.read_bytes()


def test_a_run_killed_while_compiling_leaves_nothing_under_the_name(
    write_compiler, tmp_path, library
):
    """The compiler has written half of its output when everything is killed."""
    folder = tmp_path / "cache"
    path = write_compiler(
        f'for out; do :; done; head -c 5000 "{library}" > "$out"; touch "{tmp_path}/half"; sleep 60'
    )
    process = start(folder)
    wait_for(tmp_path / "half")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(folder.glob("*")) if folder.exists() else True
    path.write_text(f"#!/bin/sh\n{VERSION}{copying(library)}\n")
    assert compiled_kernels(folder).forerun_interface() != 0
    assert len(list(folder.iterdir())) == 1


def test_a_compiler_killed_on_its_own_is_an_error_once(write_compiler, tmp_path, library):
    """The next run compiles."""
    folder = tmp_path / "cache"
    path = write_compiler(f'for out; do :; done; head -c 5000 "{library}" > "$out"; kill -9 $$')
    with pytest.raises(RunnerUnavailable, match="exit code -9"):
        compiled_kernels(folder)
    path.write_text(f"#!/bin/sh\n{VERSION}{copying(library)}\n")
    assert compiled_kernels(folder).forerun_interface() != 0


def test_real_sources_and_a_mistake_in_them(tmp_path, monkeypatch):
    """What a real compiler says reaches the user."""
    (tmp_path / "kernels.cpp").write_text("int main( {")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    try:
        real = find_compiler()
    except RunnerUnavailable:
        pytest.skip("no C++ compiler here")
    with pytest.raises(RunnerUnavailable, match=r"cannot compile the CPU kernels: .+"):
        compile_to(tmp_path / "out.so", real)


@pytest.fixture
def planted(tmp_path, library, write_compiler) -> Path:
    """A library of the right name and hash in a private cache folder."""
    write_compiler(copying(library))
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    content = library.read_bytes()
    stem = f"kernels-{fingerprint(find_compiler())}"
    path = folder / f"{stem}-{hash_of(content)}.so"
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_private_cache_is_used(planted, monkeypatch):
    monkeypatch.setattr(compiler, "create_scratch", lambda: pytest.fail("compiled again"))
    assert compiled_kernels(planted.parent).forerun_interface


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_cache_that_others_may_write_is_neither_read_nor_written(planted, mode, caplog):
    planted.parent.chmod(mode)
    before = [path.stat().st_mtime_ns for path in planted.parent.iterdir()]
    assert compiled_kernels(planted.parent).forerun_interface
    assert [path.stat().st_mtime_ns for path in planted.parent.iterdir()] == before
    assert "can be written by other users" in caplog.text


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_library_of_another_user_is_not_loaded(planted, is_folder, caplog, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root may give files away")
    monkeypatch.setattr(ctypes, "CDLL", refusing(planted.parent))
    os.chown(planted.parent if is_folder else planted, 12345, -1)
    assert compiled_kernels(planted.parent).forerun_interface
    assert "belongs to another user (uid 12345)" in caplog.text


def test_a_library_that_others_may_write_is_not_loaded(planted, caplog, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", refusing(planted.parent))
    planted.chmod(0o666)
    assert compiled_kernels(planted.parent).forerun_interface
    assert "can be written by other users" in caplog.text


def test_a_cache_below_a_folder_of_others_is_not_used(planted, caplog):
    below = planted.parent / "a" / "cache"
    below.mkdir(parents=True, mode=0o700)
    planted.parent.chmod(0o777)
    compiled_kernels(below)
    assert not [*below.iterdir()]
    assert "can be written by other users" in caplog.text


def test_a_new_cache_is_private(tmp_path, library, write_compiler):
    write_compiler(copying(library))
    previous = os.umask(0)
    try:
        compiled_kernels(tmp_path / "new")
    finally:
        os.umask(previous)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def refusing(folder: Path) -> Callable[[str], ctypes.CDLL]:
    """CDLL that loads from anywhere but `folder`."""
    load = ctypes.CDLL

    def checked(name: str) -> ctypes.CDLL:
        assert not Path(name).is_relative_to(folder), "loaded a library that is not trusted"
        return load(name)

    return checked
