"""`forerun bench`: drafts and K compared with plain decoding, or servers with each other."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from tyro.conf import UseAppendAction, arg

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command
from forerun.cli.flags import (
    TraceFlags,
    check_threads,
    check_writable,
)
from forerun.cli.tables import SafeConsole, progress_bar, status_text, table_of, with_ends
from forerun.client.urls import shown_url
from forerun.control.config import ControllerName
from forerun.drafters.config import AUTO
from forerun.errors import InvalidRequest, Range
from forerun.measure.bench.config import LEAST_BLOCKS, BenchConfig, parse_arms
from forerun.models.architecture import WeightFormat
from forerun.models.catalog import DEFAULT_TARGET, ZOO_DRAFTS

if TYPE_CHECKING:
    from forerun.measure.bench.comparison import BenchComparison, BenchTrace
    from forerun.sampling.config import SamplingParams
    from forerun.theory.intervals import Interval
    from forerun.trace.files import TraceWriter
    from forerun.tune.load import LoadBlock
    from forerun.tune.server import MeasuredServer


CONCURRENCY = (1, 4, 8, 16)
MOST_CLIENTS = 256
COLUMNS = {
    "requests_per_s": ("requests/s", 1.0, ".2f"),
    "tokens_per_s": ("tokens/s", 1.0, ".0f"),
    "ttft_median_s": ("TTFT, ms\nmedian", 1e3, ".0f"),
    "ttft_p95_s": ("TTFT, ms\np95", 1e3, ".0f"),
    "tpot_median_s": ("TPOT, ms\nmedian", 1e3, ".1f"),
    "tpot_p95_s": ("TPOT, ms\np95", 1e3, ".1f"),
}
"""Heading, scale and format of every figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFlags:
    """Flags of a load test over OpenAI-compatible endpoints."""

    url: UseAppendAction[tuple[str, ...]] = ()
    """Measure a server with the OpenAI API (http://HOST:PORT/v1) under load, or compare two.
    --model is then the name of the model there; by default the first one that it lists."""
    api_key_env: UseAppendAction[tuple[str, ...]] = ()
    """Environment variable with the API key; with two servers, one for each.
    Default: OPENAI_API_KEY, if it is set."""
    concurrency: UseAppendAction[tuple[int, ...]] = ()
    """Clients at once; one table row each. Default: 1 4 8 16."""
    requests: int | None = None
    """Requests of a block. Default: two per client, at least 3."""
    ignore_eos: bool = False
    """Ask for outputs of --max-tokens exactly; forerun, vLLM and llama.cpp know the field."""

    def check(self) -> None:
        if not self.url:
            for item in fields(self):
                if getattr(self, item.name) != item.default:
                    raise InvalidRequest(f"--{item.name.replace('_', '-')} needs --url")
            return
        if len(self.url) > 2 or len(set(self.url)) < len(self.url):
            names = ", ".join(map(shown_url, self.url))
            raise InvalidRequest(f"--url is {names}; give one server, or two others")
        if len(self.api_key_env) > len(self.url):
            raise InvalidRequest("--api-key-env is given more often than --url")
        for num_clients in self.concurrency:
            Range("--concurrency", 1, MOST_CLIENTS, integer=True).check(num_clients)
        if self.requests is not None:
            Range("--requests", 1, integer=True).check(self.requests)

    @property
    def num_requests(self) -> dict[int, int]:
        found = sorted(set(self.concurrency or CONCURRENCY))
        return {n: max(n, self.requests or max(3, 2 * n)) for n in found}


@dataclass(slots=True, kw_only=True)
class EndpointRun:
    """Runs a load test and shows its results, also after an interruption."""

    options: BenchOptions
    params: SamplingParams
    servers: dict[str, MeasuredServer] = field(default_factory=dict)
    blocks: list[LoadBlock] = field(default_factory=list)
    number: int = field(default_factory=lambda: secrets.randbits(32))

    def run(self, texts: Sequence[str]) -> int:
        """Measure all blocks, with a progress bar, and show what was measured."""
        check_writable("--out", self.options.out)
        counts = self.options.endpoints.num_requests
        with ExitStack() as stack:
            for place, url in enumerate(self.options.endpoints.url):
                name = shown_url(url)
                name += " (2)" if name in self.servers else ""
                self.servers[name] = stack.enter_context(self._connect(place, url))
            total = self.options.blocks * len(counts) * len(self.servers)
            try:
                with progress_bar("warming up", total) as report:
                    for block in self._measure(texts, counts):
                        self.blocks.append(block)
                        done = len(self.blocks)
                        report(f"{block.load.clients} clients, block {done} of {total}", done)
            except BaseException:
                for server in self.servers.values():
                    server.close()  # ends the requests that still run
                raise
            finally:
                if self.blocks:
                    self.show()
        return 0

    def _measure(self, texts: Sequence[str], counts: dict[int, int]) -> Iterator[LoadBlock]:
        """Yield blocks: of every number of clients all servers in turn, then again."""
        from forerun.tune.arms import Load
        from forerun.tune.load import PromptDeck, measure_load

        deck = PromptDeck(texts, self.number, marks_all=True)
        names, most = list(self.servers), max(counts)
        short = replace(self.params, max_tokens=min(8, self.params.max_tokens or 8))
        warm = deck.deal_warm_up(most)
        for name in names:
            load = Load(clients=most, temperature=self.params.temperature)
            measure_load(self.servers[name], warm, short, arm=name, load=load, index=-1)
        for index in range(self.options.blocks):
            for clients, number in counts.items():
                load = Load(clients=clients, temperature=self.params.temperature)
                prompts = deck.deal(load, index, number)
                for name in names[:: -1 if index % 2 else 1]:
                    server = self.servers[name]
                    yield measure_load(
                        server, prompts, self.params, arm=name, load=load, index=index
                    )

    def _connect(self, place: int, url: str) -> MeasuredServer:
        from forerun.client.connection import ClientConfig
        from forerun.tune.server import MeasuredServer

        variables = self.options.endpoints.api_key_env
        variable = variables[min(place, len(variables) - 1)] if variables else None
        return MeasuredServer(
            ClientConfig(
                url=url,
                model=self.options.model,
                key_variable=variable,
                max_connections=max(self.options.endpoints.num_requests),
            )
        )

    def show(self) -> None:
        """Print and write the results measured until now."""
        content = json.dumps(self.report())
        if self.options.json:
            print(content)
        else:
            self._print()
        if self.options.out is not None:
            with atomic_write(self.options.out) as scratch:
                scratch.write_text(content + "\n", encoding="utf-8")

    def report(self) -> dict[str, object]:
        from forerun.provenance import collect
        from forerun.tune.load import compare_texts, compute_figures

        cells = []
        for row in self._rows():
            pair = list(row.values())
            cell: dict[str, object] = {
                "concurrency": pair[0][0].load.clients,
                "num_blocks": len(pair[0]),
                "figures": {url: as_json(compute_figures(blocks)) for url, blocks in row.items()},
            }
            if len(pair) == 2:
                cell["first_over_second"] = as_json(compute_figures(*pair))
                if self.params.temperature == 0:
                    number, share = compare_texts(*pair)
                    assert share is not None
                    cell["equal_texts"] = {"num_texts": number, **asdict(share)}
            cells.append(cell)
        return {
            "endpoints": [
                {"url": url, "model": server.model, "num_retries": len(server.waits_s)}
                for url, server in self.servers.items()
            ],
            "cells": cells,
            "blocks": [asdict(block) for block in self.blocks],
            "config": {
                "max_tokens": self.params.max_tokens,
                "temperature": self.params.temperature,
                "ignore_eos": self.params.ignore_eos,
                "requests_of_a_block": self.options.endpoints.num_requests,
                "run": self.number,
            },
            "provenance": collect({}).to_dict(),
        }

    def _print(self) -> None:
        from forerun.tune.load import compute_figures

        console = SafeConsole()
        letters = dict(zip(self.servers, "AB", strict=False))
        for url, server in self.servers.items():
            waits = server.waits_s
            busy = f"; {len(waits)} retries after {sum(waits):.0f} s, included in the times"
            line = f"{letters[url]}: {url}, model {server.model}{busy if waits else ''}"
            console.print(line, markup=False)
        headings = (heading for heading, _, _ in COLUMNS.values())
        table = table_of(Column("clients", no_wrap=True), *headings)
        rows = self._rows()
        for row in rows:
            for url, blocks in row.items():
                name = f"{blocks[0].load.clients}, {letters[url]}\n{len(blocks)} blocks"
                table.add_row(name, *_format_cells(compute_figures(blocks)))
        console.print(table, "", "TTFT: time to first token; TPOT: time per output token", sep="\n")
        for row in rows if len(letters) == 2 else ():
            console.print(*self._compare(*row.values()), sep="\n", markup=False)

    def _rows(self) -> list[dict[str, list[LoadBlock]]]:
        """Return the blocks that all servers have, by server, for every number of clients."""
        rows = []
        for clients in sorted({block.load.clients for block in self.blocks}):
            here = [block for block in self.blocks if block.load.clients == clients]
            shared = set.intersection(
                *({b.index for b in here if b.arm == name} for name in self.servers)
            )
            if shared:
                rows.append(
                    {
                        name: [b for b in here if b.arm == name and b.index in shared]
                        for name in self.servers
                    }
                )
        return rows

    def _compare(self, first: Sequence[LoadBlock], second: Sequence[LoadBlock]) -> list[str]:
        """Return sentences on the ratios and on the texts at one number of clients."""
        from forerun.measure.bench.report import warn_of_few
        from forerun.tune.load import compare_texts, compute_figures

        found = [f"A / B with {first[0].load.clients} clients:"]
        for name, ratio in compute_figures(first, second).items():
            label = " ".join(COLUMNS[name][0].replace(", ms", "").split())
            outcome = ", no difference shown" if ratio.low <= 1.0 <= ratio.high else ""
            found.append(f"  {label} {ratio.show()}{warn_of_few(len(first))}{outcome}")
        if self.params.temperature == 0:
            number, share = compare_texts(first, second)
            assert share is not None
            found.append(f"  equal texts: {round(share.estimate * number)} of {number}")
        return found


def as_json(figures: dict[str, Interval]) -> dict[str, dict[str, float | None]]:
    """Return figures for JSON; an end at infinity is None."""
    return {
        name: {end: v if math.isfinite(v) else None for end, v in asdict(interval).items()}
        for name, interval in figures.items()
    }


def _format_cells(figures: dict[str, Interval]) -> list[str]:
    found = []
    for name, interval in figures.items():
        _, scale, spec = COLUMNS[name]
        scaled = {end: scale * value for end, value in asdict(interval).items()}
        found.append(with_ends(replace(interval, **scaled), spec))
    return found


DEFAULTS = BenchConfig(arms=())


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `forerun bench`."""

    model: Annotated[str | None, arg(name="model", aliases=("--target",))] = None
    """Target: folder, hub name or zoo: name of the model whose text is wanted.
    Default: zoo:smollm2-135m."""
    arms: UseAppendAction[tuple[str, ...]] = ()
    """Compared with plain decoding: [NAME=]DRAFT@K[,K...], one arm per K, or
    [NAME=]DRAFT@tree:NODES[,DEPTH,WIDTH], where every draft is a tree of that shape; "auto"
    chooses among the drafts at hand and K at every step, as --draft auto does.
    Plain decoding is always the first arm.
    Default: auto; for a target with a shipped draft, that draft at K=1 to 4."""
    prompts: Path | None = None
    """A .jsonl, .json or .parquet file with "prompt" or "messages", or .txt with one
    per line or between "---". Default: shipped chats for a chat model, else Python code on which no
    shipped model was trained."""
    raw: bool = False
    """Continue texts as they are, even if the model has a chat template."""
    temperatures: Annotated[
        UseAppendAction[tuple[float, ...]], arg(name="temperature", aliases=("--temperatures",))
    ] = ()
    """One table each; greedy completions (0) are cut where they begin to loop. Default: 0 1."""
    batch: Annotated[UseAppendAction[tuple[int, ...]], arg(aliases=("--batches",))] = ()
    """Prompts continued together; one table each. Default: 1."""
    blocks: int = DEFAULTS.num_blocks
    """Most blocks per table: a block is one batch of prompts continued by every arm."""
    max_tokens: int = DEFAULTS.max_tokens
    """Longest completion."""
    dtype: str = DEFAULTS.dtype
    """auto (as stored), bfloat16, float16 or float32."""
    device: str = DEFAULTS.device
    """auto, cpu, cuda or mps."""
    weights: WeightFormat = DEFAULTS.weights
    """Bits of the target's weights; see `forerun generate --help`."""
    threads: int | None = None
    """Threads of the passes. Default: the number with which plain decoding is fastest."""
    controller: Annotated[
        UseAppendAction[tuple[ControllerName, ...]], arg(aliases=("--controllers",))
    ] = ()
    """One more arm per draft and controller, which chooses K up to the draft's largest.
    `forerun generate --help` describes them."""
    json: bool = False
    """Print one JSON object, all measurements included, instead of tables."""
    out: Path | None = None
    """Write the same JSON object to this file."""
    tracing: TraceFlags = field(default_factory=TraceFlags)
    """Written between the measurements, so that no measurement pays for it."""

    endpoints: EndpointFlags = field(default_factory=EndpointFlags)
    """Of servers with the OpenAI API."""

    @property
    def target(self) -> str:
        return self.model or DEFAULT_TARGET

    @property
    def config(self) -> BenchConfig:
        shipped = ZOO_DRAFTS.get(self.target)
        arms = self.arms or ((f"{shipped}@1,2,3,4",) if shipped else (AUTO,))
        return BenchConfig(
            target=self.target,
            arms=parse_arms(arms),
            controllers=self.controller,
            temperatures=self.temperatures or DEFAULTS.temperatures,
            batches=self.batch or DEFAULTS.batches,
            num_blocks=self.blocks,
            max_tokens=self.max_tokens,
            dtype=self.dtype,
            device=self.device,
            weights=self.weights,
            num_threads=self.threads,
        )

    def check(self) -> None:
        """Refuse options that would otherwise fail only after the measurements."""
        check_threads(self.threads)
        check_writable("--out", self.out)
        self.tracing.check()


def run(options: BenchOptions) -> int:
    """Run the comparison; an interruption or failure still shows the results before it."""
    options.endpoints.check()
    if options.endpoints.url:
        return _make_endpoint_run(options).run(_read_texts(options.prompts))
    config = options.config
    options.check()

    from forerun.measure.bench.compare import MIN_TOKENS
    from forerun.measure.bench.comparison import BenchComparison
    from forerun.measure.prompt_files import read_prompts

    prompts = None if options.prompts is None else read_prompts(options.prompts)

    with SafeConsole(stderr=True).status("starting") as status, ExitStack() as opened:
        comparison = BenchComparison(
            config,
            prompts,
            raw=options.raw,
            clock=time.perf_counter,
            notify=status_text(status),
        )
        try:
            comparison.load()
            # An existing trace is replaced only now, after the models were loaded.
            trace = opened.enter_context(options.tracing.opened())
            if trace is not None:
                comparison.trace = _begin_trace(trace, options, comparison)
            comparison.add_controllers()
            comparison.run()
        finally:
            status.stop()
            if any(comparison.blocks.values()):
                show(comparison, options)
    if not any(comparison.blocks.values()):
        raise InvalidRequest(
            "nothing was measured: of every prompt the greedy completion ends or begins to loop "
            f"within {MIN_TOKENS} tokens; raise --max-tokens (it is {options.max_tokens}), give "
            "other --prompts, or --temperature 1"
        )
    return 0


def _read_texts(path: Path | None) -> list[str]:
    """Return the prompts of a load test, which a server completes as they are."""
    from forerun.measure.prompt_files import neighbours_apart, plain_text, read_prompts
    from forerun.models.catalog import held_out_prompts

    if path is None:
        return neighbours_apart([prompt.text for prompt in held_out_prompts()])
    return [plain_text(entry) for entry in read_prompts(path)]


FOR_ENDPOINTS = frozenset(
    ("model", "prompts", "temperatures", "blocks", "max_tokens", "json", "out", "endpoints")
)


def _make_endpoint_run(options: BenchOptions) -> EndpointRun:
    """Return the load test of the servers that the options name."""
    from forerun.sampling.config import SamplingParams

    defaults = BenchOptions()
    for item in fields(options):
        name = item.name
        if name not in FOR_ENDPOINTS and getattr(options, name) != getattr(defaults, name):
            flag = "trace" if name == "tracing" else name.replace("_", "-")
            raise InvalidRequest(f"--{flag} has no effect with --url")
    if len(options.temperatures) > 1 or options.blocks < LEAST_BLOCKS:
        raise InvalidRequest(
            f"--url takes one --temperature, and at least {LEAST_BLOCKS} --blocks for an interval"
        )
    params = SamplingParams(
        temperature=options.temperatures[0] if options.temperatures else 0.0,
        max_tokens=options.max_tokens,
        ignore_eos=options.endpoints.ignore_eos,
    )
    return EndpointRun(options=options, params=params)


def _begin_trace(
    trace: TraceWriter, options: BenchOptions, comparison: BenchComparison
) -> BenchTrace:
    """Write one trace header per draft; the draft's hash in each step refers to its header."""
    from forerun.measure.bench.comparison import BenchTrace
    from forerun.provenance import trace_header

    device = str(comparison.device)
    drafts = dict.fromkeys(name for names in comparison.drafts.values() for name in names)
    headers = [trace_header(options.target, draft, device) for draft in drafts]
    for header in headers:
        trace.add(header)
    hashes = {h.draft: h.draft_hash for h in headers if h.draft is not None and h.draft_hash}
    return BenchTrace(trace, hashes)


def show(comparison: BenchComparison, options: BenchOptions) -> None:
    """Print, write and plot the results measured until now."""
    from forerun.cli.bench_tables import print_comparison

    report = comparison.report()
    content = json.dumps(report.to_dict())
    if options.json:
        print(content)
    else:
        print_comparison(report)
    if options.out is not None:
        with atomic_write(options.out) as scratch:
            scratch.write_text(content + "\n", encoding="utf-8")


LISTS = {
    "--arms": "",
    "--temperature": ",",
    "--temperatures": ",",
    "--batch": ",",
    "--batches": ",",
    "--controller": ",",
    "--controllers": ",",
    "--url": "",
    "--api-key-env": "",
    "--concurrency": ",",
}


COMMAND = Command(
    options=BenchOptions,
    run=run,
    lists=LISTS,
    usual="model arms prompts raw temperatures batch blocks max_tokens weights threads controller "
    "json out trace url",
    description="Compare drafts and K with plain decoding of the same target: every arm continues\n"
    "a batch of prompts before the next comes, and intervals are of the paired ratio. The best\n"
    "of several arms is chosen on one half of the blocks and scored on the other half.\n"
    "With --url, servers answer streamed requests of several clients at once.",
    examples=(
        "forerun bench",
        "forerun bench --model zoo:code-40m --arms zoo:code-2m-for-40m@2,4 --batch 1 8",
        "forerun bench --arms suffix@8 self:int4@3 auto",
        "forerun bench --model zoo:code-40m --arms zoo:code-2m-for-40m@tree:7,3,4",
        "forerun bench --model DIR --arms DRAFT_DIR@4 --prompts prompts.jsonl",
        "forerun bench --arms self:int4@2,4,8 --controller auto",
        "forerun bench --temperature 0 --blocks 30 --out bench.json",
        "forerun bench --url http://127.0.0.1:8000/v1 --concurrency 1 4",
        "forerun bench --trace bench.jsonl && forerun explain bench.jsonl",
    ),
)
