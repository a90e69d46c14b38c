from __future__ import annotations

from dataclasses import replace

from tests.unit.measure.profile.test_profile_file import PROFILE, SETUP

from forerun.measure.profile import plot, title


def test_pictures_are_written_and_the_same_profile_gives_the_same_picture(tmp_path):
    picture, drawing, again = (tmp_path / name for name in ("v.png", "v.svg", "again.svg"))
    plot([PROFILE], [drawing, picture])
    plot([PROFILE], [again])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in drawing.read_text()
    assert drawing.read_text() == again.read_text()


def test_several_profiles_stand_side_by_side(tmp_path):
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    plot([PROFILE], [one])
    plot([PROFILE, PROFILE], [two])
    assert two.read_text().count("axes_") > one.read_text().count("axes_")


def test_the_title_names_the_threads_of_a_cpu_and_the_name_of_a_gpu():
    assert title(PROFILE).endswith("Imaginary 9000, 2 threads")
    on_gpu = replace(PROFILE, setup=replace(SETUP, device="cuda Imaginary H"))
    assert title(on_gpu).endswith("cuda Imaginary H")
