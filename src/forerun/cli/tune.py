"""`forerun tune`: the fastest exact setting of speculation for a server, by measurement."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command, Exit, is_flag
from forerun.cli.tables import SafeConsole, progress_bar
from forerun.client.urls import hide_keys
from forerun.errors import InvalidRequest
from forerun.terminal_text import printable
from forerun.tune.arms import Arm, Load
from forerun.tune.config import TuneConfig

if TYPE_CHECKING:
    from forerun.tune.compare import EarlierReport
    from forerun.tune.report import TuneReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of `forerun tune`."""

    server: Annotated[Positional[str], arg(metavar="COMMAND")] = ""
    """Command line that starts vLLM, llama.cpp, SGLang or forerun, in quotes or after "--". Its
    speculation, host and port are replaced, the rest stays as it is."""
    target: str | None = None
    """Tune forerun's own engine for this model: short for the command `forerun serve MODEL`."""
    arm: UseAppendAction[tuple[str, ...]] = ()
    """NAME=COMMAND of one setting of any server, with {port} where its port belongs, or NAME=URL of
    one that runs already, with the key of OPENAI_API_KEY. The one called "none" is the baseline,
    else the first."""
    draft: UseAppendAction[tuple[str, ...]] = ()
    """Drafts to try: a path, METHOD:PATH or the name of a method, in the engine's own words.
    Default: what needs no weights, and what the command names."""
    k: UseAppendAction[tuple[int, ...]] = ()
    """Numbers of draft tokens to try. Default: a few that are usual for each method."""
    clients: UseAppendAction[tuple[int, ...]] = ()
    """Clients that send requests at once; each number has a fastest setting of its own.
    Default: 1."""
    temperature: UseAppendAction[tuple[float, ...]] = ()
    """Sampling temperatures, the same. Default: 0."""
    acceptance_length: float | None = None
    """Accept drafts by chance, so many tokens per step on average (vLLM, llama.cpp): says what a
    draft of this size must reach here before it is trained. Texts are wrong then."""
    prompts: Path | None = None
    """Your prompts: .jsonl with "prompt" or "messages", or a text file. Default: shipped chats."""
    max_tokens: int = TuneConfig().max_tokens
    """Longest answer."""
    minutes: float = TuneConfig().minutes
    """Time for everything, the starts of servers included."""
    audit_tokens: int = TuneConfig().audit_tokens
    """Output tokens that are audited before a setting is recommended; 0: none."""
    one_at_a_time: bool = False
    """Run one server at a time, as is done anyway on a GPU or where memory is short."""
    out: Path = Path("forerun-tune")
    """Folder of page.html, result.json, state and logs, where an interrupted run goes on."""
    compare: Path | None = None
    """The result.json of an earlier run: name what became slower since."""
    plan: bool = False
    """Show the commands that would be compared, and start nothing."""

    @property
    def source(self) -> str:
        """Return the command that is tuned; empty where all arms are given."""
        if self.target is None:
            return self.server
        return shlex.join(["forerun", "serve", self.target])

    def read_loads(self) -> tuple[Load, ...]:
        """Return every number of clients at every temperature."""
        return tuple(
            Load(clients=clients, temperature=temperature)
            for temperature in dict.fromkeys(self.temperature or (0.0,))
            for clients in dict.fromkeys(self.clients or (1,))
        )


def run(options: TuneOptions) -> int:
    """Compare the arms; returns 0 also where no speculation is recommended."""
    from forerun.tune.compare import read_earlier

    if bool(options.server) + (options.target is not None) + bool(options.arm) != 1:
        raise InvalidRequest(
            "give one of: a command in quotes, such as 'vllm serve MODEL'; --target MODEL; or "
            "--arm NAME=COMMAND for every setting"
        )
    config = TuneConfig(
        loads=options.read_loads(),
        max_tokens=options.max_tokens,
        minutes=options.minutes,
        audit_tokens=options.audit_tokens,
        one_at_a_time=True if options.one_at_a_time else None,
        prompts=options.prompts,
        acceptance_length=options.acceptance_length,
    )
    earlier = None if options.compare is None else read_earlier(options.compare)
    if options.compare is not None and options.compare.parent.resolve() == options.out.resolve():
        raise InvalidRequest(
            f"--compare {options.compare} is of the run that --out {options.out} would go on with: "
            "name another folder with --out"
        )
    arms = plan(options)
    if options.plan:
        console = SafeConsole(soft_wrap=True)
        for arm in arms:
            console.print(f"{arm.name}\n  {arm.started_command}", markup=False)
        return Exit.GOOD
    with raise_on_signals():
        return run_tuner(arms, config, options, earlier)


def run_tuner(
    arms: Sequence[Arm], config: TuneConfig, options: TuneOptions, earlier: EarlierReport | None
) -> int:
    """Run the comparison and write its results, also where it ends early."""
    from forerun.tune.process import ServerFailed
    from forerun.tune.run import Tuner

    tuner: Tuner | None = None
    try:
        with progress_bar("starting", config.minutes) as report:
            tuner = Tuner(
                arms,
                config,
                source=options.source,
                folder=options.out,
                notify=lambda text: report(text, tuner.minutes if tuner else 0.0),
            )
            result = tuner.run()
    except (KeyboardInterrupt, InvalidRequest, ServerFailed):
        if tuner is not None and tuner.has_blocks:
            write_results(tuner.report(), options, earlier)
            line = f"{options.out} has what is known; the same command goes on where this run ended"
            print(line, file=sys.stderr)
        raise
    write_results(result, options, earlier)
    return Exit.GOOD


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do in the block what Ctrl-C does, unless they are ignored (nohup)."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    changed = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def write_results(result: TuneReport, options: TuneOptions, earlier: EarlierReport | None) -> None:
    """Write `result.json` and `page.html` into the folder of a run, and print its result."""
    from forerun.cli.tune_tables import print_tune
    from forerun.tune.compare import compare_runs
    from forerun.tune.page import render_page

    changes = [] if earlier is None else compare_runs(result, earlier)
    values = {**result.to_dict(), "changes": changes}
    pages = {"result.json": json.dumps(values) + "\n", "page.html": render_page(result, changes)}
    for name, content in pages.items():
        with atomic_write(options.out / name) as scratch:
            scratch.write_text(content, encoding="utf-8")
    print_tune(result, changes)
    print(f"\n{printable(options.out)} has page.html with pictures, and result.json")


def plan(options: TuneOptions) -> list[Arm]:
    """Return the arms that the options ask for."""
    from forerun.tune.command_line import parse_command, plan_arms
    from forerun.tune.process import free_ports

    ports = free_ports()
    if options.arm:
        arms = list(read_arms(options.arm, ports))
        if len({arm.name for arm in arms}) < max(2, len(arms)):
            names = ", ".join(arm.name for arm in arms)
            raise InvalidRequest(f"--arm needs two arms or more, of different names, not {names}")
        return arms
    return plan_arms(
        parse_command(options.source),
        options.draft,
        options.k,
        ports,
        acceptance_length=options.acceptance_length,
    )


def read_arms(texts: Sequence[str], ports: Iterator[int]) -> Iterator[Arm]:
    """Yield the arms of NAME=COMMAND and NAME=URL."""
    from forerun.client.urls import is_url, shown_url
    from forerun.tune.command_line import split_command

    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or not name.isprintable():
            raise InvalidRequest(f"--arm {hide_keys(text)!r:.200} is not NAME=COMMAND or NAME=URL")
        if is_url(value):
            yield Arm(name=name, url=value, typed=shown_url(value))
            continue
        if "{port}" not in value:
            raise InvalidRequest(
                f"--arm {hide_keys(text)!r:.200} has no {{port}}, where its port belongs"
            )
        port = next(ports)
        environment, words = split_command(value.replace("{port}", str(port)))
        yield Arm(
            name=name,
            url=f"http://127.0.0.1:{port}/v1",
            command=tuple(words),
            environment=environment,
            typed=value,
        )


def fill_command(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments with an empty command first where flags name what is tuned.

    Lists may then have several words, none of which is the command.
    """
    names = {word.partition("=")[0] for word in arguments}
    has_command = names.isdisjoint(("--target", "--arm")) or not is_flag(arguments[0])
    return arguments if has_command else ["", *arguments]


COMMAND = Command(
    options=TuneOptions,
    run=run,
    has_positional=True,
    rewrite=fill_command,
    lists={"--arm": "", **dict.fromkeys(("--draft", "--k", "--clients", "--temperature"), ",")},
    description="Find the fastest exact setting of speculation for the server you run: every\n"
    "setting is a server started once, all answer the same prompts in turns, slower ones are\n"
    "given up, and the fastest is confirmed on other prompts and audited.",
    examples=(
        "forerun tune 'vllm serve Qwen/Qwen3-8B --max-model-len 8192' --clients 1 16",
        "forerun tune 'llama-server -m model.gguf' --draft draft.gguf --minutes 15",
        "forerun tune --target zoo:smollm2-135m --clients 1 4",
        "forerun tune --arm 'none=my-server --port {port}' 'fast=my-server --fast --port {port}'",
    ),
)
