"""The fault laboratory: every fault runs and leaves a trace; one that is a bug is caught."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.catalogue import FAULTS
from tests.lab.dice import Dice
from tests.lab.laboratory import Lab
from tests.lab.run import run_fault

from forerun.doctor.diagnosis import CAUSES, derive, diagnose
from forerun.doctor.readers.trace import read_trace_evidence
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.files import read_trace

pytestmark = pytest.mark.usefixtures("unchecked")  # dozens of runs of the shipped pair


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A laboratory of very short runs."""
    folder = tmp_path_factory.mktemp("lab")
    return Lab(folder, num_prompts=4, num_tokens=8, num_training_steps=2)


def test_every_label_is_a_cause_and_there_are_twenty_faults():
    labels = [fault.label for fault in FAULTS.values()]
    assert set(labels) <= set(CAUSES)
    assert len(labels) - labels.count("healthy") >= 20 and labels.count("healthy") >= 6


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_leaves_a_readable_trace(name: str, short: Lab, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    run = run_fault(FAULTS[name], 3, path, short)
    records = list(read_trace(path))
    steps = [record for record in records if isinstance(record, StepRecord)]
    requests = [record for record in records if isinstance(record, RequestRecord)]
    assert sum(step.num_emitted for step in steps) == sum(r.num_output_tokens for r in requests)
    assert all(step.verify_s > 0.0 for step in steps)
    assert len(run.outputs) == len(run.requests)
    evidence = read_trace_evidence(path)
    for fact, value in run.says.items():
        evidence.add(fact, value, "the complaint")
    evidence = derive(evidence)
    drafts = FAULTS[name].label != "speculation_not_engaged"
    assert evidence.flag("drafts_absent") in ((False,) if drafts else (True, None))


def test_a_seed_repeats_itself_and_another_differs(short: Lab, tmp_path: Path):
    def tokens(name: str, seed: int) -> list[tuple[int, ...]]:
        run = run_fault(FAULTS[name], seed, tmp_path / "trace.jsonl", short)
        return [output.token_ids for output in run.outputs]

    assert tokens("rejected row kept", 0) == tokens("rejected row kept", 0)
    assert tokens("rejected row kept", 0) != tokens("rejected row kept", 1)
    assert Dice(0, "one").bits() != Dice(0, "other").bits()


def test_a_pass_per_row_is_named_for_what_it_is(tmp_path: Path):
    lab = Lab(tmp_path / "lab", num_prompts=3, num_tokens=48)
    run = run_fault(FAULTS["separate passes"], 1, tmp_path / "trace.jsonl", lab)
    diagnosis = diagnose(read_trace_evidence(run.trace))
    assert diagnosis.causes[0].scored.cause.label == "verify_not_parallel"
