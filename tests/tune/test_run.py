"""Whole runs over servers whose speed and faults are chosen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tune.fakes import FAKE, LONG_S, fake_arm, is_running, wait_until

from forerun.errors import InvalidRequest
from forerun.tune.arms import Arm, Load
from forerun.tune.check import TOO_SHORT, check_text
from forerun.tune.config import TuneConfig
from forerun.tune.process import ServerFailed, ServerProcess
from forerun.tune.report import LoadResult, TuneReport
from forerun.tune.run import Tuner

PLAIN = ("--step-s", "0.01")
DRAFTS = ("--step-s", "0.01", "--k", "3", "--acceptance", "0.9")
SLOW = ("--step-s", "0.05")


def run(arms: list[Arm], folder: Path, **settings: Any) -> TuneReport:
    given: dict[str, Any] = {"max_tokens": 32, "minutes": 10.0, "audit_tokens": 0, **settings}
    tuner = Tuner(arms, TuneConfig(**given), source="fake", folder=folder, notify=lambda text: None)
    return tuner.run()


def reasons_of(result: LoadResult) -> dict[str, str]:
    return {arm.arm: arm.reason or "" for arm in result.arms}


def test_faulty_servers_are_given_up_and_the_fastest_is_recommended(tmp_path: Path) -> None:
    arms = [
        fake_arm(name="none", options=PLAIN),
        fake_arm(name="drafts", options=DRAFTS),
        fake_arm(name="slow", options=SLOW),
        fake_arm("crash=CUDA out of memory", name="without memory"),
        fake_arm("crash-after=4", name="crashing", options=PLAIN),
        fake_arm("hang-after=4", name="hanging", options=PLAIN),
        fake_arm("garbage", name="garbage", options=PLAIN),
        fake_arm("ignores-port", name="elsewhere", options=PLAIN),
        fake_arm("never-ready", name="never ready"),
    ]
    report = run(arms, tmp_path, ready_s=15.0, hang_s=5.0)
    [result] = report.loads
    reasons = reasons_of(result)
    assert result.recommended == "drafts" and report.is_complete
    assert report.versions["server"] == "0.26.0"
    assert result.confirmed is not None and result.confirmed.low > 1.0
    assert not reasons["none"] and not reasons["drafts"]
    assert "of the tokens/s of drafts" in reasons["slow"]
    assert "not enough memory" in reasons["without memory"]
    assert reasons["crashing"] and "timed out" in reasons["hanging"]
    assert "not JSON" in reasons["garbage"] and "never listened" in reasons["elsewhere"]
    assert "not ready after 15 s" in reasons["never ready"]
    drafts = next(arm for arm in result.arms if arm.arm == "drafts")
    assert drafts.drafting is not None and (drafts.drafting.acceptance_length or 0.0) > 2.0
    assert drafts.equal_texts == 1.0


def test_a_setting_that_changes_the_text_is_never_recommended(tmp_path: Path) -> None:
    arms = [
        fake_arm(name="none", options=PLAIN),
        fake_arm("wrong-text", name="wrong", options=DRAFTS),
        fake_arm(name="honest", options=("--step-s", "0.01", "--k", "1", "--acceptance", "0.9")),
    ]
    [result] = run(arms, tmp_path, audit_tokens=3000).loads
    assert result.recommended == "honest"
    assert "it changes the text" in reasons_of(result)["wrong"]
    assert result.check is not None and result.check.status != "deviates"


def test_a_setting_none_of_whose_texts_is_right_is_not_recommended_without_an_audit(
    tmp_path: Path,
) -> None:
    arms = [
        fake_arm(name="none", options=PLAIN),
        fake_arm("wrong-text", name="wrong", options=DRAFTS),
    ]
    [result] = run(arms, tmp_path, audit_tokens=0).loads
    assert result.recommended == "none"
    assert "texts at T=0 is that of none" in reasons_of(result)["wrong"]


def test_none_is_recommended_where_drafts_lose(tmp_path: Path) -> None:
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="slow", options=SLOW)]
    loads = (Load(clients=1), Load(clients=3, temperature=1.0))
    report = run(arms, tmp_path, loads=loads)
    assert [result.recommended for result in report.loads] == ["none", "none"]
    assert all(result.confirmed is None for result in report.loads)


def test_one_server_at_a_time_finds_the_same(tmp_path: Path) -> None:
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="drafts", options=DRAFTS)]
    alive: list[int] = []
    start = ServerProcess.start

    def count(server: ServerProcess) -> None:
        alive.append(sum(s.memory_bytes() > 0 for s in servers))
        servers.append(server)
        start(server)

    servers: list[ServerProcess] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProcess, "start", count)
        [result] = run(arms, tmp_path, one_at_a_time=True).loads
    assert result.recommended == "drafts"
    assert len(alive) > 2 and not any(alive)


def test_a_confirmation_one_at_a_time_has_starts_in_the_order_abba(tmp_path: Path) -> None:
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="drafts", options=DRAFTS)]
    [result] = run(arms, tmp_path, one_at_a_time=True).loads
    finals = [block for block in read_blocks(tmp_path) if block["is_final"]]
    starts = dict.fromkeys((one["block"]["arm"], one["block"]["unit"]) for one in finals)
    names = [name for name, _ in starts]
    assert names[:4] == ["none", "drafts", "drafts", "none"]
    assert result.num_starts == len(names) / 2 >= 2


def read_blocks(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "state.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == "block"]


def test_a_second_candidate_is_compared_on_new_prompts_in_turns(tmp_path: Path) -> None:
    arms = [
        fake_arm(name="none", options=PLAIN),
        fake_arm("wrong-text", name="wrong", options=DRAFTS),
        fake_arm(name="honest", options=("--step-s", "0.01", "--k", "1", "--acceptance", "0.9")),
    ]
    [result] = run(arms, tmp_path).loads
    assert result.recommended == "honest"
    indices: dict[str, list[int]] = {}
    for one in read_blocks(tmp_path):
        if one["is_final"]:
            indices.setdefault(one["block"]["arm"], []).append(one["block"]["index"])
    assert not set(indices["wrong"]) & set(indices["honest"])
    assert indices["none"] == indices["wrong"] + indices["honest"]


@pytest.mark.parametrize("arm", [("hang-after=6",), ("hang-after=14",), ()])
def test_the_minutes_bound_a_run_with_a_server_that_hangs_or_is_slow(arm, tmp_path: Path) -> None:
    slow = DRAFTS if arm else ("--step-s", "3")  # an event now and then
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(*arm, name="hanging", options=slow)]
    began_s = time.monotonic()
    [result] = run(arms, tmp_path, minutes=0.3).loads
    assert time.monotonic() - began_s < 1.2 * 18.0 + 15.0  # starts on a busy machine
    assert result.recommended == "none" and reasons_of(result)["hanging"]


def test_an_audit_ends_with_its_time(tmp_path: Path) -> None:
    arm = fake_arm("hang-after=0")
    with ServerProcess(arm, tmp_path / "log") as server:
        server.wait_ready(LONG_S, lambda elapsed_s: None)
        began_s = time.monotonic()
        found = check_text(arm, None, TuneConfig(audit_tokens=3000), 1.0, lambda text: None)
    assert (found.status, found.sentence) == ("cannot_judge", TOO_SHORT)
    assert time.monotonic() - began_s < 60.0


def test_a_prompt_that_is_too_long_is_named_and_left_out(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"tell me about {n}" + " please" * (200 if n in (1, 7) else 0) for n in range(12)]
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    faults = ("longest=1000",)
    arms = [
        fake_arm(*faults, name="none", options=PLAIN),
        fake_arm(*faults, name="drafts", options=DRAFTS),
    ]
    report = run(arms, tmp_path / "out", prompts=prompts)
    assert report.loads[0].recommended == "drafts"
    second, eighth = report.left_out
    assert second.startswith(f"{prompts}:2: ") and eighth.startswith(f"{prompts}:8: ")
    assert "this has 99" in second
    assert run(arms, tmp_path / "out", prompts=prompts).left_out == report.left_out


def test_without_a_prompt_that_the_server_takes_there_is_no_run(tmp_path: Path) -> None:
    arms = [fake_arm("longest=9", name="none"), fake_arm(name="drafts")]
    with pytest.raises(InvalidRequest, match="this has 99"):
        run(arms, tmp_path)


def test_a_budget_of_seconds_measures_the_baseline_alone(tmp_path: Path) -> None:
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="drafts", options=DRAFTS)]
    [result] = run(arms, tmp_path, minutes=0.001).loads
    assert result.recommended == "none"
    assert "lack of time" in reasons_of(result)["drafts"]


def test_a_baseline_that_fails_ends_the_run(tmp_path: Path) -> None:
    arms = [fake_arm("crash=no model", name="none"), fake_arm(name="drafts", options=DRAFTS)]
    with pytest.raises(ServerFailed, match=r"compared with: .*no model"):
        run(arms, tmp_path)


def test_servers_that_run_already_are_measured_and_left_alone(tmp_path: Path) -> None:
    servers = [fake_arm(name="none", options=PLAIN), fake_arm(name="drafts", options=DRAFTS)]
    started = [ServerProcess(arm, tmp_path / f"{arm.name}.log") for arm in servers]
    try:
        for server in started:
            server.start()
            server.wait_ready(60.0, lambda s: None)
        arms = [Arm(name=arm.name, url=arm.url) for arm in servers]
        [result] = run(arms, tmp_path / "out").loads
        assert result.recommended == "drafts"
        assert all(server.failure() is None and server.memory_bytes() for server in started)
    finally:
        for server in started:
            server.stop()


RESUMED = """
import os, sys
from pathlib import Path
from tests.tune.test_run import DRAFTS, PLAIN, run
from tests.tune.fakes import fake_arm
from forerun.tune.run import Tuner

count, add = 0, Tuner._add
def stop_at(tuner, block, is_final):
    global count
    count += 1
    add(tuner, block, is_final)
    if count == int(sys.argv[2]):
        servers = tuner.fleet._running.values()
        print(*(p.pid for s in servers for p in s._list_processes()), flush=True)
        os.kill(os.getpid(), int(sys.argv[3]))
Tuner._add = stop_at
arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="drafts", options=DRAFTS)]
run(arms, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_and_goes_on(tmp_path: Path, signal_number: int) -> None:
    root = FAKE.parents[2]
    stopped = subprocess.run(
        [sys.executable, "-c", RESUMED, tmp_path, "5", str(int(signal_number))],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert stopped.returncode != 0
    pids = [int(pid) for pid in stopped.stdout.split()]
    assert pids
    wait_until(lambda: not any(map(is_running, pids)))
    num_records = len((tmp_path / "state.jsonl").read_text().splitlines())
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="drafts", options=DRAFTS)]
    [result] = run(arms, tmp_path).loads
    lines = (tmp_path / "state.jsonl").read_text().splitlines()
    assert num_records >= 5 and len(lines) == len(set(lines)) > num_records
    assert result.recommended == "drafts"


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    arms = [fake_arm(name="none", options=PLAIN), fake_arm(name="slow", options=SLOW)]
    run(arms, tmp_path, minutes=0.001)
    with pytest.raises(InvalidRequest, match="max_tokens was 32, is 16"):
        run(arms, tmp_path, max_tokens=16)
