"""What vLLM loads, with modules in its place: nothing that it does may raise in its processes."""

from __future__ import annotations

import asyncio
import importlib
import logging
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from forerun.vllm_plugin.endpoint import ForerunEndpoint

from .conftest import CONFIG, AggregateStatLoggerBase, StatLoggerBase, step_of

KEY = "one key of vLLM's"


@pytest.fixture
def kind(fake_vllm, monkeypatch):
    """The class that vLLM 0.32 loads, with a registry of its own."""
    fake_vllm(AggregateStatLoggerBase=AggregateStatLoggerBase, StatLoggerBase=StatLoggerBase)
    module = importlib.import_module("forerun.vllm_plugin.stat_logger")
    monkeypatch.setattr(module, "REGISTRY", CollectorRegistry(auto_describe=True))
    monkeypatch.setattr("forerun.vllm_plugin.observer.VllmObserver.start", lambda _: None)
    return module.ForerunStatLogger


@pytest.fixture
def stat_logger(kind):
    found = kind(vllm_config=CONFIG, engine_indexes=[0])
    found.log_engine_initialized()
    return found


def test_the_entry_points_name_what_exists(kind):
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for group in ("vllm.stat_logger_plugins", "vllm.endpoint_plugins"):
        ((name, value),) = project["entry-points"][group].items()
        module, _, attribute = value.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert (name, callable(found)) == ("forerun", True)
    assert issubclass(kind, StatLoggerBase)  # or vLLM does not start


def test_the_statistics_reach_the_observer(stat_logger):
    scheduler, iteration = step_of([(3, 2)])
    stat_logger.record(scheduler, iteration, mm_cache_stats=None, engine_idx=1)
    stat_logger.record(scheduler_stats=scheduler, iteration_stats=None)
    stat_logger.observer.drain()
    assert stat_logger.observer.counts.num_accepted == 4


def test_arguments_of_another_version_are_no_error(stat_logger, caplog):
    with caplog.at_level(logging.ERROR):
        stat_logger.record(*step_of([(3, 2)]), None, 0, "more", more=1)
        assert stat_logger.observer.failure is None
        stat_logger.record(other_stats=1)
        stat_logger.record(other_stats=1)
    assert "TypeError" in stat_logger.observer.failure
    assert len(caplog.records) == 1


@pytest.mark.parametrize("given", [(), (SimpleNamespace(),), (None, [0])])
def test_a_config_of_another_version_starts_without_it(kind, caplog, given):
    found = kind(*given)
    assert found.observer is None
    assert "written for vLLM 0.32, does not start in vLLM 0.32.0" in caplog.text
    found.record(*step_of([(3, 2)]))
    found.log_engine_initialized()


def test_a_second_engine_in_a_process_starts_without_it(kind, stat_logger, caplog):
    assert kind(vllm_config=CONFIG, engine_indexes=[0]).observer is None
    assert "Duplicated" in caplog.text


class NewBase(AggregateStatLoggerBase):
    from abc import abstractmethod

    @abstractmethod
    def flush(self): ...


@pytest.mark.parametrize(
    ("loggers", "words"),
    [
        ({}, "written for vLLM 0.32, does not know the loggers of this vLLM"),
        ({"AggregateStatLoggerBase": NewBase}, "lacks flush, which vLLM 0.99 asks for"),
    ],
)
def test_other_loggers_are_an_import_error_that_vllm_logs(fake_vllm, loggers, words):
    fake_vllm("0.99", **loggers)
    with pytest.raises(ImportError, match=words):
        importlib.import_module("forerun.vllm_plugin.stat_logger")


def serve(stat_loggers, api_key=None) -> TestClient:
    app, plugin = FastAPI(), ForerunEndpoint()
    plugin.attach_router(app)
    client = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=stat_loggers))
    asyncio.run(plugin.init_state(client, app.state, Namespace(api_key=api_key)))
    return TestClient(app)


def test_every_route_with_figures_checks_the_key(stat_logger):
    client = serve([object(), stat_logger], [KEY, "x"])
    routes = (("GET", "live"), ("GET", "metrics"), ("POST", "live/answers"), ("GET", "other"))
    for method, path in routes:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            answer = client.request(method, f"/forerun/{path}", headers=given)
            assert answer.status_code == 401, path
    headers = {"Authorization": f"Bearer {KEY}"}
    for method, path in routes[:3]:
        answer = client.request(method, f"/forerun/{path}", headers=headers, json={"answers": {}})
        assert answer.status_code == 200, path
    assert client.get("/forerun/live", headers={"Authorization": "Bearer x"}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/forerun//live", "/forerun/./live", "/forerun/%6cive", "/forerun/forerun/", "/live"]
)
def test_other_spellings_open_nothing(stat_logger, path):
    client = serve([stat_logger], [KEY])
    assert client.get(path).status_code in (401, 404)


def test_the_page_and_its_files_need_no_key(stat_logger):
    client = serve([stat_logger], [KEY])
    assert "forerun" in client.get("/forerun").text  # redirected
    assert client.get("/forerun/page/main.js").status_code == 200
    assert client.post("/forerun/page/main.js").status_code == 401


def test_the_key_of_the_environment_counts(stat_logger, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert serve([stat_logger]).get("/forerun/live").status_code == 401
    monkeypatch.delenv("VLLM_API_KEY")
    assert serve([stat_logger]).get("/forerun/live").status_code == 200


def test_the_page_shows_what_was_recorded(stat_logger):
    client = serve([stat_logger])
    stat_logger.record(*step_of([(3, 2), (3, 1)]))
    assert client.get("/forerun/live").json()["totals"]["num_accepted"] == 3
    assert (
        'forerun:drafted_per_position_total{model_name="target",position="0"} 2.0'
        in client.get("/forerun/metrics").text
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"answers": {"no_such_fact": "yes"}}', 400),
        (b'{"answers": 3}', 422),
        (b"{", 422),
        (b'{"answers": {"x": "' + b"y" * (1 << 17) + b'"}}', 413),
    ],
)
def test_wrong_answers_are_refused(stat_logger, body, status):
    headers = {"Content-Type": "application/json"}
    answer = serve([stat_logger]).post("/forerun/live/answers", content=body, headers=headers)
    assert answer.status_code == status


def test_what_is_off_says_so(stat_logger, kind):
    assert serve([kind()]).get("/forerun/live").status_code == 503
    client = serve([stat_logger])
    stat_logger.record(other_stats=1)
    answer = client.get("/forerun/live")
    assert answer.status_code == 503
    assert "forerun is off, vLLM goes on" in answer.json()["error"]["message"]


def test_an_engine_of_another_version_leaves_the_page_off(kind, caplog):
    app, plugin = FastAPI(), ForerunEndpoint()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(SimpleNamespace(), app.state, Namespace(api_key=None)))
    assert "page is off, vLLM goes on" in caplog.text
    assert TestClient(app).get("/forerun/").status_code == 503


def test_without_the_loggers_of_vllm_the_page_is_off(fake_vllm, caplog):
    fake_vllm("0.99")
    assert serve([]).get("/forerun/live").status_code == 503
    assert "does not know the loggers of this vLLM" in caplog.text
