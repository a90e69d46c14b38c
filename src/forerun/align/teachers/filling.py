"""Run the target once over every sample that a cache lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.data.sample import Sample
from forerun.align.teachers.cache import RowCache, key_of
from forerun.align.teachers.planner import RowSizes, plan_cache
from forerun.align.teachers.rows import passes
from forerun.align.teachers.target import TargetModel, check_samples
from forerun.errors import NumericalError

__all__ = ["Filler", "Report"]

MAX_TOKENS = 4096
"""Tokens of one pass over the target."""

Report = Callable[[int, int], None]
"""Told how many learned rows are cached of how many that were lacking."""
MakeColumns = Callable[[TargetModel, Sample, Float[Tensor, "rows hidden"]], Mapping[str, Tensor]]
"""What is kept of a sample, from the target's hidden states at its learned rows."""


class Filler:
    """Fills a cache, and goes on where an earlier run was interrupted.

    Args:
        what: is cached, for people.
        cache: to fill.
        load: gives the target; called only if something is lacking.
        sizes: of the rows.
        max_bytes: most bytes to write; None: nine tenths of what the disk has free.
        report: told after every pass.
    """

    def __init__(
        self,
        *,
        what: str,
        cache: RowCache,
        load: Callable[[], TargetModel],
        sizes: RowSizes,
        max_bytes: int | None = None,
        report: Report | None = None,
    ) -> None:
        self.what = what
        self.cache = cache
        self.load = load
        self.sizes = sizes
        self.max_bytes = max_bytes
        self.report = report

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
        if not lacking:
            return None
        num_rows = sum(sample.num_learned for sample in lacking)
        folder = self.cache.folder
        plan_cache(self.what, folder, num_rows, self.sizes, self.max_bytes).check()
        target = self.load()
        check_samples(lacking, target)
        try:
            self._run(target, lacking, make_columns, num_rows)
        except KeyboardInterrupt:
            self.cache.flush()
            raise
        self.cache.flush()
        return target

    def _run(
        self,
        target: TargetModel,
        samples: Sequence[Sample],
        make_columns: MakeColumns,
        num_rows: int,
    ) -> None:
        num_done = 0
        for batch, indices in passes(samples, MAX_TOKENS):
            states = target.hidden(batch)
            lengths = [samples[index].num_learned for index in indices]
            for index, own in zip(indices, torch.split(states, lengths), strict=True):
                sample = samples[index]
                if not bool(own.isfinite().all()):
                    raise NumericalError(
                        "the target's hidden states are not finite in a response to the prompt "
                        f"{sample.prompt_hash}; load it in bf16 or fp32"
                    )
                self.cache.put(key_of(sample), make_columns(target, sample, own))
            num_done += sum(lengths)
            if self.report is not None:
                self.report(num_done, num_rows)
