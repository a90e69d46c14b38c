"""Blocks of requests, their figures, and the prompts that are dealt to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from forerun.client.connection import ClientConfig
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.sampling.config import SamplingParams
from forerun.tune.arms import Load
from forerun.tune.load import (
    LoadBlock,
    PromptDeck,
    compare_texts,
    compute_figures,
    count_requests,
    list_prompts,
    mark_prompt,
    measure_load,
)
from forerun.tune.server import MeasuredServer, Prompt, TimedAnswer, digest_text

LOAD, BUSY = Load(), Load(clients=4)
PARAMS = SamplingParams(max_tokens=8)


def answer(text: str, ttft_s: float, total_s: float, num_tokens: int) -> TimedAnswer:
    return TimedAnswer(
        digest=digest_text(text), ttft_s=ttft_s, total_s=total_s, num_tokens=num_tokens
    )


def block(index: int, scale: float = 1.0, arm: str = "a", text: str = "x") -> LoadBlock:
    """Two requests of 11 tokens: first tokens after 1 s and 3 s, then 0.1 s and 0.3 s a token."""
    return LoadBlock(
        arm=arm,
        load=LOAD,
        index=index,
        unit=index,
        wall_s=4.0 * scale,
        answers=(
            answer(text, 1.0 * scale, 2.0 * scale, 11),
            answer("y", 3.0 * scale, 6.0 * scale, 11),
        ),
    )


# ----------------------------------------------------------------------------------------- figures


def test_figures_are_as_defined():
    found = compute_figures([block(0), block(1)])
    assert found["requests_per_s"].estimate == pytest.approx(0.5)
    assert found["tokens_per_s"].estimate == pytest.approx(5.5)
    assert found["ttft_median_s"].estimate == pytest.approx(2.0)
    assert found["ttft_p95_s"].estimate == pytest.approx(3.0)
    assert found["tpot_median_s"].estimate == pytest.approx(0.2)
    assert found["tpot_p95_s"].estimate == pytest.approx(0.3)


def test_blocks_of_one_start_are_one_unit():
    starts = [replace(block(n, 1.0 + n), unit=n // 2) for n in range(4)]
    found = compute_figures(starts)["requests_per_s"]
    assert found.estimate == pytest.approx(8 / 40)
    assert (found.low, found.high) == (pytest.approx(4 / 28), pytest.approx(4 / 12))


def test_one_block_shows_nothing_and_none_is_refused():
    found = compute_figures([block(0)])["requests_per_s"]
    assert (found.low, found.high) == (0.0, float("inf"))
    with pytest.raises(ValueError, match="no blocks"):
        compute_figures([])


def test_texts_of_the_same_prompts_are_compared():
    number, share = compare_texts([block(0), block(1)], [block(0, text="z"), block(2)])
    assert share is not None and (number, share.estimate) == (2, 0.5)
    assert compare_texts([block(0)], [block(1)]) == (0, None)


# ---------------------------------------------------------------------------------------- measured


def over(reply: Callable[[dict[str, object]], httpx.Response]) -> MeasuredServer:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return reply(json.loads(request.content))

    config = ClientConfig(url="http://server", num_tries=1)
    return MeasuredServer(config, transport=httpx.MockTransport(handle))


def stream(num_tokens: int) -> httpx.Response:
    events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 0}}]
    events[1]["usage"] = {"completion_tokens": num_tokens}
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def test_a_block_has_the_temperature_of_its_load_and_the_order_of_its_prompts():
    sent = []

    def reply(body: dict[str, object]) -> httpx.Response:
        sent.append(body)
        return stream(2 + len(str(body["prompt"])))

    load = Load(clients=2, temperature=0.7)
    with over(reply) as server:
        found = measure_load(server, ["a", "bb", "ccc"], PARAMS, arm="x", load=load, index=4)
    assert [one.num_tokens for one in found.answers] == [3, 4, 5]
    assert {body["temperature"] for body in sent} == {0.7}
    times = found.times
    assert (times.arm, times.load, times.index, times.num_tokens) == ("x", load, 4, 12)
    assert times.wall_s == found.wall_s > 0.0


def test_a_block_of_single_tokens_and_one_that_fails_are_errors():
    with over(lambda _: stream(1)) as server, pytest.raises(InvalidRequest, match="two tokens"):
        measure_load(server, ["a"], PARAMS, arm="x", load=LOAD, index=0)
    with over(lambda _: httpx.Response(500)) as server, pytest.raises(ServerUnavailable):
        measure_load(server, ["a"] * 9, PARAMS, arm="x", load=BUSY, index=0)


def test_a_block_has_two_requests_per_client():
    assert [count_requests(Load(clients=n)) for n in (1, 2, 4)] == [3, 4, 8]


# ----------------------------------------------------------------------------------------- prompts


def named(number: int) -> dict[str, Prompt]:
    return {f"p.jsonl:{n}": f"p{n}" for n in range(number)}


def test_every_block_has_other_prompts_and_all_arms_the_same():
    deck = PromptDeck(named(20), 0xAB)
    dealt = [deck.deal(LOAD, 0, 3), deck.deal(BUSY, 0, 8), deck.deal(LOAD, 1, 3)]
    assert len({prompt for prompts in dealt for prompt in prompts}) == 14
    assert deck.deal(BUSY, 0, 8) == dealt[1]
    assert deck.deal(LOAD, 2, 3) == ["p18", "# ab-150\np0", "# ab-160\np1"]


def test_a_prompt_that_is_left_out_is_dealt_no_more():
    deck = PromptDeck(named(9), 1)
    assert deck.deal(LOAD, 0, 3) == ["p0", "p1", "p2"]
    assert deck.find_name(LOAD, 0, 1, False) == "p.jsonl:1"
    deck = PromptDeck(named(9), 1, left_out=["p.jsonl:1"])
    assert deck.deal(LOAD, 0, 3) == ["p0", "p2", "p4"]
    assert deck.deal(LOAD, 0, 3, is_final=True)[:2] == ["p3", "p7"]
    with pytest.raises(InvalidRequest, match="refuses all prompts"):
        PromptDeck(named(9), 1, left_out=["p.jsonl:3", "p.jsonl:7"])


def test_the_final_measurement_has_prompts_of_its_own():
    deck = PromptDeck(named(20), 1)
    chosen = {p for index in range(4) for p in deck.deal(LOAD, index, 3)}
    final = deck.deal(LOAD, 0, 3, is_final=True) + deck.deal(BUSY, 0, 3, is_final=True)
    assert not {p.rpartition("\n")[2] for p in final} & chosen
    assert final[:5] == ["p3", "p7", "p11", "p15", "p19"] and final[5].endswith("\np3")


def test_a_run_that_goes_on_deals_the_same():
    order = [(LOAD, 0), (BUSY, 0), (LOAD, 1)]
    decks = [PromptDeck(named(9), 1) for _ in range(2)]
    dealt = [[deck.deal(load, index, 3) for load, index in order] for deck in decks]
    assert dealt[0] == dealt[1]
    decks[1].deal_warm_up(4)
    assert decks[0].deal(BUSY, 1, 8) == decks[1].deal(BUSY, 1, 8)


def test_servers_that_ran_before_get_marked_prompts_only():
    deck = PromptDeck(named(4), 0xF, marks_all=True)
    assert deck.deal(LOAD, 0, 2) == ["# f-00\np0", "# f-10\np1"]
    assert len({*deck.deal_warm_up(3)}) == 3


def test_a_mark_is_the_first_line_of_a_conversation():
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    marked = mark_prompt(chat, "7")
    assert marked == ({"role": "system", "content": "# 7\ns"}, chat[1])
    assert chat[0]["content"] == "s"


def test_prompts_of_a_file_become_conversations_or_stay_texts(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    texts = [{"prompt": text} for text in ("t", "u", "t", "v")]
    path.write_text("\n".join(map(json.dumps, [*texts, {"messages": turns}])))
    users = [({"role": "user", "content": text},) for text in ("t", "u", "v")]
    found = list_prompts(path, is_chat=True)
    assert [*found.values()] == [*users, (turns[0],)]
    assert [name.rpartition(":")[2] for name in found] == ["1", "2", "4", "5"]
    with pytest.raises(InvalidRequest, match="is a conversation"):
        list_prompts(path, is_chat=False)
    path.write_text("\n".join(map(json.dumps, texts)))
    with pytest.raises(InvalidRequest, match="has 3 different prompts; 4 are needed"):
        list_prompts(path, is_chat=False)
    assert all(isinstance(p, str) for p in list_prompts(None, is_chat=False).values())
    shipped = list_prompts(None, is_chat=True).values()
    assert len(shipped) == 40 and all(len(prompt) == 1 for prompt in shipped)
