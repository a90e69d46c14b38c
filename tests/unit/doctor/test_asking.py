"""Questions of a diagnosis: the most telling next, until none would change the advice."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.doctor.asking import (
    MAX_ITEMS,
    MAX_QUESTIONS,
    likeliest_causes,
    next_question,
    read_answer,
    with_answers,
)
from forerun.doctor.diagnosis import CAUSES, EXPERIMENTS, diagnose
from forerun.doctor.evidence import FACTS, GROUPS, Evidence
from forerun.doctor.readers.complaint import read_complaint
from forerun.errors import InvalidRequest

COMPLAINT = ["diagnose", "--tokens-per-s", "60", "--tokens-per-s-plain", "80", "--ask"]


def evidence_of(**facts):
    found = Evidence()
    for name, value in facts.items():
        found.add(name, value, "given")
    return found


def ask_until_the_end(known, reply):
    """Answer every question; returns the answers and how many questions there were."""
    answers = {}
    while True:
        number, question = next_question(known, answers)
        if not question:
            return answers, number
        assert not any(item.fact in answers for item in question)
        answers |= {item.fact: reply(item) for item in question}


def likeliest(known, answers):
    found = likeliest_causes(diagnose(with_answers(known, answers)).evidence)
    return [item.cause.label for item in found]


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        ("tokenizer_mismatch", {"acceptance_zero": True}),
        ("draft_weights_misloaded", {"acceptance_zero": True}),
        ("low_alignment", {"acceptance_low": True}),
        ("domain_shift", {"acceptance_low": True}),
        ("graphs_missing_or_launch_bound", {"slowed_down": True, "acceptance_fine": True}),
        ("compute_bound_batch", {"slower_than_plain": True}),
        ("recurrent_state_rollback", {"output_differs": True}),
        ("grammar_constraint_conflict", {"output_corrupt": True}),
    ],
)
def test_truthful_answers_lead_to_the_cause(label, complaint):
    """Who answers as the signs of a cause say gets it first."""
    signs = {sign.fact: sign.yes > sign.no for sign in CAUSES[label].signs if sign.word is None}
    known = evidence_of(**complaint)
    flags = {name for name, kind in FACTS.items() if kind.type == "flag"}
    answers, number = ask_until_the_end(
        known, lambda item: signs.get(item.fact, False) if item.fact in flags else None
    )
    assert 1 <= number <= MAX_QUESTIONS
    assert likeliest(known, answers)[0] == label


def test_questions_are_about_what_is_not_known():
    known = evidence_of(tokens_per_s=60.0, tokens_per_s_plain=80.0)
    number, question = next_question(known, {})
    evidence = diagnose(known).evidence
    assert number == 0 and 1 <= len(question) <= MAX_ITEMS + 2
    for item in question:
        assert item.fact not in evidence and item.text.endswith("?")
    assert question[0].information > 0


def test_unknown_costs_nothing():
    known = evidence_of(slower_than_plain=True)
    answers, number = ask_until_the_end(known, lambda item: None)
    assert 2 <= number <= MAX_QUESTIONS
    assert likeliest(known, answers) == likeliest(known, {})


def test_a_screen_is_about_one_group_and_its_numbers():
    known = evidence_of(acceptance_low=True, tokens_per_s=60.0, tokens_per_s_plain=80.0)
    groups = {kind.name: group for group, kinds in GROUPS.items() for kind in kinds}
    answers = {}
    for _ in range(3):
        _, question = next_question(known, answers)
        flags = [item.fact for item in question if FACTS[item.fact].type == "flag"]
        assert len({groups[fact] for fact in flags}) <= 1 and len(flags) <= MAX_ITEMS
        beside = {item.fact for item in question} - set(flags)
        assert not flags or beside <= set(FACTS[flags[0]].numbers)
        answers |= {item.fact: None for item in question}


def test_nothing_is_asked_where_the_cause_is_sure():
    known = evidence_of(speculation_refused=True, drafts_absent=True, no_gain=True)
    assert next_question(known, {}) == (0, ())


def test_a_number_is_a_fact():
    known = read_complaint("decoding is slower than without speculation")
    found = diagnose(with_answers(known, {"tokens_per_s": 60.0, "tokens_per_s_plain": 80.0}))
    assert found.evidence.number("speedup") == pytest.approx(0.75)


def test_what_was_read_is_asked_again_where_it_decides():
    text = "Acceptance is low. GPU clocks fall after a while."
    known = read_complaint(text)
    _, (item, *_) = next_question(known, {})
    assert item.wrote in text and f'You wrote: "{item.wrote}"' in item.text
    denied = diagnose(with_answers(known, {item.fact: False})).evidence
    assert denied.flag(item.fact) is False and denied.facts[item.fact].source == "answered"
    unsure = diagnose(with_answers(known, {item.fact: None})).evidence
    assert unsure.flag(item.fact) is True


def test_what_words_may_mean_is_asked_beside_them():
    known = read_complaint("Perhaps constrained JSON output is invalid with speculation.")
    assert "schema_violations" not in known and "schema_violations" in known.supposed
    answers, _ = ask_until_the_end(known, lambda item: True if item.wrote else None)
    assert answers["schema_violations"] is True
    assert likeliest(known, answers)[0] == "grammar_constraint_conflict"


def test_loops_with_speculation_alone_are_no_inflated_measurement():
    known = read_complaint("The output loops only with speculation.")
    found = diagnose(known)
    assert "degenerate_output_inflation" not in likeliest(known, {})
    assert not any("32-gram" in c.remedy.change for r in found.causes for c in r.changes)


def test_every_question_says_how_to_find_out():
    tested = {fact for item in EXPERIMENTS for fact in item.yields}
    for name, kind in FACTS.items():
        if kind.type == "flag" and name != "symptom_seen":
            assert kind.ask.endswith("?") and name in tested, name
        assert all(FACTS[number].ask for number in kind.numbers)


def test_answers_of_a_file_are_used_and_the_next_question_is_printed(tmp_path, capsys):
    path = tmp_path / "answers.json"
    answers = {}
    for number in range(MAX_QUESTIONS + 1):
        path.write_text(json.dumps(answers))
        code = main([*COMPLAINT, "--answers", str(path), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["num_asked"] == number
        if "question" not in found:
            break
        assert code == 4
        for item in found["question"]:
            assert item["fact"] not in answers and "unknown" in item["answers"]
            answers[item["fact"]] = "no" if "no" in item["answers"] else "unknown"
    assert answers and len(found["likeliest"]) == 3
    answered = [name for name, answer in answers.items() if answer == "no"]
    assert all(found["evidence"][fact]["source"] == "answered" for fact in answered)


def test_the_terminal_asks_until_its_end(monkeypatch, capsys):
    replies = iter(["perhaps", "n", "y", "", "?", "n", "n", "seven"])

    def reply(_prompt):
        try:
            return next(replies)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", reply)
    assert main(["diagnose", "--ask", "good morning to everybody"]) in (3, 4)
    shown = capsys.readouterr().out
    assert "'perhaps' is no answer" in shown
    assert f"Question 1 of at most {MAX_QUESTIONS}" in shown and "Question 2" in shown
    assert "To find out" in shown


def test_answers_are_of_the_type_of_their_fact():
    words = ["Yes", False, "?", None, " n "]
    answers = [read_answer("output_differs", word) for word in words]
    assert answers == [True, False, None, None, False]
    assert read_answer("tokens_per_s", "61.5") == 61.5
    assert read_answer("changed", "engine, driver") == ("engine", "driver")
    for word in ("perhaps", 1, 0.0, [], {}):
        with pytest.raises(InvalidRequest, match="no answer"):
            read_answer("output_differs", word)
    for fact, word in (("tokens_per_s", "fast"), ("changed", "weather"), ("k", -1)):
        with pytest.raises(InvalidRequest, match="or answer unknown"):
            read_answer(fact, word)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "JSON object"),
        ("{", "JSON"),
        ('{"output_differ": "no"}', "no observation"),
        ('{"tau": "no"}', "no observation"),
        ('{"output_differs": 3}', "no answer"),
    ],
)
def test_unusable_answers_are_refused(tmp_path, capsys, text, message):
    path = tmp_path / "answers.json"
    path.write_text(text)
    assert main([*COMPLAINT, "--answers", str(path), "--json"]) == 2
    assert message in capsys.readouterr().err


def test_answers_without_ask_are_refused(tmp_path, capsys):
    assert main(["diagnose", "x", "--answers", str(tmp_path / "none.json")]) == 2
    assert "--ask" in capsys.readouterr().err


def test_figures_that_no_run_has_are_refused():
    with pytest.raises(InvalidRequest, match="acceptance_length is 9 at k 4"):
        with_answers(evidence_of(k=4), {"acceptance_length": 9.0})
    with pytest.raises(InvalidRequest, match=r"k is 0\.5; it must be a whole number"):
        read_answer("k", 0.5)
    with pytest.raises(InvalidRequest, match=r"alpha is 1\.3"):
        read_answer("alpha", 1.3)
    with pytest.raises(InvalidRequest, match="9 at k 4"):
        evidence_of(k=4, acceptance_length=9).check_counts()
    evidence_of(k=4, acceptance_length=5.01).check_counts()
