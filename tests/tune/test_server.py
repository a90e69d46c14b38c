"""A server under a load test: the same texts and counts as the engine behind it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from tests.server.conftest import serving, tiny_engine

from forerun.client.connection import ClientConfig
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.measure.request_fields import sampling_fields
from forerun.sampling.config import SamplingParams
from forerun.tune.server import MeasuredServer, digest_text

PARAMS = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(tiny_engine()) as client:
        yield str(client.base_url)


@pytest.mark.parametrize("extra", [{}, {"speculation": "off"}])
def test_it_has_the_texts_and_counts_of_the_engine(address, extra):
    with MeasuredServer(ClientConfig(url=address), extra=extra) as server:
        for prompt in ([3, 4, 5], [6, 7], [8]):
            found = server.ask(prompt, PARAMS)
            text = tiny_engine().generate([prompt], PARAMS)[0].text
            assert found.digest == digest_text(text)
            assert (found.num_tokens, found.finish_reason) == (20, "length")
            assert bool(found.num_drafted) == (not extra)
            assert found.ttft_s is not None
            assert 0.0 <= found.ttft_s <= found.total_s


# ------------------------------------------------------------------------------------- bad servers

CARD = {"data": [{"id": "m", "max_model_len": 64}]}


TEXT = {"choices": [{"text": "hi", "finish_reason": "stop"}]}


def over(answer: httpx.Response) -> MeasuredServer:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=CARD) if request.method == "GET" else answer

    config = ClientConfig(url="http://server", num_tries=1)
    return MeasuredServer(config, transport=httpx.MockTransport(reply))


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
        (events({"usage": {"completion_tokens": 3}}), "ends its answer without a token"),
        (events({"id": 3}), "ends its answer without a token"),
        (events({"choices": [{"finish_reason": "stop"}]}), "ends its answer without a token"),
        (events(TEXT), "text without its number of tokens"),
        (events(TEXT, {"usage": {"completion_tokens": 0}}), "text without its number of tokens"),
        (events(TEXT, {"usage": {"completion_tokens": 10**9}}), "counts 1000000000 tokens in an"),
        (httpx.Response(200, headers={"content-encoding": "br"}, content=b""), "encoding 'br'"),
    ],
)
def test_a_broken_server_is_an_error_that_names_it(answer, message):
    with pytest.raises(ServerUnavailable, match=message):
        over(answer).ask("a", PARAMS)


def test_a_refusal_is_final():
    with pytest.raises(InvalidRequest, match="refuses the request with status 404: no such model"):
        over(httpx.Response(404, text="no such model")).ask("a", PARAMS)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "type": "BadRequest"}},
        {"object": "error", "message": "too long"},
        {"detail": "too long"},
        {"error": "too long"},
    ],
)
def test_a_refusal_has_the_message_of_the_server_alone(body):
    with pytest.raises(InvalidRequest, match=r"with status 400: too long$"):
        over(httpx.Response(400, json=body)).ask("a", PARAMS)


def test_text_without_ids_has_the_count_of_the_server():
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    server = over(events({"choices": [{"text": "hi", "finish_reason": "stop"}]}, {"usage": usage}))
    found = server.ask("a", PARAMS)
    assert (found.digest, found.num_tokens) == (digest_text("hi"), 2)
    assert (found.finish_reason, found.num_drafted) == ("stop", None)


# ------------------------------------------------------------------------------------------- chats

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})


def delta(**message: str) -> dict[str, object]:
    return {"choices": [{"delta": message}]}


def test_a_conversation_is_sent_as_one_and_its_counts_are_read():
    """As llama.cpp streams them: reasoning apart, counts of drafting in the last event."""
    sent = []

    def reply(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=CARD)
        sent.append((request.url.path, json.loads(request.content)))
        return events(
            {"choices": [{"delta": {"role": "assistant", "content": None}}]},
            delta(reasoning_content="hm"),
            delta(content="Hello"),
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {
                "choices": [],
                "usage": {"completion_tokens": 9},
                "timings": {"predicted_n": 9, "draft_n": 8, "draft_n_accepted": 6},
            },
        )

    config = ClientConfig(url="http://server", num_tries=1)
    with MeasuredServer(config, transport=httpx.MockTransport(reply)) as server:
        found = server.ask(CHAT, PARAMS)
    [(path, body)] = sent
    assert path == "/v1/chat/completions"
    assert body["messages"] == list(CHAT) and "prompt" not in body
    assert body["stream"] and body["model"] == "m" and body["max_tokens"] == 20
    assert found.digest == digest_text("hmHello")
    assert found.ttft_s is not None and found.num_tokens == 9
    assert (found.num_drafts, found.num_drafted, found.num_accepted) == (3, 8, 6)


def test_reasoning_under_its_other_name_counts_as_text():
    usage = {"usage": {"completion_tokens": 3}}
    found = over(events(delta(reasoning="so"), delta(content="!"), usage)).ask(CHAT, PARAMS)
    assert found.digest == digest_text("so!")


def test_a_server_without_a_chat_template_cannot_chat(address):
    refusal = httpx.Response(400, json={"error": {"message": "no chat template"}})
    assert not over(refusal).can_chat()
    answer = {"choices": [{"message": {"content": "a"}}]}
    assert over(httpx.Response(200, json=answer)).can_chat()
    with pytest.raises(ServerUnavailable):
        over(httpx.Response(500, text="oops")).can_chat()
    with MeasuredServer(ClientConfig(url=address)) as server:
        assert isinstance(server.can_chat(), bool)


@pytest.mark.parametrize("prompt", ["a", CHAT])
def test_a_server_that_hangs_is_unavailable(prompt):
    """It sends the beginning of an answer, or nothing of it, and then no event."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            card = json.dumps(CARD).encode()
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            for number in range(2):
                peer, _ = listener.accept()
                peer.recv(1 << 16)
                if number == 0:
                    length = f"Content-Length: {len(card)}\r\nConnection: close\r\n\r\n"
                    peer.sendall(head + length.encode() + card)
                    peer.close()
                else:
                    peer.sendall(head + b'\r\ndata: {"choices": [{"text": "a"}]}\n\n')
                    hung.append(peer)

        hung: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        config = ClientConfig(url=f"http://127.0.0.1:{port}", num_tries=1, timeout_s=0.5)
        with MeasuredServer(config) as server, pytest.raises(ServerUnavailable) as caught:
            server.ask(prompt, PARAMS)
        assert "\n" not in str(caught.value) and "0.5" in str(caught.value)
        for peer in hung:
            peer.close()


def test_no_server_and_no_such_model():
    with pytest.raises(ServerUnavailable, match="cannot be reached"):
        MeasuredServer(ClientConfig(url="http://127.0.0.1:9/v1"))
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=CARD))
    with pytest.raises(InvalidRequest, match="does not serve 'other'; it serves m"):
        MeasuredServer(ClientConfig(url="http://server", model="other"), transport=transport)


@pytest.mark.parametrize("model", [None, "m"])
def test_a_server_without_models_is_named(model):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": []}))
    with pytest.raises(InvalidRequest, match="http://server/v1 serves no model"):
        MeasuredServer(ClientConfig(url="http://server", model=model), transport=transport)


def test_what_is_off_is_sent_to_servers_that_have_defaults_of_their_own():
    params = SamplingParams(max_tokens=4, top_k=0)
    assert set(sampling_fields(params, None)) == {"temperature", "top_p", "max_tokens"}
    assert sampling_fields(params, "vllm")["top_k"] == -1
    assert sampling_fields(replace(params, top_k=3), "forerun")["top_k"] == 3
    fields = sampling_fields(replace(params, repetition_penalty=1.5, min_p=0.1), "llamacpp")
    assert (fields["repeat_penalty"], fields["min_p"]) == (1.5, 0.1)
    assert "min_p" in str(fields["samplers"])
