"""Runs a comparison of servers: measures in turns, confirms the fastest setting, audits it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable
from forerun.provenance import collect
from forerun.theory.intervals import Interval
from forerun.tune.arms import Arm, Load
from forerun.tune.check import ExactnessCheck, check_text
from forerun.tune.config import TuneConfig
from forerun.tune.fleet import Fleet, Notify
from forerun.tune.process import ServerFailed
from forerun.tune.race import BlockTimes, Race
from forerun.tune.report import ArmResult, LoadResult, TuneReport

RACE_SHARE = 0.7
"""Share of the minutes for choosing; the rest confirms and audits what was chosen."""
CONFIRM_BLOCKS = 8
"""Blocks of the chosen arm and of the baseline on prompts that had no part in the choice."""
