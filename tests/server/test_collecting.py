"""Which texts a server hands on for training: only those of requests that consent."""

from __future__ import annotations

import pytest
from tests.server.conftest import MODEL, serving, tiny_engine

from forerun.server.guard import ApiKey

OPEN_KEY, SHUT_KEY = "a" * 32, "b" * 32


class Kept:
    """A collector in memory."""

    def __init__(self):
        self.texts = {}

    def put(self, request_id, tenant, output):
        self.texts[request_id] = (tenant, output)

    def delete(self, request_id, tenant):
        found = self.texts.get(request_id)
        if found is None or found[0] != tenant:
            return 0
        del self.texts[request_id]
        return 1


@pytest.fixture
def kept():
    return Kept()


def ask(client, key=None, route="completions", **fields):
    given = {"input": "x", "max_output_tokens": 3} if route == "responses" else None
    body = given or {"prompt": "import os", "max_tokens": 3}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = client.post(f"/v1/{route}", json={"model": MODEL, **body, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def test_a_text_is_kept_only_where_the_request_says_so(kept):
    with serving(tiny_engine(), collector=kept) as client:
        ask(client)
        ask(client, store=False)
        assert kept.texts == {}
        answer = ask(client, store=True)
        ((name, (tenant, output)),) = kept.texts.items()
        assert answer.json()["id"] == f"cmpl-{name}"
        assert tenant == "everyone"
        assert output.text == answer.json()["choices"][0]["text"]
        assert "x-forerun-ignored" not in answer.headers
        ask(client, store=True, stream=True)
    assert len(kept.texts) == 2  # a stream may end before its text is kept


def test_a_key_may_consent_for_requests_that_say_nothing(kept):
    keys = [
        ApiKey.of("shut", SHUT_KEY),
        ApiKey(tenant="open", sha256=ApiKey.of("open", OPEN_KEY).sha256, collect=True),
    ]
    with serving(tiny_engine(), keys=keys, collector=kept) as client:
        ask(client, SHUT_KEY)
        ask(client, OPEN_KEY, store=False)
        assert kept.texts == {}
        name = ask(client, OPEN_KEY).json()["id"]
        (tenant,) = {tenant for tenant, _ in kept.texts.values()}
        assert tenant == "open"
        for key, status in ((SHUT_KEY, 404), (OPEN_KEY, 200), (OPEN_KEY, 404)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.delete(f"/v1/completions/{name}", headers=headers).status_code == status
        assert client.delete(f"/v1/completions/{name}").status_code == 401
        assert kept.texts == {}


def test_without_a_collector_store_is_ignored_and_named(client):
    assert ask(client, store=True).headers["x-forerun-ignored"] == "store"
    assert client.delete("/v1/completions/cmpl-1").status_code in (404, 405)


def test_all_choices_of_a_request_are_kept_together(kept):
    with serving(tiny_engine(), collector=kept) as client:
        assert ask(client, store=True, n=2).json()["usage"]["completion_tokens"] == 6
    ((_, output),) = kept.texts.values()
    assert len(output.completions) == 2
