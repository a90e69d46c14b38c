"""Whole runs over servers whose speed and faults are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tune.fakes import fake_arm

from forerun.tune.arms import Arm, Load
from forerun.tune.config import TuneConfig
from forerun.tune.process import ServerFailed
from forerun.tune.report import TuneReport
from forerun.tune.run import Tuner

PLAIN = ("--step-s", "0.004")
DRAFTS = ("--step-s", "0.004", "--k", "3", "--acceptance", "0.9")
FAST = ("--step-s", "0.002")
SLOW = ("--step-s", "0.02")


def run(
    arms: list[Arm],
    folder: Path,
    *,
    audit_tokens: int = 0,
    minutes: float = 10.0,
    **settings: object,
) -> TuneReport:
    notes: list[str] = []
    config = TuneConfig(max_tokens=32, minutes=minutes, audit_tokens=audit_tokens, **settings)
    tuner = Tuner(arms, config, source="fake", folder=folder, notify=notes.append)
    return tuner.run()


def test_faulty_servers_are_given_up_and_the_fastest_is_recommended(tmp_path: Path) -> None:
    arms = [
        fake_arm(name="none", options=PLAIN),
        fake_arm(name="fast", options=DRAFTS),
        fake_arm(name="slow", options=SLOW),
        fake_arm("crash=CUDA out of memory", name="crashing"),
        fake_arm("hang-after=4", name="hanging", options=FAST),
        fake_arm("garbage", name="garbage", options=FAST),
        fake_arm("ignores-port", name="elsewhere", options=FAST),
    ]
    report = run(arms, tmp_path, ready_s=20.0)
    [result] = report.loads
    reasons = {arm.arm: arm.reason for arm in result.arms}
    print(reasons)
    assert result.recommended == "fast"
