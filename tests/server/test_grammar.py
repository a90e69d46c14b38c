"""Texts that follow a grammar, with and without a draft."""

from __future__ import annotations

import json
import re

import pytest
from tests import tiny
from tests.server.test_completions import PROMPT, streamed

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BODY = {"prompt": PROMPT, "seed": 4, "max_tokens": 60}


@pytest.mark.parametrize("speculation", ["auto", "off"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_choice_is_followed(client, speculation, temperature):
    texts = ["yes", 'no "x" é\n', "maybe not"]
    body = BODY | {"structured_outputs": {"choice": texts}, "temperature": temperature}
    found = client.post("/v1/completions", json=body | {"speculation": speculation}).json()
    assert found["choices"][0]["text"] in texts
    assert found["choices"][0]["finish_reason"] == "stop"


def test_a_seeded_text_under_a_grammar_does_not_depend_on_speculation(client):
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    body = BODY | {"response_format": schema, "n": 3}
    found = [
        [c["text"] for c in client.post("/v1/completions", json=body | changes).json()["choices"]]
        for changes in ({}, {"speculation": "off"}, {"speculation": {"num_speculative_tokens": 1}})
    ]
    assert found[0] == found[1] == found[2]


def test_a_regular_expression_is_followed(client):
    body = BODY | {"structured_outputs": {"regex": "[ab]{3,5}c"}}
    usage = client.post("/v1/completions", json=body).json()
    assert re.fullmatch("[ab]{3,5}c", usage["choices"][0]["text"])


def test_a_lark_grammar_is_followed_in_a_stream(client):
    body = BODY | {"structured_outputs": {"grammar": 'start: "f(" /[0-9]{2}/ ")"'}}
    parts = streamed(client, "/v1/completions", body)
    text = "".join(choice["text"] for part in parts for choice in part["choices"])
    assert re.fullmatch(r"f\([0-9]{2}\)", text)


def test_json_follows_its_schema(client):
    body = BODY | {"structured_outputs": {"json": SCHEMA}, "temperature": 0.0}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    if len(text) < 60:  # spaces may fill the rest
        assert set(json.loads(text)) == {"a", "b"}


def test_min_tokens_is_refused_with_a_grammar(client):
    body = BODY | {"structured_outputs": {"choice": ["a"]}, "min_tokens": 3}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "min_tokens" in response.json()["error"]["message"]


def test_tiny_vocabulary_has_padding():
    assert len(tiny.tokenizer().vocabulary) <= tiny.VOCAB_SIZE
