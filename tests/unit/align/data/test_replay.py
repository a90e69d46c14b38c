"""Where a draft was rejected, from traces of an engine that drafted."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace as changed
from tests import tiny
from tests.records import HEADER, REQUEST, STEP

from forerun.align.texts import replayed
from forerun.cli.session import Session
from forerun.errors import InvalidRequest, InvalidTrace
from forerun.sampling.config import SamplingParams
from forerun.trace.files import open_trace

HASHES = {"target_hash": "t0", "tokenizer_hash": "k0"}


def write(path, items):
    with open_trace(path) as trace:
        for item in items:
            trace.add(item)
    return path


def step(number: int, context: int, *token_ids: int, source: str = "recovered", **changes):
    values = {
        "step": number,
        "context_tokens": context,
        "token_ids": token_ids,
        "num_emitted": len(token_ids),
        "num_accepted": len(token_ids) - (source != "accepted"),
        "last_token_source": source,
    }
    return changed(STEP, **(values | changes))


REQUEST_OF_3 = changed(
    REQUEST, num_prompt_tokens=3, num_output_tokens=6, prompt_token_ids=(7, 8, 9)
)
STEPS = [
    step(0, 3, 10, source="bonus"),
    step(1, 4, 11, 12, 13),
    step(2, 7, 14),
    step(3, 8, 15, source="accepted"),
]


def test_rejected_positions_by_hand(tmp_path):
    path = write(tmp_path / "t.jsonl", [HEADER, *STEPS, REQUEST_OF_3])
    (sample,) = replayed(path, **HASHES)
    assert sample.token_ids == (7, 8, 9, 10, 11, 12, 13, 14, 15)
    assert sample.spans == ((6, 7), (7, 8))
    assert (sample.source, sample.tag) == ("replay", "python/größe")


def test_the_order_of_records_does_not_matter(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    items = [HEADER, *STEPS, REQUEST_OF_3]
    write(paths[0], items)
    write(paths[1], [items[0], *reversed(items[1:])])
    assert replayed(paths[0], **HASHES) == replayed(paths[1], **HASHES)


@pytest.mark.parametrize("lost", range(4))
def test_a_request_with_a_lost_step_is_passed_over(tmp_path, lost):
    other = changed(REQUEST_OF_3, request_id="whole")
    path = write(
        tmp_path / "t.jsonl",
        [
            HEADER,
            *(s for number, s in enumerate(STEPS) if number != lost),
            *(changed(s, request_id="whole") for s in STEPS),
            REQUEST_OF_3,
            other,
        ],
    )
    assert len(replayed(path, **HASHES)) == 1


def test_damage_costs_its_own_request(tmp_path):
    path = write(tmp_path / "t.jsonl", [HEADER, *STEPS, REQUEST_OF_3])
    path.write_text(path.read_text() + "{half a li")
    assert len(replayed(path, **HASHES)) == 1


def test_what_was_never_rejected_teaches_nothing(tmp_path):
    steps = [changed(s, last_token_source="bonus") for s in STEPS]
    path = write(tmp_path / "t.jsonl", [HEADER, *steps, REQUEST_OF_3])
    assert replayed(path, **HASHES) == []


@pytest.mark.parametrize(
    ("items", "hashes", "message"),
    [
        ([HEADER, *STEPS, REQUEST_OF_3], {"tokenizer_hash": "k1"}, "another tokenizer"),
        ([HEADER, *STEPS, REQUEST_OF_3], {"target_hash": "t1"}, "another target"),
        ([HEADER, *STEPS, changed(REQUEST_OF_3, prompt_token_ids=None)], {}, "--trace-tokens"),
        ([HEADER, *STEPS], {}, "no finished request"),
    ],
)
def test_traces_of_no_use_are_refused(tmp_path, items, hashes, message):
    path = write(tmp_path / "t.jsonl", items)
    with pytest.raises(InvalidRequest, match=message):
        replayed(path, **(HASHES | hashes))


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(InvalidTrace, match="cannot be read"):
        replayed(tmp_path / "t.jsonl", **HASHES)


def test_rejections_of_an_engine_are_where_the_two_models_disagree(tmp_path):
    """Greedy target and draft: it was right at every drafted position but the replayed ones."""
    networks = [tiny.network(seed=0), tiny.network(seed=0, jitter=0.12)]
    target, draft = (tiny.adapted(network) for network in networks)
    engine = tiny.engine_over(target, tiny.drafting(draft), k=3)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    path = tmp_path / "t.jsonl"
    with open_trace(path) as trace:
        trace.add(HEADER)
        session = Session(engine, trace=trace, trace_tokens=True)
        for text in tiny.PROMPTS:
            list(session.run(engine.tokenizer.encode(text), params))
    steps = session.records
    num_rejections = sum(s.last_token_source == "recovered" for s in steps)
    assert num_rejections > 3
    samples = replayed(path, **HASHES)
    assert sum(sample.num_learned for sample in samples) == num_rejections
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        theirs, own = (network(ids).logits[0].argmax(-1) for network in networks)
        for start, end in sample.spans:
            assert end == start + 1
            assert theirs[start - 1] == ids[0, start] != own[start - 1]
