"""Run faults and controls, probe their engines, and keep traces and facts for `judge.py`.

    python benchmarks/faults/collect.py --seeds 5-14 --out build/faults [--seconds 50]

What is there already is not run again, so that it can be called until nothing is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import torch
from tests.lab.catalogue import FAULTS
from tests.lab.laboratory import Lab
from tests.lab.run import FaultRun, run_fault
from tests.lab.setups import Fault

from forerun.doctor.evidence import Evidence
from forerun.doctor.probe.config import EvidenceConfig
from forerun.doctor.probe.run import ProbedEngine, probe_engine
from forerun.doctor.readers.sources import facts_document

PROBE = EvidenceConfig(num_prompts=8, num_tokens=64, num_self_prompts=0, max_rows=0)
"""Passes are not timed: this machine is not the device of the laboratory."""
LEFT = 3
"""Exit code where time was up before everything was there."""


def main() -> None:
    """Whatever is missing, until time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, required=True)
    parser.add_argument("--only", choices=FAULTS, nargs="*", default=FAULTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("forerun.drafting").setLevel(logging.ERROR)  # one fault breaks the draft
    options.out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    lab = Lab(options.out / "models")
    for seed in options.seeds:
        for fault in FAULTS.values():
            facts = options.out / f"{name_of(fault, seed)}.facts.json"
            if facts.exists() or fault.name not in options.only:
                continue
            if time.monotonic() - start_s > options.seconds:
                sys.exit(LEFT)
            collect(fault, seed, facts, lab)


def seeds_of(text: str) -> range:
    """As in 5-14."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def name_of(fault: Fault, seed: int) -> str:
    """Of the files of a run."""
    return f"{fault.name.replace(' ', '-').replace('>', 'above')}-{seed}"


def collect(fault: Fault, seed: int, facts: Path, lab: Lab) -> None:
    """One run: a trace, then what a person says and what a probe finds, as facts."""
    start_s = time.monotonic()
    trace = facts.with_name(f"{name_of(fault, seed)}.jsonl")
    run = run_fault(fault, seed, trace, lab)
    ran_s = time.monotonic() - start_s
    document = {"says": dict(run.says), "probe": facts_document(probed(run), "the probe")}
    facts.write_text(json.dumps(document, indent=1) + "\n")
    probed_s = time.monotonic() - start_s - ran_s
    print(f"{fault.name}, seed {seed}: run {ran_s:.1f} s, probe {probed_s:.1f} s", flush=True)


def probed(run: FaultRun) -> Evidence:
    """What a probe of the live engine finds."""
    return probe_engine(
        ProbedEngine(
            engine=run.engine,
            target_folder=run.target_folder,
            draft_folder=run.draft_folder,
        ),
        [request.prompt for request in run.requests],
        run.requests[0].params,
        PROBE,
    )


if __name__ == "__main__":
    main()
