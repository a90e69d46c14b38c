"""`forerun bench`: drafts and K compared with plain decoding, or servers with each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from forerun.atomic_write import atomic_write
from forerun.cli.bench_endpoints import EndpointFlags, EndpointRun
from forerun.cli.command import Command
from forerun.cli.flags import TraceFlags, check_plot, check_threads, check_writable
from forerun.cli.tables import SafeConsole, status_text
from forerun.control.config import ControllerName
from forerun.errors import InvalidRequest
from forerun.measure.bench.config import LEAST_BLOCKS, BenchConfig, parse_arms
from forerun.models.architecture import Runner, WeightFormat
from forerun.models.catalog import PREFIX

if TYPE_CHECKING:
    from forerun.measure.bench.comparison import BenchComparison, BenchTrace
    from forerun.plan.costs import DraftCosts
    from forerun.trace.files import TraceWriter

DEFAULTS = BenchConfig(arms=())
SHIPPED_ARMS = (PREFIX + "code-2m@1,2,3,4",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `forerun bench`."""

    model: Annotated[str | None, arg(name="model", aliases=("--target",))] = None
    """Target: folder, hub name or zoo: name of the model whose text is wanted.
    Default: zoo:code-11m."""
    arms: UseAppendAction[tuple[str, ...]] = ()
    """Compared with plain decoding: [NAME=]DRAFT@K[,K...], one arm per K, or
    [NAME=]DRAFT@tree:NODES[,DEPTH,WIDTH], where every draft is a tree of that shape.
    Plain decoding is always the first arm.
    Default for a shipped target: its domain draft at K=1 to 4."""
    prompts: Path | None = None
    """Texts to continue: a .jsonl, .json, .csv, .tsv or .parquet file with "prompt", or .txt with
    one per line or between "---". Default: the shipped prompts, on which no shipped model was
    trained."""
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
    max_context: int = DEFAULTS.max_context
    """Longest prompt and completion."""
    dtype: str = DEFAULTS.dtype
    """auto (as stored), bfloat16, float16 or float32."""
    device: str = DEFAULTS.device
    """auto, cpu, cuda or mps."""
    runner: Runner = DEFAULTS.runner
    """Runs the passes; see `forerun generate --help`."""
    weights: WeightFormat = DEFAULTS.weights
    """Bits of the target's weights; see `forerun generate --help`."""
    threads: int | None = None
    """Threads of the passes. Default: the number with which plain decoding is fastest."""
    controller: Annotated[
        UseAppendAction[tuple[ControllerName, ...]], arg(aliases=("--controllers",))
    ] = ()
    """One more arm per draft and controller, which chooses K up to the draft's largest.
    `forerun generate --help` describes them."""
    profile: UseAppendAction[tuple[Path, ...]] = ()
    """Predict from these profiles of `forerun profile` instead of measuring costs first."""
    no_prediction: bool = False
    """Neither measure costs nor predict."""
    json: bool = False
    """Print one JSON object, all measurements included, instead of tables."""
    out: Path | None = None
    """Write the same JSON object to this file."""
    plot: Path | None = None
    """Draw the tables into this .png, .svg or .pdf file."""
    tracing: TraceFlags = field(default_factory=TraceFlags)
    """Written between the measurements, so that no measurement pays for it."""

    endpoints: EndpointFlags = field(default_factory=EndpointFlags)
    """Of servers with the OpenAI API."""

    @property
    def target(self) -> str:
        return self.model or DEFAULTS.target

    @property
    def config(self) -> BenchConfig:
        shipped = self.target.startswith(PREFIX)
        arms = self.arms or (SHIPPED_ARMS if shipped else ())
        if not arms:
            raise InvalidRequest(f"name the --arms to compare on {self.target}, as DRAFT@K")
        return BenchConfig(
            target=self.target,
            arms=parse_arms(arms),
            controllers=self.controller,
            temperatures=self.temperatures or DEFAULTS.temperatures,
            batches=self.batch or DEFAULTS.batches,
            num_blocks=self.blocks,
            max_tokens=self.max_tokens,
            max_context=self.max_context,
            dtype=self.dtype,
            device=self.device,
            runner=self.runner,
            weights=self.weights,
            num_threads=self.threads,
        )

    def check(self) -> None:
        """Refuse options that would otherwise fail only after the measurements."""
        check_threads(self.threads)
        check_writable("--out", self.out)
        check_plot(self.plot)
        if self.no_prediction and self.profile:
            raise InvalidRequest("--profile and --no-prediction exclude each other")
        self.tracing.check()


def run(options: BenchOptions) -> int:
    """Run the comparison; an interruption or failure still shows the results before it."""
    options.endpoints.check()
    if options.endpoints.url:
        return _endpoint_run(options).run(texts_of(options))
    config = options.config
    options.check()
    prompts = texts_of(options)

    from forerun.measure.bench.compare import MIN_TOKENS
    from forerun.measure.bench.comparison import BenchComparison

    with SafeConsole(stderr=True).status("starting") as status, ExitStack() as opened:
        comparison = BenchComparison(
            config, prompts, clock=time.perf_counter, notify=status_text(status)
        )
        try:
            comparison.load()
            # An existing trace is replaced only now, after the models were loaded.
            trace = opened.enter_context(options.tracing.opened())
            if trace is not None:
                comparison.trace = _begin_trace(trace, options, comparison)
            comparison.run(costs_of(options, comparison, status_text(status)))
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


FOR_ENDPOINTS = frozenset(
    ("model", "prompts", "temperatures", "blocks", "max_tokens", "json", "out", "endpoints")
)


def _endpoint_run(options: BenchOptions) -> EndpointRun:
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
    return EndpointRun(
        options.endpoints,
        options.model,
        params,
        num_blocks=options.blocks,
        json_output=options.json,
        out=options.out,
    )


def texts_of(options: BenchOptions) -> list[str]:
    from forerun.measure.bench.comparison import neighbours_apart, read_prompts

    if options.prompts is not None:
        return read_prompts(options.prompts)
    from forerun.models.catalog import held_out_prompts

    return neighbours_apart([prompt.text for prompt in held_out_prompts()])


def costs_of(
    options: BenchOptions, comparison: BenchComparison, notify: Callable[[str], None]
) -> Mapping[str, DraftCosts]:
    if options.no_prediction:
        return {}
    from forerun.cli.pair_costs import measured_costs, read_costs

    if options.profile:
        return read_costs(options.profile, comparison)
    return measured_costs(comparison, notify)


def _begin_trace(
    trace: TraceWriter, options: BenchOptions, comparison: BenchComparison
) -> BenchTrace:
    """Write one trace header per draft; the draft's hash in each step refers to its header."""
    from forerun.measure.bench.comparison import BenchTrace
    from forerun.provenance import trace_header

    device = str(comparison.device)
    headers = [trace_header(options.target, arm.draft, device) for arm in comparison.config.arms]
    for header in headers:
        trace.add(header)
    hashes = {h.draft: h.draft_hash for h in headers if h.draft is not None and h.draft_hash}
    return BenchTrace(trace, draft_hashes=hashes, with_tokens=options.tracing.trace_tokens)


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
    if options.plot is not None and report.has_results:
        from forerun.measure.bench.summary import plot

        panels = {cell.title: cell.rows for cell in report.cells if cell.rows}
        plot(panels, report.config.target, [options.plot])


LISTS = {
    "--arms": "",
    "--temperature": ",",
    "--temperatures": ",",
    "--batch": ",",
    "--batches": ",",
    "--controller": ",",
    "--controllers": ",",
    "--profile": ",",
    "--url": "",
    "--api-key-env": "",
    "--concurrency": ",",
}


COMMAND = Command(
    options=BenchOptions,
    run=run,
    lists=LISTS,
    description="Compare drafts and K with plain decoding of the same target: every arm continues\n"
    "a batch of prompts before the next comes, and intervals are of the paired ratio. The best\n"
    "of several arms is chosen on one half of the blocks and scored on the other half.\n"
    "With --url, servers answer streamed requests of several clients at once.",
    examples=(
        "forerun bench",
        "forerun bench --arms zoo:code-2m@2,4 other=zoo:books-1m@2 --batch 1 8",
        "forerun bench --arms zoo:code-2m@3 suffix@8 self:2@3",
        "forerun bench --arms zoo:code-2m@2,4 zoo:code-2m@tree:7,3,4",
        "forerun bench --model DIR --arms DRAFT_DIR@4 --prompts prompts.jsonl",
        "forerun bench --arms zoo:code-2m@2,4,8 --controller auto",
        "forerun bench --temperature 0 --blocks 30 --out bench.json --plot bench.svg",
        "forerun bench --url http://127.0.0.1:8000/v1 --concurrency 1 4",
        "forerun bench --trace bench.jsonl && forerun trace summarize bench.jsonl",
    ),
)
