"""`forerun bench --url`: one server under load, or two compared."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column
from tyro.conf import UseAppendAction

from forerun.atomic_write import atomic_write
from forerun.cli.flags import check_writable
from forerun.cli.tables import SafeConsole, progress_bar, table_of, with_ends
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.engine.http_backend import HttpBackend
    from forerun.measure.bench.load import LoadBlock
    from forerun.sampling.config import SamplingParams
    from forerun.theory.intervals import Interval

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
            raise InvalidRequest(f"--url is {list(self.url)}; give one server, or two others")
        if len(self.api_key_env) > len(self.url):
            raise InvalidRequest("--api-key-env is given more often than --url")
        if any(not 1 <= n <= MOST_CLIENTS for n in self.concurrency):
            raise InvalidRequest(
                f"--concurrency is {list(self.concurrency)}; it must be from 1 to {MOST_CLIENTS}"
            )
        if self.requests is not None and self.requests < 1:
            raise InvalidRequest(f"--requests is {self.requests}; it must be at least 1")

    @property
    def num_requests(self) -> dict[int, int]:
        found = sorted(set(self.concurrency or CONCURRENCY))
        return {n: max(n, self.requests or max(3, 2 * n)) for n in found}


class EndpointRun:
    """Runs a load test and shows its results, also after an interruption.

    Args:
        model: name of the model on the servers; None takes the first one.
    """

    def __init__(
        self,
        flags: EndpointFlags,
        model: str | None,
        params: SamplingParams,
        *,
        num_blocks: int,
        json_output: bool,
        out: Path | None,
    ) -> None:
        self.flags = flags
        self.model = model
        self.params = params
        self.num_blocks = num_blocks
        self.json_output = json_output
        self.out = out
        self.backends: dict[str, HttpBackend] = {}
        self.blocks: list[LoadBlock] = []
        self.number = secrets.randbits(32)

    def run(self, texts: Sequence[str]) -> int:
        """Measure all blocks, with a progress bar, and show what was measured."""
        from forerun.measure.bench.load import load_prompts, run_load

        check_writable("--out", self.out)
        counts = self.flags.num_requests
        with ExitStack() as stack:
            for place, url in enumerate(self.flags.url):
                self.backends[url] = stack.enter_context(self._connected(place, url))
            total = self.num_blocks * len(counts) * len(self.backends)
            try:
                with progress_bar("warming up", total) as report:
                    for block in run_load(
                        self.backends,
                        lambda first, n: load_prompts(texts, first, n, self.number),
                        self.params,
                        num_requests=counts,
                        num_blocks=self.num_blocks,
                    ):
                        self.blocks.append(block)
                        done = len(self.blocks)
                        report(f"{block.concurrency} clients, block {done} of {total}", done)
            except BaseException:
                for backend in self.backends.values():
                    backend.close()  # ends the requests that still run
                raise
            finally:
                if self.blocks:
                    self.show()
        return 0

    def _connected(self, place: int, url: str) -> HttpBackend:
        from forerun.client.config import ClientConfig
        from forerun.engine.http_backend import HttpBackend

        variables = self.flags.api_key_env
        variable = variables[min(place, len(variables) - 1)] if variables else None
        most = max(self.flags.num_requests)
        return HttpBackend(
            ClientConfig(url=url, model=self.model, key_variable=variable, max_connections=most)
        )

    def show(self) -> None:
        """Print and write the results measured until now."""
        if not self.json_output:
            self._print()
        if not self.json_output and self.out is None:
            return
        content = json.dumps(self.report())
        if self.json_output:
            print(content)
        if self.out is not None:
            with atomic_write(self.out) as scratch:
                scratch.write_text(content + "\n", encoding="utf-8")

    def report(self) -> dict[str, object]:
        from forerun.measure.bench.load import agreement, load_figures, load_rows
        from forerun.provenance import collect

        cells = []
        for row in load_rows(self.blocks):
            pair = list(row.values())
            cell: dict[str, object] = {
                "concurrency": pair[0][0].concurrency,
                "num_blocks": len(pair[0]),
                "figures": {url: as_json(load_figures(blocks)) for url, blocks in row.items()},
            }
            if len(pair) == 2:
                cell["first_over_second"] = as_json(load_figures(*pair))
                if self.params.temperature == 0:
                    number, share = agreement(*pair)
                    cell["equal_texts"] = {"num_texts": number, **asdict(share)}
            cells.append(cell)
        return {
            "endpoints": [
                {"url": url, "model": backend.model, "num_retries": len(backend.waits_s)}
                for url, backend in self.backends.items()
            ],
            "cells": cells,
            "blocks": [block.to_dict() for block in self.blocks],
            "config": {
                "max_tokens": self.params.max_tokens,
                "temperature": self.params.temperature,
                "ignore_eos": self.params.ignore_eos,
                "requests_of_a_block": self.flags.num_requests,
                "run": self.number,
            },
            "provenance": collect({}).to_dict(),
        }

    def _print(self) -> None:
        from forerun.measure.bench.load import load_figures, load_rows

        console = SafeConsole()
        letters = dict(zip(self.backends, "AB", strict=False))
        for url, backend in self.backends.items():
            waits = backend.waits_s
            busy = f"; {len(waits)} retries after {sum(waits):.0f} s, included in the times"
            line = f"{letters[url]}: {url}, model {backend.model}{busy if waits else ''}"
            console.print(line, markup=False)
        headings = (heading for heading, _, _ in COLUMNS.values())
        table = table_of(Column("clients", no_wrap=True), *headings)
        rows = load_rows(self.blocks)
        for row in rows:
            for url, blocks in row.items():
                name = f"{blocks[0].concurrency}, {letters[url]}\n{len(blocks)} blocks"
                table.add_row(name, *_cells_of(load_figures(blocks)))
        console.print(table, "", "TTFT: time to first token; TPOT: time per output token", sep="\n")
        for row in rows if len(letters) == 2 else ():
            console.print(*self._comparison(*row.values()), sep="\n", markup=False)

    def _comparison(self, first: Sequence[LoadBlock], second: Sequence[LoadBlock]) -> list[str]:
        """Return sentences on the ratios and on the texts at one number of clients."""
        from forerun.measure.bench.load import agreement, load_figures, load_outcome

        found = [f"A / B with {first[0].concurrency} clients:"]
        for name, ratio in load_figures(first, second).items():
            label = " ".join(COLUMNS[name][0].replace(", ms", "").split())
            found.append(f"  {label} {load_outcome(ratio, len(first))}")
        if self.params.temperature == 0:
            number, share = agreement(first, second)
            found.append(f"  equal texts: {round(share.estimate * number)} of {number}")
        return found


def as_json(figures: dict[str, Interval]) -> dict[str, dict[str, float | None]]:
    """Return figures for JSON; an end at infinity is None."""
    return {
        name: {end: v if math.isfinite(v) else None for end, v in asdict(interval).items()}
        for name, interval in figures.items()
    }


def _cells_of(figures: dict[str, Interval]) -> list[str]:
    found = []
    for name, interval in figures.items():
        _, scale, spec = COLUMNS[name]
        scaled = {end: scale * value for end, value in asdict(interval).items()}
        found.append(with_ends(replace(interval, **scaled), spec))
    return found
