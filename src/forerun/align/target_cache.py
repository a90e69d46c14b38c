"""A cache on disk of what the target computes for every sample, filled by one process or several.

Every sample has one file, whose name ends in the hash of its content: what a killed process was
writing is not read, and a damaged file is computed again. The name of the folder has everything
that decides its content, so the cache of a changed target is never used. The target runs once over
every sample that is missing, if the disk has room.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from forerun.align.config import TeacherConfig
from forerun.align.samples import PackedBatch, Sample
from forerun.align.target import EngineTarget, TargetHead, TargetModel, load_target, read_head
from forerun.align.workspace import OnProgress
from forerun.atomic_write import atomic_write
from forerun.cache import hash_of, is_whole, write_cached
from forerun.errors import CacheTooLarge, InvalidCache, NumericalError
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import choose_device, choose_dtype
from forerun.models.memory import readable
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams

logger = logging.getLogger("forerun.cache")
preparation = logging.getLogger("forerun.preparation")

FORMAT = 2
DESCRIPTION = "cache.json"
ROWS, SUFFIX = "rows", ".safetensors"
MAX_TOKENS = 4096
"""Tokens of one pass over the target."""


@dataclass(frozen=True, kw_only=True)
class TeacherSource:
    """The target, its deployment settings, and the devices and folder available to a teacher.

    Attributes:
        process: number of this process, and of all that together fill a cache on a shared disk.
            All must then prepare the teacher; or one fills it first, alone.
        wait: returns when all processes have called it.
        computed: type of the target's products; None: that of its weights.
        runs: the target in an engine of this process that is idle, which then scores texts.
        on_progress: called after every pass with the learned rows done, of this process's share.
    """

    target: ModelFiles
    sampling: SamplingParams
    cache_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    computed: torch.dtype | None = None
    runs: LanguageModel | None = None
    on_progress: OnProgress = lambda num_done, num_all: None
    process: tuple[int, int] = (0, 1)
    wait: Callable[[], None] = lambda: None

    def load(self) -> TargetModel:
        return load_target(
            self.target, dtype=self.dtype, device=self.device, computed=self.computed
        )

    def read_head(self) -> TargetHead:
        """Read the target's output layer alone."""
        head = read_head(self.target, self.state_dtype)
        return head.to(self.probs_device, self.computed)

    def scorer(self, samples: Sequence[Sample]) -> TargetModel | EngineTarget:
        """Return the target that scores these samples fastest."""
        runs = self.runs
        longest = max(len(sample.token_ids) for sample in samples)
        if self.process[1] > 1 or not isinstance(runs, NativeModel) or longest > runs.max_context:
            return self.load()
        return EngineTarget(model=runs, load_head=self.read_head)

    @property
    def probs_device(self) -> torch.device:
        """Device on which distributions are computed from a cache."""
        return choose_device(self.device)

    @cached_property
    def state_dtype(self) -> torch.dtype:
        """Type of cached states: that of the target, in whichever type it is scored."""
        return choose_dtype(self.dtype, self.target)


def allowed_bytes(folder: Path, max_bytes: int | None) -> int:
    """Return the bytes that may be written: nine tenths of the free ones, or `max_bytes`."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)


def learned_places(sample: Sample) -> Int64[Tensor, " learned"]:
    ranges = [torch.arange(start - 1, end - 1) for start, end in sample.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def passes(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[int]]:
    """Yield groups of samples of similar length, each to be read in one pass."""
    rows: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i].token_ids)):
        if rows and (len(rows) + 1) * len(samples[rows[0]].token_ids) > max_tokens:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def one_per_row(samples: Sequence[Sample], rows: Sequence[int]) -> PackedBatch:
    width = max(len(samples[index].token_ids) for index in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    owners = torch.full((len(rows), width), -1)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, index in enumerate(rows):
        length = len(samples[index].token_ids)
        ids[row, :length] = torch.tensor(samples[index].token_ids)
        owners[row, :length] = index
        predicts[row, learned_places(samples[index])] = True
    positions = torch.arange(width).repeat(len(rows), 1)
    return PackedBatch(ids=ids, positions=positions, samples=owners, predicts=predicts)


def sample_runs(
    batch: PackedBatch, samples: Sequence[Sample]
) -> Iterator[tuple[int, Int64[Tensor, " rows"]]]:
    """Yield sample and rows among its learned places, for every run of learned places."""
    predicts = batch.predicts.cpu()
    owners, counts = torch.unique_consecutive(batch.samples.cpu()[predicts], return_counts=True)
    positions = torch.split(batch.positions.cpu()[predicts], counts.tolist())
    for index, places in zip(owners.tolist(), positions, strict=True):
        yield index, torch.searchsorted(learned_places(samples[index]), places)


WHAT = {"hidden": "last hidden states", "features": "features and last hidden states"}
"""What a kind of cache holds, in words."""
Target = TargetModel | EngineTarget
MakeColumns = Callable[[Target, Float[Tensor, "rows states hidden"]], Mapping[str, Tensor]]
"""Returns what is cached of a sample, from the target's states at the rows that are learned."""


class TargetCache:
    """Cache on disk of what the target computes for samples, one file per sample.

    Args:
        kind: first part of the folder's name.
        settings: settings that decide the content, beside target, tokenizer, template and text.
        layers: layers of the target whose inputs are cached beside the last hidden states; None for
            a draft model.
    """

    def __init__(
        self,
        source: TeacherSource,
        config: TeacherConfig,
        kind: str,
        settings: Mapping[str, str],
        row_bytes: int,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        identity = {
            "format": FORMAT,
            "kind": kind,
            "target_hash": source.target.content_hash,
            "tokenizer_hash": source.target.tokenizer_hash,
            "template_hash": source.target.template_hash,
            "settings": settings,
        }
        self.source = source
        self.kind = kind
        self.max_bytes = config.max_cache_bytes
        self.row_bytes = row_bytes
        self.layers = layers
        self.description = json.dumps(identity, sort_keys=True, indent=1) + "\n"
        self.folder = source.cache_dir / f"{kind}-{hash_of(self.description.encode())}"
        self._files: dict[str, Path] = {}

    def read(self, sample: Sample) -> dict[str, Tensor]:
        """Return the cached tensors of a sample by name; `fill` must have stored them."""
        path = self._files.get(hash_sample(sample))
        if path is None:
            raise InvalidCache(f"{self.folder} has no rows of a sample that was not prepared")
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise InvalidCache(
                f"{path} cannot be read any more: {error}; start again, and its content is "
                "computed again"
            ) from error

    def read_runs(
        self, batch: PackedBatch, samples: Sequence[Sample]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the cached tensors of every run of learned places, in the order of the batch."""
        for index, rows in sample_runs(batch, samples):
            yield {name: part[rows] for name, part in self.read(samples[index]).items()}

    def fill(self, samples: Sequence[Sample], make_columns: MakeColumns) -> Target | None:
        """Compute what is missing; returns the target if it was loaded.

        Raises:
            CacheTooLarge: it would not fit, and nothing is written; or the disk filled up.
        """
        missing = self._missing(samples)
        if missing:
            self._check_room(sum(sample.num_learned for sample in missing))
        self.source.wait()  # no process writes before all have listed what is missing
        if not missing:
            return None
        target = self.source.scorer(missing)
        target.check(missing)
        self._run(target, missing, make_columns)
        self.source.wait()
        self._list_files()
        return target

    def _list_files(self) -> None:
        files = self.folder.glob(f"{ROWS}-*{SUFFIX}")
        self._files = {path.stem.split("-")[1]: path for path in files}

    def _missing(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples without an undamaged file, each once, after reading all files."""
        self._list_files()
        missing = []
        for key, sample in {hash_sample(sample): sample for sample in samples}.items():
            path = self._files.get(key)
            if path is not None and is_whole(path):
                continue
            missing.append(sample)
            if path is not None:
                logger.warning("%s is damaged; its content is computed again", path)
                with suppress(OSError):
                    path.unlink()
        return missing

    def _check_room(self, num_rows: int) -> None:
        """Log the size of the rows to write, and refuse more than the disk has room for."""
        needed, allowed = num_rows * self.row_bytes, allowed_bytes(self.folder, self.max_bytes)
        what = f"{WHAT.get(self.kind, self.kind)} of {num_rows:,} positions"
        preparation.info(
            "caching %s in %s: %s (%s each), %s may be taken",
            what,
            self.folder,
            readable(needed),
            readable(self.row_bytes),
            readable(allowed),
        )
        if needed > allowed:
            raise CacheTooLarge(
                f"{what} take {readable(needed)}, {readable(allowed)} may be taken in "
                f"{self.folder}: use fewer prompts, another folder, a higher limit, or the teacher "
                "that reruns the target (model)"
            )

    def _run(self, target: Target, samples: Sequence[Sample], make_columns: MakeColumns) -> None:
        index, number = self.source.process
        parts = [*passes(samples, MAX_TOKENS)][index::number]
        num_rows = sum(samples[index].num_learned for part in parts for index in part)
        num_done = 0
        for part in parts:
            batch = one_per_row(samples, part)
            states = target.states(batch, self.layers or ())
            for row, index in enumerate(part):
                learned = states[row, learned_places(samples[index]).to(states.device)]
                if not bool(learned.isfinite().all()):
                    raise NumericalError(
                        "the target's hidden states are not finite in a response to the prompt "
                        f"{samples[index].prompt_hash}; load it in bf16 or fp32"
                    )
                self._write(samples[index], make_columns(target, learned))
                num_done += len(learned)
            self.source.on_progress(num_done, num_rows)

    def _write(self, sample: Sample, columns: Mapping[str, Tensor]) -> None:
        content = save({name: column.cpu().contiguous() for name, column in columns.items()})
        description, stem = self.folder / DESCRIPTION, f"{ROWS}-{hash_sample(sample)}"
        try:
            if not description.exists():
                with atomic_write(description) as scratch:
                    scratch.write_text(self.description, encoding="utf-8")
            write_cached(self.folder, stem, SUFFIX, content, durable=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheTooLarge(
                f"the disk of {self.folder} is full; finished files are kept and are not computed "
                "again: make room, or name another folder for caches, and start again"
            ) from error


def hash_sample(sample: Sample) -> str:
    """Return the hash of a sample's text and of its learned ranges."""
    content = json.dumps([sample.prompt_hash, sample.token_ids, sample.spans])
    return hash_of(content.encode())
