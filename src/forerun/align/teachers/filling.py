"""Run the target once over every sample that a cache lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.data.sample import Sample
from forerun.align.phases import Tell
from forerun.align.teachers.cache import RowCache, key_of
from forerun.align.teachers.planner import RowSizes, check_room
from forerun.align.teachers.rows import one_per_row, passes
from forerun.align.teachers.share import Share
from forerun.align.teachers.target import TargetModel, check_samples
from forerun.errors import NumericalError

__all__ = ["Filler"]

MAX_TOKENS = 4096
"""Tokens of one pass over the target."""

MakeColumns = Callable[[TargetModel, Sample, Float[Tensor, "rows hidden"]], Mapping[str, Tensor]]
"""What is kept of a sample, from the target's hidden states at its learned rows."""


class Filler:
    """Fills a cache, and goes on where an earlier run was interrupted.

    Args:
        cache: to fill.
        load: gives the target; called only if something is lacking.
        sizes: of the rows.
        max_bytes: most bytes to write; None: nine tenths of what the disk has free.
        tell: told after every pass how many learned rows of this process's share is done.
        share: of the samples; all processes fill together.
    """

    def __init__(
        self,
        *,
        cache: RowCache,
        load: Callable[[], TargetModel],
        sizes: RowSizes,
        max_bytes: int | None,
        tell: Tell,
        share: Share,
    ) -> None:
        self.cache = cache
        self.load = load
        self.sizes = sizes
        self.max_bytes = max_bytes
        self.tell = tell
        self.share = share

    def fill(self, samples: Sequence[Sample], make_columns: MakeColumns) -> TargetModel | None:
        """Work out and keep what is lacking.

        Returns:
            The target if it had to be loaded.

        Raises:
            CacheTooLarge: it does not fit, said before the target is loaded; or the disk filled up.
            InvalidRequest: samples hold ids the target does not know, or are too long for it.
            NumericalError: the target's hidden states are not finite.
        """
        by_key = {key_of(sample): sample for sample in samples}
        lacking = [by_key[key] for key in self.cache.lacking([*by_key])]
        if lacking:
            num_rows = sum(sample.num_learned for sample in lacking)
            check_room(self.cache.folder, num_rows, self.sizes, self.max_bytes)
        self.share.wait()  # nobody writes before all have seen the same lacking, and room for it
        if not lacking:
            return None
        target = self.load()
        check_samples(lacking, target)
        try:
            self._run(target, lacking, make_columns)
        finally:  # whatever ended it: what is worked out is kept
            self.cache.flush()
        self.share.wait()
        self.cache.look_again()
        return target

    def _run(
        self, target: TargetModel, samples: Sequence[Sample], make_columns: MakeColumns
    ) -> None:
        parts = [*self.share.of([*passes(samples, MAX_TOKENS)])]
        num_rows = sum(samples[index].num_learned for part, kept in parts for index in part if kept)
        num_done = 0
        for part, kept in parts:
            states = target.hidden(one_per_row(samples, part))
            if not kept:
                continue
            lengths = [samples[index].num_learned for index in part]
            for index, own in zip(part, torch.split(states, lengths), strict=True):
                check_finite(samples[index], own)
                self.cache.put(key_of(samples[index]), make_columns(target, samples[index], own))
            num_done += sum(lengths)
            self.tell(num_done, num_rows)


def check_finite(sample: Sample, hidden: Float[Tensor, "rows hidden"]) -> None:
    """Refuse to keep what nobody can learn from.

    Raises:
        NumericalError: a hidden state holds NaN or infinity.
    """
    if not bool(hidden.isfinite().all()):
        raise NumericalError(
            "the target's hidden states are not finite in a response to the prompt "
            f"{sample.prompt_hash}; load it in bf16 or fp32"
        )
