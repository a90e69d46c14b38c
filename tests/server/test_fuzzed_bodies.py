"""The HTTP server against bodies made of every field that it knows, with hostile values.

`make test-full` sends 10,000 bodies; the suite sends some hundred.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.fuzz.harness import SECONDS
from tests.server.conftest import serving, wait_until_idle
from tests.server.test_tools import tool_engine

from forerun.errors import EngineStopped
from forerun.server.protocol import IGNORED, ChatRequest, CompletionRequest, TokenizeRequest
from forerun.server.responses import ResponsesRequest

NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 16, 63, 64, 255, 299, 300, 303, 304, 4096, 65536),
    *(
        2**31 - 1,
        2**31,
        2**32,
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
        -(2**31),
        -(2**63),
        -(2**64),
    ),
    *(0.0, -0.0, 0.5, 1.0, 1e-300, 1e-5, 1e-6, 1e5, 1e308, -1e308, 2.0**-1074),
    *(math.nan, math.inf, -math.inf),
)
TEXTS = (
    *("", "x", "import os", "\x00", "\ud800", "\u202e", "é" * 50, "x" * 5000, "<|end|>"),
    *("<tool_call>", "{", "a" * 300, "\n" * 200, "../../etc/passwd", "{{ 1/0 }}", "auto", "off"),
)
BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
}
WORKERS = 6
REFUSALS = frozenset({400, 404, 413, 415, 429})


def deep(rng: random.Random) -> Any:
    """Return nested lists or objects."""
    value: Any = rng.choice(TEXTS)
    for _ in range(rng.choice((1, 5, 50, 90, 130, 600))):
        value = [value] if rng.random() < 0.5 else {rng.choice(("a", "items", "properties")): value}
    return value


def anything(rng: random.Random) -> Any:
    """Return a value of any JSON type."""
    return rng.choice(
        (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice((None, True, False, [], {})),
            lambda: [rng.choice(NUMBERS) for _ in range(rng.choice((1, 3, 70, 400)))],
            lambda: [rng.choice(TEXTS) for _ in range(rng.choice((1, 3, 70)))],
            lambda: {rng.choice(TEXTS): rng.choice(NUMBERS) for _ in range(3)},
            lambda: deep(rng),
        )
    )()


def schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON schema, often a valid one."""
    if depth > rng.choice((1, 2, 4, 30)):
        return rng.choice(({}, True, {"type": "string"}, {"$ref": "#"}, {"enum": ["a", 1]}))
    inner = [schema(rng, depth + 1) for _ in range(rng.choice((1, 1, 2)))]
    return rng.choice(
        (
            {"type": "object", "properties": dict(zip("ab", inner, strict=False))},
            {"type": "array", "items": inner[0], "minItems": rng.choice(NUMBERS)},
            {"anyOf": inner},
            {"allOf": inner},
            {"type": "string", "pattern": regex(rng)},
            {"type": "string", "maxLength": rng.choice(NUMBERS)},
            {"type": "integer", "minimum": rng.choice(NUMBERS), "maximum": rng.choice(NUMBERS)},
            {"$defs": {"a": inner[0]}, "$ref": "#/$defs/a"},
            {"const": anything(rng)},
            {"enum": [anything(rng) for _ in range(3)]},
            {"patternProperties": {regex(rng): inner[0]}},
        )
    )


def regex(rng: random.Random) -> str:
    parts = (
        "a",
        "[ab]",
        "(a|b)*",
        "a{1,50}",
        "a?" * 40,
        "(",
        ")",
        "\\d+",
        ".",
        "(?=a)",
        "é",
        "[^a]",
    )
    return "".join(rng.choice(parts) for _ in range(rng.choice((1, 3, 10, 200))))


def lark(rng: random.Random) -> str:
    lines = [
        "start: " + rng.choice(('"a"', "r0", "start", 'r0 "b"', "/a+/", "<[300]>", "<[99999]>"))
    ]
    for number in range(rng.choice((0, 1, 3, 300))):
        body = (
            f"r{number + 1}",
            '"a"',
            f'r{number} | "a"',
            f"/{regex(rng)}/",
            f"%json {schema(rng)}",
        )
        lines.append(f"r{number}: {rng.choice(body)}")
    return "\n".join(lines)


def form(rng: random.Random) -> Any:
    """Return structured outputs."""
    kinds = {"json": schema, "regex": regex, "grammar": lark}
    name = rng.choice((*kinds, "choice"))
    if name == "choice":
        return {"choice": [rng.choice(TEXTS) for _ in range(rng.choice((1, 2, 300)))]}
    return {name: kinds[name](rng)}


def tools(rng: random.Random, *, flat: bool = False) -> Any:
    function = {"name": rng.choice(("look", "é", "", "x" * 300)), "parameters": schema(rng)}
    tool = {"type": "function", **function} if flat else {"type": "function", "function": function}
    return [tool] * rng.choice((1, 1, 3))


def messages(rng: random.Random) -> Any:
    roles = ("user", "assistant", "system", "tool", "", "x")
    return [
        {
            "role": rng.choice(roles),
            "content": rng.choice((*TEXTS, None, [{"type": "text", "text": "a"}])),
        }
        for _ in range(rng.choice((1, 2, 30)))
    ]


SPECIAL = {
    "prompt": lambda rng: rng.choice(
        (
            "x",
            "import os",
            [5, 6],
            ["x", "y"],
            [[5], [6, 7]],
            [rng.choice(NUMBERS)],
            rng.choice(TEXTS),
        )
    ),
    "messages": messages,
    "input": lambda rng: rng.choice(("x", messages(rng), [{"type": "function_call", "name": "a"}])),
    "tools": tools,
    "structured_outputs": form,
    "response_format": lambda rng: rng.choice(
        ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": schema(rng)}})
    ),
    "text": lambda rng: {"format": {"type": "json_schema", "name": "a", "schema": schema(rng)}},
    "tool_choice": lambda rng: rng.choice(("auto", "none", "required")),
    "speculation": lambda rng: rng.choice(
        ("auto", "off", {"num_speculative_tokens": rng.choice(NUMBERS)}, {"tree": {"num_nodes": 3}})
    ),
    "logit_bias": lambda rng: {str(rng.choice(NUMBERS)): rng.choice(NUMBERS) for _ in range(3)},
    "deadline_s": lambda rng: rng.choice((0.01, 1e-9, rng.choice(NUMBERS))),
}
NEEDED = ("prompt", "messages", "input")


def fields_of(path: str) -> list[str]:
    """Return the names of all fields of a body, as clients write them."""
    fields = BODIES[path].model_fields
    return [field.alias or name for name, field in fields.items() if name != "ignored"] + sorted(
        IGNORED
    )


def body_of(rng: random.Random, path: str, known: list[str]) -> bytes:
    """Return a body with some fields, most with values of their kind."""
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 20))} if "max_tokens" in known else {}
    body |= {name: SPECIAL[name](rng) for name in NEEDED if name in known and rng.random() < 0.95}
    if path == "/tokenize":
        body.pop(rng.choice(("prompt", "messages")), None)
    for name in rng.sample(known, rng.choice((0, 1, 1, 2, 4))):
        own = SPECIAL.get(name)
        body[name] = own(rng) if own is not None and rng.random() < 0.8 else anything(rng)
    if "tools" in body and path == "/v1/responses":
        body["tools"] = tools(rng, flat=True)
    content = json.dumps(body).encode()
    if rng.random() < 0.03:
        at = rng.randrange(len(content))
        content = (
            content[:at] + rng.choice((b"", b"[" * 2000, b"\xff", b'{"a":')) + content[at + 1 :]
        )
    return content


def send_all(client: httpx.Client, numbers: Any, ends_s: float) -> Counter[str]:
    """Send bodies until the numbers or the time end; returns how many got which status."""
    known = {path: fields_of(path) for path in BODIES}
    counts: Counter[str] = Counter()
    for number in numbers:
        if time.monotonic() > ends_s:
            break
        rng = random.Random(number)
        path = rng.choice(list(BODIES))
        content = body_of(rng, path, known[path])
        headers = {"Content-Type": "application/json"}
        answer = client.post(path, content=content, headers=headers)
        failed = answer.status_code >= 500 or (b'"server_error"' in answer.content)
        assert not failed, (number, path, content[:2000], answer.text[:500])
        assert answer.status_code in REFUSALS | {200}, (number, answer.status_code)
        counts[f"{path} {answer.status_code}"] += 1
    return counts


OTHER_TYPES = (None, True, 2**70, "\ud800", ["x"], [[1]], [{}], {"x": 1}, {"type": ["x"]})
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
MADE: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {
            "prompt": ["x", "y"],
            "logit_bias": {"5": 1},
            "stop": ["x"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"tree": {"num_nodes": 3, "depth": 2, "width": 2}},
            "metadata": {"a": "b"},
        },
    ),
    ("/v1/completions", {"prompt": [[5]], "structured_outputs": {"choice": ["a"]}, "logprobs": 1}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "name": "n", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "a", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "look"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [{"type": "message", "role": "user", "content": "x"}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
            "stream": True,
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
]


def places_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values in a body, however deep."""
    yield place
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places_of(value[name], (*place, name))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a body with another value at a place."""
    if not place:
        return new
    found = value.copy()
    found[place[0]] = changed(value[place[0]], place[1:], new)
    return found


@pytest.mark.usefixtures("unchecked")
def test_no_value_of_another_type_is_an_error_of_the_server():
    with serving(tool_engine()) as client:
        for path, body in MADE:
            whole = body if path == "/tokenize" else body | {"max_tokens": 1}
            for place in places_of(whole):
                for new in OTHER_TYPES:
                    content = json.dumps(changed(whole, place, new)).encode()
                    headers = {"Content-Type": "application/json"}
                    answer = client.post(path, content=content, headers=headers)
                    where = (path, place, new, answer.text[:300])
                    assert answer.status_code in REFUSALS | {200}, where
                    assert b'"server_error"' not in answer.content, where


@pytest.mark.parametrize(
    ("num_bodies", "max_seconds"),
    [(200, math.inf), pytest.param(10_000, SECONDS or math.inf, marks=pytest.mark.full)],
    ids=["some", "many"],
)
@pytest.mark.usefixtures("unchecked")
def test_no_body_ends_the_server(num_bodies, max_seconds):
    engine = tool_engine()
    with serving(engine) as client:
        ends_s = time.monotonic() + max_seconds
        shares = [range(worker, num_bodies, WORKERS) for worker in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            runs = [pool.submit(send_all, client, share, ends_s) for share in shares]
            counts = sum((run.result() for run in runs), Counter[str]())
        print(counts)
        running = client.app.state.server.engine
        try:
            running.check_running()
        except EngineStopped as error:
            pytest.fail(f"the engine ended: {error}")
        assert client.get("/health").status_code == 200
        body = {"prompt": "x", "max_tokens": 2, "seed": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        wait_until_idle(engine)
    statuses = Counter(key.split()[1] for key in counts.elements())
    assert min(statuses["200"], statuses["400"]) > 0.1 * statuses.total(), counts
