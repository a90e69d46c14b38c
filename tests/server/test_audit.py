"""`forerun audit` over our own server, healthy and broken, and over servers that misbehave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import msgspec
import pytest
from tests.lab.audited import Rule, plant
from tests.server.conftest import serving

from forerun.cli.main import main
from forerun.client.connection import ClientConfig
from forerun.doctor.audit.config import KINDS, AuditConfig
from forerun.doctor.audit.endpoint import HttpEndpoint
from forerun.doctor.audit.prepare import encode_prompts, find_chats
from forerun.doctor.audit.records import AuditAnswer, Question, StateFile
from forerun.doctor.audit.reference import ReportedLogprobs, load_reference
from forerun.doctor.audit.run import Audit
from forerun.doctor.audit.verdict import judge
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("unchecked")
SMALL = ("--tokens", "1600", "--max-tokens", "24", "--json")
KEEPS_ALL = Rule(accepts=lambda p, q, x, u: True)
"""Far from the target, so that few tokens show it: requests over HTTP have no seed."""
CONFIG = EngineConfig(num_speculative_tokens=3, max_context=512, max_batch=4, controller="fixed")


@contextmanager
def address(change: Callable[[Engine], None] = lambda engine: None) -> Iterator[str]:
    engine = Engine.load("zoo:code-2m", "zoo:books-1m", config=CONFIG)
    change(engine)
    with serving(engine) as client:
        yield str(client.base_url)


def test_a_healthy_server_passes_and_an_audit_resumes(tmp_path, capsys):
    files = ("--state", str(tmp_path / "state.jsonl"))
    with address() as url:
        assert main(["audit", url, "--reference", "zoo:code-2m", *files, *SMALL]) == 0
        first = json.loads(capsys.readouterr().out)
        assert main(["audit", url, "--reference", "zoo:code-2m", *files, *SMALL]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["spent"] == first["spent"]
    assert again["peak_log_e"] == pytest.approx(first["peak_log_e"])
    assert first["status"] == "no_deviation"
    assert first["spent"]["num_tokens"] <= 1200
    groups = {item["group"] for item in first["deviations"]["served"]}
    kinds = {group.removeprefix("kind ") for group in groups if group.startswith("kind ")}
    assert kinds >= {kind.name for kind in KINDS} - {"chat"}
    assert "No deviation" in first["sentence"]


@pytest.mark.full
def test_a_broken_server_is_found_and_the_control_is_clean(capsys):
    flags = ("--reference", "zoo:code-2m", "--draft", "zoo:books-1m", "--tokens", "2400", "--json")
    with address(lambda engine: plant(engine, KEEPS_ALL)) as url:
        assert main(["audit", url, *flags]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "deviates"
    assert found["control"] == "off"
    assert [place["place"] for place in found["steps"]][:4] == [0, 1, 2, 3]


def test_bad_input_is_refused(capsys):
    assert main(["audit", "http://127.0.0.1:1/v1", "--draft", "zoo:code-2m"]) == 2
    assert main(["audit", "http://127.0.0.1:1/v1", "--tokens", "0"]) == 2
    assert main(["audit", "http://127.0.0.1:1/v1"]) == 1
    shown = capsys.readouterr().err
    assert "--reference" in shown
    assert "max_tokens is 0" in shown
    assert "Connection refused; is it running?" in shown


def test_too_few_tokens_are_refused_before_any_is_asked_for(capsys):
    limits = ("--max-tokens", "48", "--tokens")
    assert main(["audit", "http://127.0.0.1:1/v1", *limits, "730"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "--tokens 730 is too few: 500 have to be judged, and 25%" in shown
    assert shown.endswith("give 731 or more")
    assert main(["audit", "http://127.0.0.1:1/v1", *limits, "731"]) == 1


# --------------------------------------------------------------------------- misbehaving servers

QUESTION = Question(arm="served", kind="sampled", prompt="a", num_tokens=8, group=0)
MODELS = {"data": [{"id": "m"}]}


def asked(
    reply: Callable[[httpx.Request], httpx.Response],
    question: Question = QUESTION,
    ids_by_text: Mapping[str, int] | None = None,
    owner: str = "another",
) -> AuditAnswer:
    models = {"data": [{"id": "m", "owned_by": owner}]}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=models) if request.method == "GET" else reply(request)

    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"),
        wants_logprobs=True,
        num_clients=1,
        ids_by_text=ids_by_text,
        transport=httpx.MockTransport(answer),
    )
    kinds = {kind.name: replace(kind) for kind in KINDS}
    return endpoint.ask([question], kinds)[0]


def stream(*events: object, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join(lines) + ("data: [DONE]\n\n" if done else ""))


def chunk(*ids: int, finish: str | None = None) -> dict[str, object]:
    choice = {"text": "x" * len(ids), "token_ids": list(ids), "finish_reason": finish}
    return {"choices": [choice]}


def test_the_steps_of_a_stream_are_kept():
    answer = asked(lambda _: stream(chunk(1, 2), chunk(3), chunk(4, 5, 6, finish="length")))
    assert answer.token_ids == (1, 2, 3, 4, 5, 6)
    assert answer.step_sizes == (2, 1, 3)
    assert (answer.num_charged, answer.num_requests, answer.problem) == (6, 1, None)


def test_texts_without_ids_are_told_apart_beyond_their_beginning():
    """Two alternatives that were one lost the probability of the first: a false alarm."""
    top = {" function": -0.1, " functions": -3.0, " functional": -4.0}
    logprobs = {"tokens": [" function"], "token_logprobs": [-0.1], "top_logprobs": [top]}
    choice = {"text": " function", "logprobs": logprobs, "finish_reason": "length"}
    ((*row,),) = asked(lambda _: stream({"choices": [choice]})).top
    assert [value for _, value in row] == [-0.1, -3.0, -4.0]
    assert len({token for token, _ in row}) == 3


@pytest.mark.parametrize("number", [2**70, 2**31, -1])
def test_ids_that_cannot_be_are_not_judged(number):
    assert asked(lambda _: stream(chunk(1, number, finish="length"))).token_ids is None


@pytest.mark.parametrize("logprob", ["Infinity", "-Infinity", "1e308", "-1e308"])
def test_log_probabilities_are_stored_as_finite_numbers(logprob, tmp_path):
    """JSON has no infinity: null was written, and an audit could not be resumed."""
    content = {
        "token": "a",
        "id": 1,
        "logprob": 0.5,
        "top_logprobs": [{"token": "a", "logprob": 0.5}],
    }
    event = json.dumps({"choices": [{"text": "a", "logprobs": {"content": [content]}}]})
    text = f"data: {event.replace('0.5', logprob)}\n\ndata: [DONE]\n\n"
    answer = asked(lambda _: httpx.Response(200, text=text))
    assert answer.top and answer.logprobs
    for _ in range(2):
        state = StateFile(tmp_path / "state", {})
        if not state.load():
            state.answer(*state.ask([QUESTION]), answer)
    ((_, stored),) = state.load()
    assert stored == answer


def test_more_log_probabilities_than_tokens_asked_for_are_cut_off():
    entries = [{"token": "a", "id": 1, "logprob": -1.0}] * (QUESTION.num_tokens + 1)
    event = {"choices": [{"token_ids": [1], "logprobs": {"content": entries}}]}
    assert "tokens asked for were sent" in asked(lambda _: stream(event)).problem


def test_a_busy_server_is_asked_once_and_charged_in_full():
    answer = asked(lambda _: httpx.Response(429, headers={"retry-after": "1"}))
    assert "429" in answer.problem
    assert (answer.num_charged, answer.num_requests) == (8, 1)
    assert not answer.is_refused


def test_a_stream_that_is_cut_keeps_its_tokens_and_is_charged_in_full():
    answer = asked(lambda _: stream(chunk(1, 2), done=False))
    assert answer.token_ids == (1, 2)
    assert answer.num_charged == 8
    assert answer.problem is not None


def test_a_server_that_sends_more_than_asked_is_cut_off():
    events = [chunk(n) for n in range(100)]
    answer = asked(lambda _: stream(*events, chunk(100, finish="length")))
    assert "more than the 8 tokens" in answer.problem
    assert answer.num_charged == 9


def misbehaving(request: httpx.Request, number: int) -> httpx.Response:
    """A reply of a server that is busy, cuts streams, sends too much, or leaves out the ids."""
    wanted = json.loads(request.content)["max_tokens"]
    whole = [chunk(n % 17) for n in range(wanted)]
    replies = (
        lambda: httpx.Response(429, headers={"retry-after": "1"}),
        lambda: stream(*whole[: wanted // 2], done=False),
        lambda: stream(*whole, chunk(1), chunk(2), chunk(3)),
        lambda: stream(*({"choices": [{"text": "abc"}]} for _ in range(4))),
        lambda: httpx.Response(500, text="no"),
        lambda: stream(*whole, {"choices": [], "usage": {"completion_tokens": wanted}}),
    )
    return replies[number % len(replies)]()


@pytest.mark.parametrize("limits", [{"max_tokens": 900}, {"max_requests": 11}])
def test_no_limit_is_passed_by_a_server_that_misbehaves_in_every_way(limits):
    received = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        received.append(json.loads(request.content)["max_tokens"])
        return misbehaving(request, len(received))

    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"),
        wants_logprobs=False,
        num_clients=1,
        transport=httpx.MockTransport(answer),
    )
    config = AuditConfig(num_tokens=20, num_clients=1, **limits)
    state = StateFile(None, {"url": "m"})
    audit = Audit(config, endpoint, ReportedLogprobs(), ["a", "b"], state, wait=lambda s: None)
    audit.run(lambda what, done: None)
    verdict = judge(audit)
    assert verdict.status == "cannot_judge"
    seen = " ".join(audit.progress.problems)
    assert "429" in seen and "more than the 20 tokens" in seen
    assert " failed: " in " ".join(verdict.notes)
    assert len(received) <= config.max_requests
    assert sum(received) <= config.max_tokens
    assert audit.progress.spent.num_tokens <= config.max_tokens
    assert audit.progress.spent.num_requests <= config.max_requests


def test_every_try_of_a_refusal_counts():
    answer = asked(lambda _: httpx.Response(400, text="no"))
    assert answer.is_refused
    assert (answer.num_charged, answer.num_requests) == (0, 3)


def test_flags_that_were_taken_once_are_not_left_out_after_a_refusal():
    """The server takes requests without flags, too; ids are wanted from every answer."""
    asked_for = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        asked_for.append("return_token_ids" in json.loads(request.content))
        return httpx.Response(400) if len(asked_for) == 2 else stream(chunk(1, finish="length"))

    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"),
        wants_logprobs=False,
        num_clients=1,
        transport=httpx.MockTransport(answer),
    )
    answers = endpoint.ask([QUESTION] * 3, {kind.name: kind for kind in KINDS})
    assert [found.token_ids for found in answers] == [(1,), None, (1,)]
    assert answers[1].is_refused
    assert asked_for == [True] * 3


def test_text_alone_is_charged_in_full():
    answer = asked(lambda _: stream({"choices": [{"text": "abc", "finish_reason": "length"}]}))
    assert answer.token_ids is None
    assert answer.num_charged == 8


def test_ids_are_taken_from_names_of_tokens():
    logprobs = {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.1],
        "top_logprobs": [{"token_id:7": -0.1, "token_id:9": -3.0}],
    }
    event = {"choices": [{"text": "x", "logprobs": logprobs, "finish_reason": "length"}]}
    answer = asked(lambda _: stream(event))
    assert answer.token_ids == (7,)
    assert answer.top == (((7, -0.1), (9, -3.0)),)


# ------------------------------------------------------- llama.cpp: one event per token, few ids

TEXTS = {"a": 7, "b": 8, "ab": 9}


def event(text: str, token: int | None = None, **further: object) -> dict[str, object]:
    """An event of llama.cpp: an accepted draft token comes without its id."""
    named = {"content": [{"id": token, "token": text, "logprob": -1.0, "top_logprobs": []}]}
    logprobs = None if token is None else named
    choice = {"text": text, "logprobs": logprobs, "finish_reason": further.pop("finish", None)}
    return {"choices": [choice], **further}


def ended(num_tokens: int, finish: str = "length") -> dict[str, object]:
    return event("", finish=finish, usage={"completion_tokens": num_tokens})


def test_draft_tokens_without_ids_are_known_by_their_texts():
    events = [event("a", 7), event("b"), event("ab"), ended(3)]
    assert asked(lambda _: stream(*events), ids_by_text=TEXTS).token_ids == (7, 8, 9)


@pytest.mark.parametrize(
    "events",
    [
        [event("a", 7), event("ab"), ended(3)],  # two tokens in one event
        [event("a", 7), event("?"), ended(2)],  # a text that is no token's alone
        [event("a", 7), event("b")],  # no count
    ],
)
def test_tokens_that_are_not_known_for_sure_are_not_judged(events):
    answer = asked(lambda _: stream(*events), ids_by_text=TEXTS)
    assert answer.token_ids is None
    assert answer.num_charged >= 2


@pytest.mark.parametrize("owner", ["llamacpp", "another"])
@pytest.mark.parametrize(
    ("num_counted", "finish", "owners"),
    [
        (3, "length", {"llamacpp", "another"}),
        (4, "length", set()),  # "ab" is two tokens that read like a third
        (3, "stop", {"another"}),  # llama.cpp counts the end: one token fewer than events
        (4, "stop", {"llamacpp"}),  # another server may not: then "ab" may be two tokens
        (5, "stop", set()),
    ],
)
def test_the_count_must_fit_the_events_of_a_text_that_has_ended(owner, num_counted, finish, owners):
    events = [event("a", 7), event("b"), event("ab"), ended(num_counted, finish)]
    answer = asked(lambda _: stream(*events), ids_by_text=TEXTS, owner=owner)
    assert answer.token_ids == ((7, 8, 9) if owner in owners else None)


@pytest.mark.parametrize("owner", ["llamacpp", "forerun", "vllm", "sglang", "another"])
def test_a_servers_own_filters_are_switched_off(owner):
    bodies: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return stream(chunk(1))

    asked(answer, msgspec.structs.replace(QUESTION, kind="filtered"), owner=owner)
    assert all((body["temperature"], body["top_p"]) == (0.8, 0.9) for body in bodies)
    unfiltered = {"llamacpp": 0, "forerun": -1, "vllm": -1, "sglang": -1}
    assert all(body.get("top_k") == unfiltered.get(owner) for body in bodies)
    assert all(body.get("min_p") == (0.0 if owner in unfiltered else None) for body in bodies)
    order = ["penalties", "temperature", "min_p", "top_k", "top_p"] if owner == "llamacpp" else None
    assert all(body.get("samplers") == order for body in bodies)


@pytest.mark.parametrize(("owner", "is_asked"), [("llamacpp", False), ("another", True)])
def test_penalties_are_not_judged_where_they_count_the_prompt(owner, is_asked):
    question = msgspec.structs.replace(QUESTION, kind="penalised")
    answer = asked(lambda _: stream(chunk(1)), question, owner=owner)
    assert (answer.num_requests, answer.is_refused) == ((1, False) if is_asked else (0, True))


def test_log_probabilities_of_a_part_of_the_tokens_are_not_taken_for_all():
    answer = asked(lambda _: stream(event("a", 7), event("b"), event("a", 7), ended(3)))
    assert answer.token_ids is None
    assert answer.num_charged == 3


def test_ids_by_text_hold_the_tokens_whose_text_is_theirs_alone():
    reference = load_reference("zoo:code-2m", None, max_context=64)
    found = reference.ids_by_text
    assert len(found) > 2000
    for text, token in [*found.items()][::97]:
        assert reference.tokenizer.token_bytes(token).decode() == text


def serve_small_context(posted: list[str], *, has_template: bool = False) -> httpx.MockTransport:
    """A server of vLLM's kind with a context of 40 tokens, one token a character."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            card = {"id": "m", "owned_by": "vllm", "max_model_len": 40}
            return httpx.Response(200, json={"data": [card]})
        body = json.loads(request.content)
        posted.append(request.url.path + (" messages" if "messages" in body else ""))
        if request.url.path != "/tokenize":
            return httpx.Response(400, text="no")
        if "messages" in body and not has_template:
            return httpx.Response(400, text="no chat template")
        return httpx.Response(200, json={"tokens": [1] * len(body.get("prompt", "hello"))})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("has_template", [True, False])
def test_a_refused_conversation_is_tokenized_once(has_template):
    posted: list[str] = []
    transport = serve_small_context(posted, has_template=has_template)
    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"), wants_logprobs=True, num_clients=1, transport=transport
    )
    assert endpoint.tokenize("abc") == (1, 1, 1)
    chats = find_chats(endpoint, [f"message {n}" for n in range(20)])
    assert len(chats) == (20 if has_template else 0)
    assert posted.count("/tokenize messages") == (20 if has_template else 1)


def test_prompts_leave_room_for_the_token_that_scoring_asks_for():
    transport = serve_small_context([])
    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"), wants_logprobs=True, num_clients=1, transport=transport
    )
    config = AuditConfig(num_tokens=10)
    (prompt,) = encode_prompts(["x" * 100], endpoint.tokenize, endpoint.max_context, config)
    assert len(prompt) + config.num_tokens + 1 == 40


def test_a_server_that_hangs_is_waited_for_two_minutes():
    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"),
        ClientConfig(url="http://m", timeout_s=5.0),
        wants_logprobs=True,
        num_clients=1,
        transport=serve_small_context([]),
    )
    limits = [client.config.timeout_s for client in endpoint._clients.values()]
    assert limits == [120.0, 5.0]


def test_counters_that_fall_are_no_negative_number_of_drafts():
    """The server began afresh between two readings."""
    values = iter([500, 20])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            name = "vllm:spec_decode_num_draft_tokens_total"
            return httpx.Response(200, text=f'{name}{{engine="0"}} {next(values)}.0\n')
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "vllm"}]})
        return stream(chunk(1, 2, finish="length"))

    endpoint = HttpEndpoint(
        ClientConfig(url="http://m"),
        wants_logprobs=True,
        num_clients=1,
        transport=httpx.MockTransport(answer),
    )
    (found,) = endpoint.ask([QUESTION], {kind.name: kind for kind in KINDS})
    assert found.num_drafted == 0
