"""The state of a run: what is kept, what is refused, and who may write it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.errors import InvalidRequest
from forerun.record_file import RecordFile
from forerun.tune.arms import Load
from forerun.tune.drafting import DraftingCounts
from forerun.tune.load import LoadBlock
from forerun.tune.server import TimedAnswer
from forerun.tune.state import AuditRecord, BlockRecord, GivenUpRecord, RunState

SETTINGS = {"command": "vllm serve m", "max_tokens": "128"}
LOAD = Load(clients=2, temperature=0.5)
ANSWER = TimedAnswer(digest="0" * 16, ttft_s=0.1, total_s=1.0, num_tokens=5, num_drafted=3)
BLOCK = LoadBlock(
    arm="none",
    load=LOAD,
    index=0,
    unit=0,
    wall_s=1.5,
    answers=(ANSWER, ANSWER),
    drafting=DraftingCounts(
        num_drafts=1, num_drafted=3, num_accepted=2, accepted_per_position=(1, 1)
    ),
)
RECORDS = [
    BlockRecord(block=BLOCK),
    GivenUpRecord(arm="a", reason="slow", load=LOAD),
    GivenUpRecord(arm="b", reason="it ended", load=Load(clients=4)),
    BlockRecord(block=BLOCK, is_final=True),
    AuditRecord(arm="none", report={"status": "exact", "tokens": 4000}),
]


def write(folder: Path) -> Path:
    with RunState(folder, SETTINGS) as state:
        assert state.records == []
        for record in RECORDS:
            state.append(record)
    return folder / "state.jsonl"


def test_a_run_goes_on_with_the_records_of_the_interrupted_one(tmp_path):
    path = write(tmp_path / "new" / "folder")
    with RunState(path.parent, SETTINGS) as state:
        assert state.records == RECORDS


def test_a_torn_last_line_is_left_out_and_then_cut_off(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[1][:50])
    for _ in range(2):
        with RunState(tmp_path, SETTINGS) as state:
            assert state.records == RECORDS
    with RunState(tmp_path, SETTINGS) as state:
        state.append(RECORDS[0])
    with RunState(tmp_path, SETTINGS) as state:
        assert state.records == [*RECORDS, RECORDS[0]]


def test_another_run_is_refused_with_what_differs(tmp_path):
    write(tmp_path)
    other = {"command": "vllm serve m", "max_tokens": "64", "prompts": "p.txt"}
    with pytest.raises(InvalidRequest) as caught, RunState(tmp_path, other):
        pass
    shown = str(caught.value)
    assert "max_tokens was 128, is 64; prompts was not set, is p.txt" in shown
    assert "command" not in shown and "\n" not in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("notes", "is not of forerun tune"),
        ('{"type": "block"}\n', "state.jsonl:1 is no record"),
        ("[]\n", "state.jsonl:1 is no record"),
        (json.dumps({"type": "prompts", "run": 1, "is_chat": True}) + "\n", "is not of forerun"),
        ('{"header": {}}\nx', "state.jsonl:1 is no record"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, content, message):
    path = tmp_path / "state.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=message), RunState(tmp_path, SETTINGS):
        pass
    assert path.read_text() == content


@pytest.mark.parametrize(
    "change",
    [("wall_s", "fast"), ("index", None), ("load", {"clients": 0, "temperature": 0.0})],
)
def test_a_record_of_wrong_types_is_refused_by_its_line(tmp_path, change):
    path = write(tmp_path)
    lines = path.read_text().splitlines()
    record = json.loads(lines[1])
    record["block"][change[0]] = change[1]
    path.write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")
    match = r"^--out .*state\.jsonl:2 is no record[^\n]*name another folder$"
    with pytest.raises(InvalidRequest, match=match), RunState(tmp_path, SETTINGS):
        pass


@pytest.mark.parametrize("name", ["result.json", "page.html", "notes"])
def test_a_folder_with_files_of_others_is_refused_and_left_as_it_is(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InvalidRequest, match=f"files that tune did not write .'{name}'"):
        RunState(tmp_path, SETTINGS).__enter__()
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "state.jsonl").exists()


def test_a_full_disk_is_an_error_that_names_the_file():
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        RecordFile(Path("/dev/full"), BlockRecord).append(RECORDS[0])


def test_a_run_is_for_its_owner_alone(tmp_path):
    assert write(tmp_path / "run").parent.stat().st_mode & 0o777 == 0o700


def test_two_runs_on_one_folder_are_refused(tmp_path):
    code = (
        "import sys; from pathlib import Path; from forerun.tune.state import RunState;"
        "RunState(Path(sys.argv[1]), {}).__enter__()"
    )
    with RunState(tmp_path, {}):
        with pytest.raises(InvalidRequest, match="another run of forerun tune uses"):
            RunState(tmp_path, {}).__enter__()
        again = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
        )
    assert "another run of forerun tune uses" in again.stderr
    with RunState(tmp_path, {}):
        pass


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"^--out .*file/folder cannot be used"):
        RunState(tmp_path / "file" / "folder", {}).__enter__()
