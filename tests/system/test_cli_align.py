"""`forerun align` from prompts to a carded draft, interrupted, resumed, refreshed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.system.conftest import save_model

from forerun.align import run as alignment
from forerun.align.config import AlignConfig, DataConfig, EvaluationConfig, TrainingConfig
from forerun.align.objectives import Objective
from forerun.align.run import align as run_align
from forerun.align.samples import read_prompts
from forerun.align.workspace import (
    StepMetrics,
    exclusive_access,
    lock_for,
    read_lines,
)
from forerun.cli.main import main
from forerun.errors import InvalidRequest
from forerun.models import checkpoint
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams

ARGUMENTS = (
    *("--temperatures", "0"),
    *("--max-tokens", "12", "--threads", "1", "--no-prediction"),
    *("--num-steps", "4", "--num-evaluations", "2", "--max-prompts", "4", "--window", "48"),
    *("--tokens-per-step", "192", "--k", "2", "--held-out-share", "0.3"),
    "--json",
)


@pytest.fixture
def align(tiny_pair, prompts, capsys):
    def run(*arguments):
        pair = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.small))
        code = main(["align", *pair, "--prompts", str(prompts), *ARGUMENTS, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run


@pytest.fixture(scope="module")
def aligned(tiny_pair, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("aligned") / "run"
    pair = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.small))
    assert main(["align", *pair, "--prompts", str(prompts), *ARGUMENTS, "--out", str(out)]) == 0
    return out


def test_the_report_says_what_was_learned_judged_and_kept(aligned, prompts, tiny_pair):
    report = json.loads((aligned / "report.json").read_text())
    assert [pair["after"]["temperature"] for pair in report["judged"]] == [1.0, 0.0]
    assert [judgement["step"] for judgement in report["judgements"]] == [0, 2, 4]
    data = report["data"]
    total = len(read_prompts(prompts, ModelFiles.find(tiny_pair.target).tokenizer, 512))
    assert data["num_training_prompts"] + data["num_held_out_prompts"] == total
    assert {"even", "odd"} == report["judged"][0]["after"]["by_tag"].keys()
    best = max(report["judgements"], key=lambda j: (j["acceptance_length"], -j["step"]))
    assert report["best_step"] == best["step"]


def test_the_draft_can_be_served(aligned, tiny_pair, capsys):
    for file in ("forerun.json", "model.safetensors", "serving/README.md"):
        assert (aligned / "draft" / file).exists()
    pair = ("--target", str(tiny_pair.target), "--draft", str(aligned / "draft"))
    assert main(["generate", "def f(", *pair, "--max-tokens", "8", "--threads", "1"]) == 0


def test_a_finished_run_says_so_and_shows_what_it_found(align, aligned, tmp_path, monkeypatch):
    def no_engine(*arguments: object, **settings: object) -> None:
        raise AssertionError("nothing is left to do")

    monkeypatch.setattr("forerun.align.run.Engine.load", no_engine)
    again = tmp_path / "again"
    shutil.copytree(aligned, again)
    code, out, err = align("--out", str(again), "--cache-dir", str(tmp_path / "elsewhere"))
    assert code == 0, err
    assert "finished before" in err
    assert json.loads(out) == json.loads((aligned / "report.json").read_text())
    assert not (again / "draft" / "serving" / "vllm.json").exists()
    for _ in range(2):
        code, _, err = align("--out", str(again), "--export", "vllm,llama.cpp")
        assert code == 0, err
    for name in ("vllm.json", "llama.cpp.json", "draft.gguf"):
        assert (again / "draft" / "serving" / name).exists()
    for name in ("report.json", "judgements.jsonl", "metrics.jsonl", "draft/model.safetensors"):
        assert (again / name).read_bytes() == (aligned / name).read_bytes()


def test_a_finished_run_is_shown_to_people_as_well(aligned, capsys):
    arguments = (*ARGUMENTS[:-1], "--out", str(aligned))  # without --json
    pair = json.loads((aligned / "align.json").read_text())
    paths = ("--target", pair["target"], "--draft", pair["draft"])
    assert main(["align", *paths, "--prompts", pair["data"]["prompts"], *arguments]) == 0
    assert f"draft: {aligned / 'draft'}" in capsys.readouterr().out.replace("\n", "")


def test_a_run_that_lost_its_end_goes_on(align, aligned, tmp_path, monkeypatch):
    again = tmp_path / "again"
    shutil.copytree(aligned, again)
    finished = json.loads((aligned / "report.json").read_text())
    for lost in ("report.json", "draft", "snapshots/4", "judgements.jsonl"):
        shutil.rmtree(again / lost) if (again / lost).is_dir() else (again / lost).unlink()
    free = ("--rows-per-pass", "2", "--cache-dir", str(tmp_path / "elsewhere"))

    def choose_anew(*arguments: object) -> None:
        raise AssertionError("the types of products were chosen before")

    for module in ("run", "trainer"):
        monkeypatch.setattr(f"forerun.align.{module}.choose_faster_dtype", choose_anew)
    code, out, err = align("--out", str(again), *free)
    assert code == 0, err
    report = json.loads(out)
    judged = [
        {j["step"]: j["acceptance_length"] for j in run["judgements"]} for run in (report, finished)
    ]
    assert judged[0] == judged[1]
    assert report["best_step"] == finished["best_step"]


def test_a_run_interrupted_in_a_later_round_trains_as_if_it_had_not_been(
    align, aligned, tmp_path, monkeypatch
):
    out, append = tmp_path / "out", alignment.append_line

    def stop_before(path: Path, metrics: StepMetrics) -> None:
        if metrics.step == 4:
            raise KeyboardInterrupt
        append(path, metrics)

    make_trainer = alignment.Run.make_trainer

    def make_saving_trainer(*arguments):
        trainer = make_trainer(*arguments)
        trainer.config = replace(trainer.config, checkpoint_every_s=0.0)
        return trainer

    monkeypatch.setattr(alignment.Run, "make_trainer", make_saving_trainer)
    monkeypatch.setattr(alignment, "append_line", stop_before)
    assert align("--out", str(out))[0] == 130
    monkeypatch.setattr(alignment, "append_line", append)
    code, _, err = align("--out", str(out))
    assert code == 0, err

    def steps(folder: Path) -> list[StepMetrics]:
        return [
            replace(step, duration_s=0.0)
            for step in read_lines(folder / "metrics.jsonl", StepMetrics)
        ]

    assert steps(out) == steps(aligned)


def test_an_objective_of_ones_own_takes_the_place_of_the_named_one(tiny_pair, prompts, tmp_path):
    def reverse_kl(log_draft, target_probs):
        log_target = target_probs.clamp(min=1e-8).log()
        return (log_draft.exp() * (log_draft - log_target)).sum(-1)

    config = AlignConfig(
        target=str(tiny_pair.target),
        draft=str(tiny_pair.small),
        out=tmp_path / "own",
        sampling=SamplingParams(max_tokens=8),
        data=DataConfig(prompts=prompts, held_out_share=0.3),
        training=TrainingConfig(num_steps=1, window=48, tokens_per_step=96),
        evaluation=EvaluationConfig(num_evaluations=1, max_prompts=2),
    )
    report = run_align(config, objective=Objective(name="rkl", divergence=reverse_kl))
    assert report is not None
    assert report.objective == report.identity["objective.objective"] == "rkl"
    with pytest.raises(InvalidRequest, match=r"objective.objective was rkl, is auto"):
        run_align(config)


def test_other_settings_need_another_folder(align, aligned):
    code, _, err = align("--out", str(aligned), "--objective", "fkl")
    assert code == 2
    assert "objective.objective was auto, is fkl" in err


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("own", "agrees"), [((), True), (("--draft-temperature", "0"), False)])
def test_a_draft_learns_at_the_temperature_it_proposes_at(align, tiny_pair, tmp_path, own, agrees):
    """The target as its own draft: nothing is refused unless it proposes at another one."""
    out = tmp_path / "out"
    code, _, err = align("--draft", str(tiny_pair.target), "--out", str(out), *own)
    assert code == 0, err
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["acceptance_probability"] > 0.97) is agrees
    if not agrees:  # "auto" takes for a greedy draft what suits one
        assert json.loads((out / "report.json").read_text())["objective"] == "fkl"


def test_a_refresh_starts_where_the_last_run_ended(aligned, tmp_path, capsys):
    out = tmp_path / "fresh"
    assert (
        main(["align", "--refresh", str(aligned), "--out", str(out), "--no-prediction", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    earlier = json.loads((aligned / "report.json").read_text())
    before = report["judged"][0]["before"]["overall"]["acceptance_length"]
    assert before == earlier["judged"][0]["after"]["overall"]["acceptance_length"]
    settings = json.loads((out / "align.json").read_text())
    assert settings["draft"] == str(aligned / "draft")
    assert settings["training"]["num_steps"] == 4


def test_a_refresh_takes_the_draft_alone_wherever_it_is(aligned, tmp_path):
    elsewhere = tmp_path / "served"
    shutil.copytree(aligned / "draft", elsewhere)
    out = tmp_path / "fresh"
    arguments = ("--refresh", str(elsewhere), "--no-prediction", "--json", "--num-steps", "2")
    assert main(["align", *arguments, "--num-evaluations", "1", "--out", str(out)]) == 0
    settings = json.loads((out / "align.json").read_text())
    first = json.loads((aligned / "align.json").read_text())
    assert settings["draft"] == str(elsewhere)
    assert settings["data"] == first["data"]


def test_a_run_does_not_replace_the_draft_it_starts_from(align, aligned, capsys):
    assert main(["align", "--refresh", str(aligned), "--out", str(aligned)]) == 2
    assert "is to be replaced by what is learned" in " ".join(capsys.readouterr().err.split())
    own = str(aligned / "draft")
    code, _, err = align("--draft", own, "--out", str(aligned), "--num-steps", "2")
    assert code == 2
    assert f"the draft {own} is to be replaced by what is learned" in err


def test_one_run_at_a_time(align, tmp_path):
    out = tmp_path / "out"
    with exclusive_access(lock_for(out / "alignment"), out):
        code, _, err = align("--out", str(out))
    assert code == 2
    assert f"another process is writing {out}" in err


def test_the_target_is_hashed_once(align, tiny_pair, tmp_path, monkeypatch):
    hashed: list[Path] = []
    compute = checkpoint.weights_hash

    def weights_hash(files):
        known = list(files)
        hashed.extend(path for path in known if path.suffix == ".safetensors")
        return compute(known)

    monkeypatch.setattr("forerun.models.checkpoint.weights_hash", weights_hash)
    code, _, err = align("--out", str(tmp_path / "out"))
    assert code == 0, err
    assert [path.parent for path in hashed].count(tiny_pair.target) == 1


def test_a_target_that_has_changed_is_another_alignment(align, aligned, tiny_pair, tmp_path):
    changed, out = tmp_path / "target", tmp_path / "out"
    shutil.copytree(tiny_pair.target, changed)
    shutil.copytree(aligned, out)
    same = ("--target", str(changed), "--out", str(out))
    assert align(*same)[0] == 0  # the same weights elsewhere
    save_model(changed, num_layers=2, seed=7)
    code, _, err = align(*same)
    assert code == 2
    assert re.search(r"with other settings \(target was \w{16}, is \w{16}\)", err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-passes", "3"), "num_passes is 3, which would change nothing here"),
    ],
)
def test_contradictions_are_refused_before_anything_is_made(align, tmp_path, arguments, message):
    code, _, err = align("--out", str(tmp_path / "x"), *arguments)
    assert code == 2
    assert message in err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "p.jsonl"), "give either --draft, to start from one, or --init"),
        (("--draft", "zoo:code-2m"), "no prompts: give --prompts FILE or DIR"),
        (("--refresh", "nowhere"), "nowhere is neither an alignment"),
        (
            ("--draft", "d", "--prompts", "p", "--profile", "x", "--no-prediction"),
            "--profile is for predictions; leave --no-prediction out",
        ),
    ],
)
def test_what_is_missing_is_named(arguments, message, capsys):
    assert main(["align", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name in [name for name in sys.modules if name.startswith("forerun.align.run")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["align", "--draft", "zoo:code-2m", "--prompts", "p.jsonl"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "accelerate is not installed: pip install 'forerun[align]'" in err


SELF = (
    *("--prompts", "self", "--num-self-prompts", "6", "--num-steps", "2", "--num-evaluations", "1"),
    *("--max-tokens", "8", "--max-prompts", "4", "--tokens-per-step", "512", "--no-prediction"),
    *("--model", "zoo:code-11m", "--draft", "zoo:code-2m", "--k", "2", "--threads", "1"),
)


@pytest.mark.full  # judging on all shipped prompts takes half a minute
def test_a_model_without_data_is_enough(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["align", *SELF, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    lines = (out / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(set(prompts)) == 6
    assert "6, written by the target" in captured.err
    assert "6 kept as prompts" in captured.err
    report = json.loads((out / "report.json").read_text())
    tag = "beginnings of Python modules that ship with forerun"
    assert list(report["judged"][0]["after"]["by_tag"]) == [tag]
    assert f"judged on 60 {tag}, not written by the target" in captured.out
    again = out / "prompts.jsonl"
    written_s = again.stat().st_mtime_ns
    assert main(["align", *SELF, "--out", str(out)]) == 0
    assert "plan:" not in capsys.readouterr().err  # it has been carried out
    assert again.stat().st_mtime_ns == written_s
    assert main(["align", *SELF, "--num-self-prompts", "7", "--out", str(out)]) == 2
    assert "has 6 prompts, with which this alignment began" in capsys.readouterr().err


def test_the_plan_alone_is_printed_before_anything_is_made(align, tmp_path, capsys):
    out = tmp_path / "out"
    code, text, _ = align("--out", str(out), "--plan-only")
    assert code == 0
    plan = json.loads(text)
    assert (plan["num_steps"], plan["tokens_per_step"], plan["window"]) == (4, 192, 48)
    assert plan["texts"]["num_texts"] == 0
    assert all(minutes >= 0 for minutes in plan["minutes"].values())
    assert not out.exists()
    assert main(["align", *SELF, "--out", str(out), "--plan-only"]) == 0
    assert capsys.readouterr().out.startswith("plan: draft_model for zoo:code-11m")
    assert not out.exists()


def test_a_number_of_self_written_prompts_needs_their_writer(align, tmp_path):
    code, _, err = align("--out", str(tmp_path / "x"), "--num-self-prompts", "9")
    assert code == 2
    assert "--num-self-prompts is for --prompts self" in err


def test_a_draft_of_another_vocabulary_is_refused_before_prompts_are_written(
    tiny_pair, tmp_path, capsys
):
    out = tmp_path / "out"
    pair = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.stranger))
    assert main(["align", *pair, "--prompts", "self", "--out", str(out)]) == 2
    assert "the draft's tokenizer is not the target's" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
