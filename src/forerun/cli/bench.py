"""`forerun bench`: drafts and K compared with plain decoding of the same target."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command
from forerun.cli.flags import (
    TraceFlags,
    check_threads,
    check_writable,
)
from forerun.cli.tables import SafeConsole, status_text
from forerun.client.urls import shown_url
from forerun.control.config import ControllerName
from forerun.drafters.config import AUTO
from forerun.errors import InvalidRequest
from forerun.measure.bench.config import BenchConfig, parse_arms
from forerun.models.architecture import WeightFormat
from forerun.models.catalog import DEFAULT_TARGET, ZOO_DRAFTS

if TYPE_CHECKING:
    from forerun.measure.bench.comparison import BenchComparison, BenchTrace
    from forerun.trace.files import TraceWriter


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
}


def refuse_urls(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments; raise InvalidRequest for servers, which `forerun tune` compares."""
    if not any(word.partition("=")[0] == "--url" for word in arguments):
        return arguments
    words = [word.removeprefix("--url=") for word in arguments]
    urls = [shown_url(word) for word in words if word.startswith("http")] or ["URL"]
    arms = " ".join(f"--arm {name}={url}" for name, url in zip("abcdefgh", urls, strict=False))
    raise InvalidRequest(f"servers are compared by another command: forerun tune {arms}")


COMMAND = Command(
    options=BenchOptions,
    run=run,
    lists=LISTS,
    rewrite=refuse_urls,
    usual="model arms prompts raw temperatures batch blocks max_tokens weights threads controller "
    "json out trace",
    description="Compare drafts and K with plain decoding of the same target: every arm continues\n"
    "a batch of prompts before the next comes, and intervals are of the paired ratio. The best\n"
    "of several arms is chosen on one half of the blocks and scored on the other half.",
    examples=(
        "forerun bench",
        "forerun bench --model zoo:code-40m --arms zoo:code-2m-for-40m@2,4 --batch 1 8",
        "forerun bench --arms suffix@8 self:int4@3 auto",
        "forerun bench --model zoo:code-40m --arms zoo:code-2m-for-40m@tree:7,3,4",
        "forerun bench --model DIR --arms DRAFT_DIR@4 --prompts prompts.jsonl",
        "forerun bench --arms self:int4@2,4,8 --controller auto",
        "forerun bench --temperature 0 --blocks 30 --out bench.json",
        "forerun bench --trace bench.jsonl && forerun explain bench.jsonl",
    ),
)
