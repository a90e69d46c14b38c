"""A file or folder is as it was until the new one is whole; a line that was cut off is left out."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

import pytest

from forerun.align.workspace import append_line, read_lines, write_lines
from forerun.atomic_write import UNFINISHED, atomic_folder, atomic_write, remove_unfinished


def test_a_folder_takes_the_place_of_another(tmp_path):
    folder = tmp_path / "made" / "draft"
    for content in ("old", "new"):
        with atomic_folder(folder) as scratch:
            (scratch / content).touch()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_what_is_not_finished_changes_nothing(tmp_path, write):
    path = tmp_path / "file"
    if write is atomic_write:
        path.write_text("old")
    else:
        path.mkdir()
    with pytest.raises(OSError, match="full"), write(path) as scratch:
        (scratch if scratch.is_file() else scratch / "inner").write_text("new")
        raise OSError("full")
    assert path.is_dir() or path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_the_mode_of_an_existing_file_is_kept(tmp_path, mode):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    with atomic_write(path) as scratch:
        assert stat.S_IMODE(scratch.stat().st_mode) == mode
        scratch.write_text("new") if os.access(scratch, os.W_OK) else None
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    (tmp_path / "usual").touch()
    with atomic_write(tmp_path / "file"):
        pass
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "file")}
    assert len(modes) == 1


def test_no_file_of_the_user_is_removed(tmp_path):
    (tmp_path / "out.html.tmp").mkdir()
    (tmp_path / "out.html.tmp" / "precious").touch()
    with atomic_write(tmp_path / "out.html") as scratch:
        scratch.write_text("new")
    assert (tmp_path / "out.html.tmp" / "precious").exists()


def test_temporary_names_cannot_be_predicted(tmp_path):
    with atomic_write(tmp_path / "file") as one, atomic_write(tmp_path / "file") as two:
        assert one != two
        assert one.parent == two.parent == tmp_path
        assert one.suffix == UNFINISHED


def test_a_link_is_followed(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with atomic_write(tmp_path / "link") as scratch:
        scratch.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    path = tmp_path / ("n" * 255)
    with atomic_write(path) as scratch:
        scratch.write_text("new")
    assert path.read_text() == "new"
    with pytest.raises(OSError, match="too long"), atomic_write(tmp_path / ("n" * 256)):
        pass


def test_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    with atomic_write(tmp_path / "file") as scratch:
        scratch.write_text("new")
    assert synced == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]
    synced.clear()
    with atomic_write(tmp_path / "file", durable=False):
        pass
    assert not synced


def test_a_full_disk_names_the_file_that_was_to_be(tmp_path):
    path = tmp_path / "report.html"
    with pytest.raises(OSError, match="No space") as caught, atomic_write(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(path)


def test_nothing_takes_the_place_of_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_write(path) as scratch:
            scratch.write_text("new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_what_a_killed_process_left_can_be_removed(tmp_path):
    path = tmp_path / "draft"
    left = tmp_path / f"draft.{'0' * 16}.tmp"
    left.mkdir()
    for other in ("draft.tmp", "draft.notes.tmp", f"other.{'0' * 16}.tmp"):
        (tmp_path / other).touch()
    remove_unfinished(path)
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_several_processes_may_write_one_file_at_once(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert first.read_text() == "first"
    assert path.read_text() == "first"  # the one that ended last
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


@dataclass(frozen=True)
class Row:
    step: int


def test_lines_after_one_that_was_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_lines(path, kind=Row) == []
    write_lines(path, [Row(step=1)])
    append_line(path, Row(step=2))
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert read_lines(path, kind=Row) == [Row(step=1), Row(step=2)]
    write_lines(path, read_lines(path, kind=Row))
    append_line(path, Row(step=3))
    assert read_lines(path, kind=Row) == [Row(step=1), Row(step=2), Row(step=3)]
