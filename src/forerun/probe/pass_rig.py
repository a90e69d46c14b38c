"""Measures passes of one model at one context length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from forerun.models.base import KVPrefix, LanguageModel, RowBatch, Span
from forerun.models.context import Context, pack
from forerun.probe.config import ProfileCell, Quantity
from forerun.probe.stopwatch import Stopwatch
from forerun.theory.tree import TokenTree

__all__ = ["PassRig", "prefixes", "rows_of", "some_tokens"]

NUM_TIMED = 2
CHUNK = 256
STRIDE = 7919


class PassRig:
    """Measures passes after a committed prefix, and restores the sequences afterwards.

    Args:
        model: whose passes.
        cells: what to measure, all of one context.
        prefix: that context, as `prefixes` made it.
        stopwatch: of the model's device.
    """

    def __init__(
        self,
        model: LanguageModel,
        cells: Sequence[ProfileCell],
        prefix: KVPrefix,
        stopwatch: Stopwatch,
    ) -> None:
        self.model = model
        self.prefix = prefix
        self.stopwatch = stopwatch
        self._cells = tuple(cells)
        self._slots: list[int] = []

    @property
    def cells(self) -> Sequence[ProfileCell]:
        """Return the cells that this rig can measure."""
        return self._cells

    @property
    def rounds_per_visit(self) -> int:
        """Every cell is measured in every round."""
        return 1

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Fill the slots of the largest batch while the block runs."""
        store = self.model.store
        if store.feature_layers:
            store.keep_features(())  # of an engine whose steps are measured in turn
        try:
            for _ in range(max(cell.batch for cell in self.cells)):
                self._slots.append(store.reserve())
                store.import_prefix(self._slots[-1], self.prefix)
            yield
        finally:
            for slot in self._slots:
                store.free(slot)
            self._slots.clear()

    def visit(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        """Measure the seconds of a pass or a chain, without the packing of its rows.

        One goes ahead unmeasured, so that none finds the caches as a larger pass left them. What a
        pass costs among the other work of a step is seen in whole steps.
        """
        slots = self._slots[: cell.batch]
        work = self._work(cell, slots)
        seconds = []
        for _ in range(1 + NUM_TIMED):
            seconds.append(self.stopwatch.seconds(work))
            for slot in slots:
                self.model.store.commit(slot, ())
        return {cell: seconds[1:]}

    def _work(self, cell: ProfileCell, slots: Sequence[int]) -> Callable[[], object]:
        if cell.quantity is Quantity.DRAFT_CHAIN:
            batch = self._rows(slots, num_nodes=0)
            vocab_size = self.model.vocab_size
            return lambda: self.model.greedy_chain(batch, cell.size, vocab_size)
        if cell.quantity in (Quantity.TARGET_READ, Quantity.DRAFT_READ):
            batch = rows_of(self.model, slots[:1], self.prefix.num_tokens, cell.size)
        else:
            batch = self._rows(slots, num_nodes=cell.size - 1)
        return lambda: self.model.forward(batch)

    def _rows(self, slots: Sequence[int], num_nodes: int) -> RowBatch:
        """Return rows of the pending token and a drafted chain per sequence, all with logits."""
        tree = TokenTree.chain(num_nodes)
        start = self.prefix.num_tokens
        spans = [Span(slot=slot, start=start, num_chain=1, tree=tree) for slot in slots]
        num_rows = len(slots) * (1 + num_nodes)
        tokens = torch.tensor(some_tokens(num_rows, self.model.vocab_size), dtype=torch.int64)
        return pack(spans, tokens, range(num_rows), self.model.device)


def rows_of(model: LanguageModel, slots: Sequence[int], start: int, num_rows: int) -> RowBatch:
    """Return a pass over the next tokens of every slot, with logits for each slot's last token."""
    spans = [Span(slot=slot, start=start, num_chain=num_rows) for slot in slots]
    tokens = torch.tensor(some_tokens(len(slots) * num_rows, model.vocab_size), dtype=torch.int64)
    last = [(place + 1) * num_rows - 1 for place in range(len(slots))]
    return pack(spans, tokens, last, model.device)


def prefixes(
    model: LanguageModel,
    contexts: Sequence[int],
    forward: Callable[[RowBatch], object] | None = None,
) -> Mapping[int, KVPrefix]:
    """Return KV prefixes of one sequence, by length.

    Args:
        model: whose keys and values they hold.
        contexts: lengths.
        forward: runs a pass of the model; None: its own `forward`.
    """
    run = model.forward if forward is None else forward
    ids = some_tokens(max(contexts), model.vocab_size)
    context = Context(model.store, ids)
    try:
        while context.num_pending:
            chunk = context.pending(CHUNK)
            span = context.span(len(chunk))
            tokens = torch.tensor(chunk, dtype=torch.int64)
            run(pack([span], tokens, [], model.device))
            context.commit(range(len(chunk)))
        return {length: model.store.export_prefix(context.slot, length) for length in contexts}
    finally:
        context.close()


def some_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """Return arbitrary token ids from the whole vocabulary."""
    return [STRIDE * (i + 1) % vocab_size for i in range(num_tokens)]
