"""Cells, halves and predictions, on engines and a clock that are simulated."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.control.base import Tree
from forerun.measure.bench import comparison as module
from forerun.measure.bench.compare import Prompt, batched, run_blocks
from forerun.measure.bench.comparison import BenchCell, BenchComparison
from forerun.measure.bench.config import BenchConfig, parse_arms
from forerun.measure.bench.report import (
    best_of_several,
    faster_chain,
    summarise,
)
from forerun.sampling.config import SamplingParams


@pytest.fixture
def comparison(make_arm, clock, monkeypatch):
    """Greedy and sampled, batches of 1 and 3, two K."""
    monkeypatch.setattr(module, "content_hash", lambda name: "0")
    config = BenchConfig(arms=parse_arms(["d@1,2"]), batches=(1, 3), num_blocks=5)
    made = BenchComparison(config, None, clock=clock, notify=lambda stage: None)
    made.prompts = [[i] for i in range(12)]
    made.arms = (
        make_arm("plain"),
        make_arm("d K=1", k=1, accepted=1, step_s=1.2),
        make_arm("d K=2", k=2, accepted=2, step_s=1.3),
    )
    return made


def blocks_of(arms, clock, count):
    params = SamplingParams(temperature=0, max_tokens=13)
    prompts = (Prompt(text=str(i), params=params) for i in range(count))
    return list(run_blocks(arms, batched(prompts, 1), clock))


def test_every_cell_is_measured_as_far_as_prompts_and_blocks_go(comparison):
    comparison.run()
    assert {(c.temperature, c.batch): len(b) for c, b in comparison.blocks.items()} == {
        (0.0, 1): 5,
        (1.0, 1): 5,
        (0.0, 3): 4,
        (1.0, 3): 4,
    }
    for cell, blocks in comparison.blocks.items():
        params = [p.params for block in blocks for m in block for p in m.batch]
        assert {p.temperature for p in params} == {cell.temperature}
        assert {len(m.batch) for block in blocks for m in block} == {cell.batch}


def test_an_interruption_leaves_the_cells_level_and_loses_no_block(comparison, clock, monkeypatch):
    engine = comparison.arms[2].engine
    generate, calls = engine.generate, []

    def interrupted(prompts, params):
        calls.append(prompts)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return generate(prompts, params)

    monkeypatch.setattr(engine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        comparison.run()
    assert [len(blocks) for blocks in comparison.blocks.values()] == [3, 3, 3, 2]
    report = comparison.report()
    assert all(len(cell.rows) == 3 for cell in report.cells)
    assert [len(cell["blocks"]) for cell in report.to_dict()["cells"]] == [3, 3, 3, 2]


def test_a_cell_of_one_block_has_no_table_but_keeps_its_measurements(comparison):
    comparison.run()
    cell = BenchCell(temperature=0.0, batch=1)
    del comparison.blocks[cell][1:]
    first = comparison.report().cells[0]
    assert first.rows == ()
    assert first.best is None
    assert len(first.to_dict()["blocks"]) == 1


def test_a_report_is_json(comparison):
    comparison.run()
    content = comparison.report().to_dict()
    assert json.loads(json.dumps(content))["cells"][0]["rows"][2]["name"] == "d K=2"


def test_the_best_is_scored_on_blocks_that_did_not_choose_it(make_arm, clock):
    plain = make_arm("plain")
    lucky = make_arm("lucky", k=1, accepted=1)
    steady = make_arm("steady", k=1, accepted=1, step_s=0.9)
    blocks = blocks_of([plain, lucky, steady], clock, 8)
    # On the blocks that choose, a machine that favours "lucky"; on the others it is the slowest.
    favoured = [
        tuple(m if m.arm is not lucky else scaled(m, 0.5 if i % 2 == 0 else 4.0) for m in block)
        for i, block in enumerate(blocks)
    ]
    best = best_of_several(favoured)
    assert best.summary.arm is lucky
    assert best.num_candidates == 2
    assert (best.num_chosen_on, best.summary.num_groups) == (4, 4)
    assert best.summary.speedup.is_below(1.0)


def test_a_tree_that_is_slower_than_a_chain_of_its_draft_says_so(make_arm, clock):
    def rows(tree_s):
        plain, chain = make_arm("plain"), make_arm("d K=2", k=2, accepted=2)
        tree = make_arm("d tree=7,3,4", k=7, accepted=3, step_s=tree_s)
        chain, tree = (replace(arm, draft="d") for arm in (chain, tree))
        tree = replace(tree, tree=Tree.parse("7,3,4"))
        return summarise(blocks_of([plain, chain, tree], clock, 6))

    for row in rows(1.0):
        assert faster_chain(row, rows(1.0)) is None
    slow = rows(3.0)
    assert faster_chain(slow[2], slow).arm.name == "d K=2"
    assert faster_chain(slow[1], slow) is faster_chain(slow[0], slow) is None
    other = replace(slow[2], arm=replace(slow[2].arm, draft="e"))
    assert faster_chain(other, slow) is None


def scaled(measurement, factor):
    return replace(measurement, total_s=measurement.total_s * factor)


def test_one_arm_is_no_choice_and_three_blocks_are_no_halves(make_arm, clock):
    plain, draft = make_arm("plain"), make_arm("d", k=1, accepted=1)
    assert best_of_several(blocks_of([plain, draft], clock, 8)) is None
    assert best_of_several(blocks_of([plain, draft, make_arm("e")], clock, 3)) is None
