"""Watching a running server for `forerun diagnose --watch`."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.atomic_write import atomic_write
from forerun.cli.command import Exit
from forerun.cli.flags import check_writable
from forerun.cli.tables import SafeConsole
from forerun.client.urls import hide_urls, is_url, shown_source
from forerun.errors import ForerunError, InvalidRequest, Range
from forerun.terminal_text import printable

if TYPE_CHECKING:
    from forerun.doctor.readers.prometheus import Metrics
    from forerun.doctor.watch import WatchState
    from forerun.trace.change_points import Incident

HOOK_HEADER = "FORERUN_HOOK_HEADER"
HOOK_TIMEOUT_S = 10.0
MAX_UNSENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFlags:
    """A running server whose figures may change."""

    watch: bool = False
    """Read the page of metrics of SOURCE every --interval-s, and report when acceptance by
    position, the time per output token at equal load or the length of prompts changes, and which
    causes fit."""
    state: Path = Path("forerun-watch.json")
    """File with all that a watch remembers; one that starts again continues from it."""
    metrics_out: Path | None = None
    """Write the watch's state as a Prometheus text file after every reading."""
    hook: str | None = None
    """Send every alarm, and its end, to this address, as a POST of JSON with an id. The environment
    variable FORERUN_HOOK_HEADER may hold a header, such as "Authorization: Bearer KEY"."""
    once: bool = False
    """Read once and end: exit code 3 if this reading raised an alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(WatchFlags):
    """One watch of a source: an address, or a file that holds a page of metrics."""

    source: str
    interval_s: float
    key_variable: str | None
    json: bool

    def __post_init__(self) -> None:
        """Refuse unusable options before the first reading."""
        Range("--interval-s", 0, 3600, above_low=True).check(self.interval_s)
        if self.hook is not None and not is_url(self.hook):
            raise InvalidRequest("--hook must be an address that begins with http:// or https://")
        if self.hook is not None:
            read_hook_header()
        if self.key_variable is not None and not is_url(self.source):
            raise InvalidRequest("--api-key-env is for a server; a file needs no key")
        check_writable("--state", self.state)
        check_writable("--metrics-out", self.metrics_out)

    @property
    def name(self) -> str:
        """The source in messages, in the state and for the hook, without secrets of a URL."""
        return shown_source(self.source)


def read_hook_header() -> dict[str, str]:
    """Return the header of the environment variable for hooks; no message quotes it."""
    text = os.environ.get(HOOK_HEADER, "")
    name, colon, value = (part.strip() for part in text.partition(":"))
    is_sendable = colon and value.isascii() and value.isprintable()
    if text and not (is_sendable and re.fullmatch(r"[\w-]+", name, re.ASCII)):
        raise InvalidRequest(
            f"the environment variable {HOOK_HEADER} must hold a header, such as "
            "Authorization: Bearer KEY"
        )
    return {name: value} if text else {}


def watch(options: Watch) -> int:
    """Read, report and remember until interrupted, or once."""
    is_first = not options.state.exists()
    state = load_state(options)
    if not options.once:
        _say(options, f"watching {options.name} every {options.interval_s:g} s")
    while True:
        found = _read_once(options, state)
        if options.once:
            if not found:
                _say(options, f"{_describe_quiet(state, is_first)} {options.state}")
            is_alarm = any(each.kind == "alarm" and each.resolved_s is None for each in found)
            return Exit.PROBLEM if is_alarm else Exit.GOOD
        time.sleep(options.interval_s)


def _describe_quiet(state: WatchState, is_first: bool) -> str:
    if is_first:
        return "first reading, kept in"
    if missing := state.watcher.missing:
        return f"no change can be seen yet: {missing}; kept in"
    return "no change since the readings in"


def load_state(options: Watch) -> WatchState:
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
            f"--state {options.state} is no state of a watch: {error}; name another file"
        ) from error
    if state.source != options.name:
        of = printable(hide_urls(state.source), max_length=300)
        raise InvalidRequest(
            f"--state {options.state} is of {of}; name another file for {options.name}"
        )
    return state


def _read_once(options: Watch, state: WatchState) -> list[Incident]:
    from forerun.doctor.watch import observe, write_message

    found: list[Incident] = []
    is_first = state.last is None
    try:
        found = observe(state, _read_metrics(options), time.time())
    except InvalidRequest as error:
        if is_first or options.once:
            raise
        state.num_failed += 1
        if state.num_failed == 1:
            _say(options, f"not read: {error}")
    for incident in found:
        _report(options, incident)
    if options.hook is not None:
        alarms = [write_message(options.name, each) for each in found if each.kind == "alarm"]
        state.unsent = [*state.unsent, *alarms][-MAX_UNSENT:]
    _save(options, state)
    if state.unsent:
        _send(options, state)
        _save(options, state)
    return found


def _save(options: Watch, state: WatchState) -> None:
    import msgspec

    from forerun.doctor.watch import watch_text

    with atomic_write(options.state, durable=False) as scratch:
        scratch.write_bytes(msgspec.json.encode(state))
    if options.metrics_out is not None:
        with atomic_write(options.metrics_out, durable=False) as scratch:
            scratch.write_text(watch_text(state), encoding="utf-8")


def _read_metrics(options: Watch) -> Metrics:
    from forerun.bounded_read import ReadLimits, read_text
    from forerun.doctor.readers.prometheus import read_page
    from forerun.doctor.readers.sources import MAX_PAGE_BYTES, page_of
    from forerun.errors import UnreadableInput

    if is_url(options.source):
        return page_of(options.source, options.key_variable).metrics
    try:
        text = read_text(Path(options.source), ReadLimits(max_bytes=MAX_PAGE_BYTES))
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error
    return read_page(text).metrics


def _report(options: Watch, incident: Incident) -> None:
    from forerun.doctor.watch import write_message

    if options.json:
        print(json.dumps(write_message(options.name, incident)), flush=True)
        return
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.started_s))
    causes = f"; likely: {', '.join(incident.causes)}" if incident.causes else ""
    mark = "better, no alarm: " if incident.kind == "note" else ""
    since = "" if incident.resolved_s else f" since {started}{causes}"
    _say(options, f"{mark}{incident.words}{since}")


def _say(options: Watch, text: str) -> None:
    now = time.strftime("%H:%M:%S")
    SafeConsole(soft_wrap=True, stderr=options.json).print(f"{now} {text}", markup=False)


def _send(options: Watch, state: WatchState) -> None:
    """Send messages in order; those that are refused are tried again at the next reading."""
    from forerun.client.door import post_once

    headers = read_hook_header()
    while state.unsent:
        try:
            post_once(str(options.hook), state.unsent[0], HOOK_TIMEOUT_S, headers)
        except ForerunError as error:
            _say(options, f"the hook did not take a message: {error}; it is sent again")
            return
        state.unsent = state.unsent[1:]
