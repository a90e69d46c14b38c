"""`forerun recommend`: its figures follow from the steps, and its advice from the figures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.records import STEP

from forerun.cli.main import main
from forerun.cli.recommend import RecommendOptions, show
from forerun.control.base import Capacity, RequestState
from forerun.measure.bench.compare import BenchArm, run_blocks
from forerun.measure.bench.config import RecommendConfig
from forerun.measure.bench.report import ArmSummary
from forerun.measure.prompt_files import PromptEntry
from forerun.measure.recommend import (
    DEPTHS,
    NUM_HELD,
    DepthFigures,
    DraftTrial,
    Recommendation,
    _DepthsInTurn,
    _figures,
    _usable,
    drafts_at_hand,
    recommend,
)
from forerun.theory.intervals import Interval

STATE = RequestState(request_id="r", num_committed=9, max_new=9, temperature=0.0)
ROOM = Capacity(max_rows=99)


def step(k, *, drafted=None, accepted=0, seconds=0.01, prefill=0):
    drafted = k if drafted is None else drafted
    return replace(
        STEP,
        k_budget=k,
        num_drafted=drafted,
        depth_drafted=drafted,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        draft_s=0.0,
        verify_s=seconds,
        other_s=0.0,
        num_prefill_rows=prefill,
    )


def test_every_depth_comes_for_some_steps_before_any_comes_again():
    controller = _DepthsInTurn(DEPTHS)
    controller.method = "suffix"
    rounds = []
    for _ in range(6):
        found = []
        for _ in DEPTHS:
            (plan,), num_steps, _ = controller.decide([STATE], ROOM)
            assert num_steps == NUM_HELD
            found.append(plan.num_speculative_tokens)
        rounds.append(found)
    assert all(sorted(found) == sorted(DEPTHS) for found in rounds)
    assert len({tuple(found) for found in rounds}) > 1  # in another order each time


def test_only_the_steps_that_read_a_prompt_are_left_out():
    """Steps before the first draft count: there a drafter found nothing to propose."""
    controller = _DepthsInTurn(DEPTHS)
    first, later = step(0, prefill=9), [step(4, drafted=0), step(0), step(2, accepted=1)]
    controller.observe([first, *later])
    assert controller.taken() == later
    assert controller.taken() == []


def test_figures_follow_from_the_steps():
    """A step with K=2 takes 15 ms and accepts both tokens every second time: 2 tokens."""
    steps = [step(0) for _ in range(20)]
    steps += [step(2, accepted=2 * (i % 2), seconds=0.015) for i in range(20)]
    [found] = _figures(steps)
    assert found.num_speculative_tokens == 2
    assert found.acceptance_length == pytest.approx(2.0)
    assert found.speedup == pytest.approx(2.0 / 1.5)


def test_a_drafter_without_a_match_counts_as_a_rejection_and_a_cheap_step():
    """Of ten steps with K=4, two draft: 4 tokens each, all accepted, in twice the time."""
    steps = [step(0) for _ in range(20)]
    steps += [step(4, drafted=0, seconds=0.011) for _ in range(16)]
    steps += [step(4, accepted=4, seconds=0.02) for _ in range(4)]
    [found] = _figures(steps)
    assert found.acceptance_length == pytest.approx(1.8)
    assert found.step_s == pytest.approx(0.0128)
    assert found.speedup == pytest.approx(1.8 / 1.28)


def measured(k, estimate, low, disturbance=None):
    interval = Interval(estimate=estimate, low=low, high=2 * estimate - low)
    engine = SimpleNamespace(generate=lambda prompts, params: [])
    arm = BenchArm(name="a", method="draft_model", num_speculative_tokens=k, engine=engine)
    return ArmSummary(
        arm=arm,
        num_groups=8,
        num_tokens=800,
        tokens_per_s=interval,
        decode_tokens_per_s=interval,
        speedup=interval,
        decode_speedup=interval,
        step_s=0.01,
        cycle_cost=interval,
        break_even=None,
        distinct_4gram_share=1.0,
        disturbance=disturbance,
    )


def chosen_on(speedup):
    return DepthFigures(
        num_speculative_tokens=4, acceptance_length=2.0, step_s=0.01, speedup=speedup
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (measured(4, 1.3, 1.1), "recommended: a, which is 1.30 times as fast with K=4"),
        (measured(4, 1.3, 0.9), "recommended: plain decoding"),
        (measured(4, 9.3, 8.1, "a pause"), "a: the measurement was disturbed: a pause"),
    ],
)
def test_only_a_draft_that_is_surely_faster_is_recommended(found, said, capsys):
    trials = (
        DraftTrial(draft="a", method="draft_model", depths=(chosen_on(1.6),), measured=found),
        DraftTrial(draft="b", failure="there is no such folder"),
    )
    result = Recommendation(
        target="t",
        temperature=0.0,
        num_prompts=8,
        plain_step_s=0.01,
        trials=trials,
    )
    show(result, RecommendOptions(target="t"))
    printed = capsys.readouterr().out
    assert said in printed
    assert "b cannot be used: there is no such folder" in printed
    assert ("forerun align --target t" in printed) == (result.chosen is None)
    json.dumps(result.to_dict())


def test_the_choice_is_made_on_prompts_that_are_not_reported(monkeypatch, tiny_pair):
    """Every other prompt is measured beside plain decoding, with an end of text as in use."""
    usable, measured_on = [], []

    def tasks_of(*arguments):
        usable.extend(_usable(*arguments))
        return usable

    def blocks_of(arms, batches, clock):
        measured_on.extend(batches)
        return run_blocks(arms, measured_on, clock)

    monkeypatch.setattr("forerun.measure.recommend._usable", tasks_of)
    monkeypatch.setattr("forerun.measure.recommend.run_blocks", blocks_of)
    config = RecommendConfig(
        target=str(tiny_pair.target), drafts=("suffix",), temperature=1.0, max_tokens=96
    )
    prompts = [PromptEntry(where="here", text=f"def f{n}(x):") for n in range(8)]
    found = recommend(config, prompts, notify=lambda text, share: None)
    assert [prompt for (prompt,) in measured_on] == usable[1::2]
    assert not any(task.params.ignore_eos for task in usable)
    assert found.trials[0].measured.num_groups == found.num_prompts // 2


def test_drafts_of_a_tiny_pair_are_tried(tiny_pair, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "def f(x):\n---\nimport os\n---\nfor i in\n---\nclass A:\n---\nx =\n---\ny =\n---\nz ="
    )
    arguments = [
        "recommend",
        str(tiny_pair.target),
        "--prompts",
        str(prompts),
        "--temperature",
        "1",
    ]
    arguments += ["--budget-s", "0.5", "--json"]
    arguments += ["--drafts", str(tiny_pair.draft), "suffix", str(tmp_path / "missing")]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    by_draft = {trial["draft"]: trial for trial in found["trials"]}
    assert {
        depth["num_speculative_tokens"] for depth in by_draft[str(tiny_pair.draft)]["depths"]
    } <= {*DEPTHS}
    assert by_draft[str(tiny_pair.draft)]["num_parameters"] > 0
    assert by_draft["suffix"]["num_parameters"] is None
    assert "missing" in by_draft[str(tmp_path / "missing")]["failure"]
    assert found["plain_step_s"] > 0


def test_drafts_that_cannot_be_used_are_an_error(tiny_pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "forerun.measure.recommend._loaded", lambda *_: pytest.fail("loaded the target first")
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):")
    arguments = ["recommend", str(tiny_pair.target), "--prompts", str(prompts), "--json"]
    arguments += ["--temperature", "1"]
    assert main([*arguments, "--drafts", str(tmp_path / "missing")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "none of the drafts can be used" in printed.err and "missing" in printed.err


def test_shipped_drafts_of_a_shipped_target_are_at_hand():
    assert drafts_at_hand("zoo:code-40m") == (
        "zoo:code-2m-for-40m",
        "zoo:eagle3-for-40m",
        "suffix",
        "recycling",
        "self:int4",
    )


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [("--budget-s", "0", "above 0"), ("--temperature", "-1", "temperature")],
)
def test_bad_values_are_refused(tiny_pair, flag, value, message, capsys):
    assert main(["recommend", str(tiny_pair.target), flag, value]) == 2
    assert message in capsys.readouterr().err
