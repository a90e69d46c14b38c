"""Lines of the server's log."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

from forerun.server.config import ServerConfig
from forerun.server.guard import Guard, Keyring
from forerun.server.request_log import LineFormatter, log_on_stderr

KEY = SimpleNamespace(tenant="search team", sha256="0" * 64)
FIGURES = {"prompt_tokens": 3, "tokens": 5, "drafted": 8, "accepted": 2}
HEADERS = [(b"host", b"localhost"), (b"x-request-id", b"i1")]
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions\n[31m", "headers": HEADERS}


async def answered(scope, receive, send):
    scope["state"] |= {"key": KEY, "figures": FIGURES}
    await send({"type": "http.response.start", "status": 200})


async def broken(scope, receive, send):
    await answered(scope, receive, send)
    raise RuntimeError("was answered")


async def left(scope, receive, send):
    await answered(scope, receive, send)
    scope["state"]["has_left"] = True


async def ignore(message):
    pass


async def nothing():
    return {"type": "http.request"}


def record_of(app, caplog, **changes) -> logging.LogRecord:
    caplog.set_level("DEBUG", logger="forerun.requests")
    caplog.clear()
    guard = Guard(app, config=ServerConfig(), keyring=Keyring(), count=lambda status: None)
    asyncio.run(guard(SCOPE | changes, nothing, ignore))
    (record,) = [each for each in caplog.records if each.name == "forerun.requests"]
    return record


def test_a_request_is_one_line(caplog):
    record = record_of(answered, caplog)
    line = LineFormatter().format(record)
    assert "\n" not in line and "\x1b" not in line
    assert " INFO request id=i1 key=search%20team method=POST path=/v1/completions%0A" in line
    assert line.endswith("prompt_tokens=3 tokens=5 drafted=8 accepted=2")


def test_polls_are_no_lines_at_the_usual_level(caplog):
    assert record_of(answered, caplog, method="GET").levelno == logging.DEBUG


def test_a_get_that_is_refused_is_a_line(caplog):
    async def refused(scope, receive, send):
        await send({"type": "http.response.start", "status": 400})

    assert record_of(refused, caplog, method="GET").levelno == logging.INFO


def test_a_long_path_is_cut(caplog):
    line = record_of(answered, caplog, path="/" + "x" * 10_000).getMessage()
    assert f" path=/{'x' * 199} status" in line


def test_a_client_that_leaves_is_told_apart(caplog):
    assert " status=499 " in record_of(left, caplog).getMessage()


def test_an_error_that_was_answered_is_not_raised_again(caplog):
    assert " status=200 " in record_of(broken, caplog).getMessage()


def test_an_error_without_an_answer_is_answered(caplog):
    async def fails(scope, receive, send):
        raise RuntimeError("unexpected")

    assert " status=500 " in record_of(fails, caplog).getMessage()


def test_the_log_of_a_server_replaces_other_notices_while_it_runs(capsys):
    package = logging.getLogger("forerun")
    before = package.handlers[:]
    with log_on_stderr():
        logging.getLogger("forerun.control").info("drafting was resumed")
        logging.getLogger("forerun.other").info("a detail")
    assert package.handlers == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO drafting was resumed")
