"""The door to the network: where it stops reading, and what its messages do not say."""

from __future__ import annotations

import contextlib
import itertools
import logging
from types import SimpleNamespace

import httpcore
import httpx
import pytest
from tests.replayed import Replayed

from forerun import bounded_read
from forerun.bounded_read import ReadLimits
from forerun.client.connection import ClientConfig, Connection
from forerun.client.door import Door, answer_deadline, fetch_page, post_once
from forerun.client.urls import hide_urls, is_url, shown_url
from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable, UnreadableInput

OK = b"HTTP/1.1 200 OK\r\n"
LIMITS = ReadLimits(max_bytes=1 << 18, max_seconds=30.0)
SECRET = "s3cr3t"
URLS = {
    "http://localhost:8000": "http://localhost:8000",
    "http://localhost:8000/v1/": "http://localhost:8000/v1/",
    "https://host/v1/chat/completions": "https://host/v1/chat/completions",
    "http://[::1]:8000/metrics": "http://[::1]:8000/metrics",
    f"http://host/{SECRET}": "http://host/…",
    f"http://host/{SECRET}/metrics": "http://host/…",
    f"http://host/metrics?token={SECRET}": "http://host/…",
    f"http://host/metrics#{SECRET}": "http://host/…",
    f"http://host?{SECRET}": "http://host/…",
    f"http://user:{SECRET}@host:81/metrics": "http://host:81/metrics",
    f"http://{SECRET}@host/": "http://host/",
    f"http://user:12/{SECRET}@host/": "http://…",
    f"http://user:{SECRET}/x@host/": "http://…",
    f"http://user:{SECRET}#x@host/": "http://…",
    f"http://user:{SECRET}?x@host/": "http://…",
    f"http://user:{SECRET} x/": "http://…",
    f"http://[{SECRET}": "http://…",
    f"http://host\\{SECRET}/": "http://…",
    f"http:///{SECRET}": "http://…",
    f"HTTP://host/{SECRET}": "HTTP://host/…",
    f"postgres://u:{SECRET}@host/x": "postgres://host/…",
    f"{SECRET}": "…",
    f"{SECRET}:{SECRET}@host/x": "…",
    f"{SECRET}@x://host/": "…",
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_shown_without_its_secrets(url):
    assert shown_url(url) == URLS[url]


@pytest.mark.parametrize("url", [f"ftp://u:{SECRET}@h/x", f"htp://u:{SECRET}@h"])
def test_addresses_of_other_kinds_are_refused(url):
    """They were taken for files, whose names are printed."""
    with pytest.raises(InvalidRequest, match=r"must begin with http:// or https://$") as raised:
        is_url(url)
    assert SECRET not in str(raised.value)


def test_files_and_addresses_are_told_apart():
    assert [is_url(name) for name in ("HTTP://h", "https://h x", "a/b", "a: b", "-")] == [
        *[True] * 2,
        *[False] * 3,
    ]


def test_urls_within_a_text_are_shown_without_their_secrets():
    text = f"Client error '403' for url 'https://u:{SECRET}@host/a?b={SECRET}' (https://x/v1)"
    assert hide_urls(text) == "Client error '403' for url 'https://host/…' (https://x/…"


@pytest.fixture(autouse=True)
def no_network():
    """Connections may be tried: nothing listens at the addresses here."""
    return


WRONG = [
    f"http://user:{SECRET}@127.0.0.1:1/{SECRET}",
    f"http://user:{SECRET}@[::1/",
    f"http://user:{SECRET}/@host/",
    f"http://{SECRET}\\x/",
    f"http://{'x' * 70}.example/{SECRET}",
    f"gopher://user:{SECRET}@host/",
    f"http:///{SECRET}",
    f"http://host/{SECRET}\n",
]


@pytest.mark.parametrize("url", WRONG)
def test_an_address_that_fails_is_reported_in_one_line_without_its_secrets(url, caplog):
    caplog.set_level(logging.DEBUG)
    connection = Connection(ClientConfig(url=url, num_tries=2, first_wait_s=0.0))
    for ask in (
        lambda: fetch_page(url, LIMITS),
        lambda: post_once(url, {}, 5.0),
        lambda: connection.get(url, 5.0),
        lambda: connection.post(url, {}, lambda found: found),
        lambda: list(connection.events(url, {})),
    ):
        with pytest.raises(ForerunError) as raised:
            ask()
        assert SECRET not in str(raised.value) and "\n" not in str(raised.value)
    assert SECRET not in caplog.text


def answered(monkeypatch: pytest.MonkeyPatch, *pieces: bytes) -> Replayed:
    return Replayed(monkeypatch, lambda: itertools.chain(pieces, itertools.repeat(b"")))


@pytest.mark.parametrize("status", [300, 302, 399])
def test_a_redirect_is_not_followed_and_its_secrets_are_not_shown(status, monkeypatch):
    head = f"HTTP/1.1 {status} Found\r\nLocation: http://user:{SECRET}@other/{SECRET}\r\n\r\n"
    server = answered(monkeypatch, head.encode())
    for ask in (lambda: fetch_page("http://h/", LIMITS), lambda: post_once("http://h/", {}, 5.0)):
        with pytest.raises(UnreadableInput, match="redirects to http://other/…, which is not"):
            ask()
    assert server.num_connections == 2


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_body_of_an_encoding_that_was_not_asked_for_is_refused(monkeypatch, encoding):
    answered(monkeypatch, OK + f"Content-Encoding: {encoding}\r\n\r\n".encode() + b"packed")
    with pytest.raises(UnreadableInput, match=f"encoding '{encoding}'"):
        fetch_page("http://h/", LIMITS)


def test_a_body_may_have_as_many_bytes_as_the_limit(monkeypatch):
    content = bytes(LIMITS.max_bytes)
    answered(monkeypatch, OK + b"\r\n" + content)
    assert fetch_page("http://h/", LIMITS) == content
    answered(monkeypatch, OK + b"\r\n" + content + b"x")
    with pytest.raises(UnreadableInput, match="more than 262144 bytes"):
        fetch_page("http://h/", LIMITS)


def test_no_read_waits_longer_than_the_time_that_is_left(monkeypatch):
    pieces = [OK, b"Content-Length: 2\r\n\r\n", b"a", b"b"]
    server = Replayed(monkeypatch, lambda: pieces)
    assert fetch_page("http://h/", LIMITS) == b"ab"
    assert server.timeouts == [30.0, 29.0, 28.0, 27.0]


def test_answers_to_posts_are_not_read(monkeypatch):
    """A web hook sent a line now and then for ever, or gigabytes in a few packed bytes."""
    server = Replayed(monkeypatch, lambda: itertools.chain([OK + b"\r\n"], itertools.repeat(b"x")))
    post_once("http://h/", {"a": 1}, 30.0)
    assert server.now_s < 30.0
    Replayed(monkeypatch, lambda: itertools.chain([OK], itertools.repeat(b"X: y\r\n")))
    with pytest.raises(UnreadableInput, match="takes more than 30 s"):
        post_once("http://h/", {"a": 1}, 30.0)


def test_a_body_has_a_total_time(monkeypatch):
    """Each piece comes at once; the time of all of them together is what is limited."""
    now_s = [0.0]
    monkeypatch.setattr(bounded_read, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    class Slow(httpx.SyncByteStream):
        def __init__(self, num_pieces: int) -> None:
            self.num_pieces = num_pieces

        def __iter__(self):
            for _ in range(self.num_pieces):
                now_s[0] += 1.0
                yield b" "
            yield b"{}"

    def post(num_pieces: int) -> object:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Slow(num_pieces)))
        config = ClientConfig(url="http://h", timeout_s=10.0, num_tries=3)
        return Connection(config, transport).post("http://h/v1", {}, lambda found: found)

    assert post(9) == {}
    with pytest.raises(ServerUnavailable, match="takes more than 10 s to answer"):
        post(10)
    assert now_s == [9.0 + 10.0]


@pytest.mark.parametrize(("num_pieces", "num_connections"), [(0, 2), (1, 1), (2, 1)])
def test_a_slow_server_is_not_asked_again_as_a_silent_one_is(
    num_pieces, num_connections, monkeypatch
):
    def start():
        yield OK + b"Content-Length: 100\r\n\r\n"
        yield from [b"x"] * num_pieces
        server.now_s += 30.0
        raise httpcore.ReadTimeout("timed out")

    server = Replayed(monkeypatch, start)
    config = ClientConfig(url="http://h", timeout_s=30.0, num_tries=2, first_wait_s=0.0)
    with pytest.raises(ServerUnavailable, match=r"takes more than 30 s|timed out"):
        Connection(config).post("http://h/v1", {}, lambda found: found)
    assert server.num_connections == num_connections


@pytest.mark.parametrize("status", [200, 400, 401, 503])
@pytest.mark.parametrize("form", ["{}", '{{"error": "{}"}}', "data: {}\n\n", "[3, "])
def test_a_key_that_a_server_repeats_is_not_shown(status, form, monkeypatch):
    key = f"sk-{SECRET}"
    monkeypatch.setenv("OPENAI_API_KEY", f" {key}\n")  # as from a file

    def reply(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {key}"
        return httpx.Response(status, text="x" * 250 + form.format(key))

    config = ClientConfig(url="http://h", num_tries=1)
    connection = Connection(config, httpx.MockTransport(reply))
    for ask in (
        lambda: connection.get("http://h/v1", 5.0),
        lambda: connection.post("http://h/v1", {}, lambda found: found),
        lambda: list(connection.events("http://h/v1", {})),
    ):
        with contextlib.suppress(ForerunError):
            ask()
            continue
        with pytest.raises(ForerunError) as raised:
            ask()
        assert "s3c" not in str(raised.value)


@pytest.mark.parametrize("key", ["a\x00b", "ä" * 20, "a\nb", "\udcff"])
def test_a_key_that_cannot_be_sent_is_not_shown(key, monkeypatch):
    monkeypatch.setattr("os.environ", {"KEY": key})
    with pytest.raises(InvalidRequest, match=r"^KEY is no API key: it has special characters$"):
        Connection(ClientConfig(url="http://h", key_variable="KEY"))


def test_a_server_that_repeats_the_password_of_its_url_does_not_show_it():
    def repeat(request):
        sent = request.headers["authorization"]
        return httpx.Response(200, text=f"{sent} swordfish http://a:b@other/token")

    url = "http://user:swordfish@127.0.0.1:1/v1"
    with Door(1.0, {}, transport=httpx.MockTransport(repeat)) as one:
        text = one.send("GET", url, answer_deadline(1.0, url)).body(answer_deadline(1.0, url), 1000)
        hidden = one.hide_key(text.decode())
    assert not any(secret in hidden for secret in ("swordfish", "dXNlcjpzd29yZGZpc2g", "token"))


@pytest.mark.parametrize(("status", "is_about_keys"), [(401, True), (403, True), (404, False)])
def test_a_page_that_needs_a_key_says_where_the_key_comes_from(status, is_about_keys, monkeypatch):
    answered(monkeypatch, b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)
    with pytest.raises(UnreadableInput) as page:
        fetch_page("http://h/metrics", LIMITS)
    assert ("that of OPENAI_API_KEY, or of the variable" in str(page.value)) == is_about_keys
