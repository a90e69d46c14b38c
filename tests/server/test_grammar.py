"""Texts that follow a grammar, with and without a draft."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from tests import tiny
from tests.server.conftest import tiny_engine
from tests.server.test_completions import PROMPT, streamed
from tests.server.test_tools import tool_engine

from forerun.engine.grammar import Grammars
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BODY = {"prompt": PROMPT, "seed": 4, "max_tokens": 60}


@pytest.mark.parametrize("choice", ["a", "xa"])
def test_a_grammar_that_other_limits_contradict_is_the_request_s_fault(client, choice):
    (token,) = client.post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    body = BODY | {"structured_outputs": {"choice": [choice]}, "allowed_token_ids": [token]}
    found = client.post("/v1/completions", json=body)
    assert found.status_code == 400
    assert "its parameters leave no possible token" in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"{99999999}',
        'start: ("a"{1000}){1000}',
        "start: " + "|".join(f'"a{number}"' for number in range(5000)),
    ],
)
def test_a_grammar_that_its_parser_gives_up_is_the_request_s_fault(client, grammar, stream):
    body = BODY | {"structured_outputs": {"grammar": grammar}, "stream": stream}
    found = client.post("/v1/completions", json=body)
    assert found.status_code == (200 if stream else 400)
    (line,) = [line for line in found.text.splitlines() if '"error"' in line]
    error = json.loads(line.removeprefix("data: "))["error"]
    assert error["type"] == "invalid_request_error"
    assert "items" in error["message"]
    assert "state>" not in error["message"]


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


def chained(num_rules):
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(num_rules))
    return {"grammar": f'start: r0\n{rules}\nr{num_rules}: "a"\n'}


def chained_references(num_references):
    names = [f"a{i}" for i in range(num_references)]
    definitions = {name: {"$ref": f"#/$defs/{name}a"} for name in names}
    links = {f"{a}a": {"$ref": f"#/$defs/{b}"} for a, b in itertools.pairwise(names)}
    last = {f"{names[-1]}a": {"type": "string"}}
    return {"json": {"$ref": "#/$defs/a0", "$defs": definitions | links | last}}


@pytest.mark.parametrize(
    "hostile",
    [
        chained(3000),
        chained(30_000),
        chained_references(3000),
        {"regex": "a?" * 20_000},
        {"json": {"type": "string", "pattern": "a?" * 20_000}},
        {"json": {"type": "object", "patternProperties": {"a?" * 20_000: {}}}},
        {"json": '{"const": "' + "x" * 300_000 + '"}'},
        {"grammar": "start: /" + "a?" * 30_000 + "/"},
    ],
    ids=[
        "rules",
        "many rules",
        "references",
        "regex",
        "pattern",
        "properties",
        "length",
        "terminal",
    ],
)
def test_a_grammar_that_would_end_the_process_is_refused(client, hostile):
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": hostile}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) < 400
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_thousands_of_choices_are_followed(client):
    texts = [f"a{i}" for i in range(3000)]
    body = {"prompt": "x", "max_tokens": 20, "structured_outputs": {"choice": texts}}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] in texts


def test_white_space_between_json_values_is_limited(client):
    schema = {"type": "array", "items": {"type": "integer"}}
    bias = {
        str(token): 100.0
        for token in client.post("/tokenize", json={"prompt": "\n"}).json()["tokens"]
    }
    body = {
        "prompt": "x",
        "max_tokens": 24,
        "temperature": 0,
        "logit_bias": bias,
        "structured_outputs": {"json": schema},
    }
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert "\n\n\n" not in text


@pytest.mark.parametrize("name", ["<tool_call>", "<|end|>"])
def test_a_text_that_spells_an_added_token_is_followed(name):
    """Such a text has an encoding with the added token, which stands for no bytes of a text."""
    engine = tool_engine()
    for choice in (f"{name}x", f"a{name}", f"a{name}b"):
        params = SamplingParams(max_tokens=60, seed=1, structured_outputs={"choice": [choice]})
        assert engine.generate("x", params)[0].text == choice
    for form in ({"json": {"enum": [f"a{name}"]}}, {"regex": f"a{name.replace('|', '[|]')}b"}):
        params = SamplingParams(max_tokens=60, seed=1, structured_outputs=form)
        assert name in engine.generate("x", params)[0].text


def test_the_library_follows_a_form_as_the_server_does(client):
    engine = tiny_engine()
    forms = (
        {"choice": ["yes", "maybe"]},
        {"regex": "[ab]{3,5}c"},
        {"grammar": 'start: "f(" /[0-9]{2}/ ")"'},
        {"json": SCHEMA},
    )
    for form in forms:
        expected = engine.generate(
            PROMPT, SamplingParams(seed=4, max_tokens=60, structured_outputs=form)
        )
        found = client.post("/v1/completions", json=BODY | {"structured_outputs": form}).json()
        assert found["choices"][0]["text"] == expected[0].text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "it has none"),
        ({"regex": "a", "choice": ["b"]}, "it has regex, choice"),
        ({"regex": 3}, "must be text"),
        ({"choice": []}, "must be text"),
        ({"choice": "ab"}, "must be a list"),
        ({"pattern": "a"}, "json, regex, choice, grammar"),
        ({"json": "{"}, "no JSON schema"),
        ({"json": {"a": {1, 2}}}, "no JSON schema"),
        ("regex", "json, regex, choice, grammar"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(form, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(structured_outputs=form)


def test_a_form_may_be_json_text():
    params = SamplingParams(structured_outputs='{"regex": "a", "choice": null}')
    assert params.structured_outputs == StructuredOutputs(regex="a")


def test_a_form_and_a_mask_are_not_combined():
    params = SamplingParams(structured_outputs={"regex": "a"})
    mask = Grammars(tiny.tokenizer(), tiny.VOCAB_SIZE, {0}).mask_of(params.structured_outputs)
    with pytest.raises(InvalidRequest, match="give one of them"):
        tiny_engine().add_request("x", params, mask=mask)
