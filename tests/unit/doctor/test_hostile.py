"""Sources that are hostile or just large end in a message, in bounded time and memory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.records import HEADER, REQUEST, STEP, steps

from forerun import bounded_read
from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.readers import sources
from forerun.doctor.readers.sources import read_source, read_text
from forerun.doctor.words import page_of
from forerun.errors import ForerunError, InvalidRequest, InvalidTrace
from forerun.trace.files import open_trace, read_trace


def read(data: bytes) -> Evidence:
    return read_text(io.BytesIO(data), "source")


@pytest.mark.parametrize("line", [b"\n", b" \n", b"\t\n", b"# comment\n", b"---\n", b" # \n"])
def test_lines_that_say_nothing_are_passed_over_at_once(line):
    started = time.process_time()
    with suppress(InvalidRequest):  # a source of blank lines is empty
        read(line * 20_000)
    read(line * 2000 + b"forerun_facts")
    assert time.process_time() - started < 15.0


@pytest.mark.parametrize(
    "facts",
    [
        '"k": ' + "9" * 400,
        '"k": 1.0e+400',
        '"tokens_per_s": {"value": 1, "interval": [0, ' + "9" * 400 + "]}",
        '"k": ' + "[" * 50_000,
        '"k": ' + "[" * 5000 + "]" * 5000,
        '"changed": ' + '{"a": ' * 200 + "1" + "}" * 200,
        '"output_differs": {"value": [[[[1]]]]}',
        '"k": 4097',
        '"accepted_per_position": [' + "1," * 5000 + "1]",
    ],
)
def test_facts_that_no_reader_can_use_are_refused(facts):
    started = time.process_time()
    with pytest.raises(ForerunError):
        read(('{"forerun_facts": 1, "facts": {' + facts + "}}").encode())
    assert time.process_time() - started < 15.0


def test_another_version_is_refused():
    with pytest.raises(ForerunError):
        read(('{"forerun_facts": ' + "[" * 10 + "]" * 10 + "}").encode())


def test_large_figures_of_a_log_are_left_out_with_a_note():
    evidence = read(
        b"SpecDecoding metrics: Mean acceptance length: 3e99, Accepted: 999999999999999 tokens, "
        b"Drafted: 999999999999999 tokens, Per-position acceptance rate: 0.9\n"
    )
    diagnosis = diagnose(evidence)
    assert json.dumps(diagnosis.to_dict(), allow_nan=False)


CHANGES = [
    {"num_drafted": 10**9, "depth_drafted": 10**9, "k_budget": 10**9},
    {"cycle_id": 2**63},
    {"verify_s": 1e308},
    {"draft_s": float("inf")},
    {"context_tokens": -5},
    {"k_budget": 2**62},
    {"k_budget": -1},
    {"num_prefill_rows": -1},
    {"batch_rows": 2**60},
    {"step": 2**63 - 1},
    {"t_s": 1e308},
    {"t_s": float("nan")},
    {"expected_accepted": 1e300},
    {"num_emitted": 3000, "num_accepted": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_impossible_steps_are_damage(tmp_path, changes):
    path = tmp_path / "trace.jsonl"
    with open_trace(path) as writer:
        writer.add(HEADER)
        for record in steps(100):
            writer.add(record)
        writer.add(STEP, changes)
        writer.add(REQUEST)
    evidence = read_source(str(path), interval_s=1.0)
    assert evidence.readings[0].num_unknown == 1
    page_of(diagnose(evidence))


def test_a_trace_with_deep_drafts_is_diagnosed(tmp_path):
    path = tmp_path / "trace.jsonl"
    depth = {"k_budget": 300, "num_drafted": 300, "depth_drafted": 300, "method": "suffix"}
    with open_trace(path) as writer:
        writer.add(HEADER)
        for record in steps(100):
            writer.add(record, depth)
    diagnosis = diagnose(read_source(str(path), interval_s=1.0))
    assert diagnosis.evidence.number("k") == 300
    assert not diagnosis.evidence.notes
    page_of(diagnosis)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/full", "x" * 5000, "a\0b", "missing"])
def test_devices_and_impossible_names_are_refused(name):
    with pytest.raises(ForerunError):
        read_source(name, interval_s=1.0)
    with pytest.raises(InvalidTrace):
        list(read_trace(Path(name)))


def test_a_pipe_without_a_writer_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LIMITS", sources.ReadLimits(max_seconds=0.2))
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ForerunError, match=r"0\.2 s"):
        read_source(str(path), interval_s=1.0)
    with pytest.raises(InvalidTrace, match="regular"):
        list(read_trace(path))


def test_a_pipe_is_given_up_where_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_read, "FIRST_DATA_S", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ForerunError, match=r"nothing was written to pipe within 0\.2 s"):
        read_source(str(path), interval_s=1.0)


def test_the_log_of_a_running_server_is_used_up_to_the_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LIMITS", sources.ReadLimits(max_seconds=1.0))
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        os.write(writer, b"sglang:spec_accept_length 2.5\n" * 3)
        evidence = read_source(str(path), interval_s=1.0)
    finally:
        os.close(writer)
    assert "acceptance_length" in evidence
    assert "only the beginning was read" in evidence.readings[0].notes[0]


def test_a_trace_may_come_through_a_pipe(tmp_path):
    path, pipe = tmp_path / "trace.jsonl", tmp_path / "pipe"
    with open_trace(path) as writer:
        writer.add(HEADER)
        for record in steps(100):
            writer.add(record)
    os.mkfifo(pipe)
    thread = threading.Thread(target=pipe.write_bytes, args=(path.read_bytes(),))
    thread.start()
    evidence = read_source(str(pipe), interval_s=1.0)
    thread.join()
    assert evidence.number("num_steps") == 100


MEMORY = """
import resource, sys
from pathlib import Path
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP, line_of
from forerun.doctor.diagnosis import diagnose
from forerun.doctor.readers.sources import read_source

path, kind, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with path.open("wb") as file:
    file.write(line_of(HEADER))
    for i in range(count):
        changes = {"request_id": f"request-{i}"}
        if kind == "steps":
            record = replace(STEP, **changes, cycle_id=i, t_s=float(i), step=0)
        else:
            record = replace(REQUEST, **changes, tags=tuple(f"tag-{i}-{j}" for j in range(10)))
        file.write(line_of(record))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
diagnose(read_source(str(path), interval_s=1.0))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize(("kind", "count"), [("steps", 60_000), ("tags", 30_000)])
def test_memory_does_not_grow_with_requests_and_tags(tmp_path, monkeypatch, kind, count):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "trace.jsonl", kind, str(count)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 300
