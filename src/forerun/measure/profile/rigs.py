"""Loads a target with its draft, and measures their passes, chains and steps in rigs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.eagle3.drafter import AttachedModel, HeadBatch
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.registry import is_head
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import check_card, load_drafter, load_pair_member
from forerun.errors import InvalidModel, InvalidRequest, NotEnoughMemory
from forerun.measure.profile.config import OVERHEAD_OF, ProfileCell, ProfileConfig, Quantity
from forerun.measure.profile.profile import ProfileSetup
from forerun.measure.profile.rounds import Stopwatch, TimedModel
from forerun.models.base import Context, LanguageModel, RowBatch, Span, StoredModel, pack
from forerun.models.checkpoint import read_checkpoint, read_object
from forerun.models.kv_store import KVPrefix
from forerun.models.load import choose_dtype, model_folder, read_config
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import content_hash, cpu_model, num_cores
from forerun.sampling.config import SamplingParams
from forerun.theory.tree import TokenTree

logger = logging.getLogger("forerun.probe")


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPair:
    """A loaded target with its draft."""

    target: LanguageModel
    drafter: DraftModel
    tokenizer: Tokenizer
    engine: EngineConfig

    @property
    def draft(self) -> LanguageModel:
        """The draft model."""
        return self.drafter.model


def load_pair(
    target: str, draft: str, *, dtype: str, device: str, engine: EngineConfig, config: ProfileConfig
) -> tuple[LoadedPair, ProfileConfig]:
    """Load target and draft, with KV stores large enough for all measurements.

    Returns the settings too, less contexts it cannot hold and batches whose KV does not fit.
    """
    check_card(draft, target)
    config = held((target,) if is_head(model_folder(draft)) else (target, draft), config)
    batches = config.batches
    while True:
        room = with_room(engine, config)
        try:
            model, tokenizer = load_pair_member(
                target, dtype=dtype, device=device, config=room, weights=room.weights
            )
            drafter = load_drafter(draft, model, tokenizer, dtype=dtype, config=room)
            break
        except NotEnoughMemory:
            if len(config.batches) == 1:
                raise
            config = replace(config, batches=config.batches[:-1])
    if config.batches != batches:
        logger.warning("only batches up to %d fit into memory", config.batches[-1])
    if not isinstance(drafter, DraftModel):
        raise InvalidRequest(
            f"{draft} drafts without passes of a model of its own, so there is no profile of it; "
            f"measure it whole: forerun bench --arms {draft}@{engine.num_speculative_tokens}"
        )
    return LoadedPair(target=model, drafter=drafter, tokenizer=tokenizer, engine=room), config


def held(names: Sequence[str], config: ProfileConfig) -> ProfileConfig:
    """Return the settings without contexts and prompt sizes that exceed either model's context."""
    checkpoints = [read_checkpoint(model_folder(name)) for name in names]
    most = min(read_config(checkpoint)[1].max_positions for checkpoint in checkpoints)
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
    name: str, model: LanguageModel, dtype: str, *, known_hash: str | None = None
) -> ModelFacts:
    """Read facts from a model's files; the weights are hashed unless their hash is known."""
    if model_folder(name).is_file():
        raise InvalidModel(
            f"{name} is a file, and a profile is of model folders: make one with `forerun "
            "quantise`, or compare drafts for this file with `forerun bench`"
        )
    if is_eagle3(read_object(model_folder(name) / "config.json")):
        return _facts_of_head(name, model, known_hash or content_hash(name))
    checkpoint = read_checkpoint(model_folder(name))
    settings, architecture = read_config(checkpoint)
    chosen = choose_dtype(dtype, checkpoint)
    num_read = model.num_parameters
    if not settings["tie_word_embeddings"]:
        num_read -= model.vocab_size * architecture.hidden_size
    num_kv = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    return ModelFacts(
        name=name,
        content_hash=known_hash or content_hash(name),
        dtype=str(chosen).removeprefix("torch."),
        pass_bytes=num_read * chosen.itemsize,
        kv_token_bytes=num_kv * chosen.itemsize,
    )


def _facts_of_head(name: str, model: LanguageModel, hashed: str) -> ModelFacts:
    """Return the facts of an EAGLE-3 head, which reads the target's embedding."""
    assert isinstance(model, StoredModel)
    sizes, num_bytes = model.architecture, model.dtype.itemsize
    return ModelFacts(
        name=name,
        content_hash=hashed,
        dtype=str(model.dtype).removeprefix("torch."),
        pass_bytes=model.num_parameters * num_bytes,
        kv_token_bytes=2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * num_bytes,
    )


def setup_of(pair: LoadedPair, target: ModelFacts, draft: ModelFacts) -> ProfileSetup:
    """Return machine, models and settings of a measurement in this process."""
    device = pair.target.device
    gpu = f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else None
    return ProfileSetup(
        cpu=cpu_model(),
        num_cores=num_cores(),
        num_threads=num_threads_of(pair.engine),
        device=gpu or device.type,
        dtype=target.dtype,
        target_runner=type(pair.target).__name__,
        draft_runner=type(pair.draft).__name__,
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
        tokens = torch.tensor(_some_tokens(num_rows, self.model.vocab_size), dtype=torch.int64)
        return pack(spans, tokens, range(num_rows), self.model.device)


def rows_of(model: LanguageModel, slots: Sequence[int], start: int, num_rows: int) -> RowBatch:
    """Return a pass over the next tokens of every slot, with logits for each slot's last token."""
    spans = [Span(slot=slot, start=start, num_chain=num_rows) for slot in slots]
    tokens = torch.tensor(_some_tokens(len(slots) * num_rows, model.vocab_size), dtype=torch.int64)
    last = [(place + 1) * num_rows - 1 for place in range(len(slots))]
    return pack(spans, tokens, last, model.device)


def prefixes(
    model: LanguageModel,
    contexts: Sequence[int],
    forward: Callable[[RowBatch], object] | None = None,
) -> Mapping[int, KVPrefix]:
    """Return KV prefixes of one sequence, by length."""
    run = model.forward if forward is None else forward
    ids = _some_tokens(max(contexts), model.vocab_size)
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


def _some_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    return [STRIDE * (i + 1) % vocab_size for i in range(num_tokens)]


FeatureShape = tuple[int, int]
"""Layers that a head reads, and the width of the target's residual stream."""


class HeadRig(PassRig):
    """Measures passes and chains of a head after a committed prefix."""

    def __init__(
        self,
        model: AttachedModel,
        cells: Sequence[ProfileCell],
        prefix: KVPrefix,
        stopwatch: Stopwatch,
        shape: FeatureShape,
    ) -> None:
        super().__init__(model, cells, prefix, stopwatch)
        self.attached = model
        self._shape = shape

    def _work(self, cell: ProfileCell, slots: Sequence[int]) -> Callable[[], object]:
        num_rows = 1 if cell.quantity is Quantity.DRAFT_CHAIN else cell.size
        slots = slots[:1] if cell.quantity is Quantity.DRAFT_READ else slots
        batch = rows_of(self.attached, slots, self.prefix.num_tokens, num_rows)
        features = _some_features(self.attached, len(batch.tokens), self._shape)
        model, vocab_size = self.attached, self.attached.vocab_size
        if cell.quantity is Quantity.DRAFT_CHAIN:
            return lambda: model.greedy_chain(
                HeadBatch.of(batch, model.fuse(features)), cell.size, vocab_size
            )
        return lambda: model.forward(HeadBatch.of(batch, model.fuse(features)))


def head_prefixes(
    model: AttachedModel, contexts: Sequence[int], shape: FeatureShape
) -> Mapping[int, KVPrefix]:
    def forward(batch: RowBatch) -> object:
        features = _some_features(model, len(batch.tokens), shape)
        return model.forward(HeadBatch.of(batch, model.fuse(features)))

    return prefixes(model, contexts, forward)


def _some_features(model: AttachedModel, num_rows: int, shape: FeatureShape) -> Tensor:
    dtype = model.embed(torch.zeros(1, dtype=torch.int64, device=model.device)).dtype
    return torch.ones((num_rows, *shape), dtype=dtype, device=model.device)


NUM_WARM_STEPS = 4
"""After all prompts were read: the first lets the draft read them, the next find cold caches."""
WARM_S, MOST_WARM_STEPS = 0.02, 16
"""Or more of them, for so long: where a step takes a millisecond, caches take a dozen to settle."""
NUM_STEPS, SPARE_STEPS = 6, 2
"""That are timed, and that there is room for beyond them."""
MOST_STEPS = MOST_WARM_STEPS + NUM_STEPS + SPARE_STEPS
"""Of a visit, once all prompts are read."""
SAMPLED = (Quantity.SAMPLED_STEP, Quantity.SAMPLED_OVERHEAD)


class EngineRig:
    """Measures steps of short generations by the engine."""

    rounds_per_visit = 5
    """A visit is slow and yields many samples."""

    def __init__(
        self,
        *,
        target: TimedModel,
        draft: TimedModel,
        drafter_of: Callable[[LanguageModel], Drafter],
        tokenizer: Tokenizer,
        config: EngineConfig,
        cells: Sequence[ProfileCell],
    ) -> None:
        self.target = target
        self.draft = draft
        self.drafter_of = drafter_of
        self.tokenizer = tokenizer
        self.config = config
        self.cells = tuple(cells)

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()

    def visit(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        """Return the seconds of whole steps and of their overhead outside both models.

        Costs of speculative steps are reported in plain steps, so plain steps are measured
        directly after them: the speed of the machine drifts.
        """
        found = dict(self._steps(cell))
        if cell.size:
            found |= self._steps(replace(cell, size=0))
        return found

    def _steps(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        engine = self._engine(cell.size)
        sampled = cell.quantity in SAMPLED
        step = replace(cell, quantity=Quantity.SAMPLED_STEP if sampled else Quantity.GREEDY_STEP)
        params = SamplingParams(temperature=float(sampled), ignore_eos=True)
        prompt = _some_tokens(cell.context, self.target.vocab_size)
        requests = [engine.add_request(prompt, params) for _ in range(cell.batch)]
        try:
            unread = set(requests)
            while unread:
                unread -= {chunk.request_id for chunk in engine.step()}
            self._warm_up(engine, cell)
            times = [self._timed_step(engine) for _ in range(NUM_STEPS)]
        finally:
            for request_id in requests:
                engine.abort(request_id)
        outside = replace(step, quantity=OVERHEAD_OF[step.quantity])
        return {step: [total for total, _ in times], outside: [rest for _, rest in times]}

    def _warm_up(self, engine: Engine, cell: ProfileCell) -> None:
        """Run steps until memory and kernel caches are warm, within the room of the context."""
        room = min(self.target.max_context, self.draft.max_context) - cell.context
        most = max(NUM_WARM_STEPS, room // (cell.size + 1) - NUM_STEPS - SPARE_STEPS)
        clock = self.target.stopwatch.clock
        begun_s = clock()
        for num_steps in range(min(most, MOST_WARM_STEPS)):
            if num_steps >= NUM_WARM_STEPS and clock() - begun_s >= WARM_S:
                return
            engine.step()

    def _engine(self, k: int) -> Engine:
        drafter = self.drafter_of(self.draft) if k else None
        return Engine(
            target=self.target,
            tokenizer=self.tokenizer,
            drafter=drafter,
            config=replace(
                self.config, num_speculative_tokens=k, sharing="none", controller="fixed"
            ),
        )

    def _timed_step(self, engine: Engine) -> tuple[float, float]:
        before_s = self.target.inside_s + self.draft.inside_s
        step_s = self.target.stopwatch.seconds(engine.step)
        return step_s, step_s - (self.target.inside_s + self.draft.inside_s - before_s)
