"""The live page beside the requests: texts of one tenant alone, and no harm where it fails."""

from __future__ import annotations

import pytest
from tests.server.conftest import serving, tiny_engine
from tests.server.test_chat import chat_engine

from forerun.server.guard import ApiKey
from forerun.server.live import LiveView

KEYS = [ApiKey.of("one", "the key of tenant one"), ApiKey.of("two", "the key of tenant two")]


@pytest.mark.parametrize(("num_keys", "shown"), [(0, True), (1, True), (2, False)])
def test_texts_are_shown_to_a_single_tenant(num_keys, shown):
    headers = {"Authorization": "Bearer the key of tenant one"}
    body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
    with serving(tiny_engine(), keys=KEYS[:num_keys]) as client:
        client.post("/v1/completions", json=body, headers=headers).raise_for_status()
        found = client.get("/live", headers=headers).json()
    assert found["shows_texts"] is shown
    assert bool(found["requests"][0]["pieces"]) is shown


def test_requests_are_named_by_the_last_message_of_their_user():
    system = {"role": "system", "content": "Be brief."}
    parts = [{"type": "text", "text": "Why "}, {"type": "text", "text": "so?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "So."}]
    prompts = {
        "/v1/chat/completions": [
            ({"messages": [system, *turns]}, "Why so?"),
            ({"messages": [system]}, "<system>Be brief.\n<assistant>"),
        ],
        "/v1/responses": [
            ({"input": "Hello", "instructions": "Be brief."}, "Hello"),
            ({"input": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]}, "B"),
        ],
        "/v1/completions": [({"prompt": "ab"}, "ab")],
    }
    with serving(chat_engine()) as client:
        for path, bodies in prompts.items():
            for body, head in bodies:
                client.post(path, json=body | {"seed": 1}).raise_for_status()
                newest = client.app.state.server.view.snapshot()["requests"][0]
                assert newest["head"] == head, path


def test_requests_are_answered_where_the_page_fails(monkeypatch, caplog):
    def fail(view, step):
        raise ZeroDivisionError

    body = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True, "seed": 1}
    with serving(tiny_engine()) as client:
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    monkeypatch.setattr(LiveView, "observe", fail)
    with serving(tiny_engine()) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == expected
        assert client.get("/health").is_success
        assert client.get("/live").is_success
        assert "vllm:generation_tokens_total" in client.get("/metrics").text
    warnings = [entry.getMessage() for entry in caplog.records if "observer" in entry.getMessage()]
    assert warnings == ["observer LiveView failed and was removed: ZeroDivisionError()"]
