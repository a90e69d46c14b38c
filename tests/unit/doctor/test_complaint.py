"""A complaint in words is a source of facts, of questions, and of what was not understood."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.doctor.evidence import FACTS, SETTING, WROTE
from forerun.doctor.readers.complaint import MAX_COMPLAINT, read_complaint, rules
from forerun.doctor.readers.sources import read_source
from forerun.errors import InvalidRequest


def read(text: str) -> dict[str, object]:
    return {fact.name: fact.value for fact in read_complaint(text)}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("slower with 8 requests at once", {"slower_with_batch": True}),
        ("slower than without speculation since the update", {"slower_than_plain": True}),
        ("acceptance falls as prompts get longer", {"acceptance_falls_with_context": True}),
        ("MTP with K=2: 18.1 tok/s with, 20.9 without", {"k": 2.0, "tokens_per_s": 18.1}),
        ("88 off, 82 at K=2", {"tokens_per_s": 82.0, "tokens_per_s_plain": 88.0}),
        ("3 is slower than 2", {"slower_with_k": True}),
        ("Throughput dropped 12% since the update.", {"slowed_down": True, "changed": ("engine",)}),
        ("The acceptance rate is 0.3%.", {"draft_acceptance_rate": 0.003}),
        ("The acceptance length is 1.012.", {"acceptance_length": 1.012, "acceptance_zero": True}),
        ("0 of 12 proposals are accepted", {"num_accepted": 0.0, "num_drafted": 12.0}),
        ("Decoding is 13% slower than without", {"speedup": 0.87}),
        (
            "Enabling MTP raises VRAM and generation falls from about 35 to 25 tok/s.",
            {"memory_pressure": True, "tokens_per_s": 25.0, "tokens_per_s_plain": 35.0},
        ),
        (
            "The output loops only with speculation.",
            {"output_loops_with_speculation": True, "output_differs": True},
        ),
        ("With MTP the outputs are truncated, without it none are.", {"output_ends_early": True}),
    ],
)
def test_sentences_are_read(text: str, facts: dict[str, object]):
    found = read(text)
    assert {name: pytest.approx(found.get(name)) for name in facts} == facts


@pytest.mark.parametrize(
    ("text", "fact", "value"),
    [
        ("The acceptance rate is not low.", "acceptance_low", False),
        ("The output does not differ from plain decoding.", "output_differs", False),
        ("Decoding is not slower than without.", "slower_than_plain", False),
        ("Throughput is low but acceptance is high.", "acceptance_low", None),
        ("Enabling MTP raises VRAM from 14.3 to 17.8 GB.", "speculation_refused", None),
        ("draft_tensor_parallel_size 1 is ignored.", "speculation_refused", None),
        ("An output that loops only with speculation.", "output_repetitive", None),
        ("With an 8B draft acceptance is good at K=1 and drops for every larger K.", "k", None),
        ("14.9 with and 23.3 without; at depth 24.8 with and 85.5 without", "tokens_per_s", None),
        ("It should accept more than it does, perhaps.", "acceptance_low", None),
        ("Acceptance is fine, half again as fast on short prompts.", "acceptance_low", None),
        ("Decoding is half again as fast on prompts above 4k.", "slower_with_context", None),
    ],
)
def test_negations_and_guesses_are_no_facts(text: str, fact: str, value: bool | None):
    assert read(text).get(fact) is value


def test_text_that_differs_is_not_put_down_to_rounding_without_a_sign_of_it(capsys):
    assert main(["diagnose", "answers differ with speculative decoding"]) == 4
    assert main(["diagnose", "answers differ", "--observed", "output_differs_at_ties"]) == 3
    assert "equally likely to within rounding" in capsys.readouterr().out


def test_a_tau_in_words_that_no_such_k_gives_is_left_out_and_one_given_is_refused(capsys):
    text = "The mean acceptance length is 9.1 and acceptance is low."
    assert main(["diagnose", text, "--k", "4"]) in (3, 4)
    found = capsys.readouterr().out
    assert "not used: acceptance_length 9.1 at k 4" in " ".join(found.split())
    main(["diagnose", text, "--k", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "acceptance_length" in found["supposed"]
    assert "acceptance_length" not in found["evidence"]
    assert main(["diagnose", text, "--k", "4", "--fact", "acceptance_length=9.1"]) == 2


def test_what_is_not_sure_is_kept_with_its_sentence():
    found = read_complaint("EAGLE accepts much less here than it should.")
    assert "acceptance_below_reference" not in found
    supposed = found.supposed["acceptance_below_reference"]
    assert supposed.source == f"{WROTE}EAGLE accepts much less here than it should."


def test_a_sentence_that_is_not_understood_is_named():
    found = read_complaint("Acceptance is low. The moon is full with MTP.")
    assert found.readings[0].unread == ["The moon is full with MTP."]
    assert found.words("method") == ("mtp",)


def test_half_a_contrast_is_not_understood():
    text = "Seven drafted tokens give 48.2 tok/s against 37.7 without, but with four it is 59.1."
    assert read_complaint(text).readings[0].unread == [text]


def test_a_complaint_that_says_nothing_is_not_refused(tmp_path, capsys):
    assert main(["diagnose", "good morning to everybody"]) == 4
    facts = tmp_path / "facts.json"
    facts.write_text('{"forerun_facts": 1, "facts": {"speedup": 1.8, "acceptance_length": 3.1}}')
    assert main(["diagnose", "good morning to everybody", str(facts), "--json"]) in (0, 4)
    found = json.loads(capsys.readouterr().out.partition("{")[1:][1].join(["{", ""]))
    assert found["sources"][-1]["unread"] == ["good morning to everybody"]


def test_words_come_after_what_was_noted(tmp_path, capsys):
    facts = tmp_path / "facts.json"
    facts.write_text('{"forerun_facts": 1, "facts": {"acceptance_low": false}}')
    main(["diagnose", "acceptance is low", str(facts), "--json"])
    evidence = json.loads(capsys.readouterr().out)["evidence"]
    assert evidence["acceptance_low"]["value"] is False


def test_too_long_a_complaint_is_refused():
    with pytest.raises(InvalidRequest, match="at most"):
        read_source("x " * MAX_COMPLAINT, interval_s=1.0)


def test_a_missing_file_is_a_missing_file():
    with pytest.raises(InvalidRequest, match="No such file"):
        read_source("no-such-file.log", interval_s=1.0)


def test_one_word_that_names_no_file_is_no_complaint():
    with pytest.raises(InvalidRequest, match="'fine' is no file"):
        read_source("fine", interval_s=1.0)


def test_every_rule_states_facts_that_exist():
    names = {
        name for table in ("symptoms", "messages") for r in rules(table) for name, _ in r.facts
    }
    assert names <= set(FACTS) and set(FACTS) >= SETTING
