"""`forerun watch`: notice when acceptance, speed or prompts of a running server change."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command, Exit
from forerun.cli.flags import check_writable
from forerun.cli.tables import SafeConsole
from forerun.client.urls import hide_urls, is_url, shown_source
from forerun.errors import ForerunError, InvalidRequest, Range
from forerun.terminal_text import printable

if TYPE_CHECKING:
    from forerun.doctor.readers.prometheus import Metrics
    from forerun.doctor.watch import WatchState
    from forerun.trace.change_points import ChangePoint

HOOK_TIMEOUT_S = 10.0
MAX_UNSENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of `forerun watch`."""

    source: Annotated[Positional[str], arg(metavar="URL_OR_FILE")]
    """Address of a /metrics page of forerun, vLLM, SGLang, TensorRT-LLM, llama.cpp or LMDeploy, or
    a file that holds such a page."""
    trace: bool = False
    """Read a trace of forerun in place of a page: a file of JSON lines, which may grow."""
    state: Path = Path("forerun-watch.json")
    """File with all that is remembered; a watch that starts again continues from it."""
    interval_s: float = 10.0
    """Between two readings."""
    target_tpot_s: float | None = None
    """Time per output token that should not be exceeded."""
    metrics_out: Path | None = None
    """Write the state as a Prometheus text file after every reading, for a textfile collector."""
    hook: str | None = None
    """Send every change point to this address, as a POST of JSON."""
    api_key_env: str | None = None
    """Environment variable with the API key of a URL; the hook does not get it.
    Default: OPENAI_API_KEY, if it is set."""
    once: bool = False
    """Read once and end: exit code 3 if this reading showed a change."""
    json: bool = False
    """Print change points as JSON lines."""

    def check(self) -> None:
        """Refuse unusable options before the first reading."""
        Range("--interval-s", 0, 3600, above_low=True).check(self.interval_s)
        if self.target_tpot_s is not None:
            Range("--target-tpot-s", 0, 3600, above_low=True).check(self.target_tpot_s)
        if self.hook is not None and not is_url(self.hook):
            raise InvalidRequest("--hook must be an address that begins with http:// or https://")
        if self.trace and is_url(self.source):
            raise InvalidRequest(f"--trace reads a file; {self.name} is an address")
        if self.api_key_env is not None and not is_url(self.source):
            raise InvalidRequest("--api-key-env is for a server; a file needs no key")
        check_writable("--state", self.state)
        check_writable("--metrics-out", self.metrics_out)

    @property
    def name(self) -> str:
        """The source in messages, in the state and for the hook, without secrets of a URL."""
        return shown_source(self.source)


def run(options: WatchOptions) -> int:
    """Read, report and remember until interrupted."""
    options.check()
    is_first = not options.state.exists()
    state = load_state(options)
    if not options.once:
        _say(options, f"watching {options.name} every {options.interval_s:g} s")
    while True:
        found = _read_once(options, state)
        if options.once:
            if not found:
                kept = "first reading, kept in" if is_first else "no change since the readings in"
                _say(options, f"{kept} {options.state}")
            return Exit.PROBLEM if found else Exit.GOOD
        time.sleep(options.interval_s)


def load_state(options: WatchOptions) -> WatchState:
    """Return the state of the file, or a new one.

    Raises:
        InvalidRequest: the file holds something else, or the state of another source.
    """
    import msgspec

    from forerun.bounded_read import ReadLimits, read_bytes
    from forerun.doctor.watch import WatchState

    if not options.state.exists():
        return WatchState(source=options.name)
    data = read_bytes(options.state, ReadLimits(max_bytes=1 << 24))
    try:
        state = msgspec.json.decode(data, type=WatchState)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(
            f"--state {options.state} is no state of forerun watch: {error}; name another file"
        ) from error
    if state.source != options.name:
        of = printable(hide_urls(state.source), max_length=300)
        raise InvalidRequest(
            f"--state {options.state} is of {of}; name another file for {options.name}"
        )
    return state


def _read_once(options: WatchOptions, state: WatchState) -> list[ChangePoint]:
    from forerun.doctor.watch import observe, observe_trace

    found: list[ChangePoint] = []
    is_first = state.last is None and state.num_read_bytes is None
    try:
        if options.trace:
            found = observe_trace(state, Path(options.source), options.target_tpot_s)
        else:
            found = observe(state, _metrics_of(options), time.time(), options.target_tpot_s)
    except InvalidRequest as error:
        if is_first or options.once:
            raise
        state.num_failed += 1
        if state.num_failed == 1:
            _say(options, f"not read: {error}")
    for change in found:
        _report(options, change)
    if options.hook is not None:
        state.unsent = [*state.unsent, *found][-MAX_UNSENT:]
    _save(options, state)
    if state.unsent:
        _send(options, state)
        _save(options, state)
    return found


def _save(options: WatchOptions, state: WatchState) -> None:
    import msgspec

    from forerun.doctor.watch import watch_text

    with atomic_write(options.state, durable=False) as scratch:
        scratch.write_bytes(msgspec.json.encode(state))
    if options.metrics_out is not None:
        with atomic_write(options.metrics_out, durable=False) as scratch:
            scratch.write_text(watch_text(state), encoding="utf-8")


def _metrics_of(options: WatchOptions) -> Metrics:
    from forerun.bounded_read import ReadLimits, read_text
    from forerun.doctor.readers.prometheus import read_page
    from forerun.doctor.readers.sources import MAX_PAGE_BYTES, page_of
    from forerun.errors import UnreadableInput

    if is_url(options.source):
        return page_of(options.source, options.api_key_env).metrics
    try:
        text = read_text(Path(options.source), ReadLimits(max_bytes=MAX_PAGE_BYTES))
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error
    return read_page(text).metrics


def _report(options: WatchOptions, change: ChangePoint) -> None:
    from msgspec.structs import asdict

    if options.json:
        print(json.dumps({"source": options.name} | asdict(change)), flush=True)
        return
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.started_s))
    causes = f"; likely: {', '.join(change.causes)}" if change.causes else ""
    _say(options, f"{change.words} since {started}{causes}")


def _say(options: WatchOptions, text: str) -> None:
    now = time.strftime("%H:%M:%S")
    SafeConsole(soft_wrap=True, stderr=options.json).print(f"{now} {text}", markup=False)


def _send(options: WatchOptions, state: WatchState) -> None:
    """Send change points in order; those that are refused are tried again at the next reading."""
    from msgspec.structs import asdict

    from forerun.client.door import post_once

    while state.unsent:
        content = {"source": options.name} | asdict(state.unsent[0])
        try:
            post_once(str(options.hook), content, HOOK_TIMEOUT_S)
        except ForerunError as error:
            _say(options, f"the hook did not take a change: {error}; it is sent again")
            return
        state.unsent = state.unsent[1:]


COMMAND = Command(
    options=WatchOptions,
    run=run,
    has_positional=True,
    description="Watch a running server: report when acceptance by position, the time per output\n"
    "token or the length of prompts changes, since when, and which cause fits. Requests are not\n"
    "sent: only its /metrics page or its trace is read. Restarts of the server and of the watch\n"
    "are no change.",
    examples=(
        "forerun watch http://localhost:8000/metrics",
        "forerun watch http://localhost:8000/metrics --target-tpot-s .02 --hook http://pager/alarm",
        "forerun watch --trace steps.jsonl",
        "forerun watch http://localhost:8000/metrics --metrics-out /var/lib/node/forerun.prom",
        "forerun watch http://localhost:8000/metrics --once --state /tmp/watch.json",
    ),
)
