"""`forerun loop`: serve, and train, try and replace the draft as the requests change."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from forerun.cli import serve
from forerun.cli.command import Command, Exit
from forerun.errors import InvalidRequest
from forerun.loop.config import LoopConfig, read_config
from forerun.terminal_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of `forerun loop`."""

    action: Positional[Literal["run", "status"]]
    """run: serve, with the loop beside it; status: what a loop has done."""
    path: Annotated[Positional[Path], arg(metavar="CONFIG|FOLDER")]
    """run: TOML or JSON file of settings, see docs/loop.md; status: the folder that it names."""


def run_or_show(options: LoopOptions) -> int:
    """Run a loop until a signal, or print its journal."""
    if options.action == "status":
        return print_status(options.path)
    from forerun.server.request_log import log_on_stderr

    with log_on_stderr():
        return run_loop(read_config(options.path))


def print_status(folder: Path) -> int:
    """Print a line per finished stage, and what comes next."""
    from forerun.loop.journal import find_draft, find_next, read_journal

    records = read_journal(folder)
    for record in records:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at_s))
        print(f"{at}  round {record.round}  {record.stage:9}  {printable(record.why)}")
    version = records[-1].version if records else 0
    draft = find_draft(records, version) or "that of the configuration"
    number, stage = find_next(records)
    print(f"in service: version {version}, {printable(draft)}; next: {stage} of round {number}")
    return Exit.GOOD


def read_serve_options(config: LoopConfig) -> serve.ServeOptions:
    """Return the options of the server; raises InvalidRequest unless they name one draft."""
    options = serve.COMMAND.parse("serve", list(config.serve))
    if len(options.pair.draft) != 1 or options.pair.draft[0] in ("auto", "none"):
        raise InvalidRequest("serve must name one draft that was trained, after --draft")
    if options.collect is not None:
        raise InvalidRequest("serve has --collect; a loop collects into its own folder")
    return options


def run_loop(config: LoopConfig) -> int:
    """Serve the draft that the journal names, with the loop beside it, until a signal."""
    from forerun.engine.thread import AsyncEngine
    from forerun.loop.journal import Journal, find_draft
    from forerun.loop.run import Loop
    from forerun.loop.store import TrafficStore

    options = read_serve_options(config)
    pair, (draft,) = options.pair, options.pair.draft
    with Journal(config.folder) as journal:
        present = find_draft(journal.records, journal.version) or draft
        options = replace(options, pair=replace(pair, draft=(present,)))
        keys, listener, engine = serve.prepare(options)
        running, quota = AsyncEngine(engine), int(config.quota_mb * 1e6)
        with TrafficStore(config.folder / "texts", engine.tokenizer.decode, quota) as store:
            app = serve.make_app(options, running, keys, store)
            totals = app.state.server.metrics.totals
            named = {"target": pair.target, "draft": draft, "dtype": pair.dtype}
            with Loop(config, journal, store, running, totals=totals, **named):
                serve.serve_app(options, listener, running, app)
    return Exit.GOOD


COMMAND = Command(
    options=LoopOptions,
    run=run_or_show,
    has_positional=True,
    description="Serve a target, and train, try and replace its draft as the requests change:\n"
    "forerun loop run CONFIG, and forerun loop status FOLDER",
    examples=("forerun loop run loop.toml", "forerun loop status forerun-loop"),
)
