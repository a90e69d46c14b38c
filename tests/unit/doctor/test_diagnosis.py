"""From facts to an answer: verdicts, predictions, words and the page."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from forerun.doctor.diagnosis import Diagnosis, diagnose
from forerun.doctor.evidence import Evidence, EvidenceCheck, Reading, merge
from forerun.doctor.readers.sources import read_text
from forerun.doctor.words import NAMED, headline, page_of, sections
from forerun.errors import InvalidRequest
from forerun.theory.cost import CostLine, CostTable

SLOW = {
    **{"k": 4, "acceptance_rate_per_position": [0.3, 0.1, 0.03, 0.01], "changed": ["target"]},
    **{"tokens_per_s": 80, "tokens_per_s_plain": 100, "tokens_per_s_before": 160},
    "reference_acceptance_length": 2.8,
}


def found_from(costs: CostTable | None = None, **facts: object) -> Diagnosis:
    evidence = Evidence()
    for name, value in facts.items():
        evidence.add(name, value, "test")
    return diagnose(evidence, costs)


def test_a_change_of_target_with_low_acceptance():
    found = found_from(**SLOW)
    assert found.verdict == "problem"
    first = found.causes[0]
    assert first.scored.cause.label == "stale_draft" and first.next_test is not None
    assert len(first.changes) >= 2
    kappa = 1.44 * 100 / 80
    restored = {c.remedy.effect: c.prediction for c in first.changes}["reference_acceptance"]
    assert restored is not None and restored.speedup == pytest.approx(2.8 / kappa)
    assert restored.gain == pytest.approx(2.8 / 1.44)


def test_json_has_the_agreed_form():
    document = json.loads(json.dumps(found_from(**SLOW).to_dict()))
    assert {"causes", "verdict", "attribution", "evidence", "next_test"} <= set(document)
    for cause in document["causes"]:
        assert {
            *("label", "score", "evidence_for", "evidence_against", "next_test", "remedies"),
        } <= set(cause)
        assert len(cause["remedies"]) >= 2
    assert sum(cause["score"] for cause in document["causes"]) <= 1.0


def test_words_name_roles_interplay_and_changes():
    found = found_from(**SLOW)
    text = "\n".join([headline(found), *(line for s in sections(found) for line in s.lines)])
    for phrase in (
        *("The draft proposes 4 tokens", "one pass over 5 rows", "tau = 1.44", "kappa = 1.80"),
        *("verified in parallel, but accepted in order", "Price:", "Predicted: "),
    ):
        assert phrase in text


def test_text_that_ends_elsewhere_is_no_rounding():
    found = found_from(output_differs=True, output_ends_early=True)
    labels = [each.scored.cause.label for each in found.causes]
    assert found.verdict == "inconclusive" and "numerical_nondeterminism" not in labels[:1]


def test_fewer_accepted_than_expected_is_the_verifiers_rule():
    counts = {"k": 4, "num_drafts": 1000, "num_drafted": 4000, "num_accepted": 1700}
    found = found_from(**counts, expected_accepted=2400.0)
    assert found.verdict == "problem"
    assert found.causes[0].scored.cause.label == "biased_accept_rule"
    assert found_from(**counts, expected_accepted=1720.0).verdict != "problem"


def test_a_single_token_is_no_tokens():
    facts = {"k": 1, "draft_acceptance_rate": 0.8, "draft_cost": 0.1, "verify_cost": 1.1}
    found = found_from(**facts, cycle_cost=1.3, num_drafts=1000)
    text = " ".join(line for section in sections(found) for line in section.lines)
    assert "drafting 1 token " in f"{text} " and "proposes 1 token," in text
    assert re.search(r"\b1 (drafted )?(tokens|lines|drafts|checks)", text) is None


def test_inconclusive_says_so_and_asks():
    found = found_from(batch=1, temperature=0.7)
    assert found.verdict == "inconclusive" and found.next_test is not None
    text = [section.heading for section in sections(found)]
    assert headline(found).startswith("Inconclusive")
    assert any(heading.startswith("Next test") for heading in text)


def test_health_without_a_plain_rate_is_said_with_care():
    found = found_from(k=4, acceptance_rate_per_position=[0.85, 0.7, 0.6, 0.5])
    assert found.verdict == "healthy" and "as far as is known" in headline(found)


def test_speculation_that_was_switched_off_is_named_and_is_no_fault():
    facts = {"k": 4, "acceptance_rate_per_position": [0.85, 0.7, 0.6, 0.5]}
    few, many = found_from(**facts, off_share=0.09), found_from(**facts, off_share=0.83)
    assert many.verdict == few.verdict == "healthy"
    assert many.causes == few.causes
    line = "The controller planned plain decoding for 83% of the steps."
    assert headline(many).endswith(line) and line[:20] not in headline(few)


def test_a_cost_table_predicts_other_k():
    line = CostLine(rows=(1, 9), verify_s=(0.010, 0.012), plain_s=0.010, draft_s=0.0005)
    facts = {"acceptance_rate_per_position": [0.9], "k": 1}
    found = found_from(CostTable(lines=(line,)), **facts)
    k = found.evidence.number("best_k")
    assert k is not None and k > 4
    assert found.causes[0].scored.cause.label == "k_too_small"
    prediction = found.causes[0].changes[0].prediction
    assert prediction is not None and prediction.basis == "cost table" and prediction.gain > 1.2


def test_what_is_assumed_is_no_evidence():
    found = found_from(k=4, acceptance_rate_per_position=[0.5, 0.3, 0.2, 0.1])
    assert "best_k" not in found.evidence


class Tags(HTMLParser):
    """The elements of a page as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>{{ 7*7 }}'


def test_the_page_escapes_everything_and_loads_nothing():
    evidence = Evidence()
    for name, value in SLOW.items():
        evidence.add(name, value, HOSTILE)
    evidence.add("target_name", HOSTILE, HOSTILE)
    evidence.series["tag"] = ((HOSTILE, 0.5, 100.0), ("b", 0.2, 50.0))
    evidence.series["time"] = ((0.0, 0.5, 10.0), (5.0, 0.4, 10.0))
    evidence.series["K"] = ((4.0, 10.0, 10.0),)
    page = page_of(diagnose(evidence))
    tags = Tags()
    tags.feed(page)
    assert not tags.names & {"script", "img", "link", "iframe", "object", "a", "form"}
    assert not tags.attributes & {"src", "href", "onerror", "onload", "action"}
    assert "&lt;script&gt;alert(1)" in page and "url(" not in page and "@import" not in page
    for picture in ("Time per token", "Survival by position", "Acceptance over time", "K = 4"):
        assert picture in page
    assert "{{ 7*7 }}" in page


def test_a_page_of_nothing_is_a_page():
    assert "Inconclusive" in page_of(found_from())


@pytest.mark.parametrize(
    ("facts", "label"),
    [
        ({"device": "cpu"}, "compute_bound_batch"),
        ({"device": "cuda"}, "verify_not_parallel"),
        ({"device": "cpu", "batch_linearity": 0.0}, "verify_not_parallel"),
        ({"device": "cuda", "batch_linearity": 0.25}, "compute_bound_batch"),
    ],
)
def test_an_expensive_pass_is_the_batchs_or_the_kernels(facts: dict[str, object], label: str):
    known = {"k": 4, "batch": 8, "acceptance_length": 2.6, "cycle_cost": 3.4}
    found = found_from(**known, draft_cost=0.08, verify_cost=2.7, **facts)
    assert found.causes[0].scored.cause.label == label


def test_what_was_measured_outweighs_what_was_claimed():
    """The waterfall puts the loss on the cost of a step: a changed target does not explain it."""
    facts = {"k": 4, "acceptance_rate_per_position": [0.8, 0.68, 0.57, 0.43]}
    slow = {"tokens_per_s": 61, "tokens_per_s_plain": 70}
    found = found_from(**facts, **slow, changed=["target"])
    share = found.evidence.number("gap_share_rejection")
    assert share is not None and share < 0.1
    labels = [ranked.scored.cause.label for ranked in found.causes]
    assert "stale_draft" not in labels
    assert found.causes[0].scored.cause.family == "cost"
    assert headline(found).startswith("Problem: A step with drafts costs too much.")
    low = {**facts, "acceptance_rate_per_position": [0.3, 0.1, 0.03, 0.01]}
    assert found_from(**low, **slow, changed=["target"]).causes[0].scored.cause.label == (
        "stale_draft"
    )


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"speedup": 1.0, "draft_share_high": True}, "inconclusive"),
        ({"speedup": 0.9, "draft_share_high": True}, "problem"),
        ({"speedup": 1.0, "tools_disagree": True, "client_counts_chunks": True}, "problem"),
        ({"num_drafts": 29, "acceptance_low": True}, "inconclusive"),
        ({"num_drafts": 30, "acceptance_low": True}, "problem"),
        ({"num_drafts": 29, "weights_incomplete": True, "acceptance_zero": True}, "problem"),
        ({"num_drafts": 7, "speedup": 0.6, "draft_share_high": True}, "inconclusive"),
        ({"num_drafts": 7, "weights_incomplete": True, "acceptance_zero": True}, "problem"),
    ],
)
def test_a_weak_cause_of_little_harm_is_inconclusive(facts, verdict):
    found = found_from(**facts)
    assert found.verdict == verdict


def test_what_to_change_follows_the_verdict_in_words():
    found = found_from(**SLOW)
    assert headline(found) == (
        "Problem: The target changed and the draft did not. Decoding runs at 0.80x the plain rate."
    )
    assert next(iter(sections(found))).heading == "What to change"
    page = page_of(found)
    order = ("What to change", "Next test", "Time per token", "1. stale_draft", "Why", "Facts")
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert page.count("rejected at position 1<") == 1
    for kind in ("ideal", "rejection", "unsplit", "total"):
        assert f'<i class="{kind}"></i>' in page


def test_names_cannot_control_the_terminal():
    found = found_from(**SLOW, target_name="\x1b[31mred\r")
    found.evidence.readings += [Reading(source="\x1b]0;title\x07", notes=["\x9b1m"])]
    text = "".join(line for section in sections(found) for line in section.lines)
    assert "\\x1b]0;title" in text and not any(c < " " or c == "\x9b" for c in text)


def test_a_page_of_deep_drafts_stays_short():
    evidence = Evidence()
    for name, value in {"k": 300, "acceptance_length": 5.0, "cycle_cost": 3.0}.items():
        evidence.add(name, value, "test")
    evidence.series["K"] = tuple((float(k), 1.0 + k, 1.0 + k) for k in range(300))
    page = page_of(diagnose(evidence))
    assert "rejected at positions 9 to 300" in page and page.count('class="bar"') < 50
    assert "K = 299" in page and "K = 1<" not in page


def test_what_was_measured_without_a_symptom_is_healthy():
    """Neither undecided text nor rows that cost something are a complaint."""
    facts = {"num_drafts": 270, "num_drafted": 1000, "num_accepted": 620, "target_entropy": 3.6}
    found = found_from(**facts, accepted_per_position=[190, 160, 140, 130], verify_linearity=0.5)
    assert found.verdict == "healthy" and headline(found).startswith("Healthy as far as is known")
    assert not any(section.heading == "What to change" for section in sections(found))
    worse = found_from(**facts, verify_linearity=0.5, verify_serial=True)
    assert worse.verdict == "problem"


def test_causes_are_sorted_and_one_change_comes_first():
    found = found_from(**SLOW, draft_share_high=True)
    scores = [ranked.scored.score for ranked in found.causes]
    assert scores == sorted(scores, reverse=True)
    by_heading = {section.heading: section.lines for section in sections(found)}
    (first,) = by_heading["What to change"]
    assert first.startswith(found.causes[0].changes[0].remedy.change)
    lines = [first, *by_heading["Other changes"]]
    assert len({line.split(".")[0] for line in lines}) == len(lines)
    gains = [float(gain) for line in lines for gain in re.findall(r"([0-9.]+) times", line)]
    assert gains and min(gains) >= 1.02
    assert sum("at K = " in line for line in lines) <= 1


def test_a_weak_score_names_no_cause_in_the_headline():
    found = found_from(k=4, acceptance_length=2.0, slower_with_context=True, schema_violations=True)
    assert found.verdict == "problem" and found.causes[0].scored.score >= NAMED
    rates = {"acceptance_rate_per_position": [0.8, 0.68, 0.57, 0.43], "k": 4}
    weak = found_from(**rates, tokens_per_s=61, tokens_per_s_plain=70)
    assert weak.verdict == "problem" and weak.causes[0].scored.score < NAMED
    assert weak.causes[0].scored.cause.what not in headline(weak)


def test_a_page_holds_no_character_that_controls_a_terminal():
    found = found_from(**SLOW, target_name="\x1b[31mred\u202e")
    found.evidence.series["tag"] = (("\x1b]0;t\x07", 0.5, 100.0), ("b", 0.2, 50.0))
    page = page_of(found)
    assert not any(c in page for c in "\x1b\x07\u202e") and "\\x1b[31m" in page


def test_more_accepted_than_drafted_is_refused():
    evidence = Evidence()
    evidence.add("num_drafted", 100, "test")
    evidence.add("num_accepted", 900, "test")
    with pytest.raises(InvalidRequest, match="900 accepted of 100 drafted"):
        evidence.check_counts()


def test_counts_of_two_sources_are_not_mixed():
    trace, probe = Evidence(), Evidence()
    trace.add("num_accepted", 10, "trace")
    probe.add("num_accepted", 900, "probe")
    probe.add("num_drafted", 1000, "probe")
    found = merge(trace, probe)
    assert found.number("num_accepted") == 10 and "num_drafted" not in found
    assert not found.disagreements


def test_drafts_of_several_lengths_are_told_by_mean_and_range():
    facts: dict[str, object] = {"k": 4, "num_drafts": 100, "num_drafted": 250, "num_accepted": 135}
    fixed = {"num_drafted": 400, "drafted_per_position": [100] * 4}
    counts = {"accepted_per_position": [70, 40, 20, 5]}
    varied = facts | counts | {"drafted_per_position": [100, 80, 50, 20]}
    assert "proposes 2.5 tokens on average, from 1 to 4" in step_of(varied)
    assert "proposes 4 tokens, one after the other" in step_of(facts | counts | fixed)
    assert "A step takes 20 ms." in step_of(varied | {"cycle_s": 0.02, "batch": 2})


def step_of(facts: dict[str, object]) -> str:
    evidence = Evidence()
    for name, value in facts.items():
        evidence.add(name, value, "test")
    found = {section.heading: section.lines for section in sections(diagnose(evidence))}
    return "\n".join(found["What happens in a step"])


def test_causes_that_are_hardly_possible_are_not_printed():
    evidence = Evidence()
    for name, value in (("acceptance_zero", True), ("weights_incomplete", True)):
        evidence.add(name, value, "test")
    found = diagnose(evidence)
    headings = [s.heading for s in sections(found) if s.heading[0].isdigit()]
    printed = [ranked for ranked in found.causes if ranked.scored.score >= 0.02]
    assert len(headings) == len(printed) == len(found.causes)


LOG = """\
(pid=1) INFO 03-12 10:00:10 SpecDecoding metrics: Mean acceptance length: 2.23, Accepted: 551 \
tokens, Drafted: 900 tokens, Per-position acceptance rate: 0.798, 0.427
(pid=1) INFO 03-12 10:00:30 SpecDecoding metrics: Mean acceptance length: 1.02, Accepted: 8 \
tokens, Drafted: 880 tokens, Per-position acceptance rate: 0.018, 0.000
(pid=1) INFO 03-12 10:00:50 SpecDecoding metrics: Mean acceptance length: 1.00, Accepted: 0 \
tokens, Drafted: 860 tokens, Per-position acceptance rate: 0.000, 0.000
"""


def test_a_fall_in_a_log_is_a_change_with_a_time():
    found = diagnose(read_text(io.BytesIO(LOG.encode()), "serve.log"))
    assert found.verdict == "problem"
    said = headline(found)
    assert "Acceptance fell from 0.61 to 0.00 of the drafted tokens" in said
    assert "between 10:00:10 and 10:00:30" in said and "no K pays" in said
    rate = found.evidence.number("draft_acceptance_rate")
    assert rate is not None and rate < 0.01
    assert found.evidence.number("reference_acceptance_rate") == pytest.approx(551 / 900)


def test_a_log_that_only_wavers_is_averaged():
    lines = LOG.splitlines()[0]
    log = "\n".join([lines, lines.replace("551", "490"), lines.replace("551", "520")])
    found = read_text(io.BytesIO(log.encode()), "serve.log")
    assert not found.changes and found.number("num_drafted") == 2700


@pytest.mark.parametrize("tau", [1.0, 1.03])
def test_acceptance_near_nothing_is_a_problem_whatever_k_is(tau: float):
    found = found_from(acceptance_length=tau, method="eagle")
    assert found.verdict == "problem" and "no K pays" in headline(found)


def test_health_needs_figures_that_could_have_shown_a_fault_and_names_them():
    assert found_from(k=4, temperature=0.7).verdict == "inconclusive"
    found = found_from(k=4, acceptance_rate_per_position=[0.85, 0.7, 0.6, 0.5])
    assert headline(found).startswith("Healthy as far as is known: no fault in acceptance.")


def test_what_was_not_understood_is_named_and_never_healthy():
    evidence = Evidence(readings=[Reading(source="words", unread=["two of six are truncated"])])
    evidence.add("acceptance_rate_per_position", [0.85, 0.7], "test")
    found = diagnose(evidence)
    assert found.verdict == "inconclusive"
    assert 'not understood: "two of six are truncated"' in headline(found)


def test_checks_share_one_error_level():
    """Ten that show nothing take from one that shows something; alone it would be enough."""
    shown = EvidenceCheck(
        name="acceptance_dropped", p_value=0.003, is_large=True, is_absent=False, words=""
    )
    others = [
        replace(shown, name=f"acceptance_falls_with_{what}", p_value=0.5)
        for what in ("context", "generation", "batch", "temperature", "k")
    ]
    alone, among = Evidence(), Evidence()
    alone.settle([shown])
    among.settle([*others, shown])
    assert alone.flag("acceptance_dropped") is True
    assert among.flag("acceptance_dropped") is None and len(among.checks) == 6


def test_the_speed_of_a_run_is_that_of_all_its_steps():
    facts = {"acceptance_length": 2.67, "cycle_cost": 1.0, "num_drafts": 36, "num_steps": 100}
    found = found_from(**facts, k=4)
    whole = (36 * 2.67 + 64) / 100
    assert found.evidence.number("speedup") == pytest.approx(whole)
    assert f"{whole:.2f}x the plain rate" in headline(found)


def test_a_page_without_sections_says_how_to_make_the_test():
    found = found_from(batch=1, temperature=0.7)
    assert found.next_test is not None
    assert headline(found).endswith(f"{found.next_test.name} (below).")
    assert found.next_test.how in headline(found, states_speedup=False)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_accepted": 500, "num_drafts": 100, "k": 4}, "500 at num_drafts 100 and k 4"),
        ({"num_accepted": 200, "num_drafts": 100, "acceptance_length": 2.1}, "is 2.1: .* 3.00"),
        ({"acceptance_rate_per_position": [0.5, 0.7]}, "rises from 0.5 to 0.7 at position 2"),
        ({"draft_s": 0.02, "cycle_s": 0.01}, "draft_s is 0.02 at cycle_s 0.01"),
    ],
)
def test_stated_figures_that_no_run_has_together_are_refused(facts, message):
    evidence = Evidence()
    for name, value in facts.items():
        evidence.add(name, value, "test")
    with pytest.raises(InvalidRequest, match=message):
        evidence.check_counts()


def test_rates_that_rise_where_k_varies_and_rounded_figures_are_no_contradiction():
    evidence = Evidence()
    for name, value in {
        **{"num_accepted": 204, "num_drafts": 100, "k": 2, "acceptance_length": 3.0},
        **{"num_drafted": 400, "drafted_per_position": [100, 50]},
        **{"acceptance_rate_per_position": [0.5, 0.7], "draft_s": 0.01, "cycle_s": 0.01},
    }.items():
        evidence.add(name, value, "test")
    evidence.check_counts()


def test_rates_that_deny_an_observed_slowdown_are_asked_about():
    rates = {"tokens_per_s": 70, "tokens_per_s_plain": 60}
    found = found_from(**rates, slower_than_plain=True)
    assert found.verdict == "inconclusive" and found.evidence.flag("slower_than_plain") is False
    assert "slower_than_plain is yes (test), but 70 tokens/s with and 60" in headline(found)
    assert "which is right?" in headline(found) and "?." not in headline(found)
    assert not found_from(**rates, slower_than_plain=False).evidence.conflicts
