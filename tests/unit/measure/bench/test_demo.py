"""The stages of the demonstration and their time, on engines and a clock that are simulated."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from forerun.control.base import Tree
from forerun.errors import InvalidRequest
from forerun.measure.bench import compare
from forerun.measure.bench import comparison as module
from forerun.measure.bench.compare import scouted
from forerun.measure.bench.comparison import Demo, DemoArms, chains_and_trees, neighbours_apart
from forerun.measure.bench.config import DemoConfig
from forerun.measure.bench.report import MIN_BLOCKS
from forerun.sampling.config import SamplingParams


@pytest.fixture
def demo_for(make_arm, clock, monkeypatch):
    """A demonstration whose engines are simulated; K=3 is the best of the first draft."""

    def make(seconds, num_prompts=60, **changes):
        costs = {"step_s": 0.01, "prefill_s": 0.02} | changes
        arms = DemoArms(
            plain=make_arm("plain", **costs),
            general=make_arm("off-the-shelf", k=10, **costs | {"step_s": 0.03}),
            drafts=(
                tuple(
                    replace(make_arm(f"K={k}", k=k, accepted=a, **costs), draft="model")
                    for k, a in ((2, 1), (3, 3), (4, 2))
                ),
                (replace(make_arm("tree", k=5, accepted=2, **costs), draft="model"),),
                tuple(
                    replace(make_arm(f"head K={k}", k=k, accepted=k, **costs), draft="head")
                    for k in (1, 2)
                ),
            ),
            copying=make_arm("copying K=16", k=16, accepted=8, **costs),
            step_s=costs["step_s"],
            num_threads=1,
        )
        monkeypatch.setattr(module, "load_arms", lambda config, text, clock: arms)
        monkeypatch.setattr(Demo, "_check_exactness", lambda self, step_s: None)
        monkeypatch.setattr(Demo, "_show_example", lambda self, arm: None)
        prompts = [str(i) for i in range(num_prompts)]
        return Demo(
            DemoConfig(seconds=seconds),
            prompts,
            [f"edit {i}" for i in range(num_prompts)],
            clock=clock,
            started_s=clock(),
            notify=lambda stage: None,
        )

    return make


def test_the_fastest_k_of_every_draft_is_chosen_and_compared(demo_for):
    demo = demo_for(60.0)
    demo.run()
    names = ["plain", "off-the-shelf", "K=3", "tree", "head K=2"]
    assert [m.arm.name for m in demo.blocks[0]] == names


def test_every_draft_is_compared_at_temperature_1_in_the_shape_that_was_faster(demo_for):
    demo = demo_for(60.0)
    demo.run()
    assert [m.arm.name for m in demo.sampled_blocks[0]] == ["plain", "K=3", "head K=2"]


def test_the_best_chain_and_the_best_tree_of_a_draft_are_chosen_apart(make_arm):
    chains = tuple(make_arm(f"K={k}", k=k, accepted=1) for k in (1, 2))
    tree = replace(make_arm("tree=5", k=5, accepted=1), tree=Tree(num_nodes=5, depth=3, width=2))
    assert list(chains_and_trees((*chains, tree))) == [chains, (tree,)]
    assert list(chains_and_trees(chains)) == [chains]
    assert list(chains_and_trees((tree,))) == [(tree,)]


def test_copying_is_compared_on_edits_alone(demo_for):
    demo = demo_for(60.0)
    demo.run()
    assert [m.arm.name for m in demo.edit_blocks[0]] == ["plain", "copying K=16"]
    texts = {prompt.text for block in demo.edit_blocks for m in block for prompt in m.batch}
    assert all(text.startswith("edit ") for text in texts)
    assert not any(p.text in texts for block in demo.blocks for m in block for p in m.batch)


def test_prompts_that_choose_k_are_not_scored(demo_for):
    demo = demo_for(60.0)
    assert not set(demo._set_aside) & set(demo._scored)
    assert len(demo._set_aside) + len(demo._scored) == 60


@pytest.mark.parametrize("seconds", [40.0, 60.0, 90.0])
def test_measuring_ends_within_the_budget(demo_for, clock, seconds):
    demo = demo_for(seconds)
    demo.run()
    assert 0.8 * seconds < clock() <= seconds
    assert len(demo.blocks) > MIN_BLOCKS
    assert demo.sampled_blocks


def test_a_slow_machine_measures_two_prompts_rather_than_overrun(demo_for):
    demo = demo_for(1.0, step_s=0.5)
    demo.run()
    assert len(demo.blocks) == 2
    assert demo.sampled_blocks == []


def test_a_slower_machine_measures_shorter_completions(demo_for, clock):
    demo = demo_for(60.0, step_s=0.03)
    demo.run()
    lengths = {m.num_tokens for block in demo.blocks for m in block}
    assert max(lengths) < DemoConfig().max_tokens
    assert min(lengths) >= DemoConfig().min_tokens
    assert len(demo.blocks) >= 8
    assert clock() <= 60.0


def test_a_report_needs_no_time_at_t_1(demo_for, monkeypatch):
    monkeypatch.setattr(module, "content_hash", lambda name: "0")
    demo = demo_for(1.0)
    demo.run()
    report = demo.report()
    assert len(report.rows) == 5
    assert report.sampled_rows == ()
    assert report.to_dict()["sampled_rows"] == []


def test_text_that_loops_at_once_is_refused(demo_for):
    demo = demo_for(60.0, vocab_size=2)
    with pytest.raises(InvalidRequest, match="loops"):
        demo.run()


def test_spread_keeps_every_prompt_and_parts_neighbours():
    prompts = [str(i) for i in range(60)]
    spread_out = neighbours_apart(prompts)
    assert sorted(spread_out) == sorted(prompts)
    assert all(abs(int(a) - int(b)) > 1 for a, b in pairwise(spread_out))


def test_scouting_cuts_completions_before_they_repeat(make_arm):
    engine = make_arm("plain", vocab_size=20).engine  # 0..19, 0..19: repeats from token 20 on
    params = SamplingParams(temperature=0, max_tokens=80)
    assert [p.params.max_tokens for p in scouted(engine, ["a", "b"], params)] == [20, 20]


def test_scouting_decodes_no_more_than_is_asked_for(make_arm):
    engine = make_arm("plain").engine
    texts = [str(i) for i in range(20)]
    prompts = scouted(engine, texts, SamplingParams(temperature=0, max_tokens=40))
    assert next(prompts).text == "0"
    assert engine.calls == texts[:8]


def test_scouting_ends_where_no_prompt_can_be_timed(make_arm, monkeypatch):
    monkeypatch.setattr(compare, "MAX_PASSED_OVER", 16)
    engine = make_arm("plain", vocab_size=20).engine
    texts = [str(i) for i in range(80)]
    params = SamplingParams(temperature=0, max_tokens=8)  # shorter than what is timed
    assert not [*scouted(engine, texts, params)]
    assert engine.calls == texts[:16]
