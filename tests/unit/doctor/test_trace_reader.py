"""Traces as evidence: figures by hand, contrasts that were planted, and damage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP, line_of, plain

from forerun.doctor.diagnosis import derive, diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.readers import trace_totals as reader
from forerun.doctor.readers.trace import read_trace_evidence
from forerun.doctor.words import headline, sections
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import INCREMENT, finalise
from forerun.trace import columns
from forerun.trace.columns import BLOCK_STEPS, StepBlock, pieces_of
from forerun.trace.files import Record, open_trace, read_trace


def drafted(index: int, accepted: int, **changes: object) -> StepRecord:
    """K = 4; drafting 4 ms, the pass 12 ms, the rest 4 ms."""
    values = {"cycle_id": index, "step": index, "t_s": index / 50, "context_tokens": index}
    values |= {"num_accepted": accepted, "num_emitted": accepted + 1}
    values |= {"expected_accepted": float(accepted)}
    values |= {"draft_s": 0.004, "verify_s": 0.012, "other_s": 0.004}
    return replace(STEP, **(values | changes))  # type: ignore[arg-type]


def undrafted(index: int, **changes: object) -> StepRecord:
    values = {"cycle_id": index, "step": index, "t_s": index / 50, "context_tokens": index}
    return plain(**(values | {"verify_s": 0.009, "other_s": 0.001} | changes))


def written(path: Path, records: Sequence[Record]) -> Path:
    with open_trace(path) as writer:
        for record in records:
            writer.add(record)
    return path


def read(path: Path, records: Sequence[Record]) -> Evidence:
    evidence = read_trace_evidence(written(path, records))
    return derive(evidence)


RUN = [
    HEADER,
    undrafted(0, num_prefill_rows=12, verify_s=0.039),
    *(drafted(index, (index % 5)) for index in range(1, 101)),
    *(undrafted(index) for index in range(101, 121)),
    replace(REQUEST, parameters={"temperature": 0.5}, tags=("code",)),
]


def test_a_small_k_that_a_controller_chose_is_not_too_small(tmp_path: Path):
    """Most steps draft one token, which is accepted; larger K were tried and left."""
    tried = [drafted(index, 2, k_budget=4) for index in range(1, 9)]
    usual = [
        drafted(index, 1, k_budget=1, num_drafted=1, depth_drafted=1, batch_rows=2)
        for index in range(9, 200)
    ]
    rest = [undrafted(index) for index in range(200, 230)]
    fixed = read(tmp_path / "fixed.jsonl", [HEADER, *usual, *rest, REQUEST])
    chosen = read(tmp_path / "chosen.jsonl", [HEADER, *tried, *usual, *rest, REQUEST])
    ceilings = ("full_accept_share", "length_over_ceiling")
    assert all(name in fixed and name not in chosen for name in ceilings)
    labels = [cause.scored.cause.label for cause in diagnose(chosen).causes]
    assert diagnose(fixed).causes[0].scored.cause.label == "k_too_small"
    assert "k_too_small" not in labels[:1]


def test_probes_of_a_controller_that_decodes_plainly_are_no_swing(tmp_path: Path):
    steps = [
        drafted(index, 0, k_budget=1, num_drafted=1, depth_drafted=1, batch_rows=2)
        if index % 40 == 0
        else undrafted(index)
        for index in range(1, 400)
    ]
    assert read(tmp_path / "probes.jsonl", [HEADER, *steps, REQUEST]).number("k_swing") == 0.0


def test_figures_by_hand(tmp_path: Path):
    found = read(tmp_path / "trace.jsonl", RUN)
    assert found.number("num_drafts") == 100 and found.number("num_accepted") == 200
    assert found.number("acceptance_length") == 3.0 and found.number("k") == 4
    assert found.numbers("acceptance_rate_per_position") == (0.8, 0.6, 0.4, 0.2)
    assert found.number("calibration") == 1.0
    assert found.number("full_accept_share") == 0.2
    assert found.number("plain_step_s") == pytest.approx(0.01)
    assert found.number("cycle_cost") == pytest.approx(2.0)
    assert found.number("draft_cost") == pytest.approx(0.1)
    assert found.number("verify_cost") == pytest.approx(1.2)
    assert found.number("overhead") == pytest.approx(0.4)
    assert found.number("acceptance_length") / found.number("cycle_cost") == pytest.approx(1.5)
    assert found.number("speedup") == pytest.approx(3.2 / 2.2)  # 20 of the 120 steps are plain
    # 0.04 s of reading the prompt, 100 x 0.02 s, 20 x 0.01 s
    assert found.number("prefill_share") == pytest.approx(0.04 / 2.24)
    assert found.number("tokens_per_s") == pytest.approx((300 + 20) / 2.2)
    assert found.number("k0_share") == pytest.approx(1 / 6)
    assert found.number("temperature") == 0.5 and found.number("batch") == 1.0
    assert found.series["K"] == ((4.0, 100.0, 100.0),)
    assert [(tag, n) for tag, _, n in found.series["tag"]] == [("code", 100.0)]


@pytest.mark.parametrize(
    ("controllers", "share"),
    [
        (("auto",), 20 / 120),
        (("goodput", "auto"), 20 / 120),
        (("fixed",), None),  # its plain steps are chosen by the requests
        ((None,), None),
        (("auto", None), None),
    ],
)
def test_steps_for_which_a_controller_planned_no_draft_are_a_share(tmp_path, controllers, share):
    headers = [replace(HEADER, controller=name) for name in controllers]
    found = read(tmp_path / "trace.jsonl", [*headers, *RUN[1:]])
    assert found.number("off_share") == (None if share is None else pytest.approx(share))
    text = headline(diagnose(found))
    line = "The controller planned plain decoding for 17% of the steps."
    assert (line in text) == bool(share)


def test_plain_decoding_without_a_draft_is_not_a_decision_of_the_controller(tmp_path):
    header = replace(HEADER, controller="auto", draft=None, draft_hash=None)
    assert read(tmp_path / "trace.jsonl", [header, *RUN[1:]]).number("off_share") is None


def test_requests_of_one_cycle_share_its_time(tmp_path: Path):
    records = [
        drafted(index, 2, request_id=name) for index in range(60) for name in ("a", "b", "c")
    ]
    found = read(tmp_path / "trace.jsonl", [HEADER, *records])
    assert found.number("batch") == 3.0 and found.number("cycle_s") == pytest.approx(0.02)
    assert found.number("num_drafts") == 180


def test_blocks_end_where_cycles_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns, "BLOCK_STEPS", 4)
    ids = [1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5, 5]
    steps = [drafted(cycle, 2, request_id=str(index)) for index, cycle in enumerate(ids)]
    found = [[step.cycle_id for step in block.records] for block in blocks_of(steps)]
    assert [*chain.from_iterable(found)] == ids
    assert len(found) > 1 and all(not set(one) & set(other) for one, other in pairwise(found))


def test_a_request_with_the_id_of_one_that_ended_is_another_one():
    """Two runs in one file number their requests alike."""
    run = [drafted(0, 2), drafted(1, 2), REQUEST]
    assert [len(block.records) for block in blocks_of([*run, *run])] == [2, 2]


def blocks_of(items: Sequence[Record]) -> list[StepBlock]:
    return [piece for piece in pieces_of(items) if isinstance(piece, StepBlock)]


def accepted_when(low: Callable[[StepRecord, StepRecord | None], bool]) -> list[Record]:
    """Steps that accept nothing where `low` says so, and otherwise 1, 4, 2, 0 in turns."""
    records: list[Record] = [HEADER]
    before: StepRecord | None = None
    for index in range(2000):
        step = drafted(index, (1, 4, 2, 0)[index % 4], context_tokens=8 * index)
        if low(step, before) and index % 8:
            step = replace(step, num_accepted=0, num_emitted=1, expected_accepted=0.0)
        before = step
        records.append(step)
    return records


@pytest.mark.parametrize(
    ("name", "low"),
    [
        (
            "acceptance_falls_after_partial",
            lambda step, before: before is not None and 0 < before.num_accepted < 4,
        ),
        (
            "acceptance_falls_after_full",
            lambda step, before: before is not None and before.num_accepted == 4,
        ),
        ("acceptance_falls_with_context", lambda step, before: step.context_tokens > 8000),
        ("acceptance_falls_with_generation", lambda step, before: step.step > 1000),
        ("acceptance_dropped", lambda step, before: step.t_s > 20),
    ],
)
def test_planted_contrasts_are_found(
    tmp_path: Path, name: str, low: Callable[[StepRecord, StepRecord | None], bool]
):
    assert read(tmp_path / "trace.jsonl", accepted_when(low)).flag(name) is True


def test_a_uniform_trace_has_no_contrast(tmp_path: Path):
    values = [finalise(index * INCREMENT) % 5 for index in range(2000)]
    records = [HEADER, *(drafted(index, value) for index, value in enumerate(values))]
    found = read(tmp_path / "trace.jsonl", records)
    for name in ("after_partial", "after_full", "with_context", "with_generation"):
        assert found.flag(f"acceptance_falls_{name}") is not True, name
    assert found.flag("acceptance_dropped") is None


def two_kinds(num_requests: int) -> list[Record]:
    """Requests of two tags and temperatures, the second kind of which accepts next to nothing."""
    records: list[Record] = [HEADER]
    for number in range(2 * num_requests):
        tag, temperature, accepted = [("en", 0, 3), ("zh", 1.0, 0)][number % 2]
        name = f"r{number}"
        records += [
            drafted(1000 * number + index, accepted if index % 10 else 2, request_id=name)
            for index in range(30)
        ]
        parameters = {"temperature": temperature}
        records.append(replace(REQUEST, request_id=name, tags=(tag,), parameters=parameters))
    return records


def test_tags_and_temperatures_are_compared(tmp_path: Path):
    found = read(tmp_path / "trace.jsonl", two_kinds(6))
    assert found.flag("acceptance_differs_by_domain") is True
    assert found.flag("acceptance_falls_with_temperature") is True
    assert "temperature" not in found


def test_a_few_requests_do_not_tell_a_tag_from_their_own_text(tmp_path: Path):
    found = read(tmp_path / "trace.jsonl", two_kinds(1))
    assert "acceptance_differs_by_domain" not in found
    assert len(found.series["tag"]) == 0, "30 steps are not even named"


def test_damage_is_named_and_costs_its_own_lines(tmp_path: Path):
    path = written(tmp_path / "trace.jsonl", RUN)
    lines = path.read_bytes().split(b"\n")
    lines[10] = lines[10][:40]
    lines[20] = b"\x00\xff garbage"
    lines[30] = lines[30].replace(b'"num_accepted":', b'"num_accepted":9')
    path.write_bytes(b"\n".join(lines))
    found = read_trace_evidence(path)
    assert found.number("num_drafts") == 97 and found.readings[0].num_unknown == 3
    assert any("line 11" in note for note in found.readings[0].notes)


def test_columns_are_the_steps_of_the_same_file(tmp_path: Path):
    records = [record for record in RUN if isinstance(record, StepRecord)]
    (block,) = blocks_of([*read_trace(written(tmp_path / "t.jsonl", RUN))])  # type: ignore[list-item]
    assert block.records == records and block.names == ("r",)
    fields = block.columns.keys() - {"request", "kind", "size", "cycle_tokens", "plans"}
    assert len(fields) == 15
    for name in fields:
        assert block.columns[name].tolist() == [getattr(record, name) for record in records]


def test_steps_by_other_writers_are_read(tmp_path: Path):
    path = written(tmp_path / "trace.jsonl", RUN)
    text = path.read_text().replace('{"record":"step",', '{"graph_hit":null,"record":"step",')
    path.write_text(text.replace('"graph_hit":null,"record"', '"record"').replace(":", ": "))
    found = read_trace_evidence(path)
    assert found.number("num_drafts") == 100


def test_a_long_trace_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns, "BLOCK_STEPS", 16)
    monkeypatch.setattr(reader, "MAX_STEPS", 50)
    found = read_trace_evidence(written(tmp_path / "trace.jsonl", RUN))
    assert 50 <= (found.number("num_steps") or 0) < 100
    assert any("only the beginning" in note for note in found.readings[0].notes)


def test_a_trace_of_rejections_is_a_problem_and_one_of_acceptance_is_healthy(tmp_path: Path):
    def steps(values: Sequence[int]) -> list[Record]:
        found: list[Record] = [HEADER]
        found += [drafted(i, values[i % len(values)], expected_accepted=0.5) for i in range(400)]
        return [*found, *(undrafted(i) for i in range(400, 440))]

    bad = diagnose(read_trace_evidence(written(tmp_path / "b.jsonl", steps([0, 1, 0, 0]))))
    assert bad.verdict == "problem"
    assert [c.remedy.effect for c in bad.causes[0].changes] == ["off"]
    assert all(c.prediction for c in bad.causes[0].changes)
    records = [
        replace(r, expected_accepted=3.0) if isinstance(r, StepRecord) else r
        for r in steps([4, 3, 4, 2, 2])
    ]
    good = diagnose(read_trace_evidence(written(tmp_path / "g.jsonl", records)))
    assert good.verdict == "healthy"


def batch_of_eight(step: StepRecord, start: int) -> Iterator[StepRecord]:
    """The same step in 30 cycles of eight requests."""
    for cycle in range(start, start + 30):
        for number in range(8):
            yield replace(step, cycle_id=cycle, t_s=cycle, step=cycle, request_id=str(number))


@pytest.mark.parametrize(
    ("plain_s", "verify_s", "growth", "worse"),
    # One sequence: 10 ms plain, 20 ms with drafts. Eight: 45 and 158 ms; 11 and 22 ms.
    [(0.045, 0.150, 3.5 / 7, True), (0.011, 0.014, 0.1 / 7, False)],
)
def test_many_sequences_are_compared_with_one(
    tmp_path: Path, plain_s: float, verify_s: float, growth: float, worse: bool
):
    steps = [
        *(drafted(i, i % 5) for i in range(30)),
        *(undrafted(i) for i in range(30, 60)),
        *batch_of_eight(drafted(0, 2, verify_s=verify_s, batch_rows=40), 100),
        *batch_of_eight(undrafted(0, verify_s=plain_s - 0.001, batch_rows=8), 200),
    ]
    found = read(tmp_path / "run.jsonl", [HEADER, *steps])
    assert found.number("batch_linearity") == pytest.approx(growth)
    assert found.flag("slower_with_batch") is worse


def test_a_block_that_is_one_cycle_is_read(tmp_path: Path):
    same = {"cycle_id": 1, "t_s": 1.0}
    line = line_of(replace(STEP, **same))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line_of(HEADER) + line * BLOCK_STEPS)
    assert read_trace_evidence(path).number("num_steps") == BLOCK_STEPS


def test_reading_ends_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "MAX_DAMAGE", 10)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line_of(HEADER) + b'{"record":"step","cycle_id":"x"}\n' * 1000)
    (found,) = read_trace_evidence(path).readings
    assert found.num_unknown == 10 and "10 places that cannot be read" in found.notes[-1]


def sound_run(num_requests: int = 12, steps: int = 60, **changes: object) -> list[Record]:
    """Requests that take turns; a step accepts each token with a chance of .8, as is expected."""
    records: list[Record] = [HEADER]
    for index in range(num_requests * steps):
        tokens = [finalise((4 * index + place) * INCREMENT) % 10 < 8 for place in range(4)]
        accepted = (*tokens, False).index(False)
        values = {"request_id": f"r{index % num_requests}", "step": index // num_requests}
        values |= {"expected_accepted": 2.36, "cycle_id": index, "t_s": index / 50}
        records.append(drafted(index, accepted, **(values | changes)))
    return records


def keep(most: int, records: Sequence[Record], where: Callable[[StepRecord], bool]) -> list[Record]:
    """Accept at most so many tokens in some steps."""
    found: list[Record] = []
    for record in records:
        if isinstance(record, StepRecord) and where(record):
            accepted = min(most, record.num_accepted)
            record = replace(record, num_accepted=accepted, num_emitted=accepted + 1)
        found.append(record)
    return found


def unexpected(records: Sequence[Record]) -> list[Record]:
    """The same run with expectations of what was accepted, as of a draft that is bad there."""
    return [
        replace(r, expected_accepted=float(r.num_accepted)) if isinstance(r, StepRecord) else r
        for r in records
    ]


def number_of(step: StepRecord) -> int:
    return int(step.request_id[1:])


PLANTED = {
    "later_positions_rejected": keep(1, sound_run(), lambda step: True),
    "requests_accept_nothing": keep(0, sound_run(), lambda step: number_of(step) % 2 == 1),
    "requests_accept_nothing of ten": keep(0, sound_run(), lambda step: number_of(step) == 5),
    "requests_accept_nothing but few drafts": keep(
        0, sound_run(), lambda step: number_of(step) == 5 and step.step % 30 > 0
    ),
    "acceptance_fell_in_run": keep(0, sound_run(), lambda step: step.t_s > 7.2),
}


@pytest.mark.parametrize("name", PLANTED)
def test_faults_of_a_part_of_the_drafts_are_problems(tmp_path: Path, name: str):
    found = diagnose(read(tmp_path / "t.jsonl", unexpected(PLANTED[name])))
    assert found.evidence.flag(name.split()[0]) is True
    assert found.verdict == "problem"


def test_a_sound_run_is_healthy(tmp_path: Path):
    assert diagnose(read(tmp_path / "t.jsonl", sound_run())).verdict == "healthy"


def test_a_fall_is_a_change_with_a_time(tmp_path: Path):
    found = diagnose(read(tmp_path / "t.jsonl", unexpected(PLANTED["acceptance_fell_in_run"])))
    said = re.search(r"Acceptance fell at .*, ([0-9.]+) s after the first draft", headline(found))
    assert said is not None and abs(float(said[1]) - 7.2) < 0.5, "to within a slice of the run"


def test_less_than_expected_is_the_verifiers_fault(tmp_path: Path):
    less = keep(1, sound_run(), lambda step: step.cycle_id % 3 == 0)
    found = diagnose(read(tmp_path / "t.jsonl", less))
    assert found.evidence.flag("acceptance_below_expected") is True
    assert found.verdict == "problem"
    assert found.causes[0].scored.cause.label == "biased_accept_rule"
    assert found.causes[0].scored.cause.what in headline(found)


def test_drafting_that_takes_nearly_all_of_a_step_cannot_pay(tmp_path: Path):
    found = diagnose(read(tmp_path / "t.jsonl", sound_run(draft_s=0.384)))
    assert found.verdict == "problem"
    assert found.causes[0].scored.cause.label == "draft_too_slow"


@pytest.mark.parametrize("seed", range(3))
def test_texts_of_all_kinds_whose_first_drafts_are_refused_are_no_pattern(tmp_path, seed):
    """60 requests, 8 at once; how hard a text is varies between requests and within them."""
    random = Random(seed)
    usual = [random.betavariate(4.0, 2.0) for _ in range(60)]
    records: list[Record] = [HEADER]
    for start in range(0, 60, 8):
        now = dict.fromkeys(range(start, min(60, start + 8)), 0.0)
        for step in range(30):
            for name in now:
                if random.random() < 0.2 or step == 1:
                    now[name] = random.betavariate(6.0 * usual[name], 6.0 - 6.0 * usual[name])
                accepted = next((k for k in range(4) if random.random() >= now[name]), 4)
                cycle = 4 * start + step
                values = {"request_id": f"r{name}", "step": step, "t_s": cycle / 50}
                records.append(drafted(cycle, accepted, **values))
    found = read_trace_evidence(written(tmp_path / "t.jsonl", records))
    assert found.flag("requests_accept_nothing") is not True and not found.doubts


def test_a_drafter_of_fixed_depth_drafts_too_much_and_has_no_wrong_positions(tmp_path: Path):
    """Two positions are accepted as usual, and none of the next: wrong rows would harm all."""
    found = diagnose(
        read(tmp_path / "t.jsonl", unexpected(keep(2, sound_run(), lambda step: True)))
    )
    assert found.verdict == "problem"
    assert found.causes[0].scored.cause.label == "k_too_large"


def test_a_trace_that_contradicts_itself_is_not_healthy(tmp_path: Path):
    records = [
        replace(r, num_emitted=1) if isinstance(r, StepRecord) and r.cycle_id % 10 == 0 else r
        for r in sound_run()
    ]
    found = diagnose(read(tmp_path / "t.jsonl", records))
    assert found.verdict == "inconclusive" and "contradicts itself" in headline(found)


def test_k_of_trees_is_their_depth_and_their_unused_rows_are_no_waste(tmp_path: Path):
    """Seven to sixteen nodes are two deep: no step has a third position."""
    shape = {"depth_drafted": 2, "batch_rows": 8}
    steps = [
        drafted(i, i % 3, k_budget=n, num_drafted=n, **shape)
        for i in range(1, 101)
        for n in [16 if i % 25 == 0 else 7]
    ]
    found = diagnose(read(tmp_path / "trees.jsonl", [HEADER, *steps, REQUEST]))
    text = " ".join(line for section in sections(found) for line in section.lines)
    assert found.evidence.number("k") == 2 and found.evidence.number("mean_drafted") == 2.0
    assert found.evidence.number("tree_nodes") == pytest.approx(7.36)
    assert "trees of 7.4 nodes on average; their depth is 2" in text and "of at most 3" in text
    assert "rejected at position 2" in text and "position 3" not in text
    assert "unused by design" in text and "computed for nothing" not in text
    assert "adaptive_k" not in found.evidence


def test_a_gaining_run_at_a_small_k_is_healthy_with_a_hint(tmp_path: Path):
    """K = 1, 85% accepted, 1.7 times as fast as plain: that a larger K may gain is no fault."""
    shape = {"k_budget": 1, "num_drafted": 1, "depth_drafted": 1, "batch_rows": 2}
    cost = {"draft_s": 0.001, "verify_s": 0.0095, "other_s": 0.0005}
    steps = [drafted(i, int(i % 20 > 2), **shape, **cost) for i in range(1, 601)]
    rest = [undrafted(i) for i in range(601, 661)]
    found = diagnose(read(tmp_path / "small.jsonl", [HEADER, *steps, *rest, REQUEST]))
    assert found.verdict == "healthy" and "A K larger than 1 may be" in headline(found)


def run_of(accepts: Callable[[int, int], bool], **changes: object) -> list[Record]:
    """30 requests in turn, 40 drafts each; every position keeps four of five drafts."""
    random = Random(0)
    found: list[Record] = [HEADER]
    for i in range(1200):
        accepted = next((k for k in range(4) if random.random() >= 0.8), 4) * accepts(i, i % 30)
        values = {"request_id": f"r{i % 30}", "step": i // 30, "context_tokens": 40 + i // 10}
        found.append(drafted(i, accepted, **(values | changes)))
    return found


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (run_of(lambda i, request: i >= 240), "none of 210 drafts of 30 requests"),
        (run_of(lambda i, request: not 600 < i < 660), "none of 60 drafts of 30 requests"),
        (run_of(lambda i, request: i < 1176), "none of 25 drafts of 25 requests"),
        (run_of(lambda i, request: i // 30 % 10 != 5), "one in 10 steps of a request, at"),
        (run_of(lambda i, request: True, other_s=0.4), "96% of a step is neither drafting nor"),
        (
            run_of(lambda i, request: True, draft_s=0.0, verify_s=0.0, other_s=0.0),
            "no step of the trace has a duration",
        ),
        (run_of(lambda i, request: True, expected_accepted=0.0), "expected_accepted is 0 in all"),
        (
            [*run_of(lambda i, request: True), *(undrafted(i, num_emitted=0) for i in range(50))],
            "49 steps without a draft emitted nothing",
        ),
    ],
)
def test_what_no_healthy_run_shows_is_not_praised(tmp_path: Path, records, words: str):
    found = diagnose(read(tmp_path / "unusual.jsonl", records))
    assert found.verdict == "inconclusive" and words in headline(found)
    sound = diagnose(read(tmp_path / "sound.jsonl", run_of(lambda i, request: True)))
    assert sound.verdict == "healthy" and not sound.evidence.doubts
