"""Runs the target once over every sample that is missing from a cache, if the disk has room."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.data.sample import PackedBatch, Sample
from forerun.align.progress import OnProgress
from forerun.align.teachers.base import ProcessShare, one_per_row, passes
from forerun.align.teachers.cache import RowCache, key_of
from forerun.align.teachers.target import TargetModel, check_samples
from forerun.errors import CacheTooLarge, NumericalError
from forerun.models.memory import readable

__all__ = ["CacheFiller", "RowSizes", "allowed_bytes", "check_room"]

MAX_TOKENS = 4096
"""Tokens of one pass over the target."""

MakeColumns = Callable[[TargetModel, Sample, Float[Tensor, "rows *states"]], Mapping[str, Tensor]]
"""What is kept of a sample, from the target's hidden states at its learned rows."""
ReadRows = Callable[[TargetModel, PackedBatch], Float[Tensor, "learned ..."]]
"""What a pass of the target gives for the learned rows of a batch."""


class CacheFiller:
    """Fills a cache, and resumes where an earlier run was interrupted.

    Args:
        cache: to fill.
        load: gives the target; called only if something is lacking.
        sizes: of the rows.
        max_bytes: most bytes to write; None: nine tenths of what the disk has free.
        on_progress: called after every pass with the learned rows done, of this process's share.
        share: of the samples; all processes fill together.
    """

    def __init__(
        self,
        *,
        cache: RowCache,
        load: Callable[[], TargetModel],
        sizes: RowSizes,
        max_bytes: int | None,
        on_progress: OnProgress,
        share: ProcessShare,
    ) -> None:
        self.cache = cache
        self.load = load
        self.sizes = sizes
        self.max_bytes = max_bytes
        self.on_progress = on_progress
        self.share = share

    def fill(
        self,
        samples: Sequence[Sample],
        make_columns: MakeColumns,
        read: ReadRows = TargetModel.hidden,
    ) -> TargetModel | None:
        """Compute and store the missing rows.

        Returns:
            The target if it had to be loaded.

        Raises:
            CacheTooLarge: it does not fit (before the target is loaded), or the disk is full.
            InvalidRequest: samples hold ids the target does not know, or are too long for it.
            NumericalError: the target's hidden states are not finite.
        """
        by_key = {key_of(sample): sample for sample in samples}
        lacking = [by_key[key] for key in self.cache.lacking([*by_key])]
        if lacking:
            num_rows = sum(sample.num_learned for sample in lacking)
            check_room(self.cache.folder, num_rows, self.sizes, self.max_bytes)
        self.share.wait()  # no process writes before all have listed what is lacking
        if not lacking:
            return None
        target = self.load()
        check_samples(lacking, target)
        try:
            self._run(target, lacking, make_columns, read)
        finally:  # keep what was computed, also after an error
            self.cache.flush()
        self.share.wait()
        self.cache.look_again()
        return target

    def _run(
        self,
        target: TargetModel,
        samples: Sequence[Sample],
        make_columns: MakeColumns,
        read: ReadRows,
    ) -> None:
        parts = [*self.share.of([*passes(samples, MAX_TOKENS)])]
        num_rows = sum(samples[index].num_learned for part, kept in parts for index in part if kept)
        num_done = 0
        for part, kept in parts:
            states = read(target, one_per_row(samples, part))
            if not kept:
                continue
            lengths = [samples[index].num_learned for index in part]
            for index, own in zip(part, torch.split(states, lengths), strict=True):
                check_finite(samples[index], own)
                self.cache.put(key_of(samples[index]), make_columns(target, samples[index], own))
            num_done += sum(lengths)
            self.on_progress(num_done, num_rows)


def check_finite(sample: Sample, hidden: Float[Tensor, rows * states]) -> None:
    """Refuse hidden states that are not finite (NumericalError)."""
    if not bool(hidden.isfinite().all()):
        raise NumericalError(
            "the target's hidden states are not finite in a response to the prompt "
            f"{sample.prompt_hash}; load it in bf16 or fp32"
        )


logger = logging.getLogger("forerun.preparation")

ID_BYTES, COUNT_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Disk space of a cache.

    Attributes:
        what: is cached, for people.
        row_bytes: of a learned row, at most.
        fixed_bytes: whatever the number of rows.
    """

    what: str
    row_bytes: int
    fixed_bytes: int = 0

    @classmethod
    def of_states(cls, *, width: int, vocab_size: int, itemsize: int) -> RowSizes:
        """Return the sizes of hidden states and of the output layer that maps them to logits."""
        return cls(
            what="last hidden states",
            row_bytes=width * itemsize,
            fixed_bytes=(width + 1) * vocab_size * itemsize,
        )

    @classmethod
    def of_features(
        cls, *, num_layers: int, width: int, vocab_size: int, itemsize: int
    ) -> RowSizes:
        """Return the sizes of features of some layers, last hidden states, and the output layer."""
        return cls(
            what=f"features of {num_layers} layers and last hidden states",
            row_bytes=(num_layers + 1) * width * itemsize,
            fixed_bytes=(width + 1) * vocab_size * itemsize,
        )

    @classmethod
    def of_ids(cls, num_ids: int) -> RowSizes:
        """Return the sizes of drawn ids with their counts, and of the number of ids per row."""
        return cls(what="drawn ids", row_bytes=num_ids * (ID_BYTES + COUNT_BYTES) + COUNT_BYTES)

    def total_bytes(self, num_rows: int) -> int:
        """Return the bytes of the given number of rows."""
        return self.fixed_bytes + num_rows * self.row_bytes


def check_room(folder: Path, num_rows: int, sizes: RowSizes, max_bytes: int | None) -> None:
    """Log the size of the rows to write, and refuse more than the disk has room for.

    Args:
        folder: of the cache, there or not.
        num_rows: learned rows to write.
        sizes: of the rows.
        max_bytes: most bytes they may take; None: nine tenths of what the disk has free.

    Raises:
        CacheTooLarge: they do not fit; nothing has been written.
    """
    needed, allowed = sizes.total_bytes(num_rows), allowed_bytes(folder, max_bytes)
    logger.info(
        "caching %s of %s positions in %s: %s (%s each), %s may be taken",
        sizes.what,
        f"{num_rows:,}",
        folder,
        readable(needed),
        readable(sizes.row_bytes),
        readable(allowed),
    )
    if needed > allowed:
        raise CacheTooLarge(
            f"{sizes.what} of {num_rows:,} positions take {readable(needed)}, {readable(allowed)} "
            f"may be taken in {folder}: use fewer prompts, another folder, a higher limit, or the "
            "teacher that reruns the target (model)"
        )


def allowed_bytes(folder: Path, max_bytes: int | None) -> int:
    """Return how many bytes may be written: at most nine tenths of the free space."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)
