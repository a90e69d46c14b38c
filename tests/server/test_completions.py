"""Texts over HTTP are the library's, streamed or not."""

from __future__ import annotations

import json
from itertools import chain

import httpx
import pytest
from tests import tiny
from tests.server.conftest import MODEL, tiny_engine

from forerun.sampling.config import SamplingParams

PROMPT = tiny.PROMPTS[0]
SEEDED = {"seed": 7, "max_tokens": 24, "ignore_eos": True}
BODIES = [
    {"temperature": 0.0, "max_tokens": 20},
    SEEDED,
    SEEDED | {"n": 3, "top_k": 40, "min_p": 0.01},
    SEEDED | {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {"65": 3.0}},
    SEEDED | {"stop": ["e", "zz"], "min_tokens": 3},
    SEEDED | {"stop_token_ids": [70, 71], "include_stop_str_in_output": True},
]


def events(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed(client: httpx.Client, path: str, body: dict) -> list[dict]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


@pytest.fixture(scope="module")
def library():
    return tiny_engine()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_texts_are_those_of_the_library(client, library, body, speculation):
    expected = library.generate([PROMPT], SamplingParams(**body))[0]
    asked = {"model": MODEL, "prompt": PROMPT, **body, "speculation": speculation}
    found = client.post("/v1/completions", json=asked).json()
    assert [c["text"] for c in found["choices"]] == [c.text for c in expected.completions]
    assert [c["finish_reason"] for c in found["choices"]] == [
        c.finish_reason for c in expected.completions
    ]
    assert [c["stop_reason"] for c in found["choices"]] == [
        c.stop_reason for c in expected.completions
    ]
    texts: dict[int, str] = {}
    for event in streamed(client, "/v1/completions", asked):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert [texts[i] for i in sorted(texts)] == [c.text for c in expected.completions]


def test_a_tree_drafts_the_same_text(client, library):
    expected = library.generate([PROMPT], SamplingParams(**SEEDED))[0]
    tree = {"tree": {"num_nodes": 3, "depth": 2, "width": 2}}
    body = {"prompt": PROMPT, **SEEDED, "speculation": tree}
    found = client.post("/v1/completions", json=body).json()
    assert found["choices"][0]["text"] == expected.text
    figures = found["usage"]["speculative_decoding"]
    assert figures["num_drafted"] > sum(figures["drafted_per_position"])


def test_several_prompts_are_numbered_together(client, library):
    params = {"seed": 3, "max_tokens": 9, "n": 2}
    prompts = list(tiny.PROMPTS[:3])
    expected = library.generate(prompts, SamplingParams(**params))
    texts = [c.text for output in expected for c in output.completions]
    asked = {"prompt": prompts, **params}
    choices = client.post("/v1/completions", json=asked).json()["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert [c["text"] for c in choices] == texts
    found = [""] * 6
    for event in streamed(client, "/v1/completions", asked):
        for choice in event["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == texts


def test_usage_has_the_figures_of_speculation(client):
    body = {"prompt": PROMPT, **SEEDED, "speculation": {"num_speculative_tokens": 2}}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    figures = usage["speculative_decoding"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert 0 < figures["num_accepted"] <= figures["num_drafted"]
    assert figures["num_drafted"] == sum(figures["drafted_per_position"])
    assert len(figures["acceptance_rate_per_position"]) == 2
    assert figures["acceptance_length"] == 1 + figures["num_accepted"] / figures["num_steps"]
    *_, last = streamed(
        client, "/v1/completions", body | {"stream_options": {"include_usage": True}}
    )
    assert last["choices"] == []
    assert last["usage"]["speculative_decoding"] == figures


def test_speculation_off_drafts_nothing(client):
    body = {"prompt": PROMPT, **SEEDED, "speculation": "off"}
    figures = client.post("/v1/completions", json=body).json()["usage"]["speculative_decoding"]
    assert figures["num_drafted"] == figures["num_steps"] == 0
    assert figures["num_plain_steps"] == 24
    assert figures["acceptance_length"] is None


def test_streamed_tokens_and_logprobs_are_those_of_the_whole(client):
    body = {
        "prompt": PROMPT,
        **SEEDED,
        "logprobs": 3,
        "return_token_ids": True,
        "return_token_sources": True,
    }
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    parts = [event["choices"][0] for event in streamed(client, "/v1/completions", body)]
    for name in ("token_ids", "token_sources"):
        assert list(chain.from_iterable(part[name] for part in parts)) == whole[name]
    assert len(whole["token_ids"]) == 24
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        found = chain.from_iterable(part["logprobs"][name] for part in parts)
        assert list(found) == whole["logprobs"][name]
    assert all(len(top) == 3 for top in whole["logprobs"]["top_logprobs"])


def test_status_routes(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json()["version"]
    model = client.get("/v1/models").json()["data"][0]
    assert model["id"] == MODEL
    assert model["max_model_len"] == tiny.MAX_CONTEXT
    assert model["drafters"] == ["draft_model"]


def test_tokens_and_texts(client):
    tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()
    assert tokens["count"] == len(tokens["tokens"])
    found = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert found == {"prompt": PROMPT}
