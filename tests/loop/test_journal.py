"""The journal of a loop: what it goes on with after a kill at any moment, and its lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from forerun.errors import InvalidRequest
from forerun.loop.journal import (
    NEXT,
    Journal,
    Record,
    find_draft,
    find_next,
    find_previous,
    read_journal,
)

NUM_KILLS = 20

# A loop of stages that take a few milliseconds each and note that they were finished.
FAKE = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from forerun.loop.journal import Journal, Record, find_next, find_previous

    folder = Path(sys.argv[1])
    with Journal(folder) as journal:
        (folder / "served").open("a").write(f"{journal.version}\\n")
        print("begun", flush=True)
        while True:
            number, stage = find_next(journal.records)
            time.sleep(0.002)
            version = journal.version
            if stage == "promote":
                version = number
            elif stage == "roll_back":
                version = find_previous(journal.records)
            good = not (stage == "settle" and number % 3 == 0)
            made = f"draft-{number}" if stage == "train" else None
            journal.append(Record(round=number, stage=stage, is_good=good, version=version,
                                  why="because", draft=made))
    """
)


def record(stage, number=1, *, is_good=True, version=0, draft=None):
    return Record(
        round=number, stage=stage, is_good=is_good, version=version, why="so", draft=draft
    )


def test_stages_follow_each_other():
    assert find_next([]) == (1, "watch")
    records = []
    for expected in ("watch", "train", "shadow", "promote", "settle"):
        number, stage = find_next(records)
        assert (number, stage) == (1, expected)
        draft = "made" if stage == "train" else None
        records.append(record(stage, version=int(stage in ("promote", "settle")), draft=draft))
    assert find_next(records) == (2, "watch")
    assert find_draft(records, 1) == "made"
    assert find_draft(records, 0) is None
    records[-1] = record("settle", is_good=False, version=1)
    assert find_next(records) == (1, "roll_back")
    assert find_previous(records) == 0


def test_every_stage_has_a_next_one():
    assert set(NEXT.values()) == {stage for stage, _ in NEXT}


def test_a_loop_that_is_killed_goes_on_without_a_gap(tmp_path):
    """At 20 moments: no finished stage is repeated, no version is in service unannounced."""
    for kill in range(NUM_KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", FAKE, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"begun\n"
        time.sleep(0.003 + 0.0037 * kill)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    records = read_journal(tmp_path)
    assert len(records) > NUM_KILLS
    for place, found in enumerate(records):
        assert (found.round, found.stage) == find_next(records[:place])
        changed = found.version != (records[place - 1].version if place else 0)
        assert changed == (found.stage in ("promote", "roll_back"))
    served = [int(line) for line in (tmp_path / "served").read_text().split()]
    assert len(served) == NUM_KILLS
    assert set(served) <= {0, *(r.version for r in records)}


def test_a_torn_line_is_a_stage_that_did_not_finish(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(record("watch"))
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"round":1,"stage":"tra')
    with Journal(tmp_path) as journal:
        assert find_next(journal.records) == (1, "train")
        journal.append(record("train"))
    assert [r.stage for r in read_journal(tmp_path)] == ["watch", "train"]


def test_a_second_loop_on_a_folder_is_refused(tmp_path):
    with Journal(tmp_path), pytest.raises(InvalidRequest, match="another run of forerun loop uses"):
        Journal(tmp_path).__enter__()
    with Journal(tmp_path):
        pass


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    path = Path(tmp_path / "file")
    path.write_text("")
    with pytest.raises(InvalidRequest, match="file cannot be used"):
        Journal(path).__enter__()
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(InvalidRequest, match="is no record"):
        read_journal(tmp_path)
