"""Servers start, fail with a reason, pause, and leave no process behind whatever ends forerun."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from tests.tune.fakes import LONG_S, fake_arm, is_running, wait_until

from forerun.client.client import Client
from forerun.client.connection import ClientConfig
from forerun.errors import ForerunError
from forerun.tune import process, supervisor
from forerun.tune.arms import Arm
from forerun.tune.process import ServerFailed, ServerProcess, explain_end, free_ports

SOURCES = Path(supervisor.__file__).parents[2]


def ignore(elapsed_s: float) -> None:
    assert elapsed_s >= 0.0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "fake.log"


def read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 1.0)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """No server, child of one or supervisor outlives its test."""
    yield
    left = find_fakes()
    for one in left:
        one.kill()
    assert not left


def find_fakes() -> list[psutil.Process]:
    """Return all processes that the tests of this process started and that have not ended."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):  # an ended process has no environment
            if one.environ().get("FORERUN_TEST") == MARK:
                found.append(one)
    return found


MARK = f"process-{os.getpid()}"


def marked(arm: Arm) -> Arm:
    """Return an arm whose processes can be told from those of other tests by their environment."""
    return Arm(name=arm.name, url=arm.url, command=arm.command, environment={"FORERUN_TEST": MARK})


def fail(arm: Arm, log: Path, timeout_s: float = LONG_S) -> str:
    """Start a server, and return why it does not become ready."""
    with (
        ServerProcess(marked(arm), log) as server,
        pytest.raises(ServerFailed, match=r"^[^\n]+$") as error,
    ):
        server.wait_ready(timeout_s, ignore)
    return str(error.value)


def read_models(arm: Arm) -> str:
    with closing(urllib.request.urlopen(f"{arm.url}/models", timeout=LONG_S)) as answer:
        return json.load(answer)["data"][0]["id"]


# ---------------------------------------------------------------------------------- starts and ends


def test_a_server_becomes_ready_and_is_stopped(log):
    arm = marked(fake_arm("slow-start=0.5", options=("serve", "some/model")))
    seconds: list[float] = []
    with ServerProcess(arm, log) as server:
        server.wait_ready(LONG_S, seconds.append)
        assert read_models(arm) == "some/model"
        assert server.failure() is None
        assert server.memory_bytes() > 1 << 20
    assert seconds == sorted(seconds)
    assert len(seconds) > 1
    assert "listening on" in read(log)
    assert server.failure() is None
    assert server.memory_bytes() == 0
    server.stop()
    server.start()  # on the same port
    server.wait_ready(LONG_S, ignore)
    server.stop()


def test_several_servers_run_at_once(tmp_path):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(marked(fake_arm()), tmp_path / f"{n}.log"))
            for n in range(3)
        ]
        for server in servers:
            server.wait_ready(LONG_S, ignore)
        servers[1].stop()
        assert [server.failure() for server in servers] == [None] * 3
        assert read_models(servers[0].arm) == read_models(servers[2].arm) == "fake"


def test_a_server_that_loads_answers_503_until_it_is_ready(log):
    with ServerProcess(marked(fake_arm("loading=1")), log) as server:
        server.wait_ready(LONG_S, ignore)
        assert read_models(server.arm) == "fake"


def test_another_thread_may_stop_a_server_that_is_waited_for(log):
    with ServerProcess(marked(fake_arm("never-ready")), log) as server:
        threading.Timer(0.5, server.stop).start()
        with pytest.raises(ServerFailed, match="stopped before it was ready"):
            server.wait_ready(LONG_S, ignore)


def test_ports_are_free_and_differ():
    ports = free_ports()
    numbers = [next(ports) for _ in range(20)]
    assert len(set(numbers)) == 20
    assert all(1024 <= number < 65536 for number in numbers)


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash=ValueError: no such thing", "exit status 1: ValueError: no such thing"),
        (
            "crash=torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "not enough memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2",
        ),
        ("killed", r"it was killed \(SIGKILL\), probably by the system for lack of main memory"),
        ("no-api", "it lists no models: .*It works!"),
        ("detached", "exit status 0: child"),
        ("key=secret", r"it refuses the API key \(status 401\)"),
    ],
)
def test_a_server_that_fails_says_why(fault, reason, log, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    assert re.match(reason, fail(fake_arm(fault), log))


def test_an_unknown_argument_is_named(log):
    reason = fail(fake_arm(options=("--warp-speed", "9")), log)
    assert reason.startswith("it refuses an argument: ")
    assert "--warp-speed" in reason


def test_a_server_that_is_never_ready_is_given_up(log):
    reason = fail(fake_arm("never-ready"), log, timeout_s=3.0)
    assert reason == "not ready after 3 s; last line: loading weights for ever"


def test_a_server_on_another_port_is_recognised(log):
    arm = fake_arm("ignores-port")
    port = arm.url.split(":")[2].removesuffix("/v1")
    reason = fail(arm, log)
    other = re.search(r"listening on http://127.0.0.1:(\d+)", read(log))[1]
    assert reason.startswith(f"never listened on port {port} (listens on {other})")


def test_a_port_in_use_is_refused_at_once(log):
    arm = fake_arm()
    server = ServerProcess(arm, log)
    with (
        socket.create_server(("127.0.0.1", server.port)),
        pytest.raises(ServerFailed, match=r"port \d+ is in use"),
    ):
        server.start()


def test_an_answer_of_another_process_is_not_taken_for_ready(log):
    """The other one takes the port after the server was started."""
    with (
        ServerProcess(marked(fake_arm()), log) as other,
        ServerProcess(marked(fake_arm("ignores-port")), log.with_name("other")) as server,
    ):
        other.wait_ready(LONG_S, ignore)
        server.arm, server.port = other.arm, other.port
        wait_until(lambda: "listening" in read(server.log))
        with pytest.raises(ServerFailed, match=r"another program answers on port \d+"):
            server.wait_ready(LONG_S, ignore)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("no-such-program-here", "serve"), "there is no program 'no-such-program-here'"),
        (("./unreadable", "serve"), "there is no program './unreadable'"),
    ],
)
def test_a_program_that_is_missing_is_named(words, reason, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("unreadable").write_text("")
    arm = Arm(name="none", url=fake_arm().url, command=words)
    with pytest.raises(ServerFailed, match=reason):
        ServerProcess(arm, log).start()


def test_a_file_that_is_no_program_is_named(log, tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no")
    program.chmod(0o755)
    reason = fail(Arm(name="none", url=fake_arm().url, command=(str(program),)), log)
    assert reason.startswith("it cannot be started: Exec format error")


def test_a_server_that_ends_later_says_why(log):
    arm = marked(fake_arm("crash-after=0"))
    with ServerProcess(arm, log) as server:
        server.wait_ready(LONG_S, ignore)
        request = urllib.request.Request(f"{arm.url}/completions", b'{"prompt": "x"}')
        with pytest.raises(OSError):
            urllib.request.urlopen(request, timeout=LONG_S)
        wait_until(server.failure)
        assert server.failure() == "exit status 1: RuntimeError: the engine died"
        server.stop()
        assert server.failure() == "exit status 1: RuntimeError: the engine died"


def test_a_log_has_the_beginning_and_the_end_of_gigabytes(log):
    with ServerProcess(marked(fake_arm("noise=40")), log) as server:
        server.wait_ready(LONG_S, ignore)
        wait_until(lambda: "listening" in read(log))
        most = supervisor.HEAD_BYTES + 2 * supervisor.TAIL_BYTES + 100
        assert supervisor.HEAD_BYTES < log.stat().st_size <= most
        left_out = int(re.search(r"\[(\d+) bytes left out\]", read(log))[1])
        assert left_out + log.stat().st_size == pytest.approx(40 << 20, rel=0.001)
        assert read(log).startswith("xxx")


@pytest.mark.parametrize(
    ("status", "line", "reason"),
    [
        (-9, "ERROR weights", "it was killed (SIGKILL), probably by the system for lack of main"),
        (137, "", "it was killed (SIGKILL)"),
        (-11, "Fatal Python error: fault", "it was ended by SIGSEGV: Fatal Python error: fault"),
        (1, "", "exit status 1: none was printed"),
        (1, "bye", "exit status 1: bye"),
        (1, "ValueError: bad\nbye", "exit status 1: ValueError: bad"),
        (
            1,
            "(EngineCore pid=17) ERROR 11-29 04:00:00 [core.py:700] ValueError: Free memory on "
            "device (3/80 GiB) is less than desired GPU memory utilization\nRuntimeError: Engine "
            "core initialization failed. See root cause above.",
            "not enough memory: ValueError: Free memory on device",
        ),
        (1, "[Errno 98] error while attempting to bind: address already in use", "its port is in"),
        (1, "error: invalid argument: --foo", "it refuses an argument: error: invalid arg"),
        (
            1,
            "0.00.021.262 E gguf: failed to open 'x'",
            "a file is missing: gguf: failed to open 'x'",
        ),
        (
            1,
            "Value error, no K [type=value_error]\n    For further information visit https://e.dev",
            "exit status 1: Value error, no K",
        ),
        (
            1,
            "load_model: failed to load\nexiting due to model loading error",
            "exit status 1: load_",
        ),
        (1, "ModuleNotFoundError: No module named 'vllm'", "a package is missing: ModuleNotFou"),
        (1, "\x1b[31mOSError: a/b is not a valid model identifier", "a file is missing: OSError"),
        (1, "get https://user:pass@host/x failed", "exit status 1: get https://host/… failed"),
    ],
)
def test_reasons(status, line, reason):
    found = explain_end(status, f"\n{line}\n\n")
    assert found.startswith(reason)
    assert "pass@" not in found


# -------------------------------------------------------------------------- nothing is left running


def test_a_grandchild_that_ignores_sigterm_is_killed(log, monkeypatch):
    with ServerProcess(marked(fake_arm("child", "stubborn")), log) as server:
        server.wait_ready(LONG_S, ignore)
        wait_until(lambda: "child" in read(log))
        child = int(re.search(r"child (\d+)", read(log))[1])
        assert is_running(child)
    assert not is_running(child)


def test_a_paused_server_does_nothing_and_can_be_resumed(log):
    with ServerProcess(marked(fake_arm("heartbeat=0.005", "child")), log) as server:
        server.wait_ready(LONG_S, ignore)
        wait_until(lambda: "beat 5\n" in read(log))
        wait_until(lambda: len(server._list_processes()) == 2)
        server.pause()
        wait_until(lambda: {p.status() for p in server._list_processes()} == {"stopped"})
        assert server.failure() is None
        number = count_beats(log)
        for _ in range(5):  # what it had printed may reach the log later
            threading.Event().wait(0.2)
            number, before = count_beats(log), number
        assert number == before
        server.resume()
        wait_until(lambda: count_beats(log) > number + 5)
        assert read_models(server.arm) == "fake"
        server.pause()
    assert not find_fakes()


def count_beats(log: Path) -> int:
    return read(log).count("beat")


PARENT = """
import signal, sys
from pathlib import Path
from forerun.tune.arms import Arm
from forerun.tune import process
from forerun.tune.process import ServerProcess
process.GRACE_S = 1.0
port, how, log, *command = sys.argv[1:]
arm = Arm(name="fake", url=f"http://127.0.0.1:{port}/v1", command=tuple(command))
server = ServerProcess(arm, Path(log))
if how == "exception":
    server.start()
    raise SystemError
with server:
    print("started", flush=True)
    if how == "stop-early":
        raise SystemExit
    server.wait_ready(120.0, lambda elapsed_s: print("waits", flush=True))
    if how == "paused":
        server.pause()
    print("ready", flush=True)
    signal.pause()
"""


def start_parent(how: str, log: Path, *faults: str) -> subprocess.Popen[str]:
    """Start a process that starts a fake server with a stubborn child."""
    arm = fake_arm("child", *faults)
    port = arm.url.split(":")[2].removesuffix("/v1")
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, port, how, str(log), *arm.command],
        env={**os.environ, "PYTHONPATH": str(SOURCES), "FORERUN_TEST": MARK},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        close_fds=True,
    )


def wait_for(parent: subprocess.Popen[str], word: str) -> None:
    while (line := parent.stdout.readline()).strip() != word:
        assert line, parent.stderr.read()


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGKILL, "ready"),
        (signal.SIGKILL, "started"),
        (signal.SIGTERM, "ready"),
        (signal.SIGHUP, "waits"),
        (signal.SIGINT, "started"),
        (signal.SIGINT, "waits"),
        (signal.SIGINT, "ready"),
    ],
)
def test_no_process_is_left_when_forerun_ends(number, word, log):
    with start_parent("wait", log) as parent:
        wait_for(parent, word)
        parent.send_signal(number)
        parent.communicate()
    assert parent.returncode
    wait_until(lambda: not find_fakes())


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_at_any_moment(number, log):
    for hundredths in range(2, 80, 4):
        with start_parent("wait", log) as parent:
            threading.Event().wait(hundredths / 100)
            parent.send_signal(number)
            parent.communicate()
        wait_until(lambda: not find_fakes())


def test_paused_servers_end_with_forerun(log):
    with start_parent("paused", log) as parent:
        wait_for(parent, "ready")
        assert len(find_fakes()) == 4  # with the supervisor
        parent.kill()
        parent.communicate()
    wait_until(lambda: not find_fakes())


@pytest.mark.parametrize("how", ["exception", "stop-early"])
def test_no_process_is_left_after_an_exception(how, log):
    with start_parent(how, log) as parent:
        parent.communicate()
    wait_until(lambda: not find_fakes())


def test_a_command_ends_with_its_supervisor(log):
    with ServerProcess(marked(fake_arm()), log) as server:
        server.wait_ready(LONG_S, ignore)
        server._supervisor.kill()
        wait_until(server.failure)
        assert server.failure() == "its supervisor was killed"
        wait_until(lambda: not find_fakes())


def test_servers_start_where_standard_input_is_closed(log):
    arm = fake_arm()
    port = arm.url.split(":")[2].removesuffix("/v1")
    script = f"import os; os.close(0)\n{PARENT.replace('signal.pause()', 'pass')}"
    run = subprocess.run(
        [sys.executable, "-c", script, port, "wait", str(log), *arm.command],
        env={**os.environ, "PYTHONPATH": str(SOURCES), "FORERUN_TEST": MARK},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["ready"]), run.stderr


def test_the_supervisor_needs_the_standard_library_alone():
    script = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    words = [sys.executable, "-I", "-S", "-c", script, supervisor.__file__]
    modules = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert not {name.split(".")[0] for name in modules} - sys.stdlib_module_names - {"__main__"}


# ---------------------------------------------------------------------------------- the fake itself


def ask(arm: Arm, **fields: object) -> dict:
    body = json.dumps({"prompt": "once upon", "max_tokens": 40, "temperature": 0.0, **fields})
    request = urllib.request.Request(f"{arm.url}/completions", body.encode())
    with closing(urllib.request.urlopen(request, timeout=LONG_S)) as answer:
        return json.load(answer)


def test_honest_fakes_agree_and_a_wrong_one_does_not(tmp_path):
    arms = [
        marked(fake_arm(*faults, options=("--k", k)))
        for k, *faults in ((0,), (4,), (4, "wrong-text"))
    ]
    with ExitStack() as stack:
        for number, arm in enumerate(arms):
            server = stack.enter_context(ServerProcess(arm, tmp_path / f"{number}.log"))
            server.wait_ready(LONG_S, ignore)
        texts = [ask(arm)["choices"][0]["text"] for arm in arms]
        assert texts[0] == texts[1] != texts[2]
        address = arms[1].url.replace("/v1", "/metrics")
        with closing(urllib.request.urlopen(address, timeout=LONG_S)) as answer:
            assert b"vllm:spec_decode_num_accepted_tokens_per_pos_total{" in answer.read()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [("garbage", "not JSON"), ("hang-after=0", "cannot be reached|no response|to answer")],
)
def test_a_fake_answers_wrongly(fault, problem, log):
    arm = marked(fake_arm(fault))
    config = ClientConfig(url=arm.url, num_tries=1, timeout_s=2.0)
    with ServerProcess(arm, log) as server, Client(config) as client:
        server.wait_ready(LONG_S, ignore)
        with pytest.raises(ForerunError, match=problem):
            list(client.stream("once", {"max_tokens": 4}))
        assert server.failure() is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fake_streams_tokens_with_usage_and_logprobs(temperature, log):
    arm = marked(fake_arm(options=("--k", "3")))
    with ServerProcess(arm, log) as server, Client(ClientConfig(url=arm.url)) as client:
        server.wait_ready(LONG_S, ignore)
        fields = {"max_tokens": 30, "temperature": temperature}
        pieces = list(client.stream("once", fields, logprobs=20, seed=3))
        whole = client.complete("once", fields, logprobs=20, seed=3)
        messages = [{"role": "user", "content": "once"}]
        assert client.chat(messages, fields).usage.completion_tokens == 30
    assert 8 <= len(pieces) < 30
    assert "".join(piece.text or "" for piece in pieces) == whole.text
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    assert sum(len(piece.logprobs or ()) for piece in pieces) == len(whole.logprobs) == 30
    assert len(whole.token_ids) == 30
