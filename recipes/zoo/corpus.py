"""Collect, split, tokenise: text sources in, one token file per split out.

Sources are named with their licence and how often their text is repeated in the training mix. A
held-out module never enters training, neither does its test file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
MAX_FILE_BYTES = 200_000

HELD_OUT_MODULES = frozenset(
    "bisect calendar cmd colorsys configparser csv difflib fnmatch fractions getopt gettext "
    "graphlib heapq imaplib ipaddress mailbox netrc pprint queue sched shlex shutil smtplib "
    "statistics string tempfile textwrap timeit wave zipfile".split()
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One body of text: where it comes from, under which licence, how often it is repeated."""

    name: str
    licence: str
    repeat: float
    package: str = ""


PYTHON_SOURCES = (
    Source(name="python-stdlib", licence="PSF-2.0", repeat=3.0),
    Source(name="python-stdlib-tests", licence="PSF-2.0", repeat=0.5),
    Source(name="peps", licence="public domain or CC0-1.0", repeat=0.5),
    Source(name="thealgorithms", licence="MIT", repeat=2.0),
    Source(name="torch", licence="BSD-3-Clause", repeat=0.3, package="torch"),
    Source(name="transformers", licence="Apache-2.0", repeat=0.2, package="transformers"),
    Source(name="sympy", licence="BSD-3-Clause", repeat=0.4, package="sympy"),
    Source(name="networkx", licence="BSD-3-Clause", repeat=1.0, package="networkx"),
    Source(name="numpy", licence="BSD-3-Clause", repeat=1.0, package="numpy"),
    Source(name="scipy", licence="BSD-3-Clause", repeat=0.5, package="scipy"),
    Source(name="matplotlib", licence="PSF-based", repeat=1.0, package="matplotlib"),
    Source(name="jinja2", licence="BSD-3-Clause", repeat=2.0, package="jinja2"),
    Source(name="rich", licence="MIT", repeat=2.0, package="rich"),
    Source(name="pygments", licence="BSD-2-Clause", repeat=0.5, package="pygments"),
)
# code-40m sees a part of one epoch, so its text has more of the kind it is judged by.
LIBRARY_SOURCES = tuple(
    replace(source, repeat=6.0) if source.name == "python-stdlib" else source
    for source in PYTHON_SOURCES
)
BOOK_SOURCES = (Source(name="classics", licence="public domain", repeat=1.0),)


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_text(path: Path) -> str | None:
    """File text, or None where it is not clean UTF-8 or larger than MAX_FILE_BYTES."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def python_files(root: Path) -> Iterator[str]:
    """Texts of the Python files under `root`, installed packages left out."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if "site-packages" not in inside and (text := read_text(path)):
            yield text


def is_held_out(path: Path) -> bool:
    """Whether a standard-library file belongs to a held-out module (or tests one)."""
    names = {part.removesuffix(".py").removeprefix("test_") for part in path.parts}
    return bool(names & HELD_OUT_MODULES)


def stdlib_files(*, tests: bool, held_out: bool) -> Iterator[str]:
    """Standard-library texts: library or tests, trained on or held out."""
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        in_tests = bool({"test", "tests", "idle_test", "lib2to3"} & set(inside.parts))
        if "site-packages" in inside.parts or in_tests != tests or is_held_out(inside) != held_out:
            continue
        if text := read_text(path):
            yield text


def split_documents(text: str, size: int = 100_000) -> Iterator[str]:
    """Cut one long text into documents of about `size` characters at line ends."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def documents(source: Source, corpora: Path) -> list[str]:
    """All documents of one source."""
    if source.name == "python-stdlib":
        return list(stdlib_files(tests=False, held_out=False))
    if source.name == "python-stdlib-tests":
        return list(stdlib_files(tests=True, held_out=False))
    if source.name == "peps":
        return list(split_documents((corpora / "peps.txt").read_text("utf-8")))
    if source.name == "thealgorithms":
        return list(split_documents((corpora / "thealgorithms-python.txt").read_text("utf-8")))
    if source.name == "classics":
        return [path.read_text("utf-8") for path in sorted((corpora / "classics").glob("*.txt"))]
    spec = importlib.util.find_spec(source.package)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"package {source.package!r} is a training source: pip install {source.package}"
        )
    return list(python_files(Path(spec.origin).parent))


def mix(sources: tuple[Source, ...], corpora: Path, seed: int) -> Iterator[str]:
    """Shuffled documents, each source `repeat` times (a fraction is a random subset)."""
    rng = np.random.default_rng(seed)
    pool: list[str] = []
    for source in sources:
        texts = documents(source, corpora)
        whole, part = divmod(source.repeat, 1.0)
        pool += texts * int(whole)
        chosen = rng.permutation(len(texts))[: round(part * len(texts))]
        pool += [texts[i] for i in chosen]
    for i in rng.permutation(len(pool)):
        yield pool[i]


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with VOCAB_SIZE entries; END_OF_TEXT is id 0 and starts every document."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=1024
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], out: Path) -> None:
    """Write `out` (uint16 ids, documents led by END_OF_TEXT) and its sizes as JSON beside it."""
    chunks = []
    for start in track(range(0, len(texts), 256), description=f"tokenise {out.name}"):
        for ids in tokenizer(texts[start : start + 256], verbose=False)["input_ids"]:
            chunks.append(np.array([0, *ids], dtype=np.uint16))
    tokens = np.concatenate(chunks)
    np.save(out, tokens)
    about = {
        "num_tokens": len(tokens),
        "num_bytes": sum(len(t.encode()) for t in texts),
        "num_documents": len(texts),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    out.with_suffix(".json").write_text(json.dumps(about, indent=1))


def build(corpora: Path, out: Path, seed: int = 0) -> None:
    """Tokenizer and token files (python, books, held_out) under `out`, kept if present."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "held_out.npy").exists():
        return
    python = list(mix(PYTHON_SOURCES, corpora, seed))
    tokenizer = train_tokenizer(iter(python[::4]))
    tokenizer.save_pretrained(out / "tokenizer")
    encode(tokenizer, python, out / "python.npy")
    encode(tokenizer, list(mix(BOOK_SOURCES, corpora, seed)), out / "books.npy")
    encode(tokenizer, list(stdlib_files(tests=False, held_out=True)), out / "held_out.npy")


def build_library(corpora: Path, tokenizer_folder: Path, out: Path, seed: int = 1) -> None:
    """Token files `library.npy` and `held_out.npy` under `out` with a tokenizer that exists."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "library.npy").exists():
        return
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(out / "tokenizer")
    encode(tokenizer, list(stdlib_files(tests=False, held_out=True)), out / "held_out.npy")
    encode(tokenizer, list(mix(LIBRARY_SOURCES, corpora, seed)), out / "library.npy")
