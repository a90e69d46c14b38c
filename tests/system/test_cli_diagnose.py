"""`forerun diagnose` from the command line: exit codes, sources, facts and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from tests.records import HEADER, STEP, plain

from forerun.cli.main import main
from forerun.trace.files import open_trace

LINE = (
    "SpecDecoding metrics: Mean acceptance length: {tau:.2f}, Accepted throughput: 1.05 tokens/s, "
    "Drafted throughput: 1.51 tokens/s, Accepted: {accepted} tokens, Drafted: 400 tokens, "
    "Per-position acceptance rate: {rates}, Avg Draft acceptance rate: 1.0%\n"
)
GOOD = LINE.format(tau=3.6, accepted=260, rates="0.850, 0.700, 0.600, 0.450")
BAD = LINE.format(tau=1.2, accepted=20, rates="0.150, 0.040, 0.010, 0.000")


@pytest.fixture
def diagnose(capsys):
    def call(*arguments):
        code = main(["diagnose", *map(str, arguments)])
        return code, capsys.readouterr()

    return call


@pytest.fixture
def log(tmp_path):
    def write(text: str, name: str = "engine.log") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def trace_of(path: Path, accepted: int, num_steps: int = 300) -> Path:
    """A trace of K = 4 whose steps accept so many tokens on average, or none."""
    spread = [-1, 0, 1] if accepted else [0]
    counts = [accepted + spread[index % len(spread)] for index in range(num_steps)]
    Random(0).shuffle(counts)
    with open_trace(path) as writer:
        writer.add(HEADER)
        for index, accepted in enumerate(counts):
            changes = {"cycle_id": index, "step": index, "t_s": index / 100}
            values = {"num_accepted": accepted, "num_emitted": accepted + 1, "draft_s": 0.001}
            writer.add(replace(STEP, expected_accepted=float(accepted), **values, **changes))
        for index in range(num_steps, num_steps + 30):
            times = {"verify_s": 0.018, "other_s": 0.001}
            writer.add(plain(cycle_id=index, step=index, t_s=index / 100, **times))
    return path


def test_healthy_is_0(diagnose, log):
    code, captured = diagnose(log(GOOD), "--tokens-per-s", 180, "--tokens-per-s-plain", 100)
    assert code == 0 and captured.out.startswith("Healthy")


def test_a_problem_is_3_and_names_two_changes_with_their_price(diagnose, log):
    flags = ("--tokens-per-s", 80, "--tokens-per-s-plain", 100, "--changed", "target")
    code, captured = diagnose(log(BAD), *flags)
    assert code == 3 and "stale_draft" in captured.out
    assert captured.out.count("Price:") >= 2 and "Predicted: " in captured.out
    assert "Next test" in captured.out


def test_too_little_is_4_and_asks(diagnose):
    code, captured = diagnose("--temperature", 0.7)
    assert code == 4 and "Inconclusive" in captured.out and "Next test" in captured.out


def test_json_is_one_object(diagnose, log):
    flags = ("--changed", "target", "--observed", "acceptance_dropped")
    code, captured = diagnose(log(BAD), "--json", *flags)
    document = json.loads(captured.out)
    assert code == 3 and document["causes"][0]["remedies"]
    assert document["evidence"]["acceptance_dropped"]["source"] == "given on the command line"


def test_a_run_before_a_change_is_what_today_is_compared_with(diagnose, tmp_path):
    before = trace_of(tmp_path / "before.jsonl", 3)
    after = trace_of(tmp_path / "after.jsonl", 0)
    code, captured = diagnose(after, "--before", before, "--json", "--changed", "adapter")
    document = json.loads(captured.out)
    assert code == 3 and document["evidence"]["reference_ratio"]["value"] == 0.25
    labels = [cause["label"] for cause in document["causes"]]
    assert "stale_draft" in labels[:3]
    code, _ = diagnose(before)
    assert code == 0


def test_a_page_is_written(diagnose, log, tmp_path):
    page = tmp_path / "report.html"
    code, _ = diagnose(log(BAD), "--html", page)
    assert code == 3 and "<svg" in page.read_text()


def test_standard_input_and_facts_files(diagnose, log, monkeypatch):
    known = {"tokens_per_s": 80, "tokens_per_s_plain": 100}
    facts = log(json.dumps({"forerun_facts": 1, "facts": known}), "f.json")
    with log(BAD).open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, captured = diagnose("-", facts, "--json")
    document = json.loads(captured.out)
    assert code == 3 and document["attribution"]["speedup"] == pytest.approx(0.8)


def test_a_trace_may_come_through_standard_input(diagnose, tmp_path, monkeypatch):
    trace = trace_of(tmp_path / "trace.jsonl", 0)
    with trace.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        piped, read = (json.loads(diagnose(name, "--json")[1].out) for name in ("-", trace))
    assert piped["causes"] == read["causes"]
    assert piped["evidence"]["num_drafts"]["value"] == read["evidence"]["num_drafts"]["value"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no evidence"),
        (("no/such/file.log",), "cannot be read"),
        (("--k", "-3"), "k is -3.0"),
        (("--fact", "acceptance_length=0.5"), "must be a number from 1"),
        (("--observed", "bad_weather"), "no fact 'bad_weather'"),
        (
            ("--observed", "slowness"),
            "no fact 'slowness'; did you mean slowdown, slower_than_plain",
        ),
        (("--fact", "k"), "NAME=VALUE"),
        (("--changed", "weather"), "must be one of target"),
        (("http://127.0.0.1:9/metrics", "--interval-s", "-1"), "interval-s"),
        (("--k", "4", "--html", "/no/such/folder/page.html"), "cannot be written"),
        (("--k", "4", "--html", "/tmp/" + "a" * 5000), "cannot be written: File name too long"),
    ],
)
def test_mistakes_are_one_line_and_2(diagnose, arguments, message):
    code, captured = diagnose(*arguments)
    assert code == 2 and message in captured.err and not captured.out


def test_binary_and_empty_sources(diagnose, tmp_path):
    binary = tmp_path / "weights.gguf"
    binary.write_bytes(b"GGUF\x00\x03" * 1000)
    code, captured = diagnose(binary)
    assert code == 2 and "binary" in captured.err
    empty = tmp_path / "empty.log"
    empty.write_text("")
    code, captured = diagnose(empty)
    assert code == 2 and "empty.log is empty" in captured.err


def test_a_text_that_no_engine_wrote_is_refused(diagnose, tmp_path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("two eggs\nsome flour\n")
    code, captured = diagnose(recipe)
    assert code == 2 and "no line of recipe.txt is understood" in captured.err
    assert diagnose(recipe, "--k", 4)[0] == 4


def test_a_log_that_is_markup_is_printed_as_text(diagnose, log):
    name = "[bold red]x.log"
    code, captured = diagnose(log("[link=http://x]" + BAD, name))
    assert code == 3 and name in captured.out


def test_it_needs_no_torch(log):
    script = (
        "import sys\nfrom forerun.cli.main import main\n"
        f"code = main(['diagnose', {str(log(BAD))!r}, '--json'])\n"
        "assert code == 3 and 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=300)
