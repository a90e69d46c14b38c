"""What a killed process, a full disk or a foreign file leave of the responses."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.unit.align.data.conftest import origin, prompts

from forerun.align.texts import Response, ResponseStore
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

PROMPTS = prompts(3)


def response(number: int, token_ids: tuple[int, ...] = (4, 2)) -> Response:
    return Response(
        prompt_hash=PROMPTS[number].prompt_hash,
        token_ids=token_ids,
        finish_reason="stop",
    )


def test_what_is_added_is_there_the_next_time(tmp_path):
    full = response(0)
    store = ResponseStore(tmp_path / "new", origin())
    store.add(full)
    again = ResponseStore(tmp_path / "new", origin())
    assert len(again) == 1
    assert again.response(full.prompt_hash) == full
    (sample,) = again.samples(PROMPTS)
    assert sample.token_ids == (1, 5, 9, 4, 2)
    assert sample.spans == ((3, 5),)
    assert sample.source == "target"


def test_prompts_without_a_response_are_missing(tmp_path):
    store = ResponseStore(tmp_path, origin())
    store.add(response(1))
    assert store.missing(PROMPTS) == [PROMPTS[0], PROMPTS[2]]


def test_a_second_response_to_the_same_is_not_kept(tmp_path):
    store = ResponseStore(tmp_path, origin())
    store.add(response(0))
    store.add(response(0, token_ids=(9,)))
    assert ResponseStore(tmp_path, origin()).response(response(0).prompt_hash) == response(0)
    assert len(store.path.read_text().splitlines()) == 2


def test_empty_responses_are_done_but_teach_nothing(tmp_path):
    store = ResponseStore(tmp_path, origin())
    store.add(response(0, token_ids=()))
    assert store.missing(PROMPTS[:1]) == []
    assert store.samples(PROMPTS[:1]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "fixed"},
        {"model": "m1"},
        {"tokenizer_hash": "k1"},
        {"params": SamplingParams(max_tokens=6, seed=2)},
        {"params": SamplingParams(max_tokens=6, seed=1, logit_bias={3: 1.0})},
    ],
)
def test_another_maker_finds_nothing_and_loses_nothing(tmp_path, changes):
    store = ResponseStore(tmp_path, origin())
    store.add(response(0))
    assert len(ResponseStore(tmp_path, origin(**changes))) == 0
    assert len(ResponseStore(tmp_path, origin())) == 1


def test_a_file_of_another_maker_under_this_name_is_refused(tmp_path):
    store, other = ResponseStore(tmp_path, origin()), ResponseStore(tmp_path, origin(model="m1"))
    other.add(response(0))
    other.path.replace(store.path)
    with pytest.raises(InvalidRequest, match="responses of another model"):
        ResponseStore(tmp_path, origin())


@pytest.mark.parametrize("num_lost", [1, 7, 40])
def test_a_line_that_was_cut_off_is_made_again(tmp_path, num_lost):
    store = ResponseStore(tmp_path, origin())
    store.add(response(0))
    store.add(response(1))
    store.path.write_bytes(store.path.read_bytes()[:-num_lost])
    again = ResponseStore(tmp_path, origin())
    assert again.missing(PROMPTS) == PROMPTS[1:]
    again.add(response(1))
    assert len(ResponseStore(tmp_path, origin())) == 2


def test_a_header_that_was_cut_off_is_written_again(tmp_path):
    store = ResponseStore(tmp_path, origin())
    store.path.write_text(origin().header[:-9])
    ResponseStore(tmp_path, origin()).add(response(0))
    assert len(ResponseStore(tmp_path, origin())) == 1
    assert store.path.read_text().startswith(origin().header + "\n")


@pytest.mark.parametrize(
    "damage",
    [
        "no JSON",
        "[]",
        "{}",
        '{"prompt_hash": "a", "index": 0, "token_ids": ["x"], "finish_reason": "stop"}',
        '{"prompt_hash": "a", "index": 0, "token_ids": [1, -2], "finish_reason": "stop"}',
    ],
)
def test_a_damaged_line_is_named_and_passed_over(tmp_path, caplog, damage):
    store = ResponseStore(tmp_path, origin())
    store.path.write_text(f"{origin().header}\n{damage}\n")
    ResponseStore(tmp_path, origin()).add(response(0))
    with caplog.at_level(logging.WARNING):
        again = ResponseStore(tmp_path, origin())
    assert len(again) == 1
    assert f"{store.path}:2 is damaged" in caplog.text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="responses cannot be kept in"):
        ResponseStore(tmp_path / "file", origin())


def test_one_process_writes_at_a_time(tmp_path):
    first, second = (ResponseStore(tmp_path, origin()) for _ in range(2))
    with first.writing():
        first.add(response(0))
        with (
            pytest.raises(InvalidRequest, match=f"another process is writing {first.path}"),
            second.writing(),
        ):
            pass
        assert len(ResponseStore(tmp_path, origin())) == 1  # reading is free
    with second.writing():  # it knows what was written before
        assert len(second) == 1


def test_reading_changes_nothing_that_another_is_writing(tmp_path):
    store = ResponseStore(tmp_path, origin())
    store.add(response(0))
    with store.path.open("ab") as file:
        file.write(b'{"half')
    content = store.path.read_bytes()
    assert len(ResponseStore(tmp_path, origin())) == 1
    assert store.path.read_bytes() == content


def test_a_maker_is_what_decides_a_response(tmp_path):
    """Parameters at their defaults are not named, so that one that is new changes no maker."""
    made = origin().header
    assert json.loads(made)["params"] == {"max_tokens": 6, "seed": 1}
    assert origin(params=replace(origin().params, n=3, logprobs=2)).header == made
    assert origin(params=replace(origin().params, top_p=0.5)).header != made


# A process that keeps one response after the other until it is killed, or the disk is full.
WRITER = """
import os, resource, signal, sys
from pathlib import Path
from forerun.align.texts import ResponseOrigin, Response, ResponseStore
from forerun.errors import CacheTooLarge
from forerun.sampling.config import SamplingParams

mode = sys.argv[2]
if mode == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
params = SamplingParams(max_tokens=6, seed=1)
origin = ResponseOrigin(source="target", model="m0", tokenizer_hash="k0", params=params)
store = ResponseStore(Path(sys.argv[1]), origin)
for index in range(1000):
    if mode == "killed" and index == 37:
        with store.path.open("ab", buffering=0) as file:
            file.write(b'{"prompt_hash": "half a li')
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        store.add(Response(
            prompt_hash=f"{index:016x}", token_ids=(index, 5), finish_reason="stop"
        ))
    except CacheTooLarge as error:
        assert f"{len(store)} responses are kept" in str(error)
        print(index)
        break
"""


@pytest.mark.parametrize("mode", ["killed", "full"])
def test_what_was_kept_before_a_process_ended_is_whole(tmp_path, mode):
    run = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), mode],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if mode == "killed":
        assert run.returncode == -signal.SIGKILL
        num_kept = 37
    else:
        assert run.returncode == 0, run.stderr
        num_kept = int(run.stdout)
        assert 10 < num_kept < 100
    store = ResponseStore(tmp_path, origin())
    assert len(store) == num_kept
    kept = [store.response(f"{index:016x}") for index in range(num_kept)]
    assert [found and found.token_ids for found in kept] == [(i, 5) for i in range(num_kept)]
    store.add(replace(response(0), prompt_hash="f" * 16))
    lines = [json.loads(line) for line in store.path.read_text().splitlines()]
    assert len(lines) == num_kept + 2


def test_an_empty_bias_is_none():
    empty = replace(origin(), params=SamplingParams(max_tokens=6, logit_bias={}))
    none = replace(origin(), params=SamplingParams(max_tokens=6))
    some = replace(origin(), params=SamplingParams(max_tokens=6, logit_bias={3: 1.0}))
    assert empty.header == none.header != some.header
