"""The suffix drafter against plain decoding: on edits that repeat, and on prose that does not.

    python benchmarks/speed/suffix/run.py --out build/suffix.json
    python benchmarks/speed/suffix/run.py --target build/pairs/292m/target --cells edits prose \
        --prompts 4 --max-tokens 96 --out build/suffix-292m.json

Cells: "edits" and "prose" are scripted (see scripted.py): the text of a model that does the edit,
or of a person who writes. The "own" cells are what the target itself makes of the same prompts,
greedy ones cut where they begin to loop. Arms take turns prompt by prompt; plain decoding takes
part twice, and what it gains on itself is noise.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from edits import edit_prompts
from scripted import ScriptedModel, ScriptReader

import forerun
from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.drafters.suffix import SuffixAutomaton, SuffixDrafter
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.measure.bench.compare import (
    BenchArm,
    Prompt,
    batched,
    on_best_threads,
    run_blocks,
    scouted,
    warm_up,
)
from forerun.measure.bench.report import ArmSummary, summarise
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio
from forerun.theory.record import StepRecord

Text = tuple[str, list[int]]
"""A prompt and the ids that follow it."""
PROSE_PROMPT_TOKENS = 80
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
CELLS = ("edits", "prose", "own edits, greedy", "own prose, greedy", "own prose, T=1")


def edit_texts(tokenizer: Tokenizer) -> list[Text]:
    return [(p.prompt, tokenizer.encode(p.result)) for p in edit_prompts()]


def prose_texts(tokenizer: Tokenizer) -> list[Text]:
    texts = (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8").split("\n---\n")
    found = []
    for text in texts:
        ids = tokenizer.encode(text)
        prompt = tokenizer.decode(ids[:PROSE_PROMPT_TOKENS])
        found.append((prompt, tokenizer.encode(text[len(prompt) :])))
    return found


def main() -> None:
    options = parser().parse_args()
    target, _ = on_best_threads(lambda n: load(options, n), "import os\n", time.perf_counter)
    texts = {"edits": edit_texts(target.tokenizer), "prose": prose_texts(target.tokenizer)}
    texts = {name: spread(found, options.prompts) for name, found in texts.items()}
    cells = {}
    for cell in options.cells:
        arms, prompts = set_up(cell, target, texts, options)
        warm_up(arms, next(iter(prompts)).text, time.perf_counter)
        batches = batched(list(prompts) * options.repeats, 1)
        rows = summarise(list(run_blocks(arms, batches, time.perf_counter)))
        cells[cell] = rows
        show(cell, rows)
    store = {
        name: store_figures([t for p in found for t in ids_of(target, p)])
        for name, found in texts.items()
    } | {"code": store_figures(code(target.tokenizer))}
    steps = {name: step_us(target, found) for name, found in texts.items()}
    within = within_run(target, texts["prose"], options) if "prose" in options.cells else None
    print(json.dumps({"store": store, "step_us": steps, "prose_within_run": within}, indent=1))
    if options.out:
        result = {
            "options": {name: value for name, value in vars(options).items() if name != "out"},
            "cells": {name: [row.to_dict() for row in rows] for name, rows in cells.items()},
            "store": store,
            "step_us": steps,
            "prose_within_run": within,
            "provenance": collect(
                {options.target: content_hash(options.target)}, target.config.num_threads
            ).to_dict(),
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--target", default="zoo:code-11m")
    flags.add_argument("--k", type=int, default=24)
    flags.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    flags.add_argument("--prompts", type=int, default=12, help="at most so many of each kind")
    flags.add_argument("--repeats", type=int, default=2)
    flags.add_argument("--max-tokens", type=int, default=256)
    flags.add_argument("--out", type=Path)
    return flags


def load(options: argparse.Namespace, num_threads: int) -> Engine:
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=options.k,
        max_context=1024,
        num_threads=num_threads,
    )
    return Engine.load(options.target, dtype="bfloat16", config=config)


def spread(found: Sequence[Text], most: int) -> list[Text]:
    """Some of them, from all files."""
    step = max(1, len(found) // most)
    return list(found[::step][:most])


def set_up(
    cell: str, target: Engine, texts: Mapping[str, Sequence[Text]], options: argparse.Namespace
) -> tuple[list[BenchArm], Iterable[Prompt]]:
    """Arms of a cell and what they continue."""
    kind = "edits" if "edits" in cell else "prose"
    if cell == kind:
        model = ScriptedModel(target.target)
        scripts = dict(texts[kind])

        def reader(engine: Engine) -> ScriptReader:
            return ScriptReader(engine=engine, target=model, scripts=scripts)

        engine = Engine(target=model, tokenizer=target.tokenizer, config=target.config)
        prompts = [
            Prompt(text=text, params=limited(min(len(ids), options.max_tokens)))
            for text, ids in texts[kind]
        ]
        return arms_over(engine, options.k, reader), prompts
    arms = arms_over(target, options.k, lambda engine: engine)
    names = [text for text, _ in texts[kind]]
    if "greedy" in cell:
        return arms, list(scouted(target, names, limited(options.max_tokens)))
    # One seed for both arms makes them write the same text.
    params = [
        SamplingParams(seed=n, max_tokens=options.max_tokens, ignore_eos=True)
        for n in range(len(names))
    ]
    return arms, [Prompt(text=t, params=p) for t, p in zip(names, params, strict=True)]


def limited(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)


def arms_over(engine: Engine, k: int, reader: Callable[[Engine], object]) -> list[BenchArm]:
    drafting = engine.with_draft("suffix", k)
    suffix = f"suffix K<={k}"
    return [
        BenchArm(name="plain", method="plain", num_speculative_tokens=0, engine=reader(engine)),
        BenchArm(
            name="plain again", method="plain", num_speculative_tokens=0, engine=reader(engine)
        ),
        BenchArm(name=suffix, method="suffix", num_speculative_tokens=k, engine=reader(drafting)),
    ]


def within_run(
    target: Engine, texts: Sequence[Text], options: argparse.Namespace
) -> dict[str, float]:
    """What suffix drafting costs on prose by its own trace, without a second arm and its drift.

    A step in which the drafter was not asked is a plain step; that time per token over the time
    that all steps took is the speed beside plain decoding.
    """
    records: list[StepRecord] = []
    model = ScriptedModel(target.target)
    engine = Engine(
        target=model,
        tokenizer=target.tokenizer,
        config=target.config,
        drafter=SuffixDrafter(),
        observers=[EmittedRecords(records.append)],
    )
    reader = ScriptReader(engine=engine, target=model, scripts=dict(texts))
    plain_s, taken_s, draft_s = [], [], 0.0
    for text, ids in [*texts] * options.repeats:
        records.clear()
        reader.generate([text], limited(min(len(ids), options.max_tokens)))
        steps = [r for r in records if not r.num_prefill_rows]
        unasked = [step_s(r) for r in steps if not r.k_budget]
        num_tokens = sum(r.num_emitted for r in steps)
        plain_s.append(sum(unasked) / len(unasked) * num_tokens)
        taken_s.append(sum(map(step_s, steps)))
        draft_s += sum(r.draft_s for r in steps)
    ratio = bootstrap_ratio(plain_s, taken_s, seed=0, num_resamples=2000)
    return {
        "speedup": ratio.estimate,
        "low": ratio.low,
        "high": ratio.high,
        "draft_share": draft_s / sum(taken_s),
        "num_texts": len(taken_s),
    }


def step_s(record: StepRecord) -> float:
    return record.draft_s + record.verify_s + record.other_s


def show(cell: str, rows: Sequence[ArmSummary]) -> None:
    for row in rows:
        speedup, decoding = row.speedup, row.decode_speedup
        tau = 1.0 if row.acceptance_length is None else row.acceptance_length.estimate
        print(
            f"{cell:20} {row.arm.name:12} {row.tokens_per_s.estimate:7.1f} tokens/s  "
            f"speedup {speedup.estimate:.3f} ({speedup.low:.3f}-{speedup.high:.3f})  "
            f"decoding {decoding.estimate:.3f} ({decoding.low:.3f}-{decoding.high:.3f})  "
            f"tau {tau:.2f}  drafted {row.num_drafted}  "
            f"accepted {row.num_accepted}  of {row.num_tokens} tokens  "
            f"4-grams {row.distinct_4gram_share:.2f}  blocks {row.num_groups}",
            flush=True,
        )


def ids_of(target: Engine, text: Text) -> list[int]:
    return [*target.tokenizer.encode(text[0]), *text[1]]


def code(tokenizer: Tokenizer) -> list[int]:
    """The package itself."""
    files = sorted(Path(forerun.__file__).parent.rglob("*.py"))
    return tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in files))


def store_figures(ids: Sequence[int]) -> dict[str, float]:
    """Time and memory of an automaton over a text, the best of three and the only one."""
    times = []
    for _ in range(3):
        automaton, start_s = SuffixAutomaton(), time.perf_counter()
        for token in ids:
            automaton.append(token)
        times.append((time.perf_counter() - start_s) / len(ids))
    tracemalloc.start()
    automaton = SuffixAutomaton()
    for token in ids:
        automaton.append(token)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "num_tokens": len(ids),
        "append_us": min(times) * 1e6,
        "bytes_per_token": size / len(ids),
    }


def step_us(target: Engine, texts: Sequence[Text]) -> dict[str, float]:
    """What a token costs the drafter when they come one at a time: reading, judging, drafting."""
    drafter, times = SuffixDrafter(), []
    for number, (prompt, output) in enumerate(texts):
        ids = target.tokenizer.encode(prompt)
        request = DraftRequest(
            request_id=str(number),
            ids=ids,
            num_prompt=len(ids),
            params=GREEDY,
            noise_key=0,
            history=None,
            coupled=False,
        )
        plan = Plan.chain("suffix", 24)
        drafter.propose([request], [plan])
        for token in output:
            ids.append(token)
            start_s = time.perf_counter()
            drafter.propose([request], [plan])
            times.append(time.perf_counter() - start_s)
        drafter.forget(str(number))
    times.sort()
    return {
        "mean": sum(times) / len(times) * 1e6,
        "median": times[len(times) // 2] * 1e6,
        "p99": times[int(len(times) * 0.99)] * 1e6,
    }


if __name__ == "__main__":
    main()
