"""`forerun explain` of a whole trace, and what --trace writes for it."""

from __future__ import annotations

import json

import pytest
from tests.records import HEADER, REQUEST, STEP, plain, steps

from forerun.cli.main import main
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import open_trace, read_trace

GREEDY = ("--temperature", "0", "--max-tokens", "24")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


@pytest.fixture
def generate(tiny_pair, capsys):
    def run(*arguments):
        draft = () if "--draft" in arguments else ("--draft", str(tiny_pair.draft))
        code = main(["generate", "def f", "--target", str(tiny_pair.target), *draft, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def records_by_kind(path):
    kinds: dict[type, list] = {TraceHeader: [], StepRecord: [], RequestRecord: []}
    for item in read_trace(path):
        kinds[type(item)].append(item)
    return kinds.values()


def write(path, records):
    with open_trace(path) as writer:
        for record in records:
            writer.add(record)


def test_generate_writes_what_summarize_reads(generate, path, tmp_path, capsys):
    code, out, _ = generate(*GREEDY, "--json", "--trace", str(path), "--trace-tokens")
    assert code == 0
    answer = json.loads(out)
    (header,), found, (request,) = records_by_kind(path)
    assert header.draft_hash is not None
    assert header.controller == "auto"
    assert [token for step in found for token in step.token_ids] == answer["token_ids"]
    hashes = {step.num_drafted > 0: step.drafter_hash for step in found}
    assert hashes == {False: None, True: header.draft_hash}
    assert request.num_output_tokens == 24
    assert main(["diagnose", str(path), "--json"]) in (0, 3, 4)
    facts = json.loads(capsys.readouterr().out)["evidence"]
    figures = answer["figures"]
    assert facts["num_output_tokens"]["value"] == 24
    assert facts["acceptance_length"]["value"] == figures["acceptance_length"]
    assert facts["num_drafted"]["value"] == figures["num_drafted"]


def test_a_drafter_without_weights_has_no_hash(generate, tmp_path):
    path = tmp_path / "t.jsonl"
    code, _, _ = generate(*GREEDY, "--draft", "suffix", "--trace", str(path))
    assert code == 0
    (header,), found, _ = records_by_kind(path)
    assert (header.draft, header.draft_hash) == ("suffix", None)
    assert {step.drafter_hash for step in found} == {None}


def test_a_full_disk_costs_no_token(generate, tmp_path):
    full = tmp_path / "trace.jsonl"
    full.symlink_to("/dev/full")
    _, expected, _ = generate(*GREEDY, "--quiet")
    code, out, err = generate(*GREEDY, "--trace", str(full), "--quiet")
    assert (code, out) == (1, expected)
    (warning,) = [line for line in err.splitlines() if "trace" in line]
    assert "No space left on device" in warning
    assert "the rest goes on" in warning


def test_another_suffix_is_refused_before_anything_is_loaded(capsys):
    code = main(["generate", "x", "--target", "/nonexistent", "--trace", "trace.txt"])
    assert code == 2
    assert "must end in .jsonl" in " ".join(capsys.readouterr().err.split())


def test_bench_tells_its_arms_apart(tiny_pair, path, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"def f{i}(x):\n" for i in range(4)))
    arms = ("--arms", f"near={tiny_pair.draft}@1,3", f"far={tiny_pair.small}@2", "suffix@2")
    small = ("--max-tokens", "18", "--threads", "1")
    code = main(
        [
            *("bench", "--target", str(tiny_pair.target), *arms, "--prompts", str(prompts), *small),
            *("--blocks", "2", "--temperatures", "0", "--batch", "1", "2"),
            *("--trace", str(path), "--json"),
        ]
    )
    assert code == 0
    content = json.loads(capsys.readouterr().out)
    headers, found, requests = records_by_kind(path)
    drafts = [str(tiny_pair.draft), str(tiny_pair.small), "suffix"]
    assert [header.draft for header in headers] == drafts
    by_tag = dict.fromkeys(("plain", "near K=1", "near K=3", "far K=2", "suffix K=2", "T=0"), 0)
    for request in requests:
        for tag in by_tag.keys() & set(request.tags):
            by_tag[tag] += request.num_output_tokens
    for row, *others in zip(*(cell["rows"] for cell in content["cells"]), strict=True):
        assert by_tag[row["name"]] == sum(one["num_tokens"] for one in (row, *others))
    far = [step.drafter_hash for step in found if step.request_id.startswith("far K=2/")]
    assert set(far) == {None, headers[1].draft_hash}
    drafted = [sum(row["num_drafted"] for row in cell["rows"]) for cell in content["cells"]]
    assert sum(step.num_drafted for step in found) == sum(drafted)


def test_the_tables(path, capsys):
    write(
        path,
        [
            HEADER,
            *steps(9),
            *(plain(cycle_id=i, t_s=float(i), batch_rows=1) for i in range(20, 30)),
            REQUEST,
        ],
    )
    assert main(["explain", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "target target, draft draft, cpu" in text
    assert "tau 3.000 over 9 drafting steps, kappa 1.476, so 2.03x in these steps" in text
    assert "decoding 1.59x plain, steps without a draft included" in text
    assert "36 drafted, 18 accepted (22.5 expected), 50.0% wasted" in text
    assert "draft 14.6%, verify 82.5%, other 2.9%" not in text
    assert "1 9 100% 100% ████████████████████████" in text
    assert "1. Why one pass checks several tokens" in text


def test_damage_is_shown_beside_what_is_whole(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    write(path, [HEADER, STEP, STEP])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00" * 9 + b"\n" + lines[1] + lines[2][:40])
    assert main(["explain", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 finished requests, 1 step, " in text
    assert "not read (2 places)" in text
    assert f"line 2 (byte {len(lines[0])}): JSON is malformed" in text
    assert "cut off in the middle" in text


def test_an_empty_trace_is_refused(path, capsys):
    write(path, [])
    assert main(["explain", str(path)]) == 2
    captured = capsys.readouterr()
    assert "holds no record" in captured.err and not captured.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere.jsonl",), 2, "No such file"),
        (("bad.jsonl",), 2, "bad.jsonl holds no record of a trace"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.jsonl", [HEADER, STEP])
    (tmp_path / "bad.jsonl").write_bytes(b"\x89PNG\n")
    assert main(["explain", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
