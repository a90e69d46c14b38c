from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from tests.profiles import SETUP, profile_of

from forerun.errors import InvalidProfile
from forerun.measure.profile import (
    FORMAT,
    MeasuredCell,
    ProfileCell,
    ProfileSetup,
    Quantity,
    check_setup,
    load_profile,
    write_profile,
)
from forerun.theory.cost import CostLine, CostTable, ReadingCost
from forerun.theory.intervals import Interval

TABLE = CostTable(
    lines=(
        CostLine(
            rows=(1, 2),
            verify_s=(0.010, 0.011),
            plain_s=0.0105,
            draft_s=0.001,
            overhead_ks=(1, 4),
            overhead_s=(0.001, 0.003),
        ),
    )
)
MEASURED = tuple(
    MeasuredCell(
        cell=ProfileCell(quantity=Quantity.TARGET_PASS, batch=1, context=0, size=rows),
        seconds=Interval(estimate=s, low=0.9 * s, high=1.1 * s),
        samples_s=((s,), (1.01 * s,)),
    )
    for rows, s in ((1, 0.010), (2, 0.011))
)
PROFILE = replace(
    profile_of(TABLE, TABLE),
    measured=MEASURED,
    left_out=(ProfileCell(quantity=Quantity.TARGET_PASS, batch=1, context=0, size=4),),
    reading=ReadingCost(tokens=(1, 64), target_s=(0.010, 0.030), draft_s=(0.001, 0.002)),
)
OTHERS = {
    "cpu": "Real 100",
    "num_cores": 4,
    "num_threads": 1,
    "device": "mps",
    "dtype": "float32",
    "target_runner": "FastModel",
    "draft_runner": "FastModel",
    "target_hash": "cccc",
    "draft_hash": "dddd",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    return path


def test_what_was_written_is_read(file):
    assert load_profile(file) == PROFILE
    check_setup(PROFILE, SETUP)


def test_the_table_above_has_every_field():
    assert OTHERS.keys() == {item.name for item in fields(ProfileSetup)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_profile_of_another_set_up_is_refused_and_the_difference_named(name):
    expected = replace(SETUP, **{name: OTHERS[name]})
    with pytest.raises(InvalidProfile) as refusal:
        check_setup(PROFILE, expected)
    said = str(refusal.value)
    assert f"{name} {getattr(SETUP, name)!r} instead of {OTHERS[name]!r}" in said
    assert not any(f"{other} " in said for other in OTHERS.keys() - {name})


def test_every_difference_is_named():
    with pytest.raises(InvalidProfile) as refusal:
        check_setup(PROFILE, ProfileSetup(**OTHERS))
    assert all(f"{name} " in str(refusal.value) for name in OTHERS)


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused(file, version):
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"format": version}))
    with pytest.raises(InvalidProfile, match=rf"format {version}.*reads {FORMAT}; profile again"):
        load_profile(file)


@pytest.mark.parametrize("name", ["overhead_s", "overhead_ks", "verify_error_s"])
def test_a_line_that_lacks_a_measurement_is_damage(file, name):
    values = json.loads(file.read_text())
    del values["sampled"]["lines"][0][name]
    file.write_text(json.dumps(values))
    with pytest.raises(InvalidProfile, match=rf"damaged.*lacks {name}"):
        load_profile(file)


@pytest.mark.parametrize("name", sorted(PROFILE.to_dict().keys() - {"format"}))
def test_a_file_that_lacks_a_part_is_damaged(file, name):
    values = json.loads(file.read_text())
    del values[name]
    file.write_text(json.dumps(values))
    with pytest.raises(InvalidProfile, match=f"damaged.*{name}"):
        load_profile(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("greedy", {"lines": []}),
        ("greedy", 3),
        ("reading", {"tokens": [1]}),
        ("setup", {"cpu": "x"}),
        ("measured", [3]),
        ("measured", "none"),
        ("limit", None),
        ("left_out", [{"quantity": "speed", "batch": 1, "context": 0, "size": 1}]),
    ],
)
def test_a_malformed_part_is_damage(file, name, value):
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {name: value}))
    with pytest.raises(InvalidProfile, match="damaged"):
        load_profile(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "names no format"), ('{"format": "1"}', "names no format")],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidProfile, match=message):
        load_profile(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidProfile, match=r"none\.json cannot be read"):
        load_profile(tmp_path / "none.json")


def test_the_limit_counts_weights_once_and_keys_and_values_of_every_sequence():
    assert PROFILE.limit.pass_s(1, 0) == pytest.approx(4.0)
    assert PROFILE.limit.pass_s(2, 1000) == pytest.approx(4.002)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"format": 3, "target": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"format": 1' + b"0" * 100_000 + b"}",
        b"\xff\xfe\x00",
        b'{"format": true}',
        b"",
    ],
    ids=["lists", "objects", "digits", "bytes", "bool", "empty"],
)
def test_a_hostile_profile_is_refused(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(InvalidProfile, match="profile"):
        load_profile(path)


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, 1e999, 2**70, True, [[]]])
def test_a_profile_with_one_wrong_value_is_read_or_refused(tmp_path, value):
    document = json.loads(json.dumps(PROFILE.to_dict()))
    path = tmp_path / "profile.json"

    def places(node):
        if isinstance(node, dict):
            for key in node:
                yield node, key
                yield from places(node[key])
        elif isinstance(node, list):
            for index in range(min(len(node), 2)):
                yield node, index
                yield from places(node[index])

    for node, key in list(places(document)):
        before, node[key] = node[key], value
        path.write_text(json.dumps(document))
        try:
            load_profile(path)
        except InvalidProfile as error:
            assert str(path) in str(error)
        node[key] = before
