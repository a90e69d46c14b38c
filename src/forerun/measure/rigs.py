"""Loads a target with its draft, and measures their passes, chains and steps in rigs.

A machine's speed drifts by more than the difference between two cells. So no cell is measured
alone: a round visits all of them, in an order that rotates, and what a round did to all its cells
(its drift) is divided out before medians are taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.config import NONE, parse_drafter
from forerun.drafters.eagle3.drafter import AttachedModel, Eagle3Drafter, HeadBatch
from forerun.drafters.foreign import OwnTokenDraft, TextDraft
from forerun.drafters.registry import is_head
from forerun.engine.auto_drafts import with_auto
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import check_draft, load_drafter, load_pair_member
from forerun.engine.observing import EmittedRecords
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.measure.profile import (
    OVERHEAD_OF,
    MeasuredCell,
    Profile,
    ProfileCell,
    ProfileConfig,
    ProfileSetup,
    Quantity,
    ReadLimit,
    chain_cells,
    pass_cells,
    read_cells,
    sizes,
    step_cells,
    without,
)
from forerun.models.base import (
    Context,
    LanguageModel,
    ModelOutput,
    RowBatch,
    Span,
    StoredModel,
    WrappedModel,
    pack,
)
from forerun.models.checkpoint import ModelFiles
from forerun.models.kv_store import KVPrefix
from forerun.models.memory import available_bytes
from forerun.provenance import collect, content_hash, num_cores, read_cpu_model
from forerun.sampling.config import Choice, SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.cost import (
    CostLine,
    CostReading,
    CostTable,
    ReadingCost,
    combine,
    interpolate,
)
from forerun.theory.intervals import Interval, median_interval
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree


class Stopwatch:
    """Times work on one device; waits for the device, so that queued work is not missed."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock = clock
        self.device = device

    def now_s(self) -> float:
        """Return the time once the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return self.clock()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that a function takes, device work included."""
        start_s = self.now_s()
        work()
        return self.now_s() - start_s


NUM_PASSES = 12


def read_bandwidth(num_bytes: int, stopwatch: Stopwatch, num_threads: int) -> tuple[float, int]:
    """Read a buffer repeatedly with the threads of the passes.

    Two reductions of 64-bit integers compete, because which of them keeps up with the memory
    depends on the device. A buffer that fits into a cache is read at the cache's rate, and so are
    weights of that size.

    Returns the best rate in bytes per second, and the bytes of the buffer.
    """
    device = stopwatch.device
    num_bytes = min(num_bytes, available_bytes(device) // 2)
    buffer = torch.ones(max(1, num_bytes // 8), dtype=torch.int64, device=device)
    reads = (buffer.sum, buffer.amax)
    with torch_threads(num_threads):
        times_s = [stopwatch.seconds(read) for _ in range(NUM_PASSES) for read in reads]
    buffer_bytes = buffer.numel() * buffer.itemsize
    return buffer_bytes / min(times_s), buffer_bytes


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Give torch this number of threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


LEAST_SAMPLES = 6
"""Least number of values whose range contains the median with a probability of 95%."""

T = TypeVar("T")

Samples = Mapping[ProfileCell, Sequence[Sequence[float]]]
"""Seconds per cell and round; a visit may yield several, and not every round visits every cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Samples of all rounds, and the cells that were left out."""

    samples: Samples
    left_out: tuple[ProfileCell, ...]
    stable: bool


def measure(
    rigs: Sequence[Rig],
    config: ProfileConfig,
    clock: Callable[[], float],
    notify: Callable[[int, float], None],
) -> Rounds:
    """Measure all cells of a profile in rounds, until their medians are stable or time runs out."""
    asked = [cell for rig in rigs for cell in rig.cells]
    # The first round is not counted: first passes are slow. It also shows which cells do not fit.
    samples: dict[ProfileCell, list[Sequence[float]]] = {
        cell: [] for cell in one_round(rigs, asked, num_rounds=0)
    }
    started_s, longest_s = clock(), 0.0
    num_rounds, error = 0, math.inf
    while num_rounds < config.min_rounds or (
        error > config.target_error and clock() - started_s + longest_s <= config.budget_s
    ):
        round_started_s = clock()
        found = one_round(rigs, samples, num_rounds)
        longest_s = max(longest_s, clock() - round_started_s)
        num_rounds += 1
        samples = {cell: [*samples[cell], seconds] for cell, seconds in found.items()}
        error = widest(samples)
        notify(num_rounds, error)
    left_out = tuple(cell for cell in asked if cell not in samples)
    if left_out:
        logger.warning(
            "%d of %d measurements do not fit into memory and were left out; the first is the %s",
            len(left_out),
            len(asked),
            left_out[0],
        )
    return Rounds(samples=samples, left_out=left_out, stable=error <= config.target_error)


def one_round(
    rigs: Sequence[Rig], cells: Collection[ProfileCell], num_rounds: int
) -> dict[ProfileCell, Sequence[float]]:
    left = set(cells)
    found: dict[ProfileCell, Sequence[float]] = {cell: () for cell in cells}
    due = [rig for rig in rigs if num_rounds % rig.rounds_per_visit == 0]
    for rig in rotated(due, num_rounds):
        with rig.ready():
            for cell in rotated(rig.cells, num_rounds):
                if cell not in left or found[cell]:
                    continue
                try:
                    for visited, seconds in rig.visit(cell).items():
                        found[visited] = (*found[visited], *seconds)
                except Exception as error:
                    if not _is_out_of_memory(error):
                        raise
                    left = fitting(left, cell, error)
    return {cell: seconds for cell, seconds in found.items() if cell in left}


def fitting(
    cells: Collection[ProfileCell], failed: ProfileCell, error: Exception
) -> set[ProfileCell]:
    """Return the cells that remain after one ran out of memory."""
    left = set(without(cells, failed))
    if not left:
        raise NotEnoughMemory(f"{failed} does not fit into memory: {error}") from error
    return left


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, NotEnoughMemory | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def rotated(items: Sequence[T], shift: int) -> Iterator[T]:
    start = shift % len(items) if items else 0
    yield from items[start:]
    yield from items[:start]


def corrected(samples: Samples) -> dict[ProfileCell, list[float]]:
    """Samples divided by the machine's relative speed in their round (Tukey 1977)."""
    middles = {cell: median(s for v in visits for s in v) for cell, visits in samples.items()}
    drift = []
    for i in range(max(map(len, samples.values()))):
        relative = [median(samples[c][i]) / s for c, s in middles.items() if s and samples[c][i]]
        drift.append(median(relative) if relative else 1.0)
    return {
        cell: [s / drift[i] for i, visit in enumerate(visits) for s in visit]
        for cell, visits in samples.items()
    }


def estimates(samples: Samples) -> dict[ProfileCell, Interval]:
    return {cell: median_interval(seconds) for cell, seconds in corrected(samples).items()}


def widest(samples: Samples) -> float:
    """Return half of the widest interval, relative to its estimate.

    For overheads and drafts smaller than a plain target pass it is a share of that pass, because a
    relative error of a small part hardly changes the time of a step. Infinite while there are too
    few samples for an interval of 95%.
    """
    if min(sum(map(len, visits)) for visits in samples.values()) < LEAST_SAMPLES:
        return math.inf
    found = estimates(samples)
    plain_s = {
        (cell.batch, cell.context): interval.estimate
        for cell, interval in found.items()
        if cell.quantity is Quantity.TARGET_PASS and cell.size == 1
    }
    floor_s = {batch: min(s for (b, _), s in plain_s.items() if b == batch) for batch, _ in plain_s}
    return max(
        (interval.high - interval.low) / 2 / max(interval.estimate, floor_s.get(cell.batch, 0.0))
        for cell, interval in found.items()
        if interval.high > 0
    )


logger = logging.getLogger("forerun.measure")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Name, hash, sizes and runner of one model.

    Attributes:
        pass_bytes: weights read by a pass; of an embedding that is not also the head only rows are.
    """

    name: str
    content_hash: str
    dtype: str
    pass_bytes: int
    kv_token_bytes: int


def draft_of(drafter: Drafter | None) -> LanguageModel | None:
    """Return the model that a drafter reads text with; None if it has none of its own."""
    drafter = drafter.draft if isinstance(drafter, TextDraft) else drafter
    return None if drafter is None else drafter.model


def reads_ids(drafter: Drafter | None) -> bool:
    """Whether a drafter is a model that continues any token ids of the target."""
    return draft_of(drafter) is not None and not isinstance(drafter, OwnTokenDraft | TextDraft)


def load_pair(
    target: str,
    draft: str | None,
    *,
    dtype: str,
    device: str,
    engine: EngineConfig,
    config: ProfileConfig,
) -> tuple[Engine, ProfileConfig]:
    """Load target and draft, with KV stores large enough for all measurements.

    Returns the settings too, less contexts it cannot hold and batches whose KV does not fit.
    """
    names = [target]
    if draft is not None:
        files = ModelFiles.open(target)
        draft = str(with_auto([draft], files, device, dtype, engine)[0][0])  # "mtp" of the target
        check_draft(draft, target)
        if parse_drafter(draft) is None and not is_head(ModelFiles.find(draft).folder):
            names.append(draft)
    config = held(names, config)
    batches = config.batches
    while True:
        room = with_room(engine, config)
        try:
            model, tokenizer = load_pair_member(
                target, dtype=dtype, device=device, config=room, weights=room.weights
            )
            drafter = None
            if draft is not None:
                drafter = load_drafter(draft, model, tokenizer, dtype=dtype, config=room)
            break
        except NotEnoughMemory:
            if len(config.batches) == 1:
                raise
            config = replace(config, batches=config.batches[:-1])
    if config.batches != batches:
        logger.warning("only batches up to %d fit into memory", config.batches[-1])
    return Engine(target=model, tokenizer=tokenizer, drafter=drafter, config=room), config


def held(names: Sequence[str], config: ProfileConfig) -> ProfileConfig:
    """Return the settings without contexts and prompt sizes that exceed either model's context."""
    most = min(ModelFiles.open(name).sizes.max_positions for name in names)
    contexts = tuple(context for context in config.contexts if context + config.rows[-1] <= most)
    if not contexts:
        raise InvalidRequest(
            f"no context of {list(config.contexts)} tokens fits with {config.rows[-1]} rows behind "
            f"it: the pair holds {most} tokens; give shorter contexts or fewer rows"
        )
    read = tuple(size for size in config.read if contexts[0] + size <= most)
    return replace(config, contexts=contexts, read=read)


def with_room(engine: EngineConfig, config: ProfileConfig) -> EngineConfig:
    most_rows = max(engine.max_step_rows, config.batches[-1] * config.rows[-1])
    chunk = min(engine.prefill_chunk, most_rows // config.batches[-1])
    # Every step may accept everything, and the first prompt decodes while others are read.
    num_steps = MOST_STEPS + -(-config.contexts[0] // chunk)
    steps = config.contexts[0] + num_steps * (config.drafted[-1] + 1)
    text = config.contexts[0] + max(config.read, default=0)
    return replace(
        engine,
        num_speculative_tokens=config.rows[-1] - 1,
        max_batch=config.batches[-1],
        max_context=max(config.contexts[-1] + config.rows[-1], steps, text),
        max_step_rows=most_rows,
    )


def facts_of(
    name: str | None, model: LanguageModel | None, *, known_hash: str | None = None
) -> ModelFacts:
    """Return the facts of a loaded model; the weights are hashed unless their hash is known.

    A draft that has no files of its own is identified by its name.
    """
    has_files = name is not None and parse_drafter(name) is None
    name = NONE if name is None else name
    stored: object = model.model if isinstance(model, WrappedModel) else model
    dtype, pass_bytes, kv_bytes = "", 0, 0
    if model is not None and isinstance(stored, StoredModel):
        dtype, element_bytes = str(stored.dtype).removeprefix("torch."), stored.dtype.itemsize
        kv_bytes = stored.architecture.kv_token_elements * element_bytes
        folder = ModelFiles.find(name).folder if has_files else None
        if model.bytes_read is not None and (folder is None or folder.is_file()):
            pass_bytes = model.bytes_read
        else:
            num_read = model.num_parameters
            if folder is not None and not is_head(folder):
                files = ModelFiles.open(folder)
                is_tied = files.settings["tie_word_embeddings"]
                num_read -= 0 if is_tied else model.vocab_size * files.sizes.hidden_size
            pass_bytes = num_read * element_bytes
    return ModelFacts(
        name=name,
        content_hash=known_hash or (content_hash(name) if has_files else name),
        dtype=dtype,
        pass_bytes=pass_bytes,
        kv_token_bytes=kv_bytes,
    )


def setup_of(
    model: LanguageModel,
    drafter: Drafter | None,
    engine: EngineConfig,
    facts: tuple[ModelFacts, ModelFacts],
) -> ProfileSetup:
    """Return machine, models and settings of a measurement in this process.

    Args:
        model: the target.
        facts: of target and draft.
    """
    device = model.device
    gpu = f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else None
    drafts, (target, draft) = draft_of(drafter) or drafter, facts
    return ProfileSetup(
        cpu=read_cpu_model(),
        num_cores=num_cores(),
        num_threads=num_threads_of(engine),
        device=gpu or device.type,
        dtype=target.dtype,
        target_runner=type(model).__name__,
        draft_runner=NONE if drafts is None else type(drafts).__name__,
        target_hash=target.content_hash,
        draft_hash=draft.content_hash,
    )


def num_threads_of(engine: EngineConfig) -> int:
    return engine.num_threads or torch.get_num_threads()


NUM_TIMED = 2
CHUNK = 256
STRIDE = 7919


class PassRig:
    """Measures passes after a committed prefix, and restores the sequences afterwards."""

    rounds_per_visit = 1

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
        self.cells = tuple(cells)
        self._slots: list[int] = []

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
        work = self._prepare(cell, slots)
        seconds = []
        for _ in range(1 + NUM_TIMED):
            seconds.append(self.stopwatch.seconds(work))
            for slot in slots:
                self.model.store.commit(slot, ())
        return {cell: seconds[1:]}

    def _prepare(self, cell: ProfileCell, slots: Sequence[int]) -> Callable[[], object]:
        start, model = self.prefix.num_tokens, self.model
        if cell.quantity is Quantity.DRAFT_CHAIN:
            batch = pack_rows(model, slots, start, 1)
            return lambda: model.greedy_chain(batch, cell.size, model.vocab_size)
        if cell.quantity is Quantity.TARGET_PASS:
            batch = self._pack_verified(slots, num_nodes=cell.size - 1)
        else:
            slots = slots if cell.quantity is Quantity.DRAFT_PASS else slots[:1]
            batch = pack_rows(model, slots, start, cell.size)
        return lambda: model.forward(batch)

    def _pack_verified(self, slots: Sequence[int], num_nodes: int) -> RowBatch:
        """Return rows of the pending token and a drafted chain per sequence, all with logits."""
        tree = TokenTree.chain(num_nodes)
        start = self.prefix.num_tokens
        spans = [Span(slot=slot, start=start, num_chain=1, tree=tree) for slot in slots]
        num_rows = len(slots) * (1 + num_nodes)
        tokens = torch.tensor(_make_tokens(num_rows, self.model.vocab_size), dtype=torch.int64)
        return pack(spans, tokens, range(num_rows), self.model.device)


def pack_rows(model: LanguageModel, slots: Sequence[int], start: int, num_rows: int) -> RowBatch:
    """Return a pass over the next tokens of every slot, with logits for each slot's last token."""
    spans = [Span(slot=slot, start=start, num_chain=num_rows) for slot in slots]
    tokens = torch.tensor(_make_tokens(len(slots) * num_rows, model.vocab_size), dtype=torch.int64)
    last = [(place + 1) * num_rows - 1 for place in range(len(slots))]
    return pack(spans, tokens, last, model.device)


def prefixes(model: LanguageModel, contexts: Sequence[int]) -> Mapping[int, KVPrefix]:
    """Return KV prefixes of one sequence, by length."""
    ids = _make_tokens(max(contexts), model.vocab_size)
    context = Context(model.store, ids)
    try:
        while context.num_pending:
            chunk = context.pending(CHUNK)
            span = context.span(len(chunk))
            tokens = torch.tensor(chunk, dtype=torch.int64)
            model.forward(pack([span], tokens, [], model.device))
            context.commit(range(len(chunk)))
        return {length: model.store.export_prefix(context.slot, length) for length in contexts}
    finally:
        context.close()


def _make_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    return [STRIDE * (i + 1) % vocab_size for i in range(num_tokens)]


class FedHead(WrappedModel):
    """A head whose passes read constant features in place of the target's.

    Args:
        layers: number of the target's layers that the head reads.
        width: of the target's residual stream.
    """

    def __init__(self, head: AttachedModel, layers: int, width: int) -> None:
        super().__init__(head)
        self._head = head
        dtype = head.embed(torch.zeros(1, dtype=torch.int64, device=head.device)).dtype
        self._feature = torch.ones((1, layers, width), dtype=dtype, device=head.device)

    def forward(self, batch: RowBatch) -> ModelOutput:
        return self._head.forward(self._add_features(batch))

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        return self._head.greedy_chain(self._add_features(batch), num_tokens, vocab_size)

    def _add_features(self, batch: RowBatch) -> HeadBatch:
        features = self._feature.repeat(len(batch.tokens), 1, 1)
        return HeadBatch.of(batch, self._head.fuse(features))


NUM_WARM_STEPS = 4
"""Least untimed steps after prefill: in the first the draft reads the prompts, then caches warm."""
WARM_S, MOST_WARM_STEPS = 0.02, 16
"""Untimed steps go on for this many seconds, up to this number: caches need a dozen short steps."""
NUM_STEPS, SPARE_STEPS = 6, 14
"""Least timed steps of a visit, and steps for which the context has room besides: a call takes up
to eight, so that the warm-up and the timed steps may each take seven more."""
MOST_STEPS = MOST_WARM_STEPS + NUM_STEPS + SPARE_STEPS
"""Most steps of a visit after prefill."""
SAMPLED = (Quantity.SAMPLED_STEP, Quantity.SAMPLED_OVERHEAD)
REPEATED = "The quick brown fox jumps over the lazy dog, and it jumps back.\n"


class FilledDraft(Drafter):
    """A drafter whose proposals are filled to K tokens, so that every step verifies as many."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.method = drafter.method
        self.required_features = drafter.required_features
        self.required_top_k = drafter.required_top_k

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.drafter.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self.drafter.forget(request_id)

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft, then repeat the last token where too few were proposed for the plan."""
        found = self.drafter.propose(requests, plans)
        return [_fill_proposal(*each) for each in zip(requests, plans, found, strict=True)]


def _fill_proposal(request: DraftRequest, plan: Plan, found: object) -> Proposal | None:
    """Return a chain of the planned length that begins with what was proposed."""
    k = plan.shape.num_nodes
    proposal = found if isinstance(found, Proposal) else None
    if proposal is not None and (proposal.num_drafted >= k or proposal.draft_probs is not None):
        return proposal
    drafted = [] if proposal is None else proposal.tokens.tolist()
    tokens = [*drafted, *request.ids[-1:] * (k - len(drafted))]
    return Proposal(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        tree=TokenTree.chain(k),
        choice=Choice.DETERMINISTIC,
    )


class EngineRig:
    """Measures steps of short generations by the engine."""

    rounds_per_visit = 5
    """Cells are visited in every fifth round, for a visit is slow and yields many samples."""

    def __init__(self, pair: Engine, cells: Sequence[ProfileCell], stopwatch: Stopwatch) -> None:
        self.pair = pair
        self.cells = tuple(cells)
        self.stopwatch = stopwatch

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()

    def visit(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        """Return the seconds of whole steps, and of them beyond drafting and the target's pass.

        Costs of speculative steps are reported in plain steps, so plain steps are measured
        directly after them: the speed of the machine drifts.
        """
        found = dict(self._run_steps(cell))
        if cell.size:
            found |= self._run_steps(replace(cell, size=0))
        return found

    def _run_steps(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        pair = self.pair
        config = replace(
            pair.config, num_speculative_tokens=cell.size, sharing="none", controller="fixed"
        )
        if self._count_room(cell) < MOST_STEPS:
            config = replace(config, cycles_per_call=1)
        drafter = pair.drafter if cell.size else None
        if drafter is not None and not reads_ids(drafter):
            drafter = FilledDraft(drafter)
        engine = Engine(
            target=pair.target, tokenizer=pair.tokenizer, drafter=drafter, config=config
        )
        sampled = cell.quantity in SAMPLED
        step = replace(cell, quantity=Quantity.SAMPLED_STEP if sampled else Quantity.GREEDY_STEP)
        params = SamplingParams(temperature=float(sampled), ignore_eos=True)
        requests = [engine.add_request(self._prompt(cell), params) for _ in range(cell.batch)]
        times: list[tuple[float, float]] = []
        try:
            unread = set(requests)
            while unread:
                unread -= {chunk.request_id for chunk in engine.step()}
            self._warm_up(engine, cell)
            while len(times) < NUM_STEPS and engine.has_unfinished:
                times += self._time_steps(engine)
        finally:
            for request_id in requests:
                engine.abort(request_id)
        outside = replace(step, quantity=OVERHEAD_OF[step.quantity])
        return {step: [total for total, _ in times], outside: [rest for _, rest in times]}

    def _time_steps(self, engine: Engine) -> list[tuple[float, float]]:
        """Return the seconds of the steps of one call, and of each without draft and target pass.

        What the call takes beyond its steps is divided among them.
        """
        cycles: dict[int, StepRecord] = {}
        engine.observers[:] = [EmittedRecords(lambda r: cycles.setdefault(r.cycle_id, r))]
        call_s = self.stopwatch.seconds(engine.step)
        spent = [(r.draft_s + r.verify_s, r.other_s) for r in cycles.values()]
        beyond_s = call_s - sum(map(sum, spent))
        rests = [(passes_s, other_s + beyond_s / len(spent)) for passes_s, other_s in spent]
        return [(passes_s + rest_s, rest_s) for passes_s, rest_s in rests]

    def _prompt(self, cell: ProfileCell) -> list[int]:
        """Return a text that repeats, which copies and other tokenizers can draft, or any ids."""
        pair = self.pair
        if pair.drafter is None or reads_ids(pair.drafter):
            return _make_tokens(cell.context, pair.target.vocab_size)
        per_sentence = max(1, len(pair.tokenizer.encode(REPEATED)) - 2)  # without special tokens
        text = REPEATED * (1 + cell.context // per_sentence)
        return pair.tokenizer.encode(text)[: cell.context]

    def _count_room(self, cell: ProfileCell) -> int:
        """Return for how many steps the context has room if each accepts everything."""
        models = (self.pair.target, draft_of(self.pair.drafter))
        most = min(model.max_context for model in models if model is not None)
        return (most - cell.context) // (cell.size + 1)

    def _warm_up(self, engine: Engine, cell: ProfileCell) -> None:
        """Run steps until memory and kernel caches are warm, within the room of the context."""
        most = max(NUM_WARM_STEPS, self._count_room(cell) - NUM_STEPS - SPARE_STEPS)
        clock = self.stopwatch.clock
        begun_s, begun = clock(), engine.stats().num_steps
        while (num_steps := engine.stats().num_steps - begun) < min(most, MOST_WARM_STEPS):
            if num_steps >= NUM_WARM_STEPS and clock() - begun_s >= WARM_S:
                return
            engine.step()


Rig = PassRig | EngineRig
"""What measures cells, each a quantity at one size, with the same models."""
Estimates = Mapping[ProfileCell, Interval]


def cost_table(found: Estimates, *, sampled: bool) -> CostTable:
    """Return the cost table of greedy or of sampled decoding from measured durations.

    A plain step is measured whole at the shortest context; at others it grows as its pass does. Of
    a speculative step, what is beyond its passes measured alone (the engine's own work, and passes
    that are slower among it) is laid on a straight line over K. Its slope and that of the draft's
    chains are what a drafted token adds. What is left of a step, at every measured K, is its
    overhead, so that at the shortest context a cycle takes just what was measured. Only where less
    than nothing is left, the overhead is 0 and the cycle costs more than was measured.
    """
    places = {(c.batch, c.context) for c in found if c.quantity is Quantity.TARGET_PASS}
    (shortest,) = {c.context for c in found if c.quantity is Quantity.GREEDY_STEP}
    lines = {
        place: _build_line(found, *place, shortest, sampled=sampled) for place in sorted(places)
    }
    return CostTable(
        lines=tuple(
            _add_overhead(line, lines[batch, shortest], found, sampled=sampled)
            for (batch, _), line in lines.items()
        )
    )


def _build_line(
    found: Estimates, batch: int, context: int, shortest: int, *, sampled: bool
) -> CostLine:
    """Return the costs at one batch size and context, without the overhead outside both models."""
    plain, steps = _read_steps(found, batch, shortest, sampled=sampled)
    passes = readings(found, Quantity.TARGET_PASS, batch, context)
    short_passes = readings(found, Quantity.TARGET_PASS, batch, shortest)
    if context != shortest:
        plain = combine([1, 1, -1], [plain, passes[1], short_passes[1]])
    chain = drafting(found, batch, shortest, steps, sampled=sampled)
    beyond = {
        k: combine([1, -1, -1], [step, chain[k], _interpolate_size(short_passes, k + 1)])
        for k, step in steps.items()
    }
    chains = drafting(found, batch, context, steps, sampled=sampled)
    draft = combine([1, 1], [slope_of(chains), slope_of(beyond)])
    return CostLine(
        batch=batch,
        context=context,
        rows=tuple(passes),
        verify_s=tuple(reading.s for reading in passes.values()),
        verify_error_s=tuple(reading.error_s for reading in passes.values()),
        plain_s=plain.s,
        plain_error_s=plain.error_s,
        draft_s=draft.s,
        draft_error_s=draft.error_s,
    )


def _add_overhead(
    line: CostLine, shortest: CostLine, found: Estimates, *, sampled: bool
) -> CostLine:
    """Return the costs at one context with the overhead outside both models added.

    At other contexts than the shortest, the chains of those take the place of its own. The error is
    that of the step: those of drafting and of the pass are counted with drafting and the pass. The
    steps were measured on arbitrary tokens, of which none is accepted; a head that reads accepted
    tokens again is charged for half of K.
    """
    _, steps = _read_steps(found, line.batch, shortest.context, sampled=sampled)
    if not steps:
        return line  # of plain decoding
    here, there = (
        drafting(found, line.batch, context, steps, sampled=sampled)
        for context in (line.context, shortest.context)
    )
    again = {k: _catch_up_s(found, line.batch, line.context, k) for k in steps}
    left_s = [
        step.s - shortest.verify(k + 1).s - k * line.draft_s + here[k].s - there[k].s + again[k]
        for k, step in steps.items()
    ]
    return replace(
        line,
        overhead_ks=tuple(steps),
        overhead_s=tuple(max(0.0, s) for s in left_s),
        overhead_error_s=tuple(step.error_s for step in steps.values()),
    )


def _catch_up_s(found: Estimates, batch: int, context: int, k: int) -> float:
    passes = readings(found, Quantity.DRAFT_PASS, batch, context)
    return (
        max(0.0, _interpolate_size(passes, 1 + k / 2).s - passes[1].s) if len(passes) > 1 else 0.0
    )


def reading_cost(found: Estimates) -> ReadingCost | None:
    """Return the prompt reading cost; None unless two sizes were measured.

    A draft that reads no prompts, such as one that shares the target's KV, has no such times.
    """
    target, draft = (
        {cell.size: interval.estimate for cell, interval in found.items() if cell.quantity is kind}
        for kind in (Quantity.TARGET_READ, Quantity.DRAFT_READ)
    )
    draft = draft or dict.fromkeys(target, 0.0)
    common = sorted(target.keys() & draft.keys())
    if len(common) < 2:
        return None
    return ReadingCost(
        tokens=tuple(common),
        target_s=tuple(target[size] for size in common),
        draft_s=tuple(draft[size] for size in common),
    )


def _read_steps(
    found: Estimates, batch: int, context: int, *, sampled: bool
) -> tuple[CostReading, dict[int, CostReading]]:
    quantity = Quantity.SAMPLED_STEP if sampled else Quantity.GREEDY_STEP
    steps = readings(found, quantity, batch, context)
    return steps.pop(0), steps


def drafting(
    found: Estimates, batch: int, context: int, ks: Iterable[int], *, sampled: bool
) -> dict[int, CostReading]:
    """Return the draft time of a cycle by K, as measured without a target pass.

    It is 0 for a drafter without passes of its own, whose whole cost is in the steps.
    """
    if sampled:
        passes = readings(found, Quantity.DRAFT_PASS, batch, context)
        chains = {k: passes[1].times(k) for k in ks if passes}
    else:
        chains = readings(found, Quantity.DRAFT_CHAIN, batch, context)
    return {k: chains.get(k, CostReading(0.0)) for k in ks}


def _interpolate_size(points: Mapping[int, CostReading], size: float) -> CostReading:
    return interpolate(list(points), list(points.values()), size)


def readings(
    found: Estimates, quantity: Quantity, batch: int, context: int
) -> dict[int, CostReading]:
    result = {}
    for size in sizes(found, quantity, batch, context):
        interval = found[ProfileCell(quantity, batch, context, size)]
        result[size] = CostReading(interval.estimate, (interval.high - interval.low) / 2)
    return result


def slope_of(points: Mapping[int, CostReading]) -> CostReading:
    """Return the additional time per unit of size, by least squares.

    A single point, or a line that would start below 0, goes through the origin; a falling one is
    flat. Where even the mean is below 0 there is nothing at all.
    """
    xs, times = list(points), list(points.values())
    if not xs or sum(reading.s for reading in times) < 0:
        return CostReading(0.0)
    middle = sum(xs) / len(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    if not spread:
        return _fit_through_origin(xs, times)
    slope_weights = [(x - middle) / spread for x in xs]
    start_weights = [1 / len(xs) - middle * weight for weight in slope_weights]
    slope, start = combine(slope_weights, times), combine(start_weights, times)
    if slope.s < 0:
        return CostReading(0.0, slope.error_s)
    return slope if start.s >= 0 else _fit_through_origin(xs, times)


def _fit_through_origin(xs: Sequence[int], times: Sequence[CostReading]) -> CostReading:
    square = sum(x * x for x in xs)
    return combine([x / square for x in xs], times)


def measure_pair(
    pair: Engine,
    facts: tuple[ModelFacts, ModelFacts],
    config: ProfileConfig,
    *,
    clock: Callable[[], float],
    notify: Callable[[int, float], None],
) -> Profile:
    """Measure a loaded target with its draft and return the profile."""
    target, draft = facts
    stopwatch = Stopwatch(clock, pair.target.device)
    num_threads = num_threads_of(pair.config)
    before = read_bandwidth(target.pass_bytes, stopwatch, num_threads)
    rounds = measure(rigs(pair, config, stopwatch), config, clock, notify)
    # The better of two rates, because the machine may have been busy during one of them.
    after = read_bandwidth(target.pass_bytes, stopwatch, num_threads)
    bytes_per_s, buffer_bytes = max(before, after)
    return Profile(
        target=target.name,
        draft=draft.name,
        setup=setup_of(pair.target, pair.drafter, pair.config, facts),
        provenance=collect({fact.name: fact.content_hash for fact in facts}, num_threads).to_dict(),
        limit=ReadLimit(
            bytes_per_s=bytes_per_s,
            buffer_bytes=buffer_bytes,
            target_bytes=target.pass_bytes,
            draft_bytes=draft.pass_bytes,
            kv_token_bytes=target.kv_token_bytes,
        ),
        left_out=rounds.left_out,
        stable=rounds.stable,
        **estimates_of(rounds.samples),
    )


def estimates_of(samples: Samples) -> dict[str, Any]:
    """Return the fields of a profile that samples decide; drift is divided out round by round."""
    found = estimates(samples)
    return dict(
        measured=tuple(
            MeasuredCell(cell=cell, seconds=found[cell], samples_s=tuple(map(tuple, visits)))
            for cell, visits in samples.items()
        ),
        greedy=cost_table(found, sampled=False),
        sampled=cost_table(found, sampled=True),
        reading=reading_cost(found),
    )


def rigs(pair: Engine, config: ProfileConfig, stopwatch: Stopwatch) -> Sequence[Rig]:
    """Return all measurements, grouped by the models and sequences they need."""
    pair.target.store.keep_features(())
    target_prefixes = prefixes(pair.target, config.contexts)
    shortest = config.contexts[0]
    passes = [
        PassRig(pair.target, list(pass_cells(config, context)), prefix, stopwatch)
        for context, prefix in target_prefixes.items()
    ]
    if config.read:
        cells = list(read_cells(config, Quantity.TARGET_READ))
        passes.append(PassRig(pair.target, cells, target_prefixes[shortest], stopwatch))
    drafted = config.drafted if pair.drafter is not None else ()
    steps = EngineRig(pair, list(step_cells(config, drafted)), stopwatch)
    return [*passes, *_draft_rigs(pair, config, stopwatch), steps]


def _draft_rigs(pair: Engine, config: ProfileConfig, stopwatch: Stopwatch) -> Iterator[PassRig]:
    """Yield the measurements of the draft's passes by context, and of its prompt reading.

    A drafter whose chains are no chains of a model's passes is measured in whole steps alone.
    """
    drafter, model = pair.drafter, draft_of(pair.drafter)
    if drafter is None or model is None:
        return
    catches_up = bool(drafter.required_features)
    if isinstance(drafter, Eagle3Drafter):
        model = FedHead(drafter.attached, len(drafter.feature_layers), pair.target.hidden_size)
    found = prefixes(model, config.contexts)
    if drafter.model is not None:
        for context, prefix in found.items():
            cells = list(chain_cells(config, context, catches_up=catches_up))
            yield PassRig(model, cells, prefix, stopwatch)
    if config.read and drafter.reads_text:
        cells = list(read_cells(config, Quantity.DRAFT_READ))
        yield PassRig(model, cells, found[config.contexts[0]], stopwatch)
