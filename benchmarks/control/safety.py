"""Never slower than plain, on the engine: a useless draft, and one that comes and goes.

    python benchmarks/control/safety.py --profile FILE --out FILE [--target T --draft D] [--part P]

The useless draft has the shape of the draft and random weights. `useless` decodes the same prompts
plainly and under `auto` with it, prompt by prompt in turns, and every round begins with models
loaded anew and a controller that knows nothing. `switch` serves request after request under `auto`
while the draft model is taken away and given back between two steps, and notes K; of the prompts
those on which the good draft pays, for on others plain decoding is right whichever draft is there.
Parts are added to FILE.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.control.base import Plan
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import load_drafters
from forerun.engine.observing import EmittedRecords
from forerun.measure.profile import load_profile
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.pictures import picture
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.acceptance import first_repeat
from forerun.theory.intervals import bootstrap_ratio
from forerun.theory.record import StepRecord

MAX_K = 8
NUM_TOKENS = 250
PER_ROUND = 8
"""Prompts, so 2,000 tokens."""
PHASE = 300
"""Steps with one draft."""
WINDOW = 20
"""Steps that are looked at together to say whether speculation is on or off."""
MOSTLY = 0.8
"""Share of a window that has to draft for it to be on, or not to for it to be off."""
PAYING_K, PAYING_TAU = 3, 2.6
"""Texts on which the good draft pays emit at least so many tokens per cycle at that K."""
LEAST_TEXT = 48
"""Tokens of the texts of `switch` at least, which end before they loop."""
MOST_PROMPT, SHORT_PROMPT = 400, 100
"""Tokens of prompts; where steps are looked at, most of the time should go into steps."""


class Swapped(Drafter):
    """Drafts with one of several draft models, which a plan cannot tell apart.

    Attributes:
        current: the one that drafts.
    """

    method = "draft_model"
    required_features: tuple[int, ...] = ()

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = drafters
        self.current = drafters[0]

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """The current one's."""
        return self.current.propose(requests, plans)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Of the current one's proposals: it is swapped between steps."""
        self.current.observe(outcomes)

    def forget(self, request_id: str) -> None:
        """By all."""
        for drafter in self.drafters:
            drafter.forget(request_id)


class Bench:
    """A loaded pair with a useless draft beside the good one.

    Args:
        arguments: of the command line.
        folder: where the useless draft is written.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.costs = {"draft_model": load_profile(arguments.profile).costs}
        config = EngineConfig(
            num_speculative_tokens=MAX_K,
            max_batch=1,
            max_context=1024,
            sharing="none",
            num_threads=arguments.threads,
        )
        self.plain = Engine.load(arguments.target, config=config)
        write_useless(arguments.draft, folder)
        self.good, self.useless = (
            load_drafters(
                [name], self.plain.target, self.plain.tokenizer, dtype="auto", config=config
            )
            for name in (arguments.draft, folder)
        )
        encoded = [self.plain.tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
        self.prompts = [ids[:MOST_PROMPT] for ids in encoded]

    def auto(self, drafter: Drafter) -> Engine:
        """An engine whose controller has no estimates yet."""
        controller = GoodputController({"draft_model": self.costs["draft_model"]}, MAX_K)
        return self.plain.with_draft(drafter, controller=controller)

    def seconds(self, engine: Engine, ids: list[int], params: SamplingParams) -> float:
        """One request, everything included."""
        started_s = time.perf_counter()
        engine.generate([ids], params)
        return time.perf_counter() - started_s

    def useless_round(self, temperature: float, number: int) -> dict[str, Any]:
        """Plain and under `auto`, prompt by prompt, the order turning round."""
        params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = islice(cycle(self.prompts), number * PER_ROUND, None)
        warm = self.auto(self.useless)
        for engine in (self.plain, warm):
            engine.generate([self.prompts[-1]], params)
        engine = self.auto(self.useless)
        plain_s, auto_s = [], []
        for at in range(PER_ROUND):
            ids = next(prompts)
            if at % 2:
                auto_s.append(self.seconds(engine, ids, params))
            plain_s.append(self.seconds(self.plain, ids, params))
            if not at % 2:
                auto_s.append(self.seconds(engine, ids, params))
        return {
            "temperature": temperature,
            "plain_s": plain_s,
            "auto_s": auto_s,
        }

    def paying(self) -> list[tuple[list[int], SamplingParams]]:
        """Requests on which the good draft pays."""
        records: list[StepRecord] = []
        fixed = self.plain.with_draft(self.good, controller=FixedController(PAYING_K))
        fixed.observers[:] = [EmittedRecords(records.append)]
        found = []
        for ids in [ids[:SHORT_PROMPT] for ids in self.prompts]:
            (output,) = self.plain.generate([ids], greedy(NUM_TOKENS))
            params = greedy(first_repeat(output.completions[0].token_ids))
            records.clear()
            if params.max_tokens >= LEAST_TEXT:
                fixed.generate([ids], params)
                cycles = [record.num_emitted for record in records if record.k_budget]
                if sum(cycles) >= PAYING_TAU * len(cycles):
                    found.append((ids, params))
        return found

    def switch_round(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> dict[str, Any]:
        """K of every step: good, useless, good."""
        swapped = Swapped((self.good, self.useless))
        engine = self.auto(swapped)
        ks: list[int] = []

        def note(record: StepRecord) -> None:
            if record.num_prefill_rows == 0:
                ks.append(record.k_budget)
                swapped.current = swapped.drafters[len(ks) // PHASE % 2]

        engine.observers[:] = [EmittedRecords(note)]
        for ids, params in cycle(requests):
            engine.generate([ids], params)
            if len(ks) >= 3 * PHASE:
                break
        return {
            "ks": ks[: 3 * PHASE],
            "off_after": followed(ks[PHASE : 2 * PHASE], on=False),
            "on_after": followed(ks[2 * PHASE : 3 * PHASE], on=True),
        }


def greedy(num_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def write_useless(draft: str, folder: Path) -> None:
    """A draft of the same shape that never learnt anything."""
    source = ModelFiles.find(draft).folder
    torch.manual_seed(0)  # noqa: TID251  # transformers draws initial weights from it
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens")):
            copy(path, folder)


def followed(ks: Sequence[int], *, on: bool) -> int | None:
    """Steps until a window of them mostly drafts, or mostly does not; None: it never does."""
    for end in range(WINDOW, len(ks) + 1):
        drafting = sum(k > 0 for k in ks[end - WINDOW : end]) / WINDOW
        if (drafting if on else 1.0 - drafting) >= MOSTLY:
            return end
    return None


def ratios(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed under `auto` over plain: all requests, by temperature."""
    found = {}
    for temperature in sorted({each["temperature"] for each in rounds}):
        own = [each for each in rounds if each["temperature"] == temperature]
        plain_s = [s for each in own for s in each["plain_s"]]
        auto_s = [s for each in own for s in each["auto_s"]]
        found[f"T={temperature:g}"] = asdict(bootstrap_ratio(plain_s, auto_s, seed=1))
    return found


def draw(rounds: Sequence[dict[str, Any]], path: Path) -> None:
    """K over steps, every round a thin line over their mean."""
    with picture([path], width=9.0, height=3.2) as figure:
        axes = figure.subplots()
        for each in rounds:
            axes.plot(each["ks"], color="#9ab8d0", linewidth=0.4)
        mean = [sum(ks) / len(rounds) for ks in zip(*(r["ks"] for r in rounds), strict=True)]
        smooth = [
            sum(mean[max(0, at - WINDOW + 1) : at + 1]) / min(WINDOW, at + 1)
            for at in range(len(mean))
        ]
        axes.plot(smooth, color="#4361a8", linewidth=1.6)
        for at, name in enumerate(("good draft", "useless draft", "good draft")):
            axes.axvline(at * PHASE, color="#888888", linewidth=0.8)
            axes.text(at * PHASE + 8, MAX_K, name, va="top")
        axes.set(xlabel="step", ylabel="K", ylim=(-0.2, MAX_K + 0.3), xlim=(0, 3 * PHASE))


def main() -> None:
    """Measure a part and write it beside the others."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", type=Path, required=True, help="of the pair, of this machine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--part", choices=("useless", "switch"), default="useless")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="of K over the steps of `switch`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part == "useless":
            rounds = []
            for number in range(arguments.rounds):
                # Where in memory a model lies decides a few hundredths of its speed.
                bench = Bench(arguments, Path(folder))
                rounds += [bench.useless_round(temperature, number) for temperature in (0.0, 1.0)]
            figures = ratios(rounds)
        else:
            bench = Bench(arguments, Path(folder))
            requests = bench.paying()
            print(f"{len(requests)} of {len(bench.prompts)} texts, on which the draft pays")
            starts = [at * len(requests) // arguments.rounds for at in range(arguments.rounds)]
            rounds = [bench.switch_round([*requests[at:], *requests[:at]]) for at in starts]
            figures = {name: [r[name] for r in rounds] for name in ("off_after", "on_after")}
    print(json.dumps(figures, indent=1))
    if arguments.part == "switch" and arguments.picture is not None:
        draw(rounds, arguments.picture)
    parts = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    parts[arguments.part] = {
        "target": arguments.target,
        "draft": arguments.draft,
        "figures": figures,
        "rounds": rounds,
        "provenance": collect({}).to_dict(),
    }
    arguments.out.write_text(json.dumps(parts, indent=1) + "\n")


if __name__ == "__main__":
    main()
