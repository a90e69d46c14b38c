"""Fields that a request leaves out take what the model states, on every route."""

from __future__ import annotations

import pytest
from tests.server.conftest import MODEL, serving, tiny_engine

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}


@pytest.mark.parametrize("route", ROUTES)
def test_fields_that_are_left_out_are_those_of_the_model(route, monkeypatch):
    engine = tiny_engine()
    engine.intake.defaults = {"temperature": 0.3, "top_k": 7}
    seen = []
    check = engine.intake.check

    def noted(prompt, params, mask=None):
        seen.append((params.temperature, params.top_k, params.top_p))
        return check(prompt, params, mask)

    monkeypatch.setattr(engine.intake, "check", noted)
    monkeypatch.setattr(engine.intake, "render", lambda *_: [1, 2])
    with serving(engine) as client:
        bodies = [{}, {"temperature": None}, {"temperature": 1.0, "top_k": 0, "top_p": 0.5}]
        for changes in bodies:
            answer = client.post(route, json={"model": MODEL, **ROUTES[route], **changes})
            assert answer.status_code == 200, answer.text
    assert seen == [(0.3, 7, 1.0), (0.3, 7, 1.0), (1.0, 0, 0.5)]
    if route == "/v1/responses":
        assert answer.json()["temperature"] == 1.0
