"""Texts on the live page: not those of other tenants."""

from __future__ import annotations

import pytest
from tests.server.conftest import serving, tiny_engine

from forerun.server.keys import ApiKey

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
