"""A file or folder is as it was until the new one is whole; a line that was cut off is left out."""

from __future__ import annotations

import errno
import os

import pytest

from forerun.align.jsonl import append_line, read_lines, write_lines
from forerun.replacing import replacing


def test_a_folder_takes_the_place_of_another(tmp_path):
    folder = tmp_path / "made" / "draft"
    for content in ("old", "new"):
        with replacing(folder) as scratch:
            scratch.mkdir()
            (scratch / content).touch()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_not_finished_changes_nothing(tmp_path, is_folder):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as scratch:
        scratch.mkdir() if is_folder else scratch.write_text("new")
        raise OSError("full")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_names_the_file_that_was_to_be(tmp_path):
    path = tmp_path / "report.html"
    with pytest.raises(OSError, match="No space") as caught, replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(path)


def test_nothing_takes_the_place_of_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(path) as scratch:
            scratch.write_text("new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path):
    path = tmp_path / "draft"
    (tmp_path / "draft.tmp").mkdir()
    with replacing(path) as scratch:
        scratch.write_text("new")
    assert path.read_text() == "new"


def test_several_processes_may_write_one_file_at_once(tmp_path):
    path = tmp_path / "file"
    with replacing(path, shared=True) as first, replacing(path, shared=True) as second:
        first.write_text("first")
        second.write_text("second")
        assert first.read_text() == "first"
    assert path.read_text() == "first"  # the one that ended last
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_lines_after_one_that_was_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_lines(path) == []
    write_lines(path, [{"step": 1}])
    append_line(path, {"step": 2})
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    write_lines(path, read_lines(path))
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
