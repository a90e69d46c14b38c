"""Questions of a diagnosis: the most telling next, until none would change the advice."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.doctor.asking import (
    MAX_ANSWERS,
    MAX_ITEMS,
    MAX_UNKNOWN,
    likeliest_causes,
    next_question,
    read_answer,
    read_answers,
    with_answers,
)
from forerun.doctor.diagnosis import CAUSES
from forerun.doctor.evidence import FACTS, GROUPS, Evidence
from forerun.errors import InvalidRequest

COMPLAINT = ["diagnose", "--tokens-per-s", "60", "--tokens-per-s-plain", "80", "--ask"]


def evidence_of(**facts):
    found = Evidence()
    for name, value in facts.items():
        found.add(name, value, "given")
    return found


def ask_until_the_end(known, reply):
    answers = {}
    while question := next_question(with_answers(known, answers), answers):
        assert not any(item.fact in answers for item in question)
        answers |= {item.fact: reply(item.fact) for item in question}
    return answers


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
    """Who answers as the signs of a cause say gets it among the first three, mostly first."""
    signs = {sign.fact: sign.yes > sign.no for sign in CAUSES[label].signs}
    known = evidence_of(**complaint)
    answers = ask_until_the_end(known, lambda fact: signs.get(fact, False))
    assert 1 <= len(answers) < MAX_ANSWERS + MAX_ITEMS
    found = [item.cause.label for item in likeliest_causes(with_answers(known, answers))]
    assert found[0] == label


def test_questions_are_about_what_is_not_known():
    known = evidence_of(tokens_per_s=60.0, tokens_per_s_plain=80.0)
    evidence = with_answers(known, {})
    question = next_question(evidence, {})
    assert 1 <= len(question) <= MAX_ITEMS
    for item in question:
        assert item.fact not in evidence
        assert FACTS[item.fact].type == "flag"
        assert item.information > 0


def test_asking_ends_where_nothing_is_ever_known():
    answers = ask_until_the_end(evidence_of(slower_than_plain=True), lambda fact: None)
    assert MAX_UNKNOWN <= len(answers) < MAX_UNKNOWN + MAX_ITEMS


def test_observations_of_a_question_are_of_one_kind():
    known = evidence_of(acceptance_low=True, tokens_per_s=60.0, tokens_per_s_plain=80.0)
    groups = {name: group for group, facts in GROUPS.items() for name in (f.name for f in facts)}
    answers = {}
    for _ in range(3):
        question = next_question(with_answers(known, answers), answers)
        assert len({groups[item.fact] for item in question}) == 1
        assert max(item.worth for item in question) == question[0].worth
        answers |= {item.fact: False for item in question}


def test_nothing_is_asked_where_the_cause_is_sure():
    known = evidence_of(speculation_refused=True, drafts_absent=True, no_gain=True)
    assert next_question(with_answers(known, {}), {}) == ()


def test_answers_of_a_file_are_used_and_the_next_question_is_printed(tmp_path, capsys):
    path = tmp_path / "answers.json"
    path.write_text("{}")
    asked, code = {}, 4
    while True:
        path.write_text(json.dumps(asked))
        code = main([*COMPLAINT, "--answers", str(path), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["num_asked"] == len(asked)
        if "question" not in found:
            break
        assert code == 4
        facts = [item["fact"] for item in found["question"]]
        assert not any(fact in asked for fact in facts)
        asked |= dict.fromkeys(facts, "no")
    assert 1 < len(asked) < MAX_ANSWERS + MAX_ITEMS
    assert len(found["likeliest"]) == 3
    assert all(found["evidence"][fact]["source"] == "answered" for fact in asked)


def test_the_terminal_asks_until_its_end(monkeypatch, capsys):
    replies = iter(["perhaps", "n y", "n", "?"])

    def reply(_prompt):
        try:
            return next(replies)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", reply)
    assert main(["diagnose", "--ask", "good morning to everybody"]) == 4
    shown = capsys.readouterr().out
    assert "'perhaps' is no answer" in shown
    assert "2 answers to 6 observations" in shown
    assert shown.count("1. Which of these hold?") == 3
    assert "2. Which of these hold?" in shown
    assert "Most likely, but not shown:" in shown


def test_answers_are_yes_no_or_unknown():
    words = ["Yes", False, "?", None, " n "]
    assert [read_answer(word) for word in words] == [True, False, None, None, False]
    for word in ("perhaps", 1, 0.0, [], {}):
        with pytest.raises(InvalidRequest, match="no answer"):
            read_answer(word)


def test_a_line_answers_each_observation_or_all():
    assert read_answers("y, n ?", 3) == (True, False, None)
    assert read_answers("no", 3) == (False, False, False)
    assert read_answers("", 2) == (None, None)
    with pytest.raises(InvalidRequest, match="2 answers to 3"):
        read_answers("y n", 3)


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
