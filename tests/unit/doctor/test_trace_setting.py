"""What a trace shows of its own setting: headers, parameters, tags, tokens, K, pauses, contexts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP

from forerun.doctor.diagnosis import derive, diagnose
from forerun.doctor.evidence import Evidence, merge
from forerun.doctor.readers.trace import read_trace_evidence
from forerun.doctor.words import headline
from forerun.theory.record import StepRecord
from forerun.trace.files import Record, open_trace


def step(index: int, accepted: int = 2, **changes: object) -> StepRecord:
    values = {"cycle_id": index, "step": index, "t_s": index / 50, "num_accepted": accepted}
    values |= {"num_emitted": accepted + 1, "expected_accepted": float(accepted)}
    return replace(STEP, **(values | changes))  # type: ignore[arg-type]


def pause(index: int) -> StepRecord:
    nothing = {"k_budget": 0, "num_drafted": 0, "depth_drafted": 0, "num_emitted": 1}
    return step(index, 0, **nothing)


def read(folder: Path, records: Sequence[Record]) -> Evidence:
    path = folder / "trace.jsonl"
    with open_trace(path) as writer:
        for record in records:
            writer.add(record)
    evidence = read_trace_evidence(path)
    return derive(evidence)


def asked(**parameters: object) -> Record:
    return replace(REQUEST, parameters={"temperature": 1.0} | parameters)  # type: ignore[arg-type]


def test_headers_that_differ_in_the_target_alone_say_that_it_changed(tmp_path: Path):
    steps = [step(index) for index in range(40)]
    other = replace(HEADER, target_hash="t1")
    assert read(tmp_path, [HEADER, *steps, other]).words("changed") == ("target",)
    assert not read(tmp_path, [HEADER, *steps, HEADER]).words("changed")
    arms = [HEADER, *steps, replace(other, draft_hash="d1")]
    assert not read(tmp_path, arms).words("changed")


@pytest.mark.parametrize(
    ("parameters", "fact", "answer"),
    [
        ({"verification": "walk"}, "exact_match_rule", True),
        ({"verification": "block"}, "exact_match_rule", False),
        ({"verification": "auto"}, "exact_match_rule", None),
        ({"draft_temperature": 0.0}, "draft_one_hot", True),
        ({"draft_temperature": None}, "draft_one_hot", False),
        ({"temperature": 0.0, "verification": "walk"}, "exact_match_rule", None),
    ],
)
def test_rules_asked_for_are_known(
    tmp_path: Path, parameters: dict[str, object], fact: str, answer: bool | None
):
    steps = [step(index) for index in range(40)]
    assert read(tmp_path, [HEADER, *steps, asked(**parameters)]).flag(fact) is answer


def test_tags_of_a_format_are_no_domains(tmp_path: Path):
    records: list[Record] = [HEADER]
    for number in range(12):
        tag, accepted = [("template:a", 3), ("template:b", 0)][number % 2]
        name = f"r{number}"
        records += [
            step(1000 * number + index, accepted if index % 9 else 1, request_id=name)
            for index in range(40)
        ]
        records.append(replace(REQUEST, request_id=name, tags=(tag,)))
    found = read(tmp_path, records)
    assert found.flag("acceptance_differs_by_template") is True
    assert found.flag("acceptance_differs_by_domain") is None


def test_repetition_is_seen_where_tokens_are_kept(tmp_path: Path):
    loop = [step(index, token_ids=(1, 2, 3)) for index in range(100)]
    assert read(tmp_path, [HEADER, *loop]).flag("output_repetitive") is True


def test_text_that_does_not_repeat_is_said_to_be_none_that_does(tmp_path: Path):
    text = [step(index, token_ids=(index, 2 * index, 7)) for index in range(100)]
    found = read(tmp_path, [HEADER, *text])
    assert found.flag("output_repetitive") is False


def test_prompts_of_random_ids_are_told_from_texts(tmp_path: Path):
    steps = [step(index) for index in range(40)]
    random = replace(REQUEST, prompt_token_ids=tuple(range(7, 4007, 10)))
    assert read(tmp_path, [HEADER, *steps, random]).flag("random_prompts") is True
    text = replace(REQUEST, prompt_token_ids=tuple(index % 23 for index in range(400)))
    assert read(tmp_path, [HEADER, *steps, text]).flag("random_prompts") is False


def test_k_that_swings_is_told_from_one_that_follows(tmp_path: Path):
    swinging = [step(index, k_budget=(1, 12)[index % 2]) for index in range(100)]
    found = read(tmp_path, [HEADER, *swinging])
    assert (found.number("k_swing") or 0.0) > 0.9 and found.flag("adaptive_k") is True
    following = [step(index, k_budget=(4, 5, 6, 5)[index % 4]) for index in range(100)]
    assert (read(tmp_path, [HEADER, *following]).number("k_swing") or 1.0) < 0.3
    fixed = read(tmp_path, [HEADER, *[step(index) for index in range(100)]])
    assert fixed.number("k_swing") == 0.0 and fixed.flag("adaptive_k") is None


def test_drafts_that_are_bad_after_a_pause(tmp_path: Path):
    def run(after: int) -> list[Record]:
        return [
            HEADER,
            *(
                pause(index)
                if index % 12 == 0
                else step(index, after if 0 < index % 12 <= 2 else 3 * (index % 5 > 0))
                for index in range(600)
            ),
        ]

    name = "acceptance_falls_after_handoff"
    assert read(tmp_path, run(0)).flag(name) is True
    assert read(tmp_path, run(3)).flag(name) is False


@pytest.mark.parametrize(("grows", "answer"), [(0.0, False), (2e-5, True)])
def test_passes_that_grow_with_the_context(tmp_path: Path, grows: float, answer: bool):
    steps = [
        step(index, context_tokens=4 * index, verify_s=0.01 + grows * 4 * index)
        for index in range(300)
    ]
    assert read(tmp_path, [HEADER, *steps]).flag("slower_with_context") is answer


def test_text_that_repeats_itself_is_a_remark_unless_a_person_compares_rates_on_it(tmp_path: Path):
    dice = random.Random(0)
    loop = [step(index, dice.choice((0, 1, 2, 3, 4)), token_ids=(1, 2, 3)) for index in range(300)]
    evidence = read(tmp_path, [HEADER, *loop])
    evidence.facts.pop("output_repetitive")
    found = diagnose(evidence)
    assert found.verdict == "healthy" and found.to_dict()["remark"] == found.remark
    assert headline(found).endswith("text that repeats itself: 0% of its 4-grams are distinct.")
    for name, value in (("output_repetitive", True), ("tokens_per_s_plain", 40.0)):
        told = merge(evidence)
        told.add(name, value, "given")
        said = diagnose(told)
        assert said.verdict == "problem" and not said.remark
        assert said.causes[0].scored.cause.label == "degenerate_output_inflation"
