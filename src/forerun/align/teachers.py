"""Teachers: their interface, the target as one, and a cache on disk of the rows they yield.

A shard is written whole or not at all, and its name ends in the hash of its content: a process that
is killed loses only the shard it was filling, and a damaged shard is computed again. The name of
the folder has everything that decides its content, so the cache of a changed target is never used.
The target runs once over every sample that is missing, if the disk has room.

A state takes kilobytes where a row of logits takes hundreds, and nothing is lost: the cached head
gives the same logits as the target, so every objective may learn from them at any temperature. Both
are stored in the target's dtype, and training then does not need the target itself.

The teachers of attached heads also provide features, the residual stream entering some layers. Both
come from one pass, made in every training step or once for a cache.

Shares of drawn ids are unbiased estimates of the target's probabilities, so an objective that is
linear in these has an unbiased gradient; any other objective would be biased. The draws of a row
are equidistant on the cumulative sum of its probabilities, with one random offset: the share of an
id then differs from its probability by less than one draw, where independent draws would differ by
the root of their number. A greedy distribution is one id, stored as it is.

Of a server's log-probabilities, all tokens that are not named count as one more token with the
missing mass. The probabilities are therefore exact at temperature 1, somewhat too small below it
and too large above, and exact at any temperature where the deployment's own truncation drops the
tokens that are not named.

Source: arXiv 2503.16870 on drawn ids; Kitagawa 1996 on equidistant draws.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forerun.align.objectives import (
    DenseDistribution,
    SparseDistribution,
    TargetDistribution,
    deployed_distribution,
)
from forerun.align.samples import PackedBatch, Sample, packed_inputs
from forerun.align.workspace import OnProgress
from forerun.atomic_write import atomic_write
from forerun.cache import find_cached, hash_of, is_whole, write_cached
from forerun.errors import (
    CacheTooLarge,
    InvalidCache,
    InvalidRequest,
    NotEnoughMemory,
    NumericalError,
    UnsupportedFeatures,
)
from forerun.models.architecture import check_trainable, read_architecture
from forerun.models.checkpoint import read_checkpoint
from forerun.models.huggingface import MODULE_NAMES, captured, read_weights
from forerun.models.load import choose_device, choose_dtype, model_folder, read_config
from forerun.models.memory import available_bytes, readable
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import row_chunks
from forerun.sampling.noise import position_key, request_key, uniform


@runtime_checkable
class TeacherRows(Protocol):
    """The target's distribution at the learned rows of one batch, computed in chunks.

    Full-vocabulary rows are large (256 rows x 152k are 156 MB in fp32), so no more than a chunk of
    them is ever asked for at once.
    """

    def __len__(self) -> int:
        """Number of learned rows in the batch."""

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows, under the deployed temperature and truncation."""


@runtime_checkable
class Teacher(Protocol):
    """A source of the target's distributions."""

    @property
    def truncated(self) -> bool:
        """Whether probability mass is missing, as in a server's top-k."""

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Prepare for batches that contain these samples, for example by filling a cache.

        Raises:
            CacheTooLarge: it would not fit, and nothing is written; or the disk filled up.
            InvalidCache: the folder holds the cache of something else.
            InvalidRequest: a sample has ids that the target lacks, is too long for it, or lacks the
                log-probabilities of a server.
        """

    def rows(self, batch: PackedBatch) -> TeacherRows:
        """Return the distributions at the learned rows of a batch over prepared samples."""


logger = logging.getLogger("forerun.preparation")

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """One of several processes that together fill a cache on a shared disk."""

    index: int = 0
    number: int = 1
    wait: Callable[[], None] = lambda: None

    def of(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """Yield the parts assigned to this process, and whether it stores the result of each.

        All processes get equally many, as a target whose weights are spread over them needs: where
        the parts run out, the first is done again for nothing.
        """
        for start in range(0, len(parts), self.number):
            place = start + self.index
            if place < len(parts):
                yield parts[place], True
            else:
                yield parts[0], False


ALONE = ProcessShare()
"""A single process, which waits for no other."""


def learned_places(sample: Sample) -> Int64[Tensor, " learned"]:
    ranges = [torch.arange(start - 1, end - 1) for start, end in sample.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def sample_runs(
    batch: PackedBatch, samples: Sequence[Sample]
) -> Iterator[tuple[int, Int64[Tensor, " rows"]]]:
    predicts = batch.predicts.cpu()
    owners, counts = torch.unique_consecutive(batch.samples.cpu()[predicts], return_counts=True)
    positions = torch.split(batch.positions.cpu()[predicts], counts.tolist())
    for index, places in zip(owners.tolist(), positions, strict=True):
        known = learned_places(samples[index])
        rows = torch.searchsorted(known, places)
        if not len(known) or not torch.equal(known[rows.clamp(max=len(known) - 1)], places):
            raise InvalidCache(
                f"sample {index} of the batch is learned at other places than the sample prepared; "
                "a teacher must be prepared with the samples as they are packed"
            )
        yield index, rows


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


ID_BYTES, COUNT_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Disk space of a cache."""

    what: str
    row_bytes: int
    fixed_bytes: int = 0

    @classmethod
    def of_states(
        cls, *, width: int, vocab_size: int, itemsize: int, num_layers: int = 0
    ) -> RowSizes:
        """Return the sizes of hidden states and of the output layer that maps them to logits."""
        features = f"features of {num_layers} layers and " if num_layers else ""
        return cls(
            what=f"{features}last hidden states",
            row_bytes=(num_layers + 1) * width * itemsize,
            fixed_bytes=(width + 1) * vocab_size * itemsize,
        )

    @classmethod
    def of_ids(cls, num_ids: int) -> RowSizes:
        return cls(what="drawn ids", row_bytes=num_ids * (ID_BYTES + COUNT_BYTES) + COUNT_BYTES)

    def total_bytes(self, num_rows: int) -> int:
        """Return the bytes of the given number of rows."""
        return self.fixed_bytes + num_rows * self.row_bytes


def check_room(folder: Path, num_rows: int, sizes: RowSizes, max_bytes: int | None) -> None:
    """Log the size of the rows to write, and refuse more than the disk has room for."""
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
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)


@dataclass(kw_only=True, eq=False)
class TargetModel:
    """The target's decoder and its output head.

    Args:
        body: token ids and positions to hidden states after the final norm; rows of several samples
            are recognised by their positions, which begin at 0 with each.
    """

    body: nn.Module
    layers: nn.ModuleList
    head: TargetHead
    model_type: str
    max_positions: int
    device: torch.device

    @torch.no_grad()
    def hidden(self, batch: PackedBatch) -> Float[Tensor, "learned hidden"]:
        """Return the last hidden states at the learned rows of a batch, the input of the head."""
        on_device = batch.to(self.device)
        outputs = self.body(**packed_inputs(on_device, self.model_type))
        states: Tensor = outputs.last_hidden_state
        return states[on_device.predicts.to(states.device)]

    @torch.no_grad()
    def layer_states(
        self, batch: PackedBatch, layers: tuple[int, ...]
    ) -> Float[Tensor, "rows width states hidden"]:
        """Return the residual stream at the input of some layers, and the last hidden state."""
        check_layers(layers, len(self.layers))
        on_device = batch.to(self.device)
        with captured(self.layers, layers) as found:
            outputs = self.body(**packed_inputs(on_device, self.model_type))
        states: list[Tensor] = [*(found[layer] for layer in layers), outputs.last_hidden_state]
        if len({state.shape[-1] for state in states}) > 1:
            raise UnsupportedFeatures(
                f"the head of this {self.model_type} target reads {states[-1].shape[-1]} values "
                f"per row, its layers {states[0].shape[-1]}; heads for it cannot be trained"
            )
        return torch.stack([state.to(self.device) for state in states], dim=2)


def adopt_target(model: Any) -> TargetModel:
    """Freeze a transformers model and use it as a teacher's target."""
    model.eval().requires_grad_(False)
    architecture = read_architecture(type(model).__name__, model.config.to_dict())
    check_trainable(architecture)
    return TargetModel(
        body=model.get_decoder(),
        layers=model.get_submodule(MODULE_NAMES[architecture.name].layers),
        head=head_of(model),
        model_type=model.config.model_type,
        max_positions=architecture.max_positions,
        device=model.device,
    )


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    missing = [layer for layer in layers if not 0 <= layer <= num_layers]
    if missing:
        raise UnsupportedFeatures(
            f"feature_layers names {missing}, but the target has {num_layers} layers: give numbers "
            f"from 0 (embeddings) to {num_layers} (what leaves the last layer)"
        )


@torch.no_grad()
def embedding_table(model: Any) -> Float[Tensor, "vocab hidden"]:
    """Return the embedding of every token as it enters the residual stream of a target."""
    settings: Mapping[str, Any] = model.config.to_dict()
    if settings.get("word_embed_proj_dim", model.config.hidden_size) != model.config.hidden_size:
        raise UnsupportedFeatures(
            f"the embeddings of this {model.config.model_type} target are projected before its "
            "first layer; heads that share them cannot be trained"
        )
    embedding = model.get_submodule(MODULE_NAMES[type(model).__name__].embedding)
    tokens = torch.arange(model.config.vocab_size, device=embedding.weight.device)
    table: Tensor = embedding(tokens) * settings.get("embedding_multiplier", 1.0)
    return table


def check_samples(samples: Sequence[Sample], target: TargetModel) -> None:
    """Refuse samples that are too long for the target or contain ids outside its vocabulary."""
    vocab_size, longest = target.head.vocab_size, target.max_positions
    for sample in samples:
        if max(sample.token_ids) >= vocab_size:
            raise InvalidRequest(
                f"a sample holds the token {max(sample.token_ids)}, the target's vocabulary ends "
                f"at {vocab_size - 1}: the text was tokenised for another model"
            )
        if len(sample.token_ids) > longest:
            raise InvalidRequest(
                f"a sample has {len(sample.token_ids)} tokens, the target reads {longest}: lower "
                "the window"
            )


def load_target(source: str | Path, *, dtype: str = "auto", device: str = "auto") -> TargetModel:
    """Load a target that only scores text; it needs no KV store."""
    checkpoint = read_checkpoint(model_folder(source))
    read_config(checkpoint)  # refuses what is not supported before a weight is read
    chosen_dtype, chosen_device = choose_dtype(dtype, checkpoint), choose_device(device)
    needed, available = (
        checkpoint.num_parameters * chosen_dtype.itemsize,
        available_bytes(chosen_device),
    )
    if needed > available:
        raise NotEnoughMemory(
            f"{source} needs {readable(needed)} on {chosen_device}, {readable(available)} are "
            'available; spread it over several GPUs with device "sharded", or take its '
            "log-probabilities from a server (teacher top-k)"
        )
    return adopt_target(read_weights(checkpoint, chosen_dtype).to(chosen_device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetHead:
    """An output projection, with the scaling and capping that some families apply to logits.

    Attributes:
        divisor: logits are divided by it (Granite).
        cap: logits are bent to stay within plus and minus this (Gemma); None: they are not.
    """

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None
    divisor: float = 1.0
    cap: float | None = None

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def to(self, device: torch.device | str) -> TargetHead:
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        states = hidden.to(device=self.weight.device, dtype=self.weight.dtype)
        logits = nn.functional.linear(states, self.weight, self.bias)
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def head_of(model: Any) -> TargetHead:
    settings: Mapping[str, Any] = model.config.to_dict()
    projection = model.get_output_embeddings()
    bias = dict(projection.named_parameters()).get("bias")
    return TargetHead(
        weight=projection.weight.detach(),
        bias=None if bias is None else bias.detach(),
        divisor=float(settings.get("logits_scaling") or 1.0),
        cap=settings.get("final_logit_softcapping"),
    )


def load_sharded(
    source: str | Path, *, dtype: str, device: str, share: ProcessShare
) -> TargetModel:
    """Load a target that is too large for one device.

    One process spreads the layers over all GPUs it has, one after the other (accelerate's device
    map). Several processes split every layer among them (FSDP2) and gather it when it is run, so
    all of them must make equally many passes, which `CacheFiller` and the trainer do.
    """
    checkpoint = read_checkpoint(model_folder(source))
    read_config(checkpoint)  # refuses what is not supported before a weight is read
    chosen_dtype = choose_dtype(dtype, checkpoint)
    if share.number == 1:
        model = read_weights(checkpoint, chosen_dtype, device_map="auto")
        refuse_offloaded(str(source), model)
        return adopt_target(model)
    target = None
    for turn in range(share.number):  # the host holds one whole copy at a time
        if turn == share.index:
            model = read_weights(checkpoint, chosen_dtype)
            target = split(model, choose_device(device), share.number)
        share.wait()
    assert target is not None
    return target


def split(model: Any, device: torch.device, number: int) -> TargetModel:
    """Shard every decoder layer, and the modules outside of the layers, over all processes."""
    target = adopt_target(model)
    weight = target.head.weight.to(device, copy=True)  # it may be the embedding, which is split
    mesh = init_device_mesh(device.type, (number,))
    layer_classes = set(model._no_split_modules or ())
    for module in target.body.modules():
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh)
    fully_shard(target.body, mesh=mesh)
    head = replace(target.head.to(device), weight=weight)
    return TargetModel(
        body=target.body,
        layers=target.layers,
        head=head,
        model_type=target.model_type,
        max_positions=target.max_positions,
        device=device,
    )


def refuse_offloaded(source: str, model: nn.Module) -> None:
    """Refuse a model with layers that do not fit on the GPUs and would be read in every pass."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise NotEnoughMemory(
            f"the GPUs here together do not hold {source}; take its log-probabilities from a "
            "server (teacher top-k)"
        )


cache_logger = logging.getLogger("forerun.cache")

FORMAT = 1
DESCRIPTION = "cache.json"
SHARD, SUFFIX = "rows", ".safetensors"
SHARD_BYTES = 1 << 27
"""What is lost at most to an interruption."""
MAX_OPEN = 256
"""Shards open at once for reading."""
ENTRIES = "entries"

Columns = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """All settings that influence the cached rows of a given sample."""

    kind: str
    target_hash: str
    tokenizer_hash: str
    template_hash: str
    settings: Mapping[str, str | int | float]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1) + "\n"

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{hash_of(self.to_json().encode())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """Location of a sample's cached rows: a shard, and a range in every column."""

    shard: Path
    ranges: Mapping[str, tuple[int, int]]


def key_of(sample: Sample) -> str:
    """Return the key of a sample's rows: the hash of its text and of its learned ranges."""
    content = json.dumps([sample.prompt_hash, sample.token_ids, sample.spans])
    return hash_of(content.encode())


class RowCache:
    """Rows of tensors by key, stored on disk in shards."""

    def __init__(self, root: Path, identity: CacheIdentity) -> None:
        self.folder = root / identity.folder_name
        self.identity = identity
        self._pending: dict[str, Columns] = {}
        self._pending_bytes = 0
        self._open: dict[Path, Any] = {}

    @cached_property
    def _entries(self) -> dict[str, CacheEntry]:
        self._check_identity()
        found: dict[str, CacheEntry] = {}
        for shard in sorted(self.folder.glob(f"{SHARD}-*{SUFFIX}")):
            found |= entries_of(shard)
        return found

    def _check_identity(self) -> None:
        path = self.folder / DESCRIPTION
        if path.exists() and path.read_text(encoding="utf-8") != self.identity.to_json():
            raise InvalidCache(
                f"{self.folder} is the cache of another target, tokenizer, template or setting "
                f"(see {DESCRIPTION} in it); delete the folder, or name another one for caches"
            )

    def lacking(self, keys: Sequence[str]) -> list[str]:
        """Return the keys without undamaged rows, each once, after reading every shard needed."""
        wanted = dict.fromkeys(keys)
        for shard in {self._entries[key].shard for key in wanted if key in self._entries}:
            if not is_whole(shard):
                self._drop(shard)
        return [key for key in wanted if key not in self._entries]

    def _drop(self, shard: Path) -> None:
        cache_logger.warning("%s is damaged; its content is computed again", shard)
        for key in [key for key, entry in self._entries.items() if entry.shard == shard]:
            del self._entries[key]
        with suppress(OSError):
            shard.unlink()

    def look_again(self) -> None:
        for shard in sorted(self.folder.glob(f"{SHARD}-*{SUFFIX}")):
            self._entries.update(entries_of(shard))

    def read(self, key: str) -> dict[str, Tensor]:
        entry = self._entries.get(key)
        if entry is None:
            raise InvalidCache(f"{self.folder} has no rows of a sample that was not prepared")
        try:
            file = self._opened(entry.shard)
            return {name: file.get_slice(name)[a:b] for name, (a, b) in entry.ranges.items()}
        except (OSError, SafetensorError) as error:
            raise InvalidCache(
                f"{entry.shard} cannot be read any more: {error}; start again, and its content is "
                "computed again"
            ) from error

    def _opened(self, shard: Path) -> Any:
        """Return an open shard; at the limit, the shard that was opened first is closed."""
        if shard not in self._open:
            if len(self._open) == MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[shard] = safe_open(shard, framework="pt")
        return self._open[shard]

    def put(self, key: str, columns: Columns) -> None:
        """Add rows under a key; they are on disk once a shard is full, or after `flush`."""
        self._pending[key] = {name: column.contiguous() for name, column in columns.items()}
        self._pending_bytes += sum(column.nbytes for column in columns.values())
        if self._pending_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the pending rows as one more shard; raises CacheTooLarge if the disk is full."""
        if not self._pending:
            return
        content, ranges = packed(self._pending)
        with full_disk_named(self.folder):
            self._write_description()
            shard = write_cached(self.folder, SHARD, SUFFIX, content)
        for key, places in ranges.items():
            self._entries[key] = CacheEntry(shard=shard, ranges=places)
        self._pending, self._pending_bytes = {}, 0

    def _write_description(self) -> None:
        path = self.folder / DESCRIPTION
        if not path.exists():
            with atomic_write(path) as scratch:
                scratch.write_text(self.identity.to_json(), encoding="utf-8")


def packed(pending: Mapping[str, Columns]) -> tuple[bytes, dict[str, dict[str, tuple[int, int]]]]:
    """Pack rows into the bytes of a shard, whose header has the ranges of every key."""
    ends: dict[str, int] = {}
    ranges: dict[str, dict[str, tuple[int, int]]] = {}
    for key, columns in pending.items():
        ranges[key] = {}
        for name, column in columns.items():
            start = ends.get(name, 0)
            ends[name] = start + len(column)
            ranges[key][name] = (start, ends[name])
    tensors = {name: torch.cat([columns[name] for columns in pending.values()]) for name in ends}
    return save(tensors, {ENTRIES: json.dumps(ranges)}), ranges


def entries_of(shard: Path) -> dict[str, CacheEntry]:
    """Return the entries in a shard's header; none if it is damaged."""
    try:
        with safe_open(shard, framework="pt") as file:
            ranges: dict[str, dict[str, Any]] = json.loads(file.metadata()[ENTRIES])
        return {
            key: CacheEntry(shard=shard, ranges={name: (a, b) for name, (a, b) in places.items()})
            for key, places in ranges.items()
        }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        cache_logger.warning("%s is damaged; its content is computed again", shard)
        with suppress(OSError):
            shard.unlink()
        return {}


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise CacheTooLarge when the disk is full; other disk errors are raised unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CacheTooLarge(
            f"the disk of {folder} is full; finished shards are kept and are not computed again: "
            "make room, or name another folder for caches, and start again"
        ) from error


MAX_TOKENS = 4096
"""Tokens of one pass over the target."""

MakeColumns = Callable[[TargetModel, Sample, Float[Tensor, "rows *states"]], Mapping[str, Tensor]]
"""What is kept of a sample, from the target's hidden states at its learned rows."""
ReadRows = Callable[[TargetModel, PackedBatch], Float[Tensor, "learned ..."]]
"""What a pass of the target gives for the learned rows of a batch."""


@dataclass(kw_only=True, eq=False)
class CacheFiller:
    """Fills a cache, and resumes where an earlier run was interrupted.

    Args:
        load: gives the target; called only if something is lacking.
        max_bytes: most bytes to write; None: nine tenths of what the disk has free.
        on_progress: called after every pass with the learned rows done, of this process's share.
    """

    cache: RowCache
    load: Callable[[], TargetModel]
    sizes: RowSizes
    max_bytes: int | None
    on_progress: OnProgress
    share: ProcessShare

    def fill(
        self,
        samples: Sequence[Sample],
        make_columns: MakeColumns,
        read: ReadRows = TargetModel.hidden,
    ) -> TargetModel | None:
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
                if not bool(own.isfinite().all()):
                    raise NumericalError(
                        "the target's hidden states are not finite in a response to the prompt "
                        f"{samples[index].prompt_hash}; load it in bf16 or fp32"
                    )
                self.cache.put(key_of(samples[index]), make_columns(target, samples[index], own))
            num_done += sum(lengths)
            self.on_progress(num_done, num_rows)


class HeadRows:
    """Distributions computed from hidden states, in chunks of rows; see `TeacherRows`."""

    def __init__(
        self, *, hidden: Float[Tensor, "rows hidden"], head: TargetHead, sampling: SamplingParams
    ) -> None:
        self._hidden = hidden
        self._head = head
        self._sampling = sampling

    def __len__(self) -> int:
        return len(self._hidden)

    def distribution(self, rows: slice) -> TargetDistribution:
        return deployed_distribution(self._head.logits(self._hidden[rows]), self._sampling)


class ModelTeacher:
    """Teacher that runs the target over every batch; see `Teacher`."""

    truncated = False

    def __init__(self, target: TargetModel, sampling: SamplingParams) -> None:
        self._target = target
        self._sampling = sampling

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that the target cannot read; nothing is stored."""
        check_samples(samples, self._target)

    def rows(self, batch: PackedBatch) -> HeadRows:
        return HeadRows(
            hidden=self._target.hidden(batch), head=self._target.head, sampling=self._sampling
        )


HEAD = "head"
STATES = "states"
"""The column of a cache that holds hidden states."""


@dataclass(kw_only=True, eq=False)
class HiddenTeacher:
    """Teacher over cached hidden states; see `Teacher`."""

    truncated = False

    filler: CacheFiller
    sampling: SamplingParams
    device: torch.device | str
    _samples: Sequence[Sample] = field(init=False, default=())
    _head: TargetHead | None = field(init=False, default=None)

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose hidden states are not cached."""
        target = self.filler.fill(samples, _states_column)
        self._head = _find_head(self.filler, target).to(self.device)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> HeadRows:
        assert self._head is not None, "prepare comes first"
        cache, found = self.filler.cache, []
        for index, rows in sample_runs(batch, self._samples):
            states = cache.read(key_of(self._samples[index]))[STATES]
            found.append(states[rows])
        hidden = torch.cat(found) if found else self._head.weight.new_empty(0, self._head.width)
        return HeadRows(hidden=hidden.to(self.device), head=self._head, sampling=self.sampling)


def _states_column(
    target: TargetModel, sample: Sample, states: Float[Tensor, "rows *states hidden"]
) -> dict[str, Tensor]:
    return {STATES: states.cpu()}


def _find_head(filler: CacheFiller, target: TargetModel | None) -> TargetHead:
    """Return the target's output layer (LM head), from the cache if it is stored there."""
    folder, share = filler.cache.folder, filler.share
    head = _read_head(folder)
    share.wait()  # no process writes before all have read
    if head is None:
        head = (target or filler.load()).head
        if share.index == 0:
            _write_head(folder, head)
        share.wait()
    return head


def _write_head(folder: Path, head: TargetHead) -> None:
    """Write the target's output layer beside its hidden states."""
    tensors = {"weight": head.weight.cpu().contiguous()}
    if head.bias is not None:
        tensors["bias"] = head.bias.cpu().contiguous()
    numbers = json.dumps({"divisor": head.divisor, "cap": head.cap})
    with full_disk_named(folder):
        write_cached(folder, HEAD, SUFFIX, save(tensors, {"numbers": numbers}))


def _read_head(folder: Path) -> TargetHead | None:
    """Read the output layer beside the hidden states; None if it is missing or damaged."""
    path = find_cached(folder, HEAD, SUFFIX)
    if path is None:
        return None
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        numbers = json.loads(file.metadata()["numbers"])
    return TargetHead(weight=tensors["weight"], bias=tensors.get("bias"), **numbers)


@runtime_checkable
class FeatureTeacherRows(TeacherRows, Protocol):
    """Distributions at the learned rows of a batch, and hidden states of all its rows."""

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream at the input of each selected layer."""

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state, after the final norm."""


class FeaturesOfRows(HeadRows):
    """Distributions and features of a batch, from given hidden states."""

    def __init__(
        self,
        *,
        states: Float[Tensor, "rows width states hidden"],
        batch: PackedBatch,
        head: TargetHead,
        sampling: SamplingParams,
    ) -> None:
        self._states = states
        learned = self.last[batch.predicts.to(states.device)]
        super().__init__(hidden=learned, head=head, sampling=sampling)

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        return self._states[:, :, :-1]

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        return self._states[:, :, -1]


class OnlineFeatures(ModelTeacher):
    """Teacher that runs the target over every batch; see `Teacher`."""

    def __init__(
        self, target: TargetModel, layers: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        super().__init__(target, sampling)
        self._layers = layers

    def rows(self, batch: PackedBatch) -> FeaturesOfRows:
        return FeaturesOfRows(
            states=self._target.layer_states(batch, self._layers),
            batch=batch,
            head=self._target.head,
            sampling=self._sampling,
        )


@dataclass(kw_only=True, eq=False)
class CachedFeatures:
    """Teacher over cached hidden states of all rows; see `Teacher`."""

    truncated = False

    filler: CacheFiller
    layers: tuple[int, ...]
    sampling: SamplingParams
    device: torch.device | str
    _keys: list[str] = field(init=False, default_factory=list)
    _head: TargetHead | None = field(init=False, default=None)

    def prepare(self, samples: Sequence[Sample]) -> None:
        whole = [replace(sample, spans=((1, len(sample.token_ids)),)) for sample in samples]

        def read(target: TargetModel, batch: PackedBatch) -> Float[Tensor, "learned states hidden"]:
            states = target.layer_states(batch, self.layers)
            return states[batch.predicts.to(states.device)]

        target = self.filler.fill(whole, _states_column, read)
        self._head = _find_head(self.filler, target).to(self.device)
        self._keys = [key_of(sample) for sample in whole]

    def rows(self, batch: PackedBatch) -> FeaturesOfRows:
        assert self._head is not None, "prepare comes first"
        shape = (*batch.ids.shape, len(self.layers) + 1, self._head.width)
        states = torch.zeros(shape, dtype=self._head.weight.dtype)
        starts = (batch.positions == 0) & (batch.samples >= 0)  # of texts, not of padding
        for row, start in starts.nonzero().tolist():
            index = int(batch.samples[row, start])
            found = self.filler.cache.read(self._keys[index])[STATES]
            states[row, start : start + len(found)] = found
        return FeaturesOfRows(
            states=states.to(self.device), batch=batch, head=self._head, sampling=self.sampling
        )


class SparseRows:
    """Sparse distributions of learned rows; see `TeacherRows`."""

    def __init__(self, distribution: SparseDistribution) -> None:
        self._whole = distribution

    def __len__(self) -> int:
        return len(self._whole.ids)

    def distribution(self, rows: slice) -> SparseDistribution:
        return SparseDistribution(ids=self._whole.ids[rows], shares=self._whole.shares[rows])


@dataclass(kw_only=True, eq=False)
class SampledTeacher:
    """Teacher over cached token ids; see `Teacher`."""

    truncated = False

    filler: CacheFiller
    sampling: SamplingParams
    num_ids: int
    device: torch.device | str
    _samples: Sequence[Sample] = field(init=False, default=())

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose token ids are not cached."""
        self.filler.fill(samples, self._columns)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> SparseRows:
        ids, shares = [], []
        for index, rows in sample_runs(batch, self._samples):
            columns = self.filler.cache.read(key_of(self._samples[index]))
            own_ids, own_shares = padded(columns)
            ids.append(own_ids[rows])
            shares.append(own_shares[rows])
        width = max((part.shape[1] for part in ids), default=1)
        distribution = SparseDistribution(
            ids=joined(ids, width, torch.int64).to(self.device),
            shares=joined(shares, width, torch.float32).to(self.device),
        )
        return SparseRows(distribution)

    def _columns(
        self, target: TargetModel, sample: Sample, hidden: Float[Tensor, "rows hidden"]
    ) -> dict[str, Tensor]:
        """Return the cache's columns: distinct ids of all rows, their counts, and ids per row."""
        key = request_key(int(key_of(sample), 16), 0)
        keys = torch.tensor([position_key(key, row) for row in range(len(hidden))])
        parts = []
        for rows in row_chunks(len(hidden), target.head.vocab_size):
            distribution = deployed_distribution(target.head.logits(hidden[rows]), self.sampling)
            if isinstance(distribution, DenseDistribution):
                offsets = uniform(keys[rows].to(distribution.target_probs.device))
                parts.append(distinct(draw_ids(distribution.target_probs, offsets, self.num_ids)))
            else:
                parts.append(distinct(distribution.ids))
        ids, counts, sizes = (torch.cat(column) for column in zip(*parts, strict=True))
        return {"ids": ids, "counts": counts, "sizes": sizes}


def draw_ids(
    probs: Float[Tensor, "rows vocab"], offsets: Float64[Tensor, " rows"], num_ids: int
) -> Int64[Tensor, "rows num_ids"]:
    """Draw token ids by systematic sampling at equal distances on the cumulative sums."""
    sums = probs.cumsum(-1, dtype=torch.float64)
    if not bool(sums[:, -1].isfinite().all()):
        raise NumericalError("the target's logits are not finite; load it in bf16 or fp32")
    steps = torch.arange(num_ids, device=probs.device, dtype=torch.float64)
    wanted = (steps + offsets[:, None]) / num_ids * sums[:, -1:]
    # The last may round up to the sum itself, which lies behind every token.
    below = torch.nextafter(sums[:, -1:], torch.zeros_like(sums[:, -1:]))
    return torch.searchsorted(sums, torch.minimum(wanted, below), right=True)


def distinct(drawn: Int64[Tensor, "rows draws"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids of sorted rows, their counts, and the number of ids per row."""
    num_rows, num_draws = drawn.shape
    starts = torch.ones_like(drawn, dtype=torch.bool)
    starts[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    first = starts.flatten().nonzero()[:, 0]
    ends = torch.cat((first[1:], first.new_tensor([num_rows * num_draws])))
    columns = (drawn[starts].to(torch.int32), ends - first, starts.sum(-1))
    return (columns[0].cpu(), columns[1].to(torch.int16).cpu(), columns[2].to(torch.int16).cpu())


def padded(
    columns: dict[str, Tensor],
) -> tuple[Int64[Tensor, "rows some"], Float[Tensor, "rows some"]]:
    """Return ids and probabilities of a sample's rows, padded with id 0 of probability 0."""
    sizes = columns["sizes"].to(torch.int64)
    width = int(sizes.max())
    filled = torch.arange(width) < sizes[:, None]
    ids = torch.zeros(filled.shape, dtype=torch.int64)
    counts = torch.zeros(filled.shape)
    ids[filled] = columns["ids"].to(torch.int64)
    counts[filled] = columns["counts"].to(torch.float32)
    return ids, counts / counts.sum(-1, keepdim=True)


def joined(parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    if not parts:
        return torch.zeros(0, width, dtype=dtype)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


@dataclass(kw_only=True, eq=False)
class TopKTeacher:
    """Teacher over log-probabilities in the samples; see `Teacher`."""

    sampling: SamplingParams
    device: torch.device | str
    _samples: Sequence[Sample] = field(init=False, default=())

    @property
    def truncated(self) -> bool:
        """Whether probability mass is missing: always, unless decoding is greedy."""
        return not self.sampling.greedy

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Check that the samples have log-probabilities; nothing is stored."""
        for sample in samples:
            given = sample.top_logprobs
            if given is None or len(given) != sample.num_learned or not all(given):
                raise InvalidRequest(
                    f"a response to the prompt {sample.prompt_hash} has no log-probabilities: let "
                    "a server write all responses (responses_from) that gives them, or use "
                    'teacher "hidden" or "model"'
                )
        self._samples = samples

    def rows(self, batch: PackedBatch) -> SparseRows:
        named: list[tuple[tuple[int, float], ...]] = []
        for index, rows in sample_runs(batch, self._samples):
            given = self._samples[index].top_logprobs
            assert given is not None
            named.extend(given[row] for row in rows.tolist())
        width = max(map(len, named), default=1)
        ids = torch.zeros(len(named), width, dtype=torch.int64)
        logprobs = torch.full((len(named), width), -torch.inf, dtype=torch.float64)
        for row, tokens in enumerate(named):
            best_first = sorted(tokens, key=lambda token: -token[1])
            ids[row, : len(tokens)] = torch.tensor([token for token, _ in best_first])
            logprobs[row, : len(tokens)] = torch.tensor([value for _, value in best_first])
        shares = known_shares(logprobs, self.sampling).float()
        distribution = SparseDistribution(ids=ids.to(self.device), shares=shares.to(self.device))
        return SparseRows(distribution)


def known_shares(
    logprobs: Float64[Tensor, "rows known"], sampling: SamplingParams
) -> Float64[Tensor, "rows known"]:
    """Convert top log-probabilities at temperature 1 to probabilities as deployed."""
    if sampling.greedy:
        shares = torch.zeros_like(logprobs)
        shares[:, 0] = 1.0
        return shares
    missing = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0.0)
    known = (logprobs / sampling.temperature).exp()
    rest = missing ** (1 / sampling.temperature)
    is_named = logprobs > -torch.inf
    if sampling.min_p > 0:
        kept = known >= sampling.min_p * known[:, :1]
        # Tokens that are not known are no likelier than the least likely one that is.
        known, rest = known * kept, rest * (kept | ~is_named).all(-1, keepdim=True)
    if sampling.top_k > 0:
        known = known * (torch.arange(known.shape[1], device=known.device) < sampling.top_k)
        rest = rest * (is_named.sum(-1, keepdim=True) < sampling.top_k)
    if sampling.top_p < 1:
        known, rest = nucleus(known, rest, sampling.top_p)
    return known / (known.sum(-1, keepdim=True) + rest)


def nucleus(
    known: Float64[Tensor, "rows known"], rest: Float64[Tensor, "rows 1"], top_p: float
) -> tuple[Float64[Tensor, "rows known"], Float64[Tensor, "rows 1"]]:
    """Apply top_p: return the kept known tokens, and the mass that unknown tokens keep."""
    wanted = top_p * (known.sum(-1, keepdim=True) + rest)
    before = known.cumsum(-1) - known
    kept = known * (before < wanted)
    return kept, (wanted - known.sum(-1, keepdim=True)).clamp(min=0.0)
