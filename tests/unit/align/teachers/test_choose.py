"""Which teacher: the cheapest that fits."""

from __future__ import annotations

from tests.unit.align.teachers.conftest import caching

from forerun.align.teachers import (
    CachedChoices,
    CachedStates,
    ModelTeacher,
    allowed_bytes,
    make_teacher,
    state_bytes,
)
from forerun.sampling.config import SamplingParams

GREEDY = SamplingParams(temperature=0)


def test_auto_caches_hidden_states_if_they_fit_and_reruns_the_target_if_not(on_disk, caplog):
    needed = 100 * 32 * 4
    assert 100 * state_bytes(on_disk.source) == needed
    config = caching("auto", max_cache_bytes=needed)
    assert isinstance(make_teacher(config, on_disk.source, 100), CachedStates)
    assert not caplog.records
    assert isinstance(make_teacher(config, on_disk.source, 101), ModelTeacher)
    assert "hidden states would not fit" in caplog.text


def test_auto_keeps_one_id_of_a_greedy_distribution(on_disk):
    source = on_disk.with_(sampling=GREEDY)
    assert isinstance(make_teacher(caching("auto"), source, 100), CachedChoices)


def test_nothing_is_written_before_samples_are_prepared(on_disk):
    for kind in ("auto", "model", "hidden"):
        make_teacher(caching(kind), on_disk.source, 100)
    assert not on_disk.source.cache_dir.exists()


def test_a_disk_is_never_filled_to_the_brim(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    folder = tmp_path / "not" / "there"
    assert allowed_bytes(folder, None) == 900
    assert allowed_bytes(folder, 2000) == 900
    assert allowed_bytes(folder, 500) == 500
