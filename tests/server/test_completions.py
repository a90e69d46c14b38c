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


@pytest.mark.one_in(3)
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


@pytest.mark.parametrize(("best_of", "n", "status"), [(1, 1, 200), (2, 2, 200), (2, 1, 400)])
def test_best_of_may_be_what_n_is(client, best_of, n, status):
    body = {"prompt": PROMPT, "max_tokens": 2, "best_of": best_of, "n": n}
    assert client.post("/v1/completions", json=body).status_code == status


def test_status_routes(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json()["version"]
    model = client.get("/v1/models").json()["data"][0]
    assert model["id"] == MODEL
    assert model["max_model_len"] == tiny.MAX_CONTEXT
    assert model["drafters"] == ["draft_model"]


def test_tokens_of_a_text(client, library):
    found = client.post("/tokenize", json={"prompt": PROMPT}).json()
    assert found["count"] == len(found["tokens"])
    assert library.tokenizer.decode(found["tokens"]) == PROMPT


def test_prompts_are_echoed_with_their_logprobs(client, library):
    """The request that lm-eval-harness sends for the likelihood of a text."""
    prompts = [library.tokenizer.encode(text) for text in tiny.PROMPTS[:2]]
    asked = {"prompt": prompts, "max_tokens": 1, "logprobs": 2, "echo": True, "seed": 1}
    choices = client.post("/v1/completions", json=asked).json()["choices"]
    for ids, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(ids) + 1
        assert choice["text"].startswith("".join(found["tokens"][:-1]))
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        for at in (1, 2, len(ids) - 1):
            params = SamplingParams(max_tokens=1, logprobs=2, allowed_token_ids=[ids[at]])
            (entry,) = library.generate([ids[:at]], params)[0].completions[0].logprobs
            assert found["token_logprobs"][at] == pytest.approx(entry.logprob, abs=1e-5)
            best = max(found["top_logprobs"][at].values())
            assert best == pytest.approx(entry.top[0][1], abs=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("echo", [True, False])
def test_offsets_are_those_of_the_returned_text(client, echo, n, max_tokens):
    asked = {"prompt": [PROMPT, "xyz"], "max_tokens": max_tokens or 1, "logprobs": 1, "n": n}
    if echo:
        asked |= {"echo": True, "max_tokens": max_tokens}
    choices = client.post("/v1/completions", json=asked | {"seed": 1}).json()["choices"]
    for choice in choices:
        found = choice["logprobs"]
        assert found["text_offset"][0] == 0
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            if "\\x" not in token and "<" not in token:
                # Bytes of no character become text with the next token.
                assert choice["text"][offset:].lstrip("\ufffd").startswith(token)


def test_logprobs_of_a_prompt_do_not_depend_on_chunks_and_other_requests():
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=1)
    prompt = tiny.PROMPTS[2]
    expected = tiny_engine().generate(prompt, params)[0].prompt_logprobs
    engine = tiny_engine(prefill_chunk=3)
    engine.generate(prompt, SEEDED_PARAMS)  # leaves the prompt in the KV cache
    others = [engine.add_request(text, SEEDED_PARAMS) for text in tiny.PROMPTS]
    found = engine.generate(prompt, params)[0].prompt_logprobs
    assert len(found) == len(engine.tokenizer.encode(prompt)) - 1
    assert [e.token_id for e in found] == [e.token_id for e in expected]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected], abs=1e-5)
    plain = tiny_engine().generate(list(tiny.PROMPTS), SEEDED_PARAMS)
    while engine.has_unfinished:
        engine.step()
    assert [engine.take_output(name).text for name in others] == [o.text for o in plain]


SEEDED_PARAMS = SamplingParams(seed=3, max_tokens=12)


def test_a_prompt_may_be_scored_alone_and_echoed_in_a_stream(client):
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 1}
    found = client.post("/v1/completions", json=body).json()
    choice = found["choices"][0]
    assert choice["text"] == PROMPT
    assert found["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
    assert choice["prompt_logprobs"][0] is None
    pairs = zip(choice["prompt_logprobs"][1:], choice["logprobs"]["tokens"][1:], strict=True)
    assert all(any(e["decoded_token"] == token for e in row.values()) for row, token in pairs)
    for row in choice["prompt_logprobs"][1:]:
        assert max(row.values(), key=lambda entry: entry["logprob"])["rank"] == 1
    streamed_body = {"prompt": [PROMPT, "x"], "echo": True, **SEEDED, "n": 2}
    texts = [""] * 4
    for event in streamed(client, "/v1/completions", streamed_body):
        for part in event["choices"]:
            texts[part["index"]] += part["text"]
    whole = client.post("/v1/completions", json=streamed_body).json()["choices"]
    assert texts == [choice["text"] for choice in whole]
    assert texts[0].startswith(PROMPT) and texts[3].startswith("x")


class Ranks:
    """An observer that notes the priorities of the sequences that emit tokens."""

    is_required = wants_logits = False

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def observe(self, step) -> None:
        self.seen |= {entry.sequence.rank[0] for entry in step.emitting}


def test_the_priority_of_a_request_is_that_of_its_sequences(client):
    observers = client.app.state.server.engine.engine.observers
    observers.append(ranks := Ranks())
    client.post("/v1/completions", json={"prompt": PROMPT, **SEEDED, "priority": 7})
    observers.remove(ranks)
    assert ranks.seen == {7}


def test_without_max_tokens_a_text_goes_on_to_the_end_of_the_context(client):
    body = {"prompt": PROMPT, "ignore_eos": True, "seed": 1}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == tiny.MAX_CONTEXT


@pytest.mark.parametrize("changes", [{"speculation": "x" * 9000}, {"logit_bias": {"9" * 9000: 1}}])
def test_an_error_does_not_repeat_a_long_value_whole(client, changes):
    reply = client.post("/v1/completions", json={"prompt": "x"} | changes)
    assert reply.status_code == 400
    assert len(reply.content) < 3000


def test_log_probabilities_name_tokens_by_id_where_asked(client):
    body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "logprobs": 2, "seed": 1}
    body |= {"return_token_ids": True, "ignore_eos": True}
    choice = client.post("/v1/completions", json=body | {"return_tokens_as_token_ids": True})
    choice = choice.json()["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True):
        assert name in top
        assert all(other.startswith("token_id:") for other in top)
    by_text = client.post("/v1/completions", json=body).json()["choices"][0]
    assert not any(name.startswith("token_id:") for name in by_text["logprobs"]["tokens"])
