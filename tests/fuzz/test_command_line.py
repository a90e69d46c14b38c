"""Hostile files given to the command line: an error in one line, in bounded time and memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf import GGMLQuantizationType as Kind
from tests.fuzz.harness import run_bounded
from tests.fuzz.test_diagnose import FACTS, LOG, PAGE, TRACE
from tests.fuzz.test_heads import EAGLE
from tests.gguf_files import all_of, write_gguf, write_tiny_folder
from tests.unit.plan.test_workload_file import TEXT as WORKLOAD

from forerun import bounded_read
from forerun.align.samples import read_prompts
from forerun.cli.flags import read_template
from forerun.cli.main import answered, guarded
from forerun.measure.prompt_files import read_prompts as read_prompt_files
from forerun.models.checkpoint import ModelFiles
from forerun.server.guard import read_keys

PROFILE = Path("benchmarks/profiles/292m.json")
KEYS = b'[[keys]]\ntenant = "a"\nkey = "0123456789abcdef0123"\nmax_tokens = 9\n'
PROMPTS = b'{"prompt": "def add(a, b):"}\n{"text": "x", "tag": "y"}\n'
SLOW = ("--tokens-per-s", "60", "--tokens-per-s-plain", "80")
RATE = ("--acceptance", "0.8")
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")

Read = Callable[[Path], int]


def contents(seed: bytes) -> dict[str, bytes]:
    """Return hostile contents of a file, some of them changes of a valid one."""
    rng = random.Random(1)
    return {
        "nothing": b"",
        "the first half": seed[: len(seed) // 2],
        "all but its end": seed[:-3],
        "zeros": bytes(5000),
        "noise": rng.randbytes(5000),
        "no UTF-8": b"\xff" * 5000,
        "UTF-16": seed.decode(errors="replace").encode("utf-16"),
        "packed": gzip.compress(seed),
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "null": b"null",
        "a list": b"[]",
        "a number": b"3",
        "a text": b'"x"',
        "an empty object": b"{}",
        "digits": b"9" * 100_000,
        "huge numbers": NUMBER.sub(b"1e308", seed),
        "negative numbers": NUMBER.sub(b"-1", seed),
        "no numbers": NUMBER.sub(b"null", seed),
        "texts for numbers": NUMBER.sub(b'"x"', seed),
        "long integers": NUMBER.sub(b"9223372036854775808", seed),
        "NaN": NUMBER.sub(b"NaN", seed),
        "one line": b"x" * (6 << 20),
        "empty lines": b"\n" * (1 << 20),
        "escape sequences": b"\x1b]0;x\x07\x1b[31m" + seed,
    }


def places(folder: Path) -> dict[str, Path]:
    """Return paths that hold no file of the usual kind."""
    sparse, fifo, loop = folder / "sparse", folder / "fifo", folder / "loop"
    begun = folder / "begun"  # as a trace, and goes on without an end
    begun.write_bytes(TRACE[: TRACE.index(b"\n") + 1] + b'{"record":')
    sparse.touch()
    for path in (sparse, begun):
        os.truncate(path, 64 << 30)
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    (folder / "folder").mkdir()
    found = (sparse, begun, fifo, loop, folder / "folder", folder / "missing", folder / ("x" * 300))
    return {path.name[:9]: path for path in found} | {"zero": Path("/dev/zero")}


def command(*arguments: str) -> Read:
    """Return a reader: a command whose arguments have a path in place of "{}"."""
    return lambda path: answered([each.replace("{}", str(path)) for each in arguments])


def within(folder: Path, name: str, read: Read) -> Read:
    """Return a reader of a model folder in which one file is another one."""

    def run(path: Path) -> int:
        (folder / name).unlink()
        (folder / name).symlink_to(path)
        return read(folder)

    return run


def readers(folder: Path) -> dict[str, tuple[bytes, Read]]:
    """Return every reader of the command line with the content of a valid file."""
    trace, model = folder / "trace.jsonl", write_tiny_folder(folder / "model")
    trace.write_bytes(TRACE)
    whole = write_gguf(folder / "whole.gguf", model, all_of(Kind.Q8_0)).read_bytes()
    tokenizer, profile = ModelFiles.find(model).tokenizer, str(PROFILE.resolve())
    (folder / "w.toml").write_text(WORKLOAD)

    def named(name: str, read: Read) -> Read:
        """Return a reader that gets a path by another name, whose end says how it is read."""

        def run(path: Path) -> int:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(path)
            return read(folder / name)

        return run

    def info(name: str) -> tuple[bytes, Read]:
        copy = Path(shutil.copytree(model, folder / f"model-{name}"))
        return (copy / name).read_bytes(), within(
            copy, name, lambda at: answered(["info", str(at)])
        )

    def of_head(name: str) -> tuple[bytes, Read]:
        copy = Path(shutil.copytree(EAGLE, folder / f"head-{name}"))
        read = command("info", str(model), "--draft", str(copy))
        return (copy / name).read_bytes(), within(copy, name, read)

    return {
        "diagnose a trace": (TRACE, command("diagnose", "{}")),
        "diagnose a log": (LOG, command("diagnose", "{}")),
        "diagnose a page": (PAGE, command("diagnose", "{}")),
        "diagnose facts": (FACTS, command("diagnose", "{}", "--json")),
        "a profile for diagnose": (
            PROFILE.read_bytes(),
            command("diagnose", str(trace), "--profile", "{}"),
        ),
        "answers": (b'{"no_gain": true}', command("diagnose", *SLOW, "--ask", "--answers", "{}")),
        "trace": (TRACE, command("explain", "{}")),
        "explain": (TRACE, command("explain", "{}", "--step", "1")),
        "plan": (PROFILE.read_bytes(), command("plan", *RATE, "--profile", "{}")),
        "plan with a trace": (TRACE, command("plan", "--profile", profile, "--trace", "{}")),
        "a workload": (
            WORKLOAD.encode(),
            command("plan", "--workload", "{}", "--profile", profile),
        ),
        "watch": (
            PAGE,
            command("diagnose", "--watch", "{}", "--once", "--state", str(folder / "state")),
        ),
        "a sample": (PROMPTS, command("quantise", "missing", "--out", "o", "--sample", "{}")),
        "prompts": (PROMPTS, named("p.jsonl", lambda path: len(read_prompt_files(path)) * 0)),
        "texts": (b"a\n---\nb", named("p.txt", lambda path: len(read_prompt_files(path)) * 0)),
        "texts to learn": (
            PROMPTS,
            named("q.jsonl", lambda path: len(read_prompts(path, tokenizer, 99)) * 0),
        ),
        "a template": (b"{{ messages }}", lambda path: len(read_template(path)) * 0),
        "keys": (KEYS, lambda path: len(read_keys(path)) * 0),
        "GGUF": (whole, named("x.gguf", command("info", "{}"))),
        **{name: info(name) for name in ("config.json", "tokenizer.json", "model.safetensors")},
        **{f"head {name}": of_head(name) for name in ("config.json", "model.safetensors")},
    }


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a second pass on the clock of readers wherever they wait for a pipe."""
    now = [0.0]

    def waiting(*_: object) -> tuple[list[int], list[int], list[int]]:
        now[0] += 1.0
        return [], [], []

    monkeypatch.setattr(bounded_read, "select", SimpleNamespace(select=waiting))
    monkeypatch.setattr(bounded_read, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return


def check(case: str, read: Read, path: Path, codes: list[int], _: bytes) -> None:
    """Run a command and keep its exit code, which must not be that of a defect."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        codes.append(guarded(lambda: read(path)))
    assert codes[-1] in (0, 1, 2, 3, 4), (case, said.getvalue()[:2000])
    assert "Traceback" not in said.getvalue(), case
    assert len(said.getvalue()) < 5000, case


@pytest.mark.usefixtures("impatient")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("share", "least"),
    [(3, 300), pytest.param(1, 750, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_no_file_ends_a_command_without_a_message(share, least, tmp_path, monkeypatch):
    known, refused, num_inputs = readers(tmp_path), set(), 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # questions get no answer there
    special = places(tmp_path)
    for number, (name, (seed, read)) in enumerate(known.items()):
        made = {}
        chosen = list(contents(seed).items())[number % share :: share]
        for what, content in [("as it is", seed), *chosen]:
            made[what] = tmp_path / f"input-{len(made)}"
            made[what].write_bytes(content)
        for what, path in {**made, **special}.items():
            codes: list[int] = []
            run_bounded(partial(check, f"{name}, {what}", read, path, codes), b"")
            if what == "as it is" and codes == [2]:
                refused.add(name)
            num_inputs += what != "as it is"
    print(f"{num_inputs} hostile files")
    assert num_inputs >= least
    assert refused == {"a sample", "plan with a trace"}, "whose model is missing, or another one"
