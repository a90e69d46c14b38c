"""The live view of an engine: requests, the origin of their tokens, and what it costs."""

from __future__ import annotations

import json
import re
from collections import deque
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests import tiny
from tests.records import STEP

from forerun.doctor import live as pages
from forerun.doctor.diagnosis import diagnose
from forerun.doctor.readers.prometheus import Metrics, PrometheusText
from forerun.doctor.readers.sources import read_lines
from forerun.engine.engine import Engine
from forerun.engine.thread import EngineThread
from forerun.sampling.config import SamplingParams
from forerun.server import live, live_page
from forerun.server.live import LiveView
from forerun.server.metrics import ServerMetrics

PARAMS = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    target = tiny.tabular(0)
    return tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 1), tiny.VOCAB_SIZE))


def view_of(engine: Engine, **changes: bool) -> LiveView:
    found = LiveView(ServerMetrics(engine, "tiny"), diagnose=pages.PageDiagnosis(), **changes)
    engine.observers.append(found)
    return found


@pytest.fixture
def view(engine: Engine) -> LiveView:
    return view_of(engine)


def shown(view: LiveView) -> SimpleNamespace:
    """What the page reads, as objects."""
    text = json.dumps(view.snapshot())
    return json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields))


def test_a_snapshot_before_any_step(view):
    found = shown(view)
    assert found.requests == []
    assert found.speedup is None
    assert found.diagnosis is None
    assert found.totals.num_steps == 0


def test_requests_show_their_text_by_origin(engine, view):
    output = engine.generate([[1, 2, 3]], PARAMS)[0]
    request = shown(view).requests[0]
    assert request.state == "length"
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 24)
    assert request.pieces[0].origin == "prompt"
    assert "".join(piece.text for piece in request.pieces[1:]) == output.text
    counts = output.completions[0].acceptance
    assert request.num_drafted == counts.num_drafted
    assert {piece.origin for piece in request.pieces} <= {
        *("prompt", "accepted", "recovered", "bonus", "plain")
    }


def test_the_text_is_the_same_however_often_it_is_read(engine, view):
    engine.add_request([1, 2, 3], PARAMS, request_id="read")
    while engine.has_unfinished:
        engine.step()
        shown(view)
    text = engine.take_output("read").text
    request = shown(view).requests[0]
    assert "".join(piece.text for piece in request.pieces[1:]) == text


def test_totals_are_those_of_the_engine(engine, view):
    engine.generate([[1], [2]], PARAMS)
    found, stats = shown(view), engine.stats()
    assert found.totals.num_emitted == stats.num_emitted == 48
    assert found.totals.num_accepted == stats.num_accepted
    assert sum(row.num_accepted for row in found.positions) == stats.num_accepted


def test_the_latency_is_that_of_the_outputs(engine):
    view = view_of(engine)
    assert shown(view).latency.ttft is None
    outputs = engine.generate([[1, 2, 3], [4, 5]], PARAMS)
    found = shown(view).latency
    times = [output.completions[0].ttft_s for output in outputs]
    assert (found.ttft.num, found.ttft.p50) == (2, pytest.approx(sum(times) / 2))
    steps = sum(output.completions[0].acceptance.num_steps for output in outputs)
    assert found.gap.num == steps - 2  # a request's first output has none before it
    assert found.prefix_hit_share == 0.0
    assert found.prompt_tokens_per_s > 0.0
    assert shown(view).load.refused == SimpleNamespace()


def test_only_the_latest_requests_are_kept(engine, view):
    for n in range(1, 30):
        engine.generate([[n % 5]], PARAMS)
    found = shown(view)
    assert len(found.requests) == live.MAX_REQUESTS
    ages = [request.age_s for request in found.requests]
    assert ages == sorted(ages)


def test_steps_without_a_reader_are_bounded(engine, view, monkeypatch):
    monkeypatch.setattr(view, "_queue", type(view._queue)(maxlen=4))
    engine.generate([[1, 2, 3]], PARAMS)
    found = shown(view)
    assert len(view._queue) == 0
    assert len(found.history) >= 1


def test_texts_can_be_kept_off_the_page(engine):
    view = view_of(engine, shows_texts=False)
    view.add_message(["request-0"], "a secret")
    engine.generate([[1, 2, 3]], PARAMS)
    found = shown(view)
    assert found.requests[0].pieces == []
    assert not found.shows_texts
    assert not any(watched.pieces for watched in view._watched.values())


def test_a_long_text_is_shortened_at_its_beginning(engine, view, monkeypatch):
    monkeypatch.setattr(live, "MAX_CHARACTERS", 20)
    output = engine.generate([[1, 2, 3]], PARAMS)[0]
    text = "".join(piece.text for piece in shown(view).requests[0].pieces[1:])
    assert len(text) <= 20
    assert output.text.endswith(text)


def test_a_diagnosis_comes_after_enough_steps(engine, view):
    view.diagnose()
    assert shown(view).diagnosis is None
    engine.generate([[n] for n in range(1, 4)] * 8, PARAMS)
    view.diagnose()
    found = shown(view).diagnosis
    assert found is not None
    assert found.verdict in ("healthy", "problem", "inconclusive")
    assert found.headline
    assert not re.search(r"\d x|\dx", " ".join([found.headline, *found.changes]))  # stated once
    assert found.num_request_steps >= pages.MIN_DIAGNOSED


def test_a_page_that_is_read_again_shows_a_diagnosis_of_what_happened_meanwhile(engine, view):
    app = FastAPI()
    app.include_router(live_page.page_router(view))
    with TestClient(app) as client:
        assert client.get("/live").json()["diagnosis"] is None
        engine.generate([[n] for n in range(1, 4)] * 8, PARAMS)
        view._encoded = b""  # as after the time for which a snapshot is kept
        found = client.get("/live").json()
        assert found["diagnosis"]["num_request_steps"] == sum(view.metrics.totals.plans.values())
        assert 0.0 <= found["diagnosis_age_s"] < 60.0
        at_s = view.clock()
        view.clock = lambda: at_s + 600.0
        assert client.get("/live").json()["diagnosis_age_s"] >= 600.0


def test_the_diagnosis_is_that_of_a_file_of_the_same_metrics(engine, view):
    engine.generate([[n] for n in range(1, 4)] * 8, PARAMS)
    view.diagnose()
    lines = view.metrics.text().decode().splitlines()
    expected = diagnose(read_lines(lines, "metrics.txt"))
    found = shown(view).diagnosis
    page = PrometheusText()
    assert all([page.read(line) for line in lines])
    expected_page = pages.diagnose_metrics(page.metrics, "forerun", found.num_request_steps)
    assert view.snapshot()["diagnosis"] == expected_page
    evidence = pages.collect_evidence(page.metrics, "forerun")
    facts = {fact.name: fact.value for fact in diagnose(evidence).evidence}
    assert facts == {fact.name: fact.value for fact in expected.evidence}


def test_a_diagnosis_rests_on_what_was_counted_since_the_oldest_sample(engine, view, monkeypatch):
    monkeypatch.setattr(view._diagnose, "_samples", deque([Metrics()], maxlen=2))
    nums = []
    for second in range(3):
        view.clock = lambda now_s=100.0 * second: now_s
        engine.generate([[n] for n in range(1, 4)] * 8, PARAMS)
        view.diagnose()
        nums.append(shown(view).diagnosis.num_request_steps)
    total = sum(view.metrics.totals.plans.values())
    assert nums[1] > nums[0] and nums[2] < total - nums[0] + 1


def test_metrics_have_the_speedup_of_the_page(engine, view):
    def gauges() -> dict[str, float]:
        families = text_string_to_metric_families(view.metrics.text().decode())
        own = ("forerun:speedup", "forerun:plain_token")
        return {s.name: s.value for f in families for s in f.samples if s.name.startswith(own)}

    assert gauges() == {}
    plain = replace(STEP, method="plain", k_budget=0, num_drafted=0, depth_drafted=0)
    plain = replace(plain, num_accepted=0, num_emitted=1, draft_s=0.0, verify_s=0.01)
    for second in range(5):
        steps = [replace(plain, cycle_id=10 * second + n, t_s=float(second)) for n in range(6)]
        steps.append(replace(STEP, cycle_id=10 * second + 9, t_s=float(second)))
        view._queue.extend((step,) for step in steps)
    found = shown(view).speedup
    assert found is not None
    assert gauges() == {
        "forerun:speedup": found.estimate,
        "forerun:speedup_low": found.low,
        "forerun:speedup_high": found.high,
        "forerun:plain_token_seconds": found.plain_token_s,
    }


def test_requests_are_named_by_the_last_message_or_the_end_of_the_prompt(engine, view, monkeypatch):
    monkeypatch.setattr(live, "HEAD_TOKENS", 2)
    engine.add_request([1, 2, 3], PARAMS, request_id="asked")
    engine.add_request([1, 2, 3, 4], PARAMS, request_id="completed")
    engine.step()
    shown(view)  # before the message is known
    view.add_message(["asked"], "x" * 10_000)
    while engine.has_unfinished:
        engine.step()
    heads = {request.request_id: request.head for request in shown(view).requests}
    end = engine.tokenizer.decode([3, 4])
    assert heads == {"asked": "x" * live.MAX_HEAD, "completed": f"… {end}"}


def test_a_diagnosis_is_made_at_a_low_rate(engine, view):
    now_s = [0.0]
    view.clock = lambda: now_s[0]
    calls = []

    def counted(evidence):
        calls.append(evidence)
        return diagnose(evidence)

    engine.generate([[n] for n in range(1, 4)] * 8, PARAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "diagnose", counted)
        for second in range(31):
            now_s[0] = float(second)
            engine.generate([[1]], PARAMS)
            view.diagnose()
    assert len(calls) == 3


def test_snapshots_from_another_thread_while_the_engine_runs(engine, view):
    with EngineThread(engine) as running:
        tickets = [running.submit([n % 5], PARAMS) for n in range(60)]
        for _ in range(200):
            shown(view)
        texts = [ticket.result(30.0).text for ticket in tickets]
    found = shown(view)
    assert found.totals.num_emitted == 60 * 24
    pieces = {r.request_id: "".join(p.text for p in r.pieces[1:]) for r in found.requests}
    assert pieces == {f"request-{n}": texts[n] for n in range(60 - live.MAX_REQUESTS, 60)}
