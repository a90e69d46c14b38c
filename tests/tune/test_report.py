"""What a run of tune shows: tables, sentences, the page, and the comparison with an earlier run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.tune.reports import MANY, ONE, make_interval, make_report

from forerun.cli.tune_tables import print_tune
from forerun.errors import UnreadableInput
from forerun.theory.intervals import Interval
from forerun.tune.arms import Speculation
from forerun.tune.check import ExactnessCheck
from forerun.tune.compare import compare_runs, read_earlier
from forerun.tune.page import render_page
from forerun.tune.race import NO_TIME
from forerun.tune.report import TuneReport
from forerun.tune.wording import list_advice


def advice_of(report: TuneReport) -> str:
    """Return sentences and commands as one text."""
    return "\n".join(f"{a.sentence} {a.command or ''}".rstrip() for a in list_advice(report))


def change_first(report: TuneReport, **values: object) -> TuneReport:
    """Return the report with other values of its first load."""
    return replace(report, loads=(replace(report.loads[0], **values), *report.loads[1:]))


def write_result(report: TuneReport, path: Path) -> Path:
    """Write a report as a run does."""
    path.write_text(json.dumps(report.to_dict(), allow_nan=False))
    return path


# --------------------------------------------------------------------------------------- sentences


def test_each_load_has_a_sentence_and_the_command_with_the_users_own_port():
    assert advice_of(make_report()).splitlines() == [
        "1 client, T=0: ngram K=4 is 1.29 times (1.23–1.35) as fast as none on prompts that had no "
        "part in the choice; text unchanged: no deviation above TV 0.031 at 95% in 4,012 audited "
        "tokens. Run "
        "vllm serve m --port 8000 # ngram K=4",
        "16 clients, T=0: no setting is shown to be faster than none. Run "
        "vllm serve m --port 8000 # none",
        "16 clients, T=0: eagle3 head K=3 makes 2.00 tokens per step; a draft that costs as much "
        "needs 2.50 to be as fast as none, and 3.25 to be 1.3 times as fast.",
        "Each setting was audited once, for all loads.",
    ]


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (None, "was not audited."),
        (ExactnessCheck(status="not_audited", sentence="--audit-tokens is 0."), "not audited."),
        (
            ExactnessCheck(status="cannot_judge", sentence="Too little was drafted."),
            "cannot be judged: Too little was drafted.",
        ),
    ],
)
def test_a_text_that_no_audit_passed_is_called_so(check, said):
    assert said in advice_of(change_first(make_report(), check=check)).splitlines()[0]


def test_one_command_for_all_loads_comes_first_where_one_setting_is_best_everywhere():
    report = make_report()
    loads = (report.loads[0], replace(report.loads[0], load=MANY))
    lines = advice_of(replace(report, loads=loads)).splitlines()
    assert lines[0].startswith("ngram K=4 is best at all loads. Run vllm serve m --port 8000")
    assert len(lines) == 4 and not any("Run" in line for line in lines[1:])


def test_a_load_that_is_not_decided_names_the_fastest_so_far():
    said = advice_of(change_first(make_report(), recommended=None, confirmed=None, check=None))
    assert "1 client, T=0: not decided; the fastest so far is ngram K=4: 1.31 (1.24–1.38)" in said
    assert "# ngram" not in said


def test_lack_of_time_is_no_proof_that_nothing_is_faster():
    report = make_report()
    rows = tuple(
        row if row.arm == "none" else replace(row, reason=NO_TIME) for row in report.loads[1].arms
    )
    report = replace(report, loads=(replace(report.loads[1], arms=rows),))
    assert "faster than none; 3 were given up for lack of time: give more --minutes." in advice_of(
        report
    )


def test_a_setting_that_may_be_faster_is_named_where_none_is_shown_to_be():
    report = change_first(make_report(), recommended="none", confirmed=None, check=None)
    said = advice_of(report)
    assert "faster than none; ngram K=4 may be, at 1.31 (1.24–1.38) times its speed: give" in said


def test_a_draft_that_chooses_its_own_k_names_no_needed_acceptance_length():
    report = make_report()
    auto = Speculation(method="eagle3", draft="head")
    arms = tuple(replace(a, speculation=auto) if "eagle" in a.name else a for a in report.arms)
    assert "makes 2.00 tokens" in advice_of(report)
    assert "tokens per step" not in advice_of(replace(report, arms=arms))


def test_drafts_that_were_accepted_by_chance_recommend_nothing():
    said = advice_of(replace(make_report(), acceptance_length=2.0))
    assert "Run" not in said and said.count("a draft that costs as much needs 2.50") == 2
    assert said.endswith("Drafts were accepted by chance, so nothing is recommended.")


def test_k_by_the_number_of_requests_is_named_where_vllm_needs_another_k_at_each_load():
    report = make_report()
    eagle = Speculation(method="ngram", k=3)
    arms = tuple(replace(a, speculation=eagle) if "eagle" in a.name else a for a in report.arms)
    loads = (report.loads[0], replace(report.loads[1], recommended="eagle3 head K=3"))
    assert "num_speculative_tokens_per_batch_size" in advice_of(
        replace(report, arms=arms, loads=loads)
    )
    assert "per_batch_size" not in advice_of(replace(report, loads=loads))


# ------------------------------------------------------------------------------- terminal and page


def test_tables_have_every_measured_arm_and_name_those_that_were_given_up(capsys):
    print_tune(make_report())
    said = capsys.readouterr().out
    row = re.search(r"ngram K=4 +52.4 +1.31 +120 / 310 +20.0 / 30.0 +2.50 .*", said)
    assert row is not None
    assert "0.70 0.50 0.20 0.10" in row[0] and "3.0 GiB" in row[0]
    assert "100 of 300" in said  # no counts by position
    assert "  suffix: out of memory" in said
    assert "  eagle3 head K=3: 0.61 (0.58–0.64) of the tokens/s of ngram K=4" in said


def test_starts_of_servers_that_ran_one_at_a_time_and_prompts_left_out_are_named(capsys):
    report = change_first(make_report(), num_starts=2)
    report = replace(report, left_out=("p.jsonl:3: 99 tokens are too many",))
    assert "part in the choice, over 2 starts of each server; text unchanged" in advice_of(report)
    print_tune(report)
    assert "  p.jsonl:3: 99 tokens are too many" in capsys.readouterr().out
    assert "<li>p.jsonl:3: 99 tokens are too many</li>" in render_page(report)


def test_a_single_block_has_no_interval(capsys):
    report = make_report()
    once = Interval(estimate=1.4, low=0.0, high=math.inf)
    rows = (replace(report.loads[0].arms[0], speedup=once), *report.loads[0].arms[1:])
    report = change_first(report, arms=rows)
    print_tune(report)
    assert "inf" not in capsys.readouterr().out
    assert "inf" not in render_page(report).replace("information", "")


def test_names_of_the_user_are_escaped(capsys):
    report = make_report()
    row = replace(report.loads[0].arms[3], reason="\x1b[31m<script>alert(1)</script>[bold]")
    report = change_first(report, arms=(*report.loads[0].arms[:3], row))
    print_tune(report)
    said = capsys.readouterr().out
    assert "\x1b[31m" not in said and "[bold]" in said
    page = render_page(report)
    assert "\x1b" not in page and "<script" not in page


class Tags(HTMLParser):
    """Counts elements, and checks that every one that opens is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_a_picture_per_load_and_loads_nothing():
    report = make_report()
    page = render_page(report, ["server was 0.25, is 0.26.0"])
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert tags.seen.count("svg") == len(report.loads) and tags.seen.count("rect") == 6
    assert not re.search(r"https?://(?!127)", page) and "default-src 'none'" in page
    assert "server was 0.25, is 0.26.0" in page and "vllm serve m --port 8000 # suffix" in page
    assert "not finished" not in page
    assert "not finished" in render_page(replace(report, is_complete=False))


# -------------------------------------------------------------------------------------- comparison


def test_a_setting_that_became_slower_is_named_first(tmp_path):
    now, before = make_report(), make_report()
    row = before.loads[0].arms[0]
    figures = {**row.figures, "tokens_per_s": make_interval(60.0, 0.01)}
    faster = replace(row, figures=figures, speedup=make_interval(1.5))
    before = change_first(before, arms=(faster, *before.loads[0].arms[1:]))
    before = replace(before, versions={"forerun": "0.1.0", "server": "0.25.0"})
    lines = compare_runs(now, read_earlier(write_result(before, tmp_path / "result.json")))
    assert lines[:2] == [
        "server was 0.25.0, is 0.26.0",
        "slower: ngram K=4, 1 client, T=0: 52.4 tokens/s, 0.87 (0.83–0.92) of before; speedup was "
        "1.50 (1.42–1.58), is 1.31 (1.24–1.38)",
    ]
    assert len(lines) == 7 and not any(line.startswith("slower") for line in lines[2:])
    assert "none, 1 client, T=0: 40.0 tokens/s, 1.00 (0.93–1.07) of before" in lines


def test_arms_of_one_block_or_of_another_load_are_not_compared(tmp_path):
    report = make_report()
    once = Interval(estimate=40.0, low=0.0, high=math.inf)
    rows = tuple(
        replace(row, figures={**row.figures, "tokens_per_s": once}) for row in report.loads[0].arms
    )
    earlier = write_result(change_first(report, arms=rows), tmp_path / "result.json")
    only_first = replace(report, loads=report.loads[:1])
    nothing = ["no arm was measured at the same load in both runs"]
    assert compare_runs(only_first, read_earlier(earlier)) == nothing
    other = replace(only_first, loads=(replace(report.loads[0], load=replace(ONE, clients=3)),))
    assert compare_runs(other, read_earlier(write_result(report, tmp_path / "b.json"))) == nothing


@pytest.mark.parametrize("content", ["", "{", "[]", '{"loads": 3}', '{"loads": []}'])
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(UnreadableInput, match=r"result\.json") as caught:
        read_earlier(path)
    assert "\n" not in str(caught.value)
