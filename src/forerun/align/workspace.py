"""Folder of an alignment: its files, lock, progress, settings and identity.

The identity is all inputs that decide the result, so that no two share a folder. It leaves out
settings that decide only where and how fast things happen, and the names of files whose content is
hashed. The manifest (align.json) has both, and the card of the draft repeats them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from forerun.align.config import FREE_TRAINING_SETTINGS, LEFT_OUT, AlignConfig
from forerun.atomic_write import atomic_write
from forerun.bounded_read import read_bytes
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card
from forerun.provenance import content_hash

logger = logging.getLogger("forerun.align")

KindT = TypeVar("KindT")


def from_json(kind: type[KindT], values: Any) -> KindT:
    """Build a dataclass from JSON values, checked by the types of its fields (ValueError).

    A field that is missing has its default; what another version had beside them is left out.
    """
    try:
        return msgspec.convert(values, kind, dec_hook=_as_path, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def to_json(value: Any) -> Any:
    return json.loads(json.dumps(msgspec.to_builtins(value, enc_hook=str, str_keys=True)))


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(to_json(value), indent=1) + "\n", encoding="utf-8")


def _as_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"{value!r:.60} is not of type {kind.__name__}")


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the parts of two identities that differ; a missing part equals the text "None"."""
    return [
        f"{name} was {found.get(name)}, is {wanted.get(name)}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name, "None") != wanted.get(name, "None")
    ]


def read_lines(path: Path, kind: type[KindT]) -> list[KindT]:
    """Return the objects of a JSON lines file; an empty list if the file does not exist."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("%s line %d is damaged and is left out: %s", path, number, error)
    return found


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    with atomic_write(path) as scratch:
        scratch.write_text("".join(map(line_of, rows)), encoding="utf-8")


def append_line(path: Path, row: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(row))


def line_of(row: Any) -> str:
    return json.dumps(asdict(row)) + "\n"


class Workspace:
    """Paths in the folder of one alignment; everything except the draft can be regenerated.

    Attributes:
        draft: the best draft so far, in Hugging Face format.
        responses: folder of responses of target and draft, one file per origin.
        training: folder of the checkpoint.
        metrics: file of the metrics of every optimiser step, as JSON lines.
        judgements: file of the judgements of the draft during training, as JSON lines.
        manifest: file of the settings and of all inputs that decide the result.
    """

    def __init__(self, root: Path, cache_root: Path | None = None) -> None:
        self.root = root
        self.draft = root / "draft"
        self.responses = root / "responses"
        self.cache = cache_root or root / "cache"
        self.training = root / "training"
        self.metrics = root / "metrics.jsonl"
        self.judgements = root / "judgements.jsonl"
        self.manifest = root / "align.json"
        self.report = root / "report.json"

    def snapshot(self, step: int) -> Path:
        return self.root / "snapshots" / str(step)


def lock_for(path: Path) -> FileLock:
    """Return the lock of a file, which is an empty file beside it.

    Holding it twice in one process takes the same lock twice: another one for the same file is
    another writer.
    """
    return FileLock(path.with_name(f".{path.name}.lock"))


@contextmanager
def exclusive_access(lock: FileLock, what: Path) -> Iterator[None]:
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InvalidRequest(
            f"another process is writing {what}; wait until it has ended, or write elsewhere"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"{what} cannot be written: {error}") from error
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimiser step, over all processes.

    Attributes:
        loss: mean over learned rows, as the objective counts.
        acceptance_probability: alpha, mean over learned rows; None without a teacher.
        num_tokens: places of the packed rows, padding included.
    """

    step: int
    loss: float
    acceptance_probability: float | None
    num_learned: int
    num_tokens: int
    grad_norm: float
    learning_rate: float
    duration_s: float


OnProgress = Callable[[int, int], None]
"""Called with the number of items done and the number of all items, whenever the first grows."""
LINE_EVERY_S = 30.0
"""Between two lines of progress where there is no terminal to draw a bar on."""


class Phases:
    """Measures the durations of an alignment's phases and shows their progress."""

    def __init__(
        self, console: Console | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(quiet=True)
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - started_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

    @contextmanager
    def bar(self, phase: str, what: str) -> Iterator[Callable[..., None]]:
        """Run a phase with a progress bar; yields what updates it: `OnProgress`, or with a text.

        Where there is no terminal, a line now and then says the rate and the time left.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        begun_s = last_s = self.clock()
        first: int | None = None

        def show(num_done: int, num_all: int, figures: str = "") -> None:
            nonlocal last_s, first
            shown.update(task, completed=num_done, total=num_all, figures=figures)
            first = num_done if first is None else first
            now_s = self.clock()
            if self.console.is_terminal or now_s - last_s < LINE_EVERY_S:
                return
            last_s = now_s
            rate = (num_done - first) / (now_s - begun_s)
            left = f"{(num_all - num_done) / rate / 60:.0f} min left" if rate else "time unknown"
            line = f"{what} {num_done:,}/{num_all:,}, {rate * 60:,.0f} a minute, {left}  {figures}"
            self.console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)

        with self.phase(phase), Progress(*columns, console=self.console) as shown:
            task = shown.add_task(what, total=None, figures="")
            yield show
            if shown.tasks[0].total is None:  # there was nothing to do
                shown.update(task, visible=False)

    @contextmanager
    def waiting(self, phase: str, what: str) -> Iterator[None]:
        """Run a phase of unknown length with a status line."""
        if not self.console.is_terminal:  # a log has no place for a spinner
            self.console.print(f"{what} ...", highlight=False, markup=False, soft_wrap=True)
        status: AbstractContextManager[object] = self.console.status(what)
        with self.phase(phase), status:
            yield


IDENTITY, DTYPES = "identity", "dtypes"
"""Keys of the manifest; the other keys are settings. The second has the types of products, which
the first process measured and which resumed runs keep."""

FREE = {
    "sampling": ("n", "logprobs"),  # responses are single samples
    "data": ("prompts", "held_out", "held_out_share", "max_prompt_tokens", "raw"),
    "teacher": ("cache_dir", "max_cache_bytes"),
    "objective": (),
    "attached": (),
    "training": FREE_TRAINING_SETTINGS,
    "evaluation": (),
}
"""Settings, by stage, that do not change the result, or whose effect a hash covers."""
OF_THE_TEACHER = "teacher."


def settings_of(config: AlignConfig) -> dict[str, Any]:
    return {name: value for name, value in to_json(config).items() if name not in LEFT_OUT}


def read_settings(folder: Path) -> tuple[AlignConfig, Path]:
    """Read the settings of an earlier alignment and the path of its kept draft.

    `folder` is that of the alignment, or of its draft wherever that has been copied: the draft's
    card repeats the settings.
    """
    workspace = Workspace(root=folder)
    values: Mapping[str, Any]
    if workspace.manifest.exists():
        values, draft = read_object(workspace.manifest), workspace.draft
    elif (card := read_card(folder)) is not None:
        values, draft = card.settings, folder
    else:
        raise InvalidRequest(
            f"{folder} is neither an alignment nor the draft of one: it has neither "
            f"{workspace.manifest.name} nor {CARD_FILE}"
        )
    try:
        return from_json(AlignConfig, values), draft
    except ValueError as error:
        raise InvalidRequest(
            f"the settings in {folder} are of another version of forerun, or damaged ({error}); "
            "align without --refresh"
        ) from error


def identity_of(
    config: AlignConfig, prompt_hashes: Mapping[str, str], target_hash: str
) -> dict[str, str]:
    """Return all inputs that decide the result of an alignment, as text by name."""
    draft = "none"  # a fresh head, whose shape is in the settings
    if config.draft is not None:
        draft = content_hash(config.draft)
    elif config.init is not None:
        draft = hashlib.sha256(read_bytes(config.init)).hexdigest()
    settings = settings_of(config)
    optimiser = {"optimiser": "muon"} if config.method in ("eagle3", "dflash") else {}
    return (
        optimiser
        | {
            "target": target_hash,
            "draft": draft,
            **prompt_hashes,
            "dtype": config.dtype,
            "method": config.method,
        }
        | {
            f"{stage}.{name}": _as_text(value)
            for stage, free in FREE.items()
            for name, value in settings[stage].items()
            if name not in free
        }
    )


def _as_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(None if value in ([], {}) else value)


def _select_for_folder(identity: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the identity that an output folder must match, without the teacher.

    Not the teacher: where its cache turned out too large, responses are there, and another may go
    on with them until the first checkpoint.
    """
    return {name: text for name, text in identity.items() if not name.startswith(OF_THE_TEACHER)}


def of_training(identity: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in identity.items() if not name.startswith("training.")}


def check_folder(workspace: Workspace, identity: Mapping[str, str]) -> None:
    """Refuse a folder that holds an alignment with other settings (InvalidRequest)."""
    if not workspace.manifest.exists():
        return
    kept = read_object(workspace.manifest).get(IDENTITY)
    if not isinstance(kept, dict):
        raise InvalidRequest(
            f"{workspace.root} holds an alignment of an earlier version of forerun, which cannot "
            "be continued; give another --out (--refresh begins with its draft)"
        )
    if found := differences(kept, _select_for_folder(identity)):
        raise InvalidRequest(
            f"{workspace.root} holds an alignment with other settings ({'; '.join(found)}); "
            "give another --out, or those settings to go on"
        )


def claim_folder(
    settings: Mapping[str, Any],
    workspace: Workspace,
    identity: Mapping[str, str],
    dtypes: Mapping[str, str],
) -> None:
    known = {IDENTITY: _select_for_folder(identity), DTYPES: dict(dtypes)}
    try:
        write_json(workspace.manifest, {**settings, **known})
    except OSError as error:
        raise InvalidRequest(f"{workspace.root} cannot be written: {error}") from error
