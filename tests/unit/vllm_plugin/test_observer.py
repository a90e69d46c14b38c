"""Counting of vLLM's steps: every figure is the sum of what vLLM says of its steps."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from forerun.doctor.readers.prometheus import read_page
from forerun.errors import EngineStopped
from forerun.vllm_plugin.observer import MAX_QUEUED_STEPS, MAX_REQUESTS, VllmObserver

from .conftest import finished, step_of

OUTCOMES = [(3, 3), (3, 0), (2, 1), (1, 1), (3, 2)]


def record(observer: VllmObserver, *steps, engine: int = 0) -> None:
    for step in steps:
        observer.record(*step, engine_idx=engine)


def samples_of(observer: VllmObserver) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(observer.read_metrics())
        for sample in family.samples
    }


def test_counters_are_the_sums_over_steps(observer):
    record(observer, step_of(OUTCOMES, num_plain=2), step_of([(2, 2)], num_first=1))
    found = samples_of(observer)
    assert found["forerun:cycles_total",] == 2
    assert found["forerun:sequence_steps_total", "plain", "0"] == 3
    assert found["forerun:sequence_steps_total", "ngram", "3"] == 6
    drafted = {key[1]: n for key, n in found.items() if "drafted_per_position" in key[0]}
    assert drafted == {"0": 6, "1": 5, "2": 3}


def test_what_only_the_scheduler_tells_counts_as_in_vllm(observer):
    scheduler, _ = step_of([(3, 1)])
    observer.record(scheduler, None)
    observer.record(None, None)
    found = samples_of(observer)
    assert found["forerun:sequence_steps_total", "ngram", "3"] == 1
    assert found["forerun:cycles_total",] == 0
    assert observer.snapshot()["totals"]["num_accepted"] == 1


def test_the_page_shows_the_same_counts(observer):
    record(observer, step_of(OUTCOMES, num_plain=2), step_of([(2, 2)], num_first=1))
    found = observer.snapshot()
    assert found["totals"] == {
        "num_steps": 2,
        "num_drafted": 14,
        "num_accepted": 9,
        "num_emitted": 18,
    }
    accepted = [row["num_accepted"] for row in found["positions"]]
    assert accepted == [5, 3, 1]
    assert found["acceptance_length"] == pytest.approx(1 + 9 / 6)
    (point,) = {p["num_speculative_tokens"] for p in found["history"]}
    assert point == 3.0
    methods = [point["methods"] for point in found["history"]]
    assert sum(m["ngram"] for m in methods if "ngram" in m) == 6
    assert found["load"]["num_running"] == 2
    assert (found["load"]["num_waiting"], found["load"]["kv_share"]) == (3, 0.25)
    latency = found["latency"]
    assert (latency["ttft"]["num"], latency["gap"]["num"]) == (1, 8)
    assert latency["prefix_hit_share"] == pytest.approx(0.4)


def test_what_vllm_does_not_measure_is_null(observer):
    record(observer, step_of(OUTCOMES), step_of([], num_plain=4), step_of([], num_plain=4))
    found = observer.snapshot()
    for name in ("speedup", "token_times", "diagnosis", "last_change"):
        assert found[name] is None
    assert found["load"]["refused"] is found["load"]["max_waiting"] is None
    assert found["setup"]["has_chat"] is None
    assert found["shows_texts"] is False


def test_engines_of_one_server_are_added(observer):
    record(observer, step_of(OUTCOMES))
    record(observer, step_of(OUTCOMES, num_plain=1), engine=1)
    found = observer.snapshot()
    assert found["load"]["num_running"] == 11
    assert found["load"]["max_running"] == 16
    assert found["totals"]["num_drafted"] == 24


def test_the_latest_requests_come_first_and_are_bounded(observer):
    for n in range(20):
        record(observer, step_of([(1, 1)], ended=[finished(f"r{n}")]))
    found = observer.snapshot()["requests"]
    assert [each["request_id"] for each in found] == [f"r{19 - n}" for n in range(MAX_REQUESTS)]
    assert found[0]["state"] == "length"
    assert (found[0]["ttft_s"], found[0]["tokens_per_s"]) == (1.0, 8.0)
    assert found[0]["acceptance_length"] is None


def test_a_server_without_speculation_has_no_drafter():
    config = SimpleNamespace(
        speculative_config=None,
        model_config=SimpleNamespace(served_model_name="plain", max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    observer = VllmObserver(config, "0.32.0", CollectorRegistry(auto_describe=True))
    record(observer, step_of([], num_plain=3))
    names = {key[0] for key in samples_of(observer)}
    assert names == {"forerun:cycles_total", "forerun:sequence_steps_total"}
    found = observer.snapshot()
    assert found["setup"]["methods"] == []
    assert found["history"][0]["methods"] == {"plain": 3}
    assert found["history"][0]["num_speculative_tokens"] == 0


def test_a_step_whose_requests_were_all_aborted_is_no_cycle(observer):
    record(observer, step_of([]))
    assert samples_of(observer)["forerun:cycles_total",] == 0
    assert observer.snapshot()["history"] == []


def test_steps_that_nobody_counts_are_bounded(observer):
    for _ in range(MAX_QUEUED_STEPS + 10):
        observer.record(*step_of([]))
    assert len(observer._queue) == MAX_QUEUED_STEPS


@pytest.mark.parametrize("part", [0, 1])
def test_unknown_statistics_switch_it_off_and_are_logged_once(observer, caplog, part):
    step = [*step_of(OUTCOMES)]
    step[part] = SimpleNamespace(renamed=1)
    with caplog.at_level(logging.ERROR):
        observer.record(*step)
        observer.record(*step)
        assert "forerun:" not in observer.read_metrics()
        observer.record(*step)
    assert len(caplog.records) == 1
    assert "written for vLLM 0.32, is off in vLLM 0.32.0, which goes on" in caplog.text
    assert "renamed" not in observer.failure  # it names what is missing
    assert not observer._queue
    with pytest.raises(EngineStopped, match="forerun is off"):
        observer.snapshot()


def test_a_page_of_metrics_is_still_read_as_one_of_vllm(observer):
    Counter("vllm:generation_tokens", "", registry=observer.registry).inc(3)
    record(observer, step_of(OUTCOMES))
    assert read_page(observer.read_metrics()).kind == "vLLM metrics"


def watched(observer: VllmObserver, outcomes, num_readings: int, start_s: float) -> float:
    """vLLM's own counters beside the plug-in's, read again and again; returns the time."""
    drafts, accepted = (
        observer.counters[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")
    )
    for n in range(num_readings):
        for outcome in itertools.islice(itertools.cycle(outcomes), 120):
            record(observer, step_of([outcome] * 5))
            drafts.inc(5)
            accepted.inc(5 * outcome[1])
            for position in range(outcome[1]):
                observer.counters["positions"].labels(str(position)).inc(5)
        observer.drain()
        observer.watch(start_s + 15.0 * n)
    return start_s + 15.0 * num_readings


@pytest.fixture
def counted(observer):
    registry = observer.registry
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    observer.counters = {
        "positions": Counter(name, "", ("position",), registry=registry),
        **{
            name: Counter(name, "", registry=registry)
            for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        },
    }
    return observer


def test_a_fall_of_acceptance_is_logged_shown_and_counted(counted, caplog):
    with caplog.at_level(logging.INFO, logger="vllm.plugins.forerun"):
        now_s = watched(counted, [(3, 3), (3, 2), (3, 1)], 80, 1.8e9)
        assert not caplog.records
        watched(counted, [(3, 0), (3, 1), (3, 0)], 20, now_s)
    alarms = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(alarms) == 1
    assert "acceptance at position 1 fell from" in alarms[0].getMessage()
    assert "acceptance at position" in counted.snapshot()["last_change"]
    changes = [key for key in samples_of(counted) if key[0] == "forerun:change_points_total"]
    assert len(changes) == 1


def test_the_diagnosis_is_of_vllm(counted):
    watched(counted, [(3, 3), (3, 2)], 1, 1.8e9)
    counted.diagnose()
    found = counted.snapshot()
    assert found["diagnosis"]["num_request_steps"] == 600
    assert found["diagnosis"]["headline"]


def test_a_failure_of_the_watch_switches_it_off(observer, monkeypatch):
    monkeypatch.setattr(type(observer), "read_metrics", lambda _: "no metric\n")
    observer.watch(1.8e9)
    assert "InvalidRequest" in observer.failure


def test_the_thread_counts_and_ends_with_the_failure(observer, monkeypatch):
    monkeypatch.setattr(type(observer), "read_metrics", lambda _: "no metric\n")
    monkeypatch.setattr("forerun.vllm_plugin.observer.COUNT_INTERVAL_S", 0.001)
    monkeypatch.setattr("forerun.vllm_plugin.observer.WATCH_INTERVAL_S", 0.0)
    record(observer, step_of(OUTCOMES))
    observer._run()
    assert observer.counts.num_drafted == 12
    assert observer.failure is not None
