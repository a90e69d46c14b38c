"""The whole loop over tiny models: a draft is tried, promoted, and rolled back."""

from __future__ import annotations

import pytest
from tests.loop.conftest import PROMPTS, load, params, traffic

from forerun.loop.journal import Record

pytestmark = [pytest.mark.measured_times, pytest.mark.usefixtures("unchecked")]


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
