"""Files of the live page and the routes that serve them."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests import tiny

from forerun.server.live import LiveView
from forerun.server.live_page import page_router
from forerun.server.metrics import ServerMetrics

PAGE = files("forerun.server") / "page"


@pytest.fixture
def view() -> LiveView:
    engine = tiny.engine_over(tiny.tabular(0))
    return LiveView(ServerMetrics(engine, "tiny"))


@pytest.fixture
def client(view: LiveView) -> TestClient:
    app = FastAPI()
    app.include_router(page_router(view))
    return TestClient(app)


def test_the_page_and_its_files_are_served_with_a_strict_policy(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = re.findall(r'(?:href|src)="page/([a-z]+\.[a-z]+)"', page.text)
    assert {"icon.svg", "main.js", "style.css"} <= set(names)
    for name in names:
        answer = client.get(f"/page/{name}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "index.html%00", "__init__.py"])
def test_other_files_are_not_served(client, name):
    assert client.get(f"/page/{name}").status_code == 404


def test_every_module_that_is_imported_is_served(client):
    for file in PAGE.iterdir():
        if file.name.endswith(".js"):
            for name in re.findall(r'from "\./([a-z]+\.js)"', file.read_text()):
                assert client.get(f"/page/{name}").status_code == 200


def test_the_page_asks_no_other_host_and_builds_no_html_from_text():
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"<[^>]+\son[a-z]+=|<[^>]+\sstyle=|<style", text), file.name


def test_live_is_json(client):
    answer = client.get("/live")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["setup"]["target"] == "tiny"


def test_several_readers_share_a_snapshot(view, monkeypatch):
    now_s = [0.0]
    taken = []
    monkeypatch.setattr(view, "snapshot", lambda: taken.append(now_s[0]) or {})
    view.clock = lambda: now_s[0]
    for tenth in range(20):
        now_s[0] = tenth / 10
        view.encoded()
    assert len(taken) == 4
