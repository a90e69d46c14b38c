"""The cache: whole files or none, and none that is not what was kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun import cache
from forerun.cache import cache_folder, cached_json, find_cached, write_cached


def test_where_the_cache_is():
    assert cache_folder({"FORERUN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/forerun")
    assert cache_folder({}) == Path.home() / ".cache" / "forerun"
    assert cache_folder({"FORERUN_CACHE": "~/c"}) == Path.home() / "c"


def test_what_is_kept_is_found_and_nothing_else(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    assert find_cached(folder, "thing-1", ".bin") is None
    path = write_cached(folder, "thing-1", ".bin", b"content")
    assert path.read_bytes() == b"content"
    assert find_cached(folder, "thing-1", ".bin") == path
    assert find_cached(folder, "thing-2", ".bin") is None
    assert find_cached(folder, "thing-1", ".txt") is None
    assert write_cached(folder, "thing-1", ".bin", b"content") == path
    assert os.listdir(folder) == [path.name]


@pytest.mark.parametrize("content", [b"", b"conten", b"contenT", b"content\0", b"garbage " * 99])
def test_a_damaged_file_is_not_found_and_goes(tmp_path, content, caplog):
    path = write_cached(tmp_path, "thing", ".bin", b"content")
    path.write_bytes(content)
    assert find_cached(tmp_path, "thing", ".bin") is None
    assert not path.exists()
    (message,) = caplog.messages
    assert message == f"{path} is damaged and is made again"


def test_a_damaged_file_does_not_hide_a_whole_one(tmp_path):
    paths = [write_cached(tmp_path, "thing", ".bin", content) for content in (b"one", b"other")]
    damaged, whole = sorted(paths)
    damaged.write_bytes(b"")
    assert find_cached(tmp_path, "thing", ".bin") == whole


def test_a_folder_in_the_place_of_a_file_is_not_found(tmp_path):
    path = write_cached(tmp_path, "thing", ".bin", b"content")
    path.unlink()
    path.mkdir()
    assert find_cached(tmp_path, "thing", ".bin") is None


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_cached(tmp_path, "thing", ".bin", b"content")
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from forerun.cache import write_cached

Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
write_cached(Path(sys.argv[1]), "thing", ".bin", b"content")
"""


def test_a_process_killed_while_writing_leaves_nothing_under_the_name(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(os.listdir(tmp_path)) == 1  # unfinished, under another name
    assert find_cached(tmp_path, "thing", ".bin") is None
    assert find_cached(tmp_path, "thing", ".bin") is None
    path = write_cached(tmp_path, "thing", ".bin", b"content")
    assert find_cached(tmp_path, "thing", ".bin") == path


def test_an_object_is_made_once(tmp_path):
    assert cached_json(tmp_path, "thing", lambda: {"a": ["ä", None]}) == {"a": ["ä", None]}
    assert cached_json(tmp_path, "thing", lambda: pytest.fail("again")) == {"a": ["ä", None]}
    assert cached_json(tmp_path, "other", lambda: {"b": 1}) == {"b": 1}


def test_a_folder_that_others_can_write_is_not_used(tmp_path, caplog):
    """Another user could have put a chat template there."""
    folder = tmp_path / "cache"
    cached_json(folder, "thing", lambda: {"a": 1})
    folder.chmod(0o777)
    assert cached_json(folder, "thing", lambda: {"a": 2}) == {"a": 2}
    assert "can be written by other users (mode 777)" in caplog.text
    assert f"chmod go-w {folder}" in caplog.text
    folder.chmod(0o700)
    (path,) = folder.iterdir()
    path.chmod(0o666)
    assert cached_json(folder, "thing", lambda: {"a": 3}) == {"a": 3}


def test_a_cache_is_private_whatever_the_umask(tmp_path):
    above = tmp_path / ".cache"
    folder = above / "forerun"
    before = os.umask(0)
    try:
        cached_json(folder, "thing", lambda: {"a": 1})
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o644)
    assert above.stat().st_mode & 0o777 == 0o700
    assert cached_json(folder, "thing", lambda: pytest.fail("again")) == {"a": 1}


def test_a_damaged_object_is_worked_out_again(tmp_path):
    cached_json(tmp_path, "thing", lambda: {"a": 1})
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({"a": 2}))
    assert cached_json(tmp_path, "thing", lambda: {"a": 1}) == {"a": 1}
    assert cached_json(tmp_path, "thing", lambda: pytest.fail("again")) == {"a": 1}


def test_without_a_place_to_keep_it_an_object_is_worked_out_every_time(tmp_path, caplog):
    """A file where the folder should be: read-only folders do not stop root."""
    folder = tmp_path / "file"
    folder.write_text("")
    with caplog.at_level(logging.INFO):
        assert [cached_json(folder, "thing", lambda n=n: {"a": n}) for n in (1, 2)] == [
            {"a": 1},
            {"a": 2},
        ]
    assert not caplog.records


def test_what_cannot_be_read_is_not_whole(tmp_path, monkeypatch):
    path = write_cached(tmp_path, "thing", ".bin", b"content")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert not cache.is_whole(path)
