"""Change points of counters: noticed soon, seldom false, kept over restarts."""

from __future__ import annotations

import json
import math
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest
import torch
from msgspec.structs import replace

from forerun.cli.main import main
from forerun.client import door
from forerun.doctor.readers.prometheus import PrometheusText
from forerun.doctor.watch import (
    PROMPT_TOKENS,
    TIME_PER_TOKEN,
    WatchState,
    estimate_load,
    observe,
    watch_text,
    write_message,
)
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.trace.change_points import Cusum, Growth, LoadCurve, sample_positions

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
        self.running: int | None = 8

    def serve(
        self,
        acceptance: float,
        *,
        num: int = 30,
        tpot_s: float = 0.02,
        prompt: int = 500,
        running: int | None = 8,
        last: float = 1.0,
    ):
        self.running = running
        for _ in range(num):
            noise = torch.randn(4, generator=self.generator).tolist()
            rate = min(0.99, max(0.01, acceptance + 0.1 * noise[0]))
            steps = max(1, round(60 * math.exp(0.5 * noise[1])))
            self.drafts += steps
            for position in range(K):
                share = last if position == K - 1 else 1.0
                self.accepted[position] += round(share * steps * rate ** (position + 1))
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
        if self.running is not None:
            lines.append(f"vllm:num_requests_running {self.running}")
        return "\n".join(lines) + "\n"


def read(page: str):
    found = PrometheusText()
    for line in page.splitlines():
        found.read(line)
    return found.metrics


def watched(state, server, polls, at_s=1e9, **traffic):
    found = []
    for number in range(polls):
        server.serve(**traffic)
        found += observe(state, read(server.page), at_s + 10.0 * number)
    return found


def alarms(found):
    return [each for each in found if each.kind == "alarm" and each.resolved_s is None]


def test_a_stable_server_gives_no_alarm():
    assert watched(WatchState(source="s"), Server(), 600, acceptance=0.74) == []


def test_a_fall_at_all_positions_is_one_alarm_within_200_requests():
    state, server = WatchState(source="s"), Server()
    assert watched(state, server, 100, acceptance=0.74) == []
    (found,) = watched(state, server, 6, 2e9, acceptance=0.47)  # of 30 requests
    first, *others = found.changes
    assert first.series == "acceptance at position 1"
    assert first.before == pytest.approx(0.74, abs=0.02)
    assert first.now == pytest.approx(0.47, abs=0.06)
    assert len(others) == K - 1
    assert "position 1 fell from 0.7" in found.words and found.words.endswith("(so did 2, 3)")
    assert found.causes
    assert watched(state, server, 200, 2e9 + 60, acceptance=0.47) == []
    assert state.watcher.num_alarms == len(state.watcher.incidents) == 1


def test_a_return_to_the_usual_level_resolves_the_alarm():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74)
    (alarm,) = watched(state, server, 20, 2e9, acceptance=0.47)
    found = watched(state, server, 20, 3e9, acceptance=0.74)
    assert found == [alarm]
    assert alarm.resolved_s > 3e9 and alarm.words.startswith("back at the usual level")
    opened = write_message("s", replace(alarm, resolved_s=None))
    closed = write_message("s", alarm)
    assert opened["id"] == closed["id"] != write_message("t", alarm)["id"]
    assert (opened["event"], closed["event"]) == ("alarm", "resolved")
    assert len(alarms(watched(state, server, 20, 4e9, acceptance=0.47))) == 1


@pytest.mark.parametrize("traffic", [{"acceptance": 0.9}, {"acceptance": 0.74, "tpot_s": 0.012}])
def test_an_improvement_is_a_note_and_its_end_is_no_alarm(traffic):
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74)
    (note,) = watched(state, server, 80, 2e9, **traffic)
    assert note.kind == "note" and not any(change.is_worse for change in note.changes)
    assert watched(state, server, 80, 3e9, acceptance=0.74) == []
    assert state.watcher.num_alarms == 0


@pytest.mark.parametrize(
    ("traffic", "series"),
    [({"tpot_s": 0.04}, TIME_PER_TOKEN), ({"prompt": 3000}, PROMPT_TOKENS)],
)
def test_other_figures_are_watched(traffic, series):
    state, server = WatchState(source="s"), Server()
    assert watched(state, server, 80, acceptance=0.74) == []
    (found,) = watched(state, server, 8, acceptance=0.74, **traffic)
    assert {change.series for change in found.changes} == {series}


def test_changes_soon_after_an_alarm_belong_to_it():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74)
    (alarm,) = watched(state, server, 20, 2e9, acceptance=0.74, prompt=3000)
    assert watched(state, server, 20, 2e9 + 600, acceptance=0.47, prompt=3000) == []
    assert {change.series for change in alarm.changes} >= {
        PROMPT_TOKENS,
        "acceptance at position 1",
    }
    later = watched(state, server, 20, 2e9 + 9000, acceptance=0.47, prompt=3000, tpot_s=0.05)
    assert [change.series for each in later for change in each.changes] == [TIME_PER_TOKEN]


@pytest.mark.parametrize(("tpot_s", "num_alarms"), [(0.028, 1), (0.05, 2)])
def test_a_longer_time_that_fewer_accepted_tokens_explain_is_no_second_alarm(tpot_s, num_alarms):
    """Acceptance of .74 gives 2.7 tokens per step, and .47 gives 1.8: a time grows by a half."""
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74)
    found = watched(state, server, 20, 2e9, acceptance=0.47)
    found += watched(state, server, 20, 2e9 + 9000, acceptance=0.47, tpot_s=tpot_s)
    assert len(alarms(found)) == state.watcher.num_alarms == num_alarms
    assert TIME_PER_TOKEN in {change.series for each in found for change in each.changes}
    assert watched(state, server, 40, 2e9 + 20_000, acceptance=0.74)[-1].resolved_s is not None


def test_a_fall_at_the_last_position_explains_only_its_part_of_the_tokens():
    """Of 3.44 tokens per step .36 are lost, so that a time grows by 12%, not by 40%."""
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.9)
    watched(state, server, 20, 2e9, acceptance=0.9, last=0.5)
    (slow,) = watched(state, server, 20, 2e9 + 9000, acceptance=0.9, last=0.5, tpot_s=0.028)
    assert [change.series for change in slow.changes] == [TIME_PER_TOKEN]


def waves(number):
    """Running requests and seconds per token of a server with waves of load."""
    running = round(20 + 18 * math.sin(number / 25))
    return {"acceptance": 0.74, "running": running, "tpot_s": 0.01 * (1 + running / 10)}


def test_waves_of_load_are_no_changes_and_a_slower_engine_is():
    state, server = WatchState(source="s"), Server()
    for number in range(1000):
        assert watched(state, server, 1, 1e9 + number, **waves(number)) == []
    found = []
    for number in range(1000, 1060):
        slower = waves(number) | {"tpot_s": 1.4 * waves(number)["tpot_s"]}
        found += watched(state, server, 1, 1e9 + number, **slower)
    ((change,),) = (each.changes for each in found)
    assert change.series == TIME_PER_TOKEN
    assert change.now / change.before == pytest.approx(1.4, abs=0.1)


def test_the_load_is_the_rate_of_tokens_times_their_time():
    names = "vllm:request_time_per_output_token_seconds"
    pages = [
        read(f"vllm:generation_tokens_total {n}\n{names}_sum {n / 5000}\n{names}_count {n / 100}\n")
        for n in (1000, 5000)
    ]
    grown = pages[1].since(pages[0])
    assert estimate_load(*pages, grown, 10.0) == pytest.approx(400 * 0.02)  # tokens/s, s
    for gauge in ("vllm:num_requests_running 3\n", "vllm:num_requests_running 5\n"):
        pages = [*pages[1:], read(gauge)]
    assert estimate_load(*pages, pages[1].since(pages[0]), 10.0) == 4
    assert estimate_load(pages[0], read("x 1\n"), read("x 1\n"), 10.0) is None


def test_times_alone_raise_no_alarm():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74, running=None)
    assert watched(state, server, 50, 2e9, acceptance=0.74, tpot_s=0.2, running=None) == []


def test_a_load_never_seen_before_is_slower_at_most_in_proportion():
    curve = LoadCurve()
    for _ in range(20):
        curve.learn(4.0, math.log(0.02))
        curve.learn(8.0, math.log(0.03))
    for load, low, high in ((4, 0.02, 0.02), (16, 0.03, 0.06), (2, 0.01, 0.02)):
        assert curve.find_bounds(load) == pytest.approx((math.log(low), math.log(high)))
    assert LoadCurve().find_bounds(3.0) is None


def test_a_short_history_gives_a_weaker_word_and_needs_more_for_an_alarm():
    state, server = WatchState(source="s"), Server()
    assert watched(state, server, 15, acceptance=0.74) == []  # some 15,000 drafts
    found = watched(state, server, 6, 2e9, acceptance=0.47)
    assert [each.kind for each in found] == ["possible"]
    assert "may have changed" in found[0].words
    assert [each.kind for each in watched(state, server, 40, 2e9 + 60, acceptance=0.47)] == [
        "alarm"
    ]


def test_a_restart_of_the_server_or_of_the_watch_is_no_change():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 80, acceptance=0.74)
    server.restart()
    state = msgspec.json.decode(msgspec.json.encode(state), type=WatchState)
    assert watched(state, server, 100, acceptance=0.74) == []
    assert watched(state, server, 10, 2e9, acceptance=0.47)


def test_a_page_of_no_engine_is_refused():
    with pytest.raises(InvalidRequest, match="no metric of an engine"):
        observe(WatchState(source="s"), read("python_info 1\n"), 0.0)


def test_a_server_that_was_just_started_is_watched():
    """Counters with labels appear with the first request."""
    state = WatchState(source="s")
    assert observe(state, read("vllm:num_requests_running 0\n"), 0.0) == []
    assert watched(state, Server(), 100, acceptance=0.74) == []
    assert state.watcher.series["acceptance at position 1"].level.num > 60


def test_the_spread_between_requests_is_learned():
    """The same deviation is evidence where batches hardly vary, and not where they vary as much."""
    for noise, is_evidence in ((0.001, True), (0.1, False)):
        cusum = Cusum()
        for number in range(100):
            cusum.add(Growth("s", 5 + 10 * noise * (-1) ** number, 10, 10), 0.0)
        for _ in range(20):
            cusum.add(Growth("s", 5.6, 10, 10), 1.0)
        assert (cusum.evidence > 1.0) == is_evidence


def test_positions_far_behind_are_not_watched():
    assert len(sample_positions(range(20, 0, -1), [30] * 20)) == 8


def test_the_state_as_prometheus_text():
    state, server = WatchState(source="s"), Server()
    watched(state, server, 100, acceptance=0.74)
    watched(state, server, 10, 2e9, acceptance=0.47)
    text = watch_text(state)
    assert "forerun_watch_change_points_total 1\n" in text
    assert "forerun_watch_open_incidents 1\n" in text
    assert 'forerun_watch_last_change_seconds{series="acceptance at position 1"} 20000000' in text


def test_the_command_remembers_and_sends_each_change_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORERUN_HOOK_HEADER", "X-Token: of-the-hook")
    page, state = tmp_path / "page.prom", tmp_path / "state.json"
    out, server, sent = tmp_path / "watch.prom", Server(), []
    refuse = [True]

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["X-Token"] == "of-the-hook"
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
        assert sent == printed and len(sent) == 1
        assert [once(0.74) for _ in range(20)] == [0] * 20
        assert [each["event"] for each in sent] == ["alarm", "resolved"]
        assert sent[0]["id"] == sent[1]["id"]
        assert "of-the-hook" not in json.dumps(sent) + state.read_text()
    finally:
        hook.shutdown()
        hook.server_close()
    assert "forerun_watch_change_points_total" in out.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--interval-s", "0"), "--interval-s is 0.0"),
        (("--hook", "pager"), "--hook must be an address"),
        (("--hook", "http://h/"), "FORERUN_HOOK_HEADER must hold a header, such as"),
    ],
)
def test_unusable_options_are_refused(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setenv("FORERUN_HOOK_HEADER", "s3cr3t")
    state = str(tmp_path / "state.json")
    assert main(["diagnose", "--watch", str(tmp_path / "none"), "--state", state, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and "s3cr3t" not in error


@pytest.mark.parametrize("content", ["[]", "{", '{"source": 3}', '{"source": "other"}'])
def test_a_strange_state_is_refused(tmp_path, capsys, content):
    page, state = tmp_path / "page.prom", tmp_path / "state.json"
    page.write_text(Server().page)
    state.write_text(content)
    assert main(["diagnose", "--watch", str(page), "--state", str(state), "--once"]) == 2
    assert "--state" in capsys.readouterr().err
    assert state.read_text() == content


def test_a_reading_without_a_change_says_so(tmp_path, capsys):
    page, server = tmp_path / "page.prom", Server()
    arguments = [
        "diagnose",
        "--watch",
        str(page),
        "--state",
        str(tmp_path / "state.json"),
        "--once",
    ]
    needed = "no change can be seen yet: {} drafts were counted since the first reading, and"
    for num, words in (
        (0, "first reading, kept in"),
        (0, needed.format(0)),
        (30, needed.format(r"[1-9]\d{3}")),
        *[(30, "")] * 8,
        (0, "no change since the readings in"),
    ):
        server.serve(0.74, num=num)
        page.write_text(server.page)
        assert main(arguments) == 0
        assert re.search(words, capsys.readouterr().out)


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

    def posted(url, content, seconds, headers):
        assert headers == {}
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


def test_a_page_with_more_accepted_than_drafted_is_refused_as_by_a_diagnosis(tmp_path, capsys):
    page = tmp_path / "metrics.txt"
    page.write_text(
        "vllm:spec_decode_num_drafts_total 100\n"
        "vllm:spec_decode_num_draft_tokens_total 100\n"
        "vllm:spec_decode_num_accepted_tokens_total 900\n"
    )
    found = []
    for flags in ((), ("--watch", "--once", "--state", str(tmp_path / "state.json"))):
        assert main(["diagnose", str(page), *flags]) == 2
        found.append(capsys.readouterr().err)
    assert all("900 accepted of 100 drafted tokens" in text for text in found)
