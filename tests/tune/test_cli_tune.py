"""`forerun tune` as a command, over fake servers: its files, its exit codes, and its refusals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tune.fakes import LONG_S, fake_words, wait_until

from forerun.cli.main import main


def arm_words(**steps_s: float) -> list[str]:
    """Return --arm of servers that differ in the seconds of a step."""
    arms = [
        f"{name}={shlex.join(fake_words('--step-s', step_s))} --port {{port}}"
        for name, step_s in steps_s.items()
    ]
    return ["--arm", *arms]


def run_tune(folder: Path, *arguments: str) -> int:
    """Run the command with short answers and no audit."""
    usual = ["--max-tokens", "16", "--audit-tokens", "0", "--out", str(folder)]
    return main(["tune", *arguments, *usual])


def test_the_faster_server_is_named_and_written_into_the_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*arm_words(none=0.02, fast=0.01), "--minutes", "2"]
    assert run_tune(folder, *arguments) == 0
    said = capsys.readouterr().out
    assert "fast is " in said and "not audited" in said and "--step-s 0.01 --port {port}" in said
    result = json.loads((folder / "result.json").read_text())
    assert result["is_complete"] and result["loads"][0]["recommended"] == "fast"
    assert "<svg" in (folder / "page.html").read_text()
    # The same command takes everything from the folder, and is compared with itself.
    earlier = tmp_path / "earlier.json"
    (folder / "result.json").rename(earlier)
    assert run_tune(folder, *arguments, "--compare", str(earlier)) == 0
    assert "since the earlier run:" in capsys.readouterr().out
    again = json.loads((folder / "result.json").read_text())
    assert any("1.00" in line for line in again["changes"])
    assert again["loads"] == result["loads"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_is_known_and_the_same_command_goes_on(tmp_path, number):
    words = [sys.executable, "-m", "forerun", "tune", *arm_words(none=0.05, fast=0.03)]
    words += ["--max-tokens", "64", "--audit-tokens", "0", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as run:
        state = tmp_path / "state.jsonl"
        wait_until(lambda: state.is_file() and '"block"' in state.read_text())
        run.send_signal(number)
        said, complaint = run.communicate(timeout=LONG_S)
    assert run.returncode == 130
    assert "the same command goes on" in complaint and "Traceback" not in complaint
    assert "not decided" in said
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["is_complete"] and result["loads"][0]["recommended"] is None
    assert "not finished" in (tmp_path / "page.html").read_text()


def test_a_baseline_that_does_not_start_is_named_and_nothing_is_written(tmp_path, capsys):
    arms = ["--arm", "none=no-such-program --port {port}", "b=no-such-program --port {port} --b"]
    assert run_tune(tmp_path, *arms) in (1, 2)
    assert "no-such-program" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


def test_the_plan_shows_commands_and_starts_nothing(tmp_path, capsys):
    command = "vllm serve m --port 8123 --max-model-len 4096"
    assert run_tune(tmp_path, command, "--plan", "--k", "2", "4") == 0
    said = capsys.readouterr().out
    assert "--max-model-len 4096" in said and "--port 8123" not in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of"),
        (["vllm serve m", "--target", "m"], "give one of"),
        (["--arm", "a"], "is not NAME=COMMAND"),
        (["--arm", "a=server --port 80"], "has no {port}"),
        (["--target", "m", "--clients", "1", "0"], "--clients is 0"),
        (["vllm serve m", "--compare", "missing.json", "--plan"], "missing.json"),
        (["vllm serve m", "--draft", "", "--plan"], "names no draft"),
    ],
)
def test_bad_input_is_one_line(arguments, said, tmp_path, capsys):
    assert run_tune(tmp_path, *arguments) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize("more", [(), ("--plan",)])
def test_too_few_tokens_for_an_audit_are_refused(more, tmp_path, capsys):
    words = ["tune", "vllm serve m", "--audit-tokens", "10", "--out", str(tmp_path), *more]
    assert main(words) == 2
    assert "--audit-tokens 10 is too few" in capsys.readouterr().err


def test_secrets_are_neither_printed_nor_written(tmp_path, capsys):
    folder = tmp_path / "run"
    secrets = ("DB_PASS=hunter2", "HF_TOKEN='hf 1234'", "--api-key sk-56 sk-78")
    arms = arm_words(none=0.01, fast=0.01)[1:]
    arms = [arm.replace("=", f"={secrets[0]} {secrets[1]} ", 1) for arm in arms]
    arms = ["--arm", *(f"{arm} {secrets[2]}" for arm in arms)]
    arms.append(f"{arms[1]} --fault 'crash=error: {{all}}'".replace("none", "c", 1))
    assert run_tune(folder, *arms, "--minutes", "0.01") == 0
    assert run_tune(folder, *arms, "--plan") == 0
    shown = capsys.readouterr()
    written = [path for path in folder.rglob("*") if path.is_file()]
    texts = [p.read_text() for p in written if p.parent == folder]
    for text in (shown.out, shown.err, *texts, *map(str, written)):
        assert not any(word in text for word in ("hunter2", "hf 1234", "sk-56", "sk-78"))
    assert "DB_PASS=... HF_TOKEN=..." in shown.out
    assert folder.stat().st_mode & 0o777 == (folder / "logs").stat().st_mode & 0o777 == 0o700
    logs = [path.stat().st_mode & 0o777 for path in (folder / "logs").iterdir()]
    assert logs and set(logs) == {0o600}


# ------------------------------------------------------------------------------ former commands


def test_recommend_tunes_the_target_and_drafts_that_it_was_given(tmp_path, capsys):
    arguments = ["zoo:code-11m", "--drafts", "zoo:code-2m", "suffix", "--temperature", "1"]
    assert main(["recommend", *arguments, "--plan", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "forerun recommend is forerun tune --target now\n"
    assert shown.out.startswith("none\n  forerun serve zoo:code-11m --draft none")
    assert "--draft zoo:code-2m" in shown.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zoo:code-11m", "--budget-s", "1"], "tune has no option '--budget-s'"),
        (["--drafts", "suffix", "--plan"], "give one of"),
    ],
)
def test_recommend_refuses_what_is_gone_in_one_line(arguments, said, capsys):
    assert main(["recommend", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_bench_names_the_command_that_compares_servers(capsys):
    urls = ["http://127.0.0.1:1/v1", "http://user:secret@127.0.0.1:2/v1"]
    assert main(["bench", "--url", urls[0], "--url=" + urls[1], "--concurrency", "1"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.endswith(
        "forerun tune --arm a=http://127.0.0.1:1/v1 --arm b=http://127.0.0.1:2/v1\n"
    )
    assert complaint.count("\n") == 1
