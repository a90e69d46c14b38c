"""Pictures: one look, and the same file for the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.pictures import COLOURS, picture


def drawn(folder: Path, heights: list[float], *suffixes: str) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"picture{suffix}" for suffix in suffixes]
    with picture(paths, width=2.0, height=1.0) as figure:
        axes = figure.subplots()
        axes.plot(heights, color=COLOURS[0], label="heights")
        axes.legend()
    return [path.read_bytes() for path in paths]


def test_every_path_is_written_in_the_format_of_its_suffix(tmp_path):
    png, svg, pdf = drawn(tmp_path, [1.0, 2.0], ".png", ".svg", ".pdf")
    assert png.startswith(b"\x89PNG") and pdf.startswith(b"%PDF")
    assert b"<svg" in svg and COLOURS[0].encode() in svg


def test_the_same_figures_are_the_same_file(tmp_path):
    first, again, other = (
        drawn(tmp_path / name, heights, ".svg")
        for name, heights in (("a", [1.0, 2.0]), ("b", [1.0, 2.0]), ("c", [2.0, 1.0]))
    )
    assert first == again != other
    assert b"dc:date" not in first[0]


def test_what_fails_while_drawing_leaves_no_file(tmp_path):
    path = tmp_path / "picture.svg"
    with pytest.raises(ZeroDivisionError), picture([path], width=1.0, height=1.0):
        _ = 1 / 0
    assert not path.exists()
