"""A server as a backend: the same texts and counts as the engine behind it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import msgspec
import pytest
from tests.server.conftest import serving, tiny_engine

from forerun.client.client import Speculation
from forerun.client.connection import ClientConfig
from forerun.engine.http_backend import HttpBackend, sampling_fields
from forerun.engine.results import Backend
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.measure.bench.compare import BenchArm, Prompt, measure
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
PROMPTS = [[3, 4, 5], [6, 7], [8]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(tiny_engine()) as client:
        yield str(client.base_url)


@pytest.fixture
def connect(address) -> Iterator[Callable[..., HttpBackend]]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kw: stack.enter_context(HttpBackend(address, *args, **kw))


def test_it_is_a_backend_with_the_texts_and_counts_of_the_engine(connect):
    backend = connect()
    assert isinstance(backend, Backend)
    expected = tiny_engine().generate(PROMPTS, PARAMS)
    found = backend.generate(PROMPTS, PARAMS)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        completion = one.completions[0]
        assert completion.finish_reason == "length"
        assert completion.ttft_s is not None
        assert 0.0 <= completion.ttft_s <= completion.total_s
        assert completion.acceptance.num_emitted >= 20
        assert completion.acceptance.num_drafted > 0
    assert sum(one.completions[0].acceptance.num_accepted for one in found) > 0


def test_a_stream_has_the_text_in_pieces(connect):
    chunks = list(connect().stream([3, 4, 5], PARAMS))
    assert len(chunks) > 1
    expected = tiny_engine().generate([[3, 4, 5]], PARAMS)[0]
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected.token_ids
    assert chunks[-1].finish_reason == "length"


def test_speculation_can_be_turned_off_for_all_requests(connect):
    backend = connect(extra={"speculation": "off"})
    found = backend.generate([[3, 4, 5]], PARAMS)[0]
    assert found.token_ids == tiny_engine().generate([[3, 4, 5]], PARAMS)[0].token_ids
    assert found.completions[0].acceptance.num_drafted == 0


def test_a_comparison_measures_a_server_as_it_does_an_engine(connect):
    arm = BenchArm(name="server", method="draft_model", num_speculative_tokens=3, engine=connect())
    found = measure(arm, (Prompt(text="abc", params=PARAMS),), clock=iter([0.0, 2.0]).__next__)
    assert found.num_tokens == 20
    assert found.total_s == 2.0
    assert found.acceptance.num_drafted > 0


def test_counts_keep_tau_and_the_rates_per_position():
    for k in (1, 3):
        output = tiny_engine(num_speculative_tokens=k).generate([[3, 4, 5]], PARAMS)[0]
        counts = output.completions[0].acceptance
        found = msgspec.convert(counts.to_dict(), Speculation).acceptance
        assert found.acceptance_length == counts.acceptance_length
        assert found.num_drafted == counts.num_drafted
        assert found.acceptance_rate_per_position == counts.acceptance_rate_per_position


# ------------------------------------------------------------------------------------- bad servers

CARD = {"data": [{"id": "m", "max_model_len": 64}]}


def over(answer: httpx.Response) -> HttpBackend:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=CARD) if request.method == "GET" else answer

    config = ClientConfig(url="http://server", num_tries=1)
    return HttpBackend(config, transport=httpx.MockTransport(reply))


def events(*data: object) -> httpx.Response:
    lines = [f"data: {json.dumps(each)}\n\n" for each in data]
    return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(500, text="oops"), "status 500: oops"),
        (httpx.Response(200, text="data: {}\n\n"), "before it was complete"),
        (httpx.Response(200, text="data: {\n\n"), "an event"),
        (httpx.Response(200, text="data: [1]\n\n"), r"sends \[1\]"),
        (events({"error": {"message": "out of memory"}}), "out of memory"),
        (events({"choices": [3]}), "no completion"),
        (events({"choices": [{"token_ids": ["x"]}]}), "no completion"),
        (events({"choices": [{"token_sources": ["x"]}]}), "no completion"),
        (httpx.Response(200, headers={"content-encoding": "br"}, content=b""), "encoding 'br'"),
    ],
)
def test_a_broken_server_is_an_error_that_names_it(answer, message):
    with pytest.raises(ServerUnavailable, match=message):
        over(answer).generate(["a"], PARAMS)


def test_a_refusal_is_final():
    with pytest.raises(InvalidRequest, match="refuses the request with status 404: no such model"):
        over(httpx.Response(404, text="no such model")).generate(["a"], PARAMS)


def test_text_without_ids_has_no_tokens_but_a_count():
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    backend = over(events({"choices": [{"text": "hi", "finish_reason": "stop"}]}, {"usage": usage}))
    output = backend.generate("a", PARAMS)[0]
    assert (output.text, output.token_ids) == ("hi", ())
    assert output.completions[0].num_tokens == 2


@pytest.mark.parametrize(
    "params", [SamplingParams(n=2, max_tokens=3), SamplingParams(logprobs=1, max_tokens=3)]
)
def test_what_is_not_supported_is_refused(params):
    with pytest.raises(InvalidRequest, match="one sample without"):
        over(events()).generate(["a"], params)


def test_no_server_and_no_such_model():
    with pytest.raises(ServerUnavailable, match="cannot be reached"):
        HttpBackend("http://127.0.0.1:9/v1")
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=CARD))
    with pytest.raises(InvalidRequest, match="does not serve 'other'; it serves m"):
        HttpBackend("http://server", "other", transport=transport)


def test_what_is_off_is_sent_to_servers_that_have_defaults_of_their_own():
    params = SamplingParams(max_tokens=4, top_k=0)
    assert set(sampling_fields(params, None)) == {"temperature", "top_p", "max_tokens"}
    assert sampling_fields(params, "vllm")["top_k"] == -1
    assert sampling_fields(replace(params, top_k=3), "forerun")["top_k"] == 3
    fields = sampling_fields(replace(params, repetition_penalty=1.5, min_p=0.1), "llamacpp")
    assert (fields["repeat_penalty"], fields["min_p"]) == (1.5, 0.1)
    assert "min_p" in str(fields["samplers"])
