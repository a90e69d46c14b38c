"""Limits, resuming and verdicts of an audit, on simulated streams of text."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.lab.audited import VOCAB_SIZE, pair, reference_of
from tests.lab.dice import Dice
from tests.tabular import TabularModel

from forerun.doctor.audit.config import KINDS, ROUNDS, AuditConfig, Kind, kinds_of
from forerun.doctor.audit.ledger import Ledger, Moments, num_drafted_of
from forerun.doctor.audit.records import AuditAnswer, Question, StateFile
from forerun.doctor.audit.reference import ReportedLogprobs, _compute_listed_probs
from forerun.doctor.audit.run import Audit
from forerun.doctor.audit.verdict import decide_cause, judge
from forerun.errors import InvalidRequest

PROMPTS = [(n % VOCAB_SIZE, 3 * n % VOCAB_SIZE) for n in range(20)]
SAMPLED = (replace(KINDS[0], share=1.0),)
GRAMMAR_KIND = next(kind for kind in KINDS if kind.has_grammar)


class Stream:
    """Draws text from a table, and may misbehave.

    Args:
        change: called with the number of the question and its answer.
    """

    name, control, max_context = "a stream", "off", None

    def __init__(self, table=None, change=lambda number, question, answer: answer, logprobs=False):
        self.table = table or pair(1)[0]
        self.change = change
        self.logprobs = logprobs
        self.num_asked = 0

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        return [self.one(question) for question in questions]

    def one(self, question: Question) -> AuditAnswer:
        self.num_asked += 1
        dice = Dice(self.num_asked, repr(question.prompt))
        ids, top, logprobs = [], [], []
        for _ in range(question.num_tokens):
            probs = self.table.probs([*question.prompt, *ids])
            token = int((probs.cumsum(0) <= dice.uniform(0, 1)).sum())
            ids.append(min(token, VOCAB_SIZE - 1))
            logs = probs.log().tolist()
            logprobs.append(logs[ids[-1]])
            top.append(tuple(sorted(enumerate(logs), key=lambda item: -item[1])[:10]))
        answer = AuditAnswer(
            token_ids=tuple(ids),
            text=str(ids),
            finish_reason="length",
            num_charged=len(ids),
            num_drafted=len(ids),
            top=tuple(top) if self.logprobs else (),
            logprobs=tuple(logprobs) if self.logprobs else (),
        )
        return self.change(self.num_asked, question, answer)


def audit_of(stream=None, *, reference=None, state=None, tokens=4000, kinds=SAMPLED, **changes):
    config = AuditConfig(max_tokens=tokens, kinds=kinds, **changes)
    reference = reference or reference_of(pair(1)[0], None)
    state = StateFile(state, {"url": "here"})
    return Audit(config, stream or Stream(), reference, PROMPTS, state, wait=lambda s: None)


def silent(what, done):
    pass


def test_a_stream_of_the_reference_passes_within_its_limits():
    audit = audit_of()
    audit.run(silent)
    verdict = judge(audit)
    assert verdict.status == "no_deviation"
    assert verdict.family is None
    assert 0 < verdict.bound < 0.2
    assert 2900 < audit.progress.spent.num_tokens <= 3000  # a quarter is kept for the control


@pytest.mark.parametrize("limits", [{"tokens": 100}, {"max_requests": 7}, {"num_tokens": 5000}])
def test_no_limit_is_passed(limits):
    audit = audit_of(**limits)
    audit.run(silent)
    assert audit.progress.spent.num_tokens <= audit.config.max_tokens
    assert audit.progress.spent.num_requests <= audit.config.max_requests
    assert judge(audit).status == "cannot_judge"


@pytest.mark.parametrize(
    ("limits", "flag"), [({"tokens": 400}, "--tokens"), ({"max_requests": 7}, "--requests")]
)
def test_an_audit_that_ends_too_early_names_a_limit_that_suffices(limits, flag):
    audit = audit_of(**limits)
    audit.run(silent)
    sentence = judge(audit).sentence
    assert f"it takes 500: rerun with {flag} " in sentence
    enough = int(sentence.removesuffix(".").rpartition(" ")[2])
    audit = audit_of(**dict.fromkeys(limits, enough))
    audit.run(silent)
    assert judge(audit).status == "no_deviation"


def test_an_answer_that_is_lost_is_charged_in_full():
    def cut(number, question, answer):
        return (
            AuditAnswer(num_charged=question.num_tokens, problem="cut off")
            if number > 3
            else answer
        )

    audit = audit_of(Stream(change=cut))
    audit.run(silent)
    assert audit.progress.spent.num_tokens == sum(audit.rounds.asked.values())
    assert audit.progress.spent.num_requests < 15  # it gives up after failures in a row
    verdict = judge(audit)
    assert verdict.status == "cannot_judge"
    assert "cut off" in " ".join(verdict.notes)


def test_text_without_ids_is_not_judged():
    def without(number, question, answer):
        return AuditAnswer(text="abc", finish_reason="length", num_charged=48)

    audit = audit_of(Stream(change=without))
    audit.run(silent)
    verdict = judge(audit)
    assert verdict.status == "cannot_judge"
    assert "without token ids" in " ".join(verdict.notes)


def test_answers_that_are_left_out_are_no_fault_of_speculation():
    """Answers with many high ids are left out, which moves the tokens of the others."""

    def without(number, question, answer):
        ids = answer.token_ids
        is_left_out = sum(ids) > 8 * len(ids) and question.arm == "served"
        return replace_answer(answer, token_ids=None) if is_left_out else answer

    audit = audit_of(Stream(change=without), tokens=20_000)
    audit.run(silent)
    assert audit.progress.alarm_tokens is not None
    verdict = judge(audit)
    assert verdict.status == "cannot_judge"
    assert "left out" in verdict.sentence


def test_another_model_is_no_fault_of_speculation():
    audit = audit_of(Stream(pair(5)[0]), tokens=8000)
    audit.run(silent)
    verdict = judge(audit)
    assert audit.progress.alarm_tokens is not None
    assert verdict.status == "cannot_judge"
    assert "another model" in verdict.sentence


def test_a_deviation_of_the_served_arm_alone_is_one_of_speculation():
    other = Stream(pair(5)[0])

    def change(number, question, answer):
        return answer if question.arm == "control" else other.one(question)

    audit = audit_of(Stream(change=change), tokens=8000)
    audit.run(silent)
    verdict = judge(audit)
    assert verdict.status == "deviates"
    assert "is not shown" not in verdict.sentence


def test_a_deviation_downwards_is_one():
    """The likeliest token never comes, so there are fewer of them than expected."""
    table = pair(1)[0]
    log_probs = table.log_probs.scatter(-1, table.log_probs.argmax(-1, keepdim=True), -30.0)
    log_probs = log_probs.log_softmax(-1)
    other = Stream(TabularModel(log_probs=log_probs, order=table.order, store=table.store))

    def change(number, question, answer):
        return answer if question.arm == "control" else other.one(question)

    audit = audit_of(Stream(change=change), tokens=8000)
    audit.run(silent)
    assert audit.ledger.deviations("served")[0].mean < 0
    assert judge(audit).status == "deviates"


def moments(values: Sequence[float]) -> Moments:
    found = Moments()
    found.add(np.array(values, dtype=float))
    return found


@pytest.mark.parametrize(
    ("served", "control", "cause"),
    [
        ([0.2] * 900, [0.0] * 900, "shown"),
        ([-0.2] * 900, [0.0] * 900, "shown"),
        ([0.0] * 900, [0.2] * 900, "denied"),  # it deviates more without speculation
        ([0.1] * 900, [0.2] * 900, "denied"),
        ([0.2] * 900, [-0.2] * 900, "denied"),  # as much, the other way
        ([0.2] * 900, [-0.1999] * 900, "shown"),
        ([0.2] * 900, [0.2] * 900, "denied"),
        ([0.2] * 900, [0.2], "open"),
        ([1.0] * 900, [-0.9], "open"),
        ([], [0.2] * 900, "open"),
        ([0.01, -0.008] * 450, [0.008, -0.01] * 450, "open"),
    ],
)
def test_the_control_decides_whether_speculation_is_the_cause(served, control, cause):
    assert decide_cause(moments(served), moments(control)) == cause


def test_a_refused_kind_is_left_out():
    def refuse(number, question, answer):
        if question.kind == "penalised":
            return AuditAnswer(num_charged=0, problem="no such field", is_refused=True)
        return answer

    kinds = (KINDS[0], KINDS[2])
    audit = audit_of(Stream(change=refuse), kinds=kinds)
    audit.run(silent)
    assert set(audit.progress.dropped) == {"penalised"}
    assert judge(audit).status == "no_deviation"
    assert "no such field" in " ".join(judge(audit).notes)


@pytest.mark.parametrize("texts", [["x"], ["123", "0", "x"]])
def test_a_server_that_ignores_grammars_is_not_at_fault(texts):
    """Servers ignore fields that they do not know, and a text may begin rightly by chance."""
    asked = []

    def ignore(number, question, answer):
        if question.kind != "grammar":
            return answer
        asked.append(number)
        text = texts[min(len(asked), len(texts)) - 1]
        return replace_answer(answer, text=text, token_ids=None)

    stream = Stream(change=ignore)
    stream.control = "first tokens"
    audit = audit_of(stream, kinds=(KINDS[0], GRAMMAR_KIND))
    audit.run(silent)
    assert judge(audit).status == "no_deviation"
    assert "does not apply grammars" in " ".join(judge(audit).notes)
    assert len(asked) <= len(texts) + 1


def test_a_fault_of_the_grammar_is_found_where_first_tokens_follow_it():
    def broken(number, question, answer):
        is_grammar = question.kind == "grammar"
        return replace_answer(answer, text="123+", token_ids=None) if is_grammar else answer

    stream = Stream(change=broken)
    stream.control = "first tokens"
    audit = audit_of(stream, kinds=(KINDS[0], GRAMMAR_KIND), tokens=8000)
    audit.run(silent)
    assert audit.progress.alarm_tokens is not None


def test_log_probabilities_of_the_server_itself_serve_as_reference():
    audit = audit_of(Stream(logprobs=True), reference=ReportedLogprobs())
    audit.run(silent)
    assert judge(audit).status == "no_deviation"


def test_log_probabilities_that_lie_are_never_a_fault_of_speculation():
    other = pair(5)[0]

    def lie(number, question, answer):
        stream = Stream(other, logprobs=True)
        found = stream.one(question)
        return replace_answer(answer, top=found.top, logprobs=found.logprobs)

    audit = audit_of(Stream(change=lie), reference=ReportedLogprobs(), tokens=8000)
    audit.run(silent)
    assert judge(audit).status == "cannot_judge"


def replace_answer(answer: AuditAnswer, **changes) -> AuditAnswer:
    import msgspec

    return msgspec.structs.replace(answer, **changes)


def test_impossible_probabilities_are_said():
    def inflate(number, question, answer):
        top = tuple(tuple((t, v + 1.0) for t, v in row) for row in answer.top)
        return replace_answer(answer, top=top)

    audit = audit_of(Stream(change=inflate, logprobs=True), reference=ReportedLogprobs())
    audit.run(silent)
    assert judge(audit).status == "cannot_judge"
    assert "impossible probabilities" in " ".join(judge(audit).notes)


# ------------------------------------------------------------------------------------------- resume


def test_an_interrupted_audit_ends_as_an_uninterrupted_one(tmp_path):
    whole = audit_of(tokens=2000)
    whole.run(silent)

    class Interrupted(Exception):
        pass

    def interrupt(what, done):
        if done > 700:
            raise Interrupted

    stream, path = Stream(), tmp_path / "state.jsonl"
    with pytest.raises(Interrupted):
        audit_of(stream, state=path, tokens=2000).run(interrupt)
    second = audit_of(stream, state=path, tokens=2000)
    second.run(silent)
    assert second.progress.spent == whole.progress.spent
    assert second.ledger.log_e == pytest.approx(whole.ledger.log_e)
    third = audit_of(state=path, tokens=2000)
    third.run(silent)
    assert third.endpoint.num_asked == 0


def test_a_question_whose_answer_was_lost_counts(tmp_path):
    path = tmp_path / "state.jsonl"
    state = StateFile(path, {"url": "here"})
    state.load()
    state.ask([Question(arm="served", kind="sampled", prompt=(1, 2), num_tokens=48, group=0)])
    with path.open("a") as file:
        file.write('{"number":0,"answ')  # torn
    audit = audit_of(state=path, tokens=100)
    audit.run(silent)
    assert audit.progress.spent.num_tokens == 48
    assert "interrupted" in " ".join(audit.progress.problems)


@pytest.mark.parametrize(
    "content", ['{"header": {"url": "there", "format": "2"}}\n', "{}\n", "x\ny\n"]
)
def test_a_state_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "state.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="state"):
        audit_of(state=path).run(silent)


def test_a_file_of_something_else_is_left_as_it_is(tmp_path):
    """Its last line, without an end, was taken for one that an interruption had torn."""
    path = tmp_path / "notes"
    path.write_text("not of an audit")
    with pytest.raises(InvalidRequest, match="state of another audit"):
        audit_of(state=path).run(silent)
    assert path.read_text() == "not of an audit"


QUESTION = {"arm": "served", "kind": "sampled", "prompt": [1, 2], "num_tokens": 4, "group": 0}
ANSWER = {"token_ids": [1, 2, 3, 4], "num_charged": 4, "finish_reason": "length"}


def recorded(tmp_path, question: object, answer: object) -> Path:
    path = tmp_path / "state.jsonl"
    lines = [
        {"header": {"url": "here", "format": "2"}},
        {"number": 0, "question": question},
        {"number": 0, "answer": answer},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "unknown"},
        {"kind": 3},
        {"arm": "other"},
        {"prompt": [2**70]},
        {"prompt": [-1]},
        {"prompt": [[1]]},
        {"num_tokens": -1},
        {"num_tokens": 2**70},
        {"token_ids": [2**70]},
        {"token_ids": [2**31]},
        {"token_ids": [-1]},
        {"token_ids": "text"},
        {"num_charged": -(10**9)},
        {"num_charged": 2**70},
        {"num_requests": -1},
        {"step_sizes": [-1]},
        {"step_sizes": [2**70]},
        {"logprobs": [float("nan")]},
        {"logprobs": [float("inf")]},
        {"logprobs": [1e300]},
        {"logprobs": [None]},
        {"top": [[[1, float("nan")]]]},
        {"top": [[[2**70, -1.0]]]},
        {"top": [[[-1, -1.0]]]},
        {"top": [[[1, -1.0]] * 129]},
        {"top": [[[1, -1.0, 3]]]},
        {"text": {"a": []}},
        {"text": "\udcff"},
    ],
    ids=repr,
)
def test_values_that_no_audit_writes_are_refused_in_one_line(tmp_path, changes):
    question = QUESTION | {k: v for k, v in changes.items() if k in QUESTION}
    answer = ANSWER | {k: v for k, v in changes.items() if k not in QUESTION}
    path = recorded(tmp_path, question, answer)
    with pytest.raises(InvalidRequest, match=r"^--state [^\n]*$"):
        audit_of(state=path, tokens=100).run(silent)


@pytest.mark.parametrize(
    "changes",
    [
        {"step_sizes": [10**10]},
        {"step_sizes": [10**10] * 3},
        {"token_ids": [1, 2, 3, 10**6]},
        {"token_ids": []},
        {"token_ids": None},
        {"top": [[], [], [], [], []], "logprobs": [0.0]},
        {"top": [[[1, 0.0], [2, 0.0]]] * 4, "logprobs": [100.0] * 4},
        {"top": [[]] + [[[1, -1.0], [2, -1.0]]] * 4, "logprobs": [-1.0] * 4},
        {"prompt": []},
        {"prompt": "text"},
        {"prompt": [10**6]},
        {"prompt": [1] * 3000},
        {"unknown": [[[[]]]]},
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_reported", [True, False])
def test_odd_answers_of_a_state_are_judged_or_left_out(tmp_path, changes, is_reported):
    question = QUESTION | {k: v for k, v in changes.items() if k in QUESTION}
    answer = ANSWER | {k: v for k, v in changes.items() if k not in QUESTION}
    path = recorded(tmp_path, question, answer)
    audit = audit_of(state=path, tokens=4, reference=ReportedLogprobs() if is_reported else None)
    audit.run(silent)
    assert audit.progress.spent.num_tokens == 4


def test_a_pipe_is_no_state(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        audit_of(state=tmp_path / "pipe").run(silent)


def test_a_deeply_nested_state_is_refused(tmp_path):
    path = recorded(tmp_path, QUESTION, ANSWER)
    with path.open("a") as file:
        file.write('{"unknown": ' + "[" * 100_000 + "\n")
    with pytest.raises(InvalidRequest, match=r"state\.jsonl:4 is no record of such a run"):
        audit_of(state=path).run(silent)


def test_the_values_of_a_state_are_limited(tmp_path):
    path = recorded(tmp_path, QUESTION, ANSWER)
    line = json.dumps({"number": 0, "answer": ANSWER | {"step_sizes": [1] * 1_000_000}}) + "\n"
    with path.open("a") as file:
        file.write(line * 5)
    with pytest.raises(InvalidRequest, match="more than 4000000 values"):
        audit_of(state=path).run(silent)


def test_first_tokens_are_the_control_of_a_server_that_cannot_switch_speculation_off():
    other, asked = Stream(pair(5)[0]), []

    def change(number, question, answer):
        if question.arm == "served":
            return other.one(question)
        asked.append(question)
        return answer

    stream = Stream(change=change)
    stream.control = "first tokens"
    audit = audit_of(stream, tokens=8000, confirm_tokens=600)
    audit.run(silent)
    assert judge(audit).status == "deviates"
    assert "is not shown" not in judge(audit).sentence
    assert len(asked) == 600
    assert {question.num_tokens for question in asked} == {1}
    assert len({len(question.prompt) for question in asked}) > 10  # at many places of the answers


def test_alternatives_without_ids_are_not_compared_with_tokens_that_have_them():
    """Of such an answer no token is among its alternatives: a sound server was accused."""
    reference = ReportedLogprobs()
    question = Question(arm="served", kind="sampled", prompt=(1,), num_tokens=2, group=0)
    name = (1 << 40) + 7
    answer = AuditAnswer(
        token_ids=(3, 4),
        top=(((name, -0.1), (name + 1, -2.5)), ((name, -0.2), (name + 1, -2.0))),
        logprobs=(-0.1, -2.0),
        num_charged=2,
    )
    assert reference.rows(question, answer, SAMPLED[0]) is None
    assert "without ids" in reference.problems[0]
    named = msgspec.structs.replace(answer, token_ids=(name, name + 1))
    assert reference.rows(question, named, SAMPLED[0]) is not None


# -------------------------------------------------------------------- what was speculated, and form


def test_a_server_that_drafts_nothing_cannot_be_judged():
    audit = audit_of(Stream(change=lambda n, q, a: replace_answer(a, num_drafted=0)))
    audit.run(silent)
    verdict = judge(audit)
    assert verdict.status == "cannot_judge"
    assert "0 draft tokens" in verdict.sentence


def test_a_server_that_drafts_for_one_client_alone_is_told():
    def change(number, question, answer):
        return replace_answer(answer, num_drafted=40 if question.setting == "alone" else 0)

    audit = audit_of(Stream(change=change))
    audit.run(silent)
    verdict = judge(audit)
    assert verdict.status == "cannot_judge"
    assert "with 8 clients at once nothing was speculated" in verdict.sentence


def test_drafts_are_counted_by_the_steps_of_a_stream():
    steps = AuditAnswer(num_charged=6, step_sizes=(3, 1, 2))
    assert num_drafted_of(steps) == 3
    assert num_drafted_of(AuditAnswer(num_charged=6)) is None
    assert num_drafted_of(replace_answer(steps, num_drafted=9)) == 9


def test_the_bound_shrinks_with_more_tokens_and_counts_all_groups():
    bounds = []
    for tokens in (2000, 8000):
        audit = audit_of(tokens=tokens)
        audit.run(silent)
        bounds.append(judge(audit).bounds["all"])
    assert bounds[1] < 0.7 * bounds[0]


class Ended:
    """A reference that knows which token ends a text, and what the ids stand for."""

    eos_token_ids = frozenset({2})

    def can_judge(self, kind):
        return True

    def rows(self, question, answer, kind):
        return None

    def text_of(self, question, answer):
        return " ".join(map(str, answer.token_ids))


@pytest.mark.parametrize(
    ("changes", "violated"),
    [
        ({}, set()),
        ({"token_ids": (5, 2, 7, 7), "text": "5 2 7 7"}, {"ending"}),  # goes on after its end
        ({"token_ids": (5, 6, 7, 8, 9), "text": "5 6 7 8 9"}, {"ending"}),  # beyond max_tokens
        ({"token_ids": (5, 6), "text": "5 6"}, {"ending"}),  # "length" after two of four tokens
        ({"token_ids": (5, 2), "text": "5", "finish_reason": "stop"}, {"text"}),
        ({"text": "5 6 7"}, {"text"}),
        ({"text": " 5 6 7 8\ufffd"}, set()),  # ends within a character
    ],
)
def test_the_end_and_the_text_of_an_answer_are_compared_with_its_ids(changes, violated):
    ledger = Ledger(AuditConfig(), Ended(), 100)
    answer = AuditAnswer(
        token_ids=(5, 6, 7, 8), text="5 6 7 8", finish_reason="length", num_charged=4
    )
    question = Question(arm="served", kind="sampled", prompt=(1,), num_tokens=4, group=0)
    ledger.add(question, replace_answer(answer, **changes))
    found = {d.direction for d in ledger.deviations("served") if d.mean > 0}
    assert found == violated


def test_a_missed_stop_string_is_seen():
    ledger = Ledger(AuditConfig(), None, None)
    question = Question(arm="served", kind="stopped", prompt=(1,), num_tokens=4, group=0, stop="ab")
    answer = AuditAnswer(token_ids=(1, 2), text="xaby", finish_reason="stop", num_charged=2)
    ledger.add(question, answer)
    assert ledger.moved("served", "ending").mean == 1.0


def test_texts_that_never_end_are_seen_in_the_probability_of_the_end():
    """Token 2 ends a text by the reference, and never comes."""
    table = pair(1)[0]
    log_probs = table.log_probs.clone()
    log_probs[:, 2] = -30.0
    never = Stream(TabularModel(log_probs=log_probs.log_softmax(-1), order=2, store=table.store))

    def change(number, question, answer):
        return answer if question.arm == "control" else never.one(question)

    reference = replace(reference_of(table, None), eos_token_ids=frozenset({2}))
    kinds = (replace(KINDS[0], share=1.0),)
    audit = audit_of(Stream(change=change), reference=reference, kinds=kinds, tokens=8000)
    audit.run(silent)
    assert judge(audit).status == "deviates"
    assert "ends" in {d.direction for d in audit.ledger.deviations("served") if d.log_e > 10}


# ----------------------------------------------------------------------------------- what is asked


def asked_of():
    stream, asked = Stream(), []
    one = stream.one

    def note(question):
        asked.append(question)
        return one(question)

    stream.one = note
    audit_of(stream, tokens=8000).run(silent)
    return asked


def test_requests_are_sent_in_every_circumstance():
    asked = asked_of()
    sizes = Counter(question.round for question in asked)
    assert {1, 8} <= {*sizes.values()}
    assert {question.setting for question in asked} == {*ROUNDS}
    assert max(question.num_tokens for question in asked) == 200
    assert any(question.cut_at for question in asked)
    assert any(not question.is_streamed for question in asked)
    again = [question for question in asked if question.setting == "again"]
    between = {q.group for q in asked} - {q.group for q in again}
    assert between  # A-B-A: other prompts came between
    assert all(any(q.group == a.group and q.round < a.round for q in asked) for a in again)
    prompts = {question.prompt for question in asked}
    continued = [question for question in asked if question.setting == "continued"]
    assert all(any(q.prompt[: len(p)] == p for p in prompts - {q.prompt}) for q in continued)


def test_what_was_not_tested_is_listed():
    audit = audit_of(tokens=2000, kinds=KINDS)
    audit.run(silent)
    found = " ".join(judge(audit).untested)
    for words in ("kind chat", "long answers", "go on with an answer", "small biases"):
        assert words in found


def test_kinds_follow_the_parameters_of_a_prompt_file():
    rows = [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}]
    first, second = kinds_of(rows)
    assert (first.temperature, first.share) == (0, pytest.approx(2 / 3))
    assert (second.name, second.top_p) == ("temperature 0.7, top_p 0.9", 0.9)
    assert kinds_of([{"prompt": "a"}]) == KINDS
    for wrong in ({"temperature": "hot"}, {"top_p": 3}):
        with pytest.raises(InvalidRequest, match=r"temperature|top_p"):
            kinds_of([wrong])


def test_listed_probabilities_follow_top_k_and_min_p_exactly():
    logs = np.log(np.array([[0.5, 0.25, 0.125, 0.0625]]))
    probs, is_known = _compute_listed_probs(logs, Kind(name="k", share=1, temperature=0.5, top_k=2))
    assert probs[0] == pytest.approx([0.8, 0.2, 0, 0, 0]) and is_known.all()
    _, is_known = _compute_listed_probs(logs, Kind(name="k", share=1, top_k=4))
    assert not is_known.any()  # the list is too short
    assert _compute_listed_probs(logs, KINDS[0])[0][0, -1] == pytest.approx(0.0625)
    for temperature, min_p, expected in ((1.0, 0.3, [2 / 3, 1 / 3]), (0.5, 0.2, [0.8, 0.2])):
        kind = Kind(name="m", share=1, temperature=temperature, min_p=min_p)
        probs, is_known = _compute_listed_probs(logs, kind)
        assert probs[0] == pytest.approx([*expected, 0, 0, 0]) and is_known.all()
    _, is_known = _compute_listed_probs(logs, Kind(name="m", share=1, min_p=0.1))
    assert not is_known.any()  # all listed tokens are left, and perhaps others


def test_the_shares_of_the_kinds_are_shares():
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)


def test_kinds_whose_distribution_is_not_reported_are_not_asked():
    """Two fifths of the tokens went to them, so that 1,500 did not suffice for a verdict."""
    asked = Counter()

    def count(number, question, answer):
        asked[question.kind] += 1
        return answer

    stream = Stream(change=count, logprobs=True)
    audit = audit_of(stream, reference=ReportedLogprobs(), kinds=KINDS[:8], tokens=1500)
    audit.run(silent)
    left_out = {"filtered", "penalised", "repetition", "biased"}
    assert not left_out & asked.keys() and {"sampled", "min_p", "top_k"} <= asked.keys()
    assert audit.ledger.arms["served"].num_tokens["all"] >= 500
    verdict = judge(audit)
    for name in left_out:
        assert any(f"kind {name}" in words for words in verdict.untested)
        assert any(f"kind {name!r} are left out: the log-prob" in words for words in verdict.notes)


def test_one_rule_says_whether_a_mean_is_clear():
    assert not moments([1.0] * 29).is_clear and moments([1.0] * 30).is_clear
    assert not moments([0.0] * 900).is_clear and not moments([1.0, -1.0] * 450).is_clear
    assert moments([1.0, -0.8] * 450).is_clear


def test_one_check_tells_where_nothing_was_speculated():
    """With several clients alone; the sentence and the list say the same."""

    def change(number, question, answer):
        return answer if question.setting == "alone" else replace_answer(answer, num_drafted=0)

    audit = audit_of(Stream(change=change))
    audit.run(silent)
    verdict = judge(audit)
    assert "with 8 clients at once nothing was speculated" in verdict.sentence
    assert "requests of the clients 8 (nothing was speculated there)" in verdict.untested
