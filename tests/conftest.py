"""Set-up of every test: shapes and types checked, one thread, no network."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from tests import checking, thinning

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "forerun"
LONGEST_ID = 80

os.environ["HF_HUB_OFFLINE"] = "1"
# Compiled kernels outlive a run: their names say what they were made of.
os.environ.setdefault("FORERUN_CACHE", str(ROOT / "build" / "cache"))

if scale := os.environ.get("FORERUN_CLOCK_SCALE"):  # `make repeat`: a clock of another speed
    for name in ("monotonic", "perf_counter"):
        reading = getattr(time, name)
        setattr(time, name, lambda read=reading, factor=float(scale): factor * read())

# How long an example takes depends on what else the machine does, so no example has a time limit.
hypothesis.settings.register_profile("forerun", deadline=None)
hypothesis.settings.load_profile("forerun")

# Every annotated function of the package checks its arguments, shapes included, while tests run.
# Configurations are left out: they judge wrong types themselves, and the tests must get that far.
# A protocol must be declared `@runtime_checkable` for this. The hook must precede the first import
# of the package.
checking.install(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem not in {"__init__", "config", "kinds"}
)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels before there are workers, which would all do it at once."""
    # A shell starts background commands with SIGINT ignored and nohup has SIGHUP ignored, and the
    # tests send both to processes that inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.option.markexpr != "not full" and "FORERUN_FEW_CHECKS" not in os.environ:
        checking.BUDGET.per_function = None
    from forerun.errors import RunnerUnavailable
    from forerun.native.library import compiled_kernels

    if "PYTEST_XDIST_WORKER" not in os.environ:
        with contextlib.suppress(RunnerUnavailable):  # the tests that need them will say so
            compiled_kernels()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Results of reductions must not depend on how many cores the machine has."""
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most combinations of some tests to the full grid, before it is deselected."""
    thinning.mark_full(items)


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name long texts by their length: some are megabytes of hostile input."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        return f"{type(val).__name__}-of-{len(val)}"
    return None


@pytest.fixture(autouse=True)
def some_calls_checked() -> Iterator[None]:
    """Every test has its first calls checked, whatever the tests before it did."""
    checking.BUDGET.restart()
    yield
    checking.BUDGET.restart()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for another machine fails."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:
            raise RuntimeError(f"tests have no network: connect to {address!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No checks of shapes and types, which slow the engine ninefold: for tests of many runs."""
    checking.BUDGET.is_off = True
    yield
    checking.BUDGET.is_off = False


STEP_TIMES = (0.0002, 0.001, 0.0001)
"""Seconds of drafting, of the target pass and of the rest, of every step of a test."""


@pytest.fixture(autouse=True)
def fixed_step_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every step of the engine the same duration, so that no controller reads a real clock.

    Tests of the measurement itself are marked `measured_times`.
    """
    if "measured_times" not in request.keywords:
        from forerun.engine.step import StepClock

        monkeypatch.setattr(StepClock, "durations", lambda clock: STEP_TIMES)
