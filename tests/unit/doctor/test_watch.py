"""Change points of counters: noticed soon, seldom false, kept over restarts."""

from __future__ import annotations

import json
import math
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest
import torch

from forerun.cli.main import main
from forerun.client import door
from forerun.doctor.readers.prometheus import PrometheusText
from forerun.doctor.watch import (
    PROMPT_TOKENS,
    TIME_PER_TOKEN,
    WatchState,
    observe,
    watch_text,
)
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.trace.change_points import Cusum, watch_position

K = 3


@pytest.fixture(autouse=True)
def no_network():
    """Connections to this machine are allowed, for the web hook."""
    return


class Server:
    """Counters of a simulated vLLM; every poll adds some requests."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.restart()

    def restart(self) -> None:
        self.drafts, self.accepted = 0, [0] * K
        self.seconds = self.requests = self.prompt = 0.0

    def serve(self, acceptance: float, *, num: int = 30, tpot_s: float = 0.02, prompt: int = 500):
        for _ in range(num):
            noise = torch.randn(4, generator=self.generator).tolist()
            rate = min(0.99, max(0.01, acceptance + 0.1 * noise[0]))
            steps = max(1, round(60 * math.exp(0.5 * noise[1])))
            self.drafts += steps
            for position in range(K):
                self.accepted[position] += round(steps * rate ** (position + 1))
            self.requests += 1
            self.seconds += tpot_s * math.exp(0.1 * noise[2])
            self.prompt += prompt * math.exp(0.6 * noise[3])

    @property
    def page(self) -> str:
        lines = [
            f"vllm:spec_decode_num_drafts_total {self.drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {K * self.drafts}",
            f"vllm:spec_decode_num_accepted_tokens_total {sum(self.accepted)}",
            f"vllm:request_time_per_output_token_seconds_sum {self.seconds}",
            f"vllm:request_time_per_output_token_seconds_count {self.requests}",
            f"vllm:request_prompt_tokens_sum {self.prompt}",
            f"vllm:request_prompt_tokens_count {self.requests}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}'
            for i, n in enumerate(self.accepted)
        ]
        return "\n".join(lines) + "\n"


def read(page: str):
    found = PrometheusText()
    for line in page.splitlines():
        found.read(line)
    return found.metrics


def watched(state, server, polls, **traffic):
    found = []
    for _ in range(polls):
        server.serve(**traffic)
        found += observe(state, read(server.page), 1e9)
    return found


def test_a_stable_server_gives_no_alarm():
    assert watched(WatchState(source="s"), Server(), 600, acceptance=0.74) == []


def test_a_fall_of_acceptance_is_noticed_within_200_requests():
    state, server = WatchState(source="s"), Server()
    assert watched(state, server, 100, acceptance=0.74) == []
    found = watched(state, server, 6, acceptance=0.47)  # of 30 requests
    first = next(change for change in found if change.series == "acceptance at position 1")
    assert first.before == pytest.approx(0.74, abs=0.02)
    assert first.now == pytest.approx(0.47, abs=0.06)
    assert "fell from 0.7" in first.words
    assert state.num_changes == len(found) == len(state.changes)
    assert all(first.causes for first in found)


@pytest.mark.parametrize(
    ("traffic", "series"),
    [({"tpot_s": 0.04}, TIME_PER_TOKEN), ({"prompt": 3000}, PROMPT_TOKENS)],
)
def test_other_figures_are_watched(traffic, series):
    state, server = WatchState(source="s"), Server()
    assert watched(state, server, 80, acceptance=0.74) == []
    assert {change.series for change in watched(state, server, 8, acceptance=0.74, **traffic)} == {
        series
    }


def test_a_restart_of_the_server_or_of_the_watch_is_no_change():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 80, acceptance=0.74)
    server.restart()
    state = msgspec.json.decode(msgspec.json.encode(state), type=WatchState)
    assert watched(state, server, 100, acceptance=0.74) == []
    assert watched(state, server, 10, acceptance=0.47)


def test_a_page_of_no_engine_is_refused():
    with pytest.raises(InvalidRequest, match="no metric of an engine"):
        observe(WatchState(source="s"), read("python_info 1\n"), 0.0)


def test_a_server_that_was_just_started_is_watched():
    """Counters with labels appear with the first request."""
    state = WatchState(source="s")
    assert observe(state, read("vllm:num_requests_running 0\n"), 0.0) == []
    assert watched(state, Server(), 100, acceptance=0.74) == []
    assert state.series["acceptance at position 1"].num > 60


def test_the_spread_between_requests_is_learned():
    """The same deviation alarms where batches hardly vary, and not where they vary as much."""
    for noise, alarms in ((0.001, True), (0.1, False)):
        cusum, found = Cusum(min_size=10), []
        for number in range(100):
            cusum.add("s", 5 + 10 * noise * (-1) ** number, 10, 0.0)
        for _ in range(20):
            found.append(cusum.add("s", 5.6, 10, 1.0))
        assert any(found) == alarms


def test_positions_far_behind_are_not_watched():
    series: dict[str, Cusum] = {}
    watch_position(series, 9, 1, 10, 0.0)
    assert series == {}


def test_the_state_as_prometheus_text():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74)
    watched(state, server, 10, acceptance=0.47)
    text = watch_text(state)
    assert f"forerun_watch_change_points_total {state.num_changes}" in text
    assert 'forerun_watch_last_change_seconds{series="acceptance at position 1"} 1000000000' in text


def test_the_command_remembers_and_sends_each_change_once(tmp_path, capsys):
    page, state = tmp_path / "page.prom", tmp_path / "state.json"
    out, server, sent = tmp_path / "watch.prom", Server(), []
    refuse = [True]

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not refuse[0]:
                sent.append(json.loads(body))
            self.send_response(503 if refuse[0] else 200)
            self.end_headers()

        def log_message(self, *_):
            return

    hook = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=hook.serve_forever, daemon=True).start()
    arguments = ["diagnose", "--watch", str(page), "--state", str(state), "--once", "--json"]
    arguments += ["--hook", f"http://127.0.0.1:{hook.server_port}", "--metrics-out", str(out)]

    def once(acceptance):
        server.serve(acceptance)
        page.write_text(server.page)
        return main(arguments)

    try:
        assert [once(0.74) for _ in range(80)] == [0] * 80
        assert 3 in [once(0.47) for _ in range(8)]
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert printed
        assert not sent  # the hook was busy
        refuse[0] = False
        once(0.47)
        assert [change["series"] for change in sent] == [change["series"] for change in printed]
        once(0.47)
        assert len(sent) == len(printed)
    finally:
        hook.shutdown()
        hook.server_close()
    assert "forerun_watch_change_points_total" in out.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--interval-s", "0"), "--interval-s is 0.0"),
        (("--hook", "pager"), "--hook must be an address"),
    ],
)
def test_unusable_options_are_refused(tmp_path, capsys, flags, message):
    state = str(tmp_path / "state.json")
    assert main(["diagnose", "--watch", str(tmp_path / "none"), "--state", state, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{", '{"source": 3}', '{"source": "other"}'])
def test_a_strange_state_is_refused(tmp_path, capsys, content):
    page, state = tmp_path / "page.prom", tmp_path / "state.json"
    page.write_text(Server().page)
    state.write_text(content)
    assert main(["diagnose", "--watch", str(page), "--state", str(state), "--once"]) == 2
    assert "--state" in capsys.readouterr().err
    assert state.read_text() == content


def test_a_reading_without_a_change_says_so(tmp_path, capsys):
    page = tmp_path / "page.prom"
    page.write_text(Server().page)
    arguments = [
        "diagnose",
        "--watch",
        str(page),
        "--state",
        str(tmp_path / "state.json"),
        "--once",
    ]
    for words in ("first reading, kept in", "no change since the readings in"):
        assert main(arguments) == 0
        assert words in capsys.readouterr().out


def test_a_page_that_cannot_be_read_ends_the_first_reading(tmp_path, capsys):
    state = str(tmp_path / "state.json")
    assert (
        main(["diagnose", "--watch", str(tmp_path / "none.prom"), "--state", state, "--once"]) == 2
    )
    assert "none.prom" in capsys.readouterr().err


SECRET = "s3cr3t"
SECRET_URL = f"http://user:{SECRET}@127.0.0.1:1/{SECRET}/metrics?token={SECRET}#{SECRET}"


def test_secrets_of_addresses_are_neither_printed_nor_stored_nor_sent(
    tmp_path, capsys, monkeypatch
):
    server, sent, keys = Server(), [], []
    state, out = tmp_path / "state.json", tmp_path / "out.prom"

    def fetched(url, limits, headers):
        assert url == SECRET_URL
        keys.append(headers["Authorization"])
        return server.page.encode()

    def posted(url, content, seconds):
        assert url == SECRET_URL
        sent.append(content)
        raise UnreadableInput("busy")

    monkeypatch.setattr(door, "fetch_page", fetched)
    monkeypatch.setattr(door, "post_once", posted)
    monkeypatch.setenv("KEY", "of-the-server")
    arguments = [
        "diagnose",
        "--watch",
        SECRET_URL,
        "--hook",
        SECRET_URL,
        "--api-key-env",
        "KEY",
        "--once",
    ]
    arguments += ["--state", str(state), "--metrics-out", str(out), "--json"]
    for acceptance in [0.74] * 80 + [0.47] * 8:
        server.serve(acceptance)
        main(arguments)
    shown = capsys.readouterr()
    assert (
        sent
        and sent[0]["source"] == "http://127.0.0.1:1/…"
        and set(keys) == {"Bearer of-the-server"}
    )
    for text in (shown.out, shown.err, state.read_text(), out.read_text(), json.dumps(sent)):
        assert SECRET not in text and "of-the-server" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        (SECRET_URL, "--once"),
        (SECRET_URL.upper().replace(SECRET.upper(), SECRET), "--once"),
        (SECRET_URL.replace("http", "htp"), "--once"),
        (SECRET_URL, "--once", "--state", "{state}"),
        ("{page}", "--once", "--hook", SECRET_URL.replace("http", "ftp")),
        ("{page}", "--once", "--api-key-env", "KEY"),
    ],
)
def test_secrets_of_addresses_are_not_in_errors(tmp_path, capsys, arguments):
    state, page = tmp_path / "state.json", tmp_path / "page.prom"
    page.write_text(Server().page)
    state.write_text(json.dumps({"source": SECRET_URL.replace("127.0.0.1", "other")}))
    names = {"state": state, "page": page}
    given = [text.format(**names) if "{" in text else text for text in arguments]
    if "--state" not in given:
        given += ["--state", str(tmp_path / "new.json")]
    assert main(["diagnose", "--watch", *given]) == 2
    shown = capsys.readouterr()
    assert shown.err and SECRET not in shown.err + shown.out


@pytest.mark.parametrize("url", [SECRET_URL, SECRET_URL.replace("http", "HTTP")])
def test_a_diagnosis_does_not_show_secrets_of_an_address(url, capsys, monkeypatch):
    server = Server()

    def fetched(url, limits, headers):
        server.serve(0.74)
        return server.page.encode()

    flags = ["--interval-s", "0.001", "--api-key-env", "KEY"]
    monkeypatch.setenv("KEY", "of-the-server")
    assert main(["diagnose", url, *flags]) == 2
    monkeypatch.setattr(door, "fetch_page", fetched)
    for form in ([], ["--json"]):
        assert main(["diagnose", url, *flags, *form]) in (0, 3, 4)
    monkeypatch.setattr(door, "fetch_page", lambda *_: b"")
    assert main(["diagnose", url, *flags]) == 2
    shown = capsys.readouterr()
    assert "127.0.0.1" in shown.out and "127.0.0.1" in shown.err
    assert SECRET not in shown.out + shown.err and "of-the-server" not in shown.out + shown.err
