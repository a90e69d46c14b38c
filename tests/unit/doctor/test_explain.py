"""Every figure of an explanation is recomputed from the records."""

from __future__ import annotations

import math
import re
from statistics import fmean

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP

from forerun.cli.main import main
from forerun.doctor.explain import (
    LENIENT,
    explain_request,
    fit_costs,
    in_words,
    outcomes_of,
    write_lessons,
)
from forerun.doctor.readers.trace_totals import collect_totals
from forerun.errors import InvalidTrace
from forerun.models.checkpoint import ModelFiles
from forerun.trace import files
from forerun.trace.files import open_trace, read_trace

ACCEPTED = (2, 4, 0, 1, 4, 3)
STEPS = [
    replace(
        STEP,
        cycle_id=number,
        step=number,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        draft_s=0.001 * (number + 1),
        verify_s=0.004 + 0.001 * number,
        other_s=0.0005,
        last_token_source="bonus" if accepted == 4 else "recovered",
        token_ids=tuple(range(100, 101 + accepted)),
    )
    for number, accepted in enumerate(ACCEPTED)
]
OTHER = replace(STEP, request_id="other", cycle_id=3)


def found():
    return explain_request([HEADER, *STEPS[3:], OTHER, *STEPS[:3], REQUEST], "r")


def test_the_steps_of_one_request_are_taken_in_order():
    assert [step.step for step in found().steps] == [0, 1, 2, 3, 4, 5]
    assert explain_request([OTHER, *STEPS]).request_id == "other"


def decode(ids):
    return " ".join(f"token {number}" for number in ids)


def test_every_drafted_token_has_an_outcome():
    assert outcomes_of(STEPS[0]) == ["accepted", "accepted", "rejected", "not reached"]
    assert outcomes_of(STEPS[1]) == ["accepted"] * 4
    assert outcomes_of(STEPS[2])[0] == "rejected"


@pytest.mark.parametrize("rule", ["token", "block", "greedy", "walk"])
def test_probabilities_say_why_a_token_was_kept(rule):
    """Tokens 1 and 2 of 4 were accepted and token 3 rejected; every figure follows from p and q."""
    p, q = (0.5, 0.25, 0.125, 0.5), (0.25, 0.5, 0.5, 0.5)
    drawn = rule in ("token", "block")
    step = replace(STEPS[0], rule=rule, target_probs=p, draft_probs=q if drawn else None)
    lines = [line for line in in_words(found(), [step]) if "; p " in line]
    assert len(lines) == 3  # nothing decided about the fourth
    ratio = 1.0
    for place, line in enumerate(lines):
        assert f"; p {p[place]:.3f}" in line
        ratio = min(1.0, ratio * p[place] / q[place])
        expected = {
            "token": f"q {q[place]:.3f}: kept with probability min(1, p/q) = "
            f"{min(1.0, p[place] / q[place]):.3f}",
            "block": f"q {q[place]:.3f}: the prefix up to here has ratio {ratio:.3f}",
            "greedy": f"most likely token is {'this' if place < 2 else 'another'} one",
            "walk": f"own draw is {'this' if place < 2 else 'another'} one",
        }[rule]
        assert line.endswith(expected)


def after(steps):
    """For each of the steps a plain one, whose pass takes 4 ms."""
    zeros = {"num_drafted": 0, "depth_drafted": 0, "num_accepted": 0, "draft_s": 0.0}
    return [
        replace(s, **zeros, cycle_id=100 + n, num_emitted=1, batch_rows=1, verify_s=0.004)
        for n, s in enumerate(steps)
    ]


def measured(steps=STEPS):
    """The steps and as many plain ones."""
    return collect_totals([HEADER, *steps, *after(steps)])


def sections(found):
    return {section.heading: section for section in write_lessons(found)}


OTHERWISE = "What would have happened otherwise"


def test_another_k_counts_what_it_would_have_accepted():
    found = fit_costs(measured())
    for k in range(5):
        tokens = 1.0 + sum(found.survival[:k])
        assert tokens == pytest.approx(sum(min(a, k) + 1 for a in ACCEPTED) / 6)
        low, high = 0.004, fmean(step.verify_s for step in STEPS)
        pass_s = low + (high - low) * k / 4  # linear between the measured numbers of rows
        drafted_s = k * sum(step.draft_s for step in STEPS) / 24
        assert found.estimate_step(k, 1)[0] == pytest.approx(drafted_s + pass_s + 0.0005)
    text = "\n".join(sections(measured())[OTHERWISE].lines)
    assert "tokens are exact):" in text and text.count("<- best") == 1


def test_another_k_beyond_the_shortest_draft_is_estimated_from_the_steps_that_drafted_as_far():
    """Six steps drafted 4 tokens; two more drafted 1, which was accepted, and one 5."""
    short = [replace(s, num_drafted=1, depth_drafted=1, num_accepted=1) for s in STEPS[:2]]
    short = [replace(s, cycle_id=20 + n) for n, s in enumerate(short)]
    long = replace(STEPS[0], cycle_id=30, num_drafted=5, depth_drafted=5, num_accepted=5)
    totals = measured([*STEPS, *short, long])
    found = fit_costs(totals)
    first, second = 8 / 9, 5 / 6  # the steps that drafted two and accepted the first: 2 4 4 3 1, 5
    assert found.survival[:2] == pytest.approx([first, first * second])
    assert len(found.survival) == 4  # 5 was drafted once
    text = "\n".join(sections(totals)[OTHERWISE].lines)
    assert "tokens are exact up to K = 1, estimated beyond" in text


def test_passes_beyond_the_measured_rows_have_bounds():
    found = fit_costs(measured())
    few, many = found.line.verify_s
    assert found.rows == (1, 5) and few == pytest.approx(0.004)
    assert found.estimate_step(0, 10) == pytest.approx((many + 0.0005, 2 * many + 0.0005))
    assert found.estimate_step(0, 3)[0] == pytest.approx((few + many) / 2 + 0.0005)


def test_every_section_asks_what_its_figures_answer():
    found = sections(measured())
    assert len(found) == 5
    for section in found.values():
        question = section.question
        assert question is None or len(set(question.options)) == len(question.options) == 3
    assert found["Why one pass checks several tokens"].question.right == "6.50 ms"
    lost = found["What a draft that is not kept costs"]
    assert "17% of the steps that drafted kept nothing, 17% one token" in " ".join(lost.lines)
    assert "expected" in found["Whether the text is still the target's"].question.right


def test_the_verifier_that_is_shown_keeps_too_much():
    found = collect_totals(read_trace(LENIENT))
    excess = found.acceptance.num_accepted - found.expected_accepted
    assert excess > 4.0 * math.sqrt(found.squares)


def test_kappa_is_one_figure_in_the_header_and_in_the_sections(tmp_path, capsys):
    """A few plain steps are enough for both, or for neither."""
    path = tmp_path / "trace.jsonl"
    for plain_steps in (5, 0):
        with open_trace(path) as writer:
            for record in (HEADER, *STEPS, *after(STEPS[:plain_steps]), REQUEST):
                writer.add(record)
        assert main(["explain", str(path)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        if plain_steps:
            step_s = fmean(s.draft_s + s.verify_s + s.other_s for s in STEPS)
            kappa = step_s / 0.0045
            assert f"kappa {kappa:.3f}, so" in text and f"{kappa:.2f} plain steps (kappa)" in text
        else:
            assert "kappa unknown" in text and "(kappa)" not in text


def test_a_trace_is_read_once(tmp_path, capsys, monkeypatch):
    path, reads = tmp_path / "trace.jsonl", []
    with open_trace(path) as writer:
        for record in (HEADER, *STEPS, REQUEST):
            writer.add(record)
    monkeypatch.setattr(files, "read_trace", lambda path: reads.append(path) or read_trace(path))
    assert main(["explain", str(path)]) == 0
    assert main(["explain", str(path), "--step", "1"]) == 0
    assert reads == [path, path]


def test_what_is_not_in_the_trace_is_left_out():
    trees = [replace(step, num_drafted=7, depth_drafted=4) for step in STEPS]
    for steps in (STEPS, trees):  # no plain steps; rows of trees
        assert list(sections(collect_totals(steps))) == [
            "How far drafts are kept",
            "Whether the text is still the target's",
        ]
    assert not sections(collect_totals([OTHER], "r"))


def test_a_tree_is_told_depth_by_depth():
    """Seven nodes: three below the root, of which the second was kept, two below that, two more."""
    step = replace(
        STEPS[0],
        num_drafted=7,
        depth_drafted=3,
        num_accepted=1,
        num_emitted=2,
        path_ranks=(2,),
        path_children=(3, 2),
    )
    text = "\n".join(in_words(found(), [step], decode))
    assert "depth 1: number 2 of 3 siblings accepted 'token 100'" in text
    assert "depth 2: none of 2 siblings accepted" in text
    assert "2 other nodes: not reached" in text
    whole = replace(step, num_accepted=2, path_ranks=(1, 1), path_children=(3, 2, 0))
    text = "\n".join(in_words(found(), [whole], decode))
    assert "none of" not in text
    assert "depth 2: number 1 of 2 siblings accepted 'token 101'" in text


def test_the_figures_of_the_page_are_those_of_the_records():
    text = "\n".join(in_words(found(), found().steps, decode))
    assert "20 tokens in 6 steps" in text
    assert "24 tokens drafted, 14 kept; 3.333 tokens per drafting step" in text
    assert re.findall(r"Verification kept (\d)", text) == [str(a) for a in ACCEPTED]
    drafted = re.findall(r"of at most 4 in ([0-9.]+) ms", text)
    assert drafted == [f"{step.draft_s * 1e3:.2f}" for step in STEPS]
    assert "token 1: accepted 'token 100'" in text and "from the same pass: 'token 102'" in text
    assert "token 100" not in "\n".join(in_words(found(), found().steps))  # ids tell nothing


def test_a_plain_step_is_explained():
    plain = replace(
        STEP,
        num_drafted=0,
        depth_drafted=0,
        num_accepted=0,
        num_emitted=1,
        last_token_source="bonus",
    )
    text = "\n".join(in_words(explain_request([plain]), [plain]))
    assert "Nothing was drafted" in text


def test_the_command_reads_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    with open_trace(path) as writer:
        for record in (HEADER, *STEPS, REQUEST):
            writer.add(record)
    assert main(["explain", str(path), "--step", "2"]) == 0
    assert "Verification kept 0" in capsys.readouterr().out
    assert main(["explain", str(path), "--step", "9"]) == 2
    assert main(["explain", str(path), "--request", "x"]) == 2
    assert "there are: r" in capsys.readouterr().err


def test_a_trace_without_steps_is_refused():
    with pytest.raises(InvalidTrace, match="no steps"):
        explain_request([HEADER])


class Counting(str):
    """A request id that counts the comparisons with it."""

    __slots__ = ()
    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counting.num_compared += 1
        return super().__eq__(other)


def test_the_work_grows_with_the_number_of_requests_and_not_its_square():
    steps = [replace(STEP, request_id=Counting(f"r{number}")) for number in range(300)]
    Counting.num_compared = 0
    explain_request(iter(steps), "r7")
    assert Counting.num_compared < 2000


def test_messages_name_few_requests_and_cut_long_ids():
    many = [replace(STEP, request_id=f"{n}" * 1000) for n in range(20)]
    with pytest.raises(InvalidTrace, match=r"no steps of request 'x'; there are: 0000") as caught:
        explain_request(many, "x")
    assert len(str(caught.value)) < 1000


def test_the_quiz_marks_answers(tmp_path, capsys, monkeypatch):
    path = tmp_path / "trace.jsonl"
    with open_trace(path) as writer:
        for record in (HEADER, *STEPS, REQUEST):
            writer.add(record)
    given = iter(["x", "a", "b"])
    monkeypatch.setattr("builtins.input", lambda _: next(given))
    assert main(["explain", str(path), "--quiz"]) == 0
    text = capsys.readouterr().out
    assert "answer with one of a, b, c" in text
    assert text.count("Question") == 2 and " of 2 answers were right." in text
    assert main(["explain", str(path), "--quiz", "--step", "2"]) == 2


def test_text_in_place_of_ids(tmp_path, capsys):
    """The tokenizer of a shipped target makes text of the ids that a trace holds."""
    path = tmp_path / "trace.jsonl"
    files = ModelFiles.find("zoo:code-2m")
    header = replace(HEADER, target="zoo:code-2m", tokenizer_hash=files.tokenizer_hash)
    ids = tuple(files.tokenizer.encode("def area")[:3])
    step = replace(STEP, num_accepted=len(ids) - 1, num_emitted=len(ids), token_ids=ids)
    for other, is_text in ((header, True), (replace(header, tokenizer_hash="x"), False)):
        with open_trace(path) as writer:
            for record in (other, step, REQUEST):
                writer.add(record)
        assert main(["explain", str(path), "--step", "2"]) == 0
        assert ("area" in capsys.readouterr().out) == is_text


def test_nodes_of_trees_are_not_called_waste_alone(tmp_path, capsys):
    path = tmp_path / "trees.jsonl"
    with open_trace(path) as writer:
        writer.add(HEADER)
        for number in range(9):
            shape = {"num_drafted": 7, "depth_drafted": 2, "num_accepted": 1, "num_emitted": 2}
            writer.add(replace(STEP, cycle_id=number, step=number, k_budget=7, **shape))
    assert main(["explain", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "85.7% wasted (nodes of trees, of which one a level is kept)" in text
