"""The whole loop over tiny models: a draft is tried, promoted, and rolled back."""

from __future__ import annotations

import pytest
from tests.loop.conftest import PROMPTS, load, params, traffic

from forerun.loop.journal import Record

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def plain(drafts):
    engine = load(drafts, None)
    return {
        (prompt, seeded): engine.generate(prompt, params(place, seeded))[0].token_ids
        for place, prompt in enumerate(PROMPTS)
        for seeded in (False, True)
    }


def begin(loop):
    """Note a drift and a training, as the stages before the trial do."""
    loop.journal.append(Record(round=1, stage="watch", is_good=True, version=0, why="drift"))
    loop.store.count = lambda since_s=0.0: 1


def test_a_better_draft_is_promoted_and_no_text_changes(drafts, open_loop, plain):
    loop, running = open_loop(drafts.far, drafts.near)
    begin(loop)
    with traffic(running) as asking:
        stages = [loop.take_stage() for _ in range(4)]
    assert [(r.stage, r.is_good, r.version) for r in stages] == [
        ("train", True, 0),
        ("shadow", True, 0),
        ("promote", True, 1),
        ("settle", True, 1),
    ], stages
    assert asking.num_answered == asking.num_asked
    assert all(texts == {plain[key]} for key, texts in asking.texts.items())
    assert stages[1].figures["acceptance_1"] > 0.5


def test_a_draft_that_is_slower_after_all_is_rolled_back(drafts, open_loop, plain):
    """The journal says that it was promoted; the former draft is tried beside it, and is faster."""
    loop, running = open_loop(drafts.near, drafts.far)
    begin(loop)
    stages = []
    with traffic(running) as asking:
        loop.take_stage()
        fields = {"round": 1, "is_good": True, "why": "by mistake"}
        loop.journal.append(Record(stage="shadow", version=0, **fields))
        for _ in range(2):
            stages.append(loop.take_stage())
        assert not stages[-1].is_good, stages[-1].why
        stages.append(loop.take_stage())
    found = [(r.stage, r.is_good, r.version) for r in stages]
    assert found == [("promote", True, 1), ("settle", False, 1), ("roll_back", True, 0)]
    assert stages[1].figures["num_requests"] <= 30
    assert asking.num_answered == asking.num_asked
    assert all(texts == {plain[key]} for key, texts in asking.texts.items())


def test_a_swap_loses_no_request(drafts, open_loop):
    """The draft is loaded before, so that requests wait for nothing but the exchange."""
    loop, running = open_loop(drafts.near, drafts.near)
    other = loop._load(str(drafts.far))
    with traffic(running) as asking:
        running.call(lambda engine: engine.use_drafter(other))
    assert running.engine.drafter is other
    assert asking.num_answered == asking.num_asked > 0


def test_a_draft_that_is_gone_before_its_promotion_changes_nothing(drafts, open_loop, tmp_path):
    loop, running = open_loop(drafts.near, drafts.far)
    begin(loop)
    fields = {"round": 1, "is_good": True, "version": 0, "why": "as it was"}
    loop.journal.append(Record(stage="train", draft=str(tmp_path / "gone"), **fields))
    loop.journal.append(Record(stage="shadow", **fields))
    record = loop.take_stage()
    assert (record.stage, record.is_good, record.version) == ("promote", False, 0)
    assert running.submit("x").result(60).text is not None
