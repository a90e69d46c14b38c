"""The target as a teacher: it scores texts, in transformers or as the engine runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from forerun.align.samples import PackedBatch, Sample, seen
from forerun.align.workspace import OnProgress
from forerun.errors import (
    InvalidRequest,
    NotEnoughMemory,
    UnsupportedFeatures,
)
from forerun.models.architecture import check_trainable, read_architecture
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.checkpoint import ModelFiles
from forerun.models.huggingface import LAYERS, captured, find_part, read_weights
from forerun.models.load import choose_device, choose_dtype
from forerun.models.memory import available_bytes, readable
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams


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

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TargetHead:
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return replace(self, weight=self.weight.to(device, dtype), bias=bias)

    def rows(self, tokens: Int64[Tensor, " some"]) -> TargetHead:
        """Return the projection to the logits of some tokens."""
        tokens = tokens.to(self.weight.device)
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        states = hidden.to(device=self.weight.device, dtype=self.weight.dtype)
        logits = nn.functional.linear(states, self.weight, self.bias)
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


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
    def states(
        self, batch: PackedBatch, layers: tuple[int, ...] = ()
    ) -> Float[Tensor, "rows width states hidden"]:
        """Return the residual stream at the input of some layers, and the last hidden state.

        The last one, after the final norm, is the input of the head.
        """
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

    def check(self, samples: Sequence[Sample]) -> None:
        check_samples(samples, self.head.vocab_size, self.max_positions)


def check_samples(samples: Sequence[Sample], vocab_size: int, max_positions: int) -> None:
    """Refuse samples that are too long, or that have ids outside the vocabulary."""
    for sample in samples:
        if max(sample.token_ids) >= vocab_size:
            raise InvalidRequest(
                f"a sample holds the token {max(sample.token_ids)}, the target's vocabulary "
                f"ends at {vocab_size - 1}: the text was tokenised for another model"
            )
        if len(sample.token_ids) > max_positions:
            raise InvalidRequest(
                f"a sample has {len(sample.token_ids)} tokens, the target reads "
                f"{max_positions}: lower the window"
            )


PASS_ROWS = 256
"""Rows of one pass of the engine's model."""


@dataclass(kw_only=True, eq=False)
class EngineTarget:
    """The target as the engine runs it, whose kernels take half the time; see `TargetModel`."""

    model: NativeModel
    load_head: Callable[[], TargetHead]

    @cached_property
    def head(self) -> TargetHead:
        return self.load_head()

    @torch.inference_mode()
    def states(
        self, batch: PackedBatch, layers: tuple[int, ...] = ()
    ) -> Float[Tensor, "rows width states hidden"]:
        model = self.model
        wanted = tuple(sorted({*layers, model.num_layers}))
        columns = [wanted.index(layer) for layer in (*layers, model.num_layers)]
        model.store.keep_features(())  # an engine over it may have asked for some
        shape = (*batch.ids.shape, len(columns), model.hidden_size)
        states = torch.zeros(shape, dtype=model.dtype)
        for row, start, end in list_texts(batch):
            ids = batch.ids[row, start:end].tolist()
            states[row, start:end] = torch.cat([*self._compute_features(ids, wanted)])[:, columns]
        states[:, :, -1] = model.final_norm(states[:, :, -1].flatten(0, 1)).view_as(
            states[:, :, -1]
        )
        return states

    def _compute_features(self, ids: list[int], layers: tuple[int, ...]) -> Iterator[Tensor]:
        context = Context(self.model.store, ids)
        try:
            while size := min(PASS_ROWS, context.num_pending):
                tokens = context.pending(size)
                batch = pack([context.span(size)], tokens, [0], self.model.device)
                features = self.model.forward(replace(batch, feature_layers=layers)).features
                assert features is not None  # layers are asked for
                yield features
                context.commit(range(size))
        finally:
            context.close()

    def check(self, samples: Sequence[Sample]) -> None:
        check_samples(samples, self.model.vocab_size, self.model.max_context)


def adopt_target(model: Any) -> TargetModel:
    """Return a transformers model, frozen, as the target of a teacher."""
    model.eval().requires_grad_(False)
    settings: Mapping[str, Any] = model.config.to_dict()
    architecture = read_architecture(type(model).__name__, settings)
    check_trainable(architecture)
    projection = model.get_output_embeddings()
    weights = {name: tensor.detach() for name, tensor in projection.named_parameters()}
    return TargetModel(
        body=model.get_decoder(),
        layers=find_part(model, *LAYERS),
        head=_make_head(weights["weight"], weights.get("bias"), settings),
        model_type=model.config.model_type,
        max_positions=architecture.max_positions,
        device=model.device,
    )


def _make_head(weight: Tensor, bias: Tensor | None, settings: Mapping[str, Any]) -> TargetHead:
    divisor = float(settings.get("logits_scaling") or 1.0)
    cap = settings.get("final_logit_softcapping")
    return TargetHead(weight=weight, bias=bias, divisor=divisor, cap=cap)


OUTPUT, EMBEDDING = "lm_head", "model.embed_tokens"


def read_head(files: ModelFiles, dtype: torch.dtype) -> TargetHead:
    """Read the output layer of a target alone, on the CPU.

    Where the files use other names than most families, the whole target is loaded for it.
    """
    names = files.weights.shapes
    if f"{EMBEDDING}.weight" not in names:
        return adopt_target(read_weights(files, dtype)).head
    read = files.weights.reader(dtype, torch.device("cpu"))
    is_tied = f"{OUTPUT}.weight" not in names
    bias = read(f"{OUTPUT}.bias") if f"{OUTPUT}.bias" in names else None
    return _make_head(read(f"{EMBEDDING if is_tied else OUTPUT}.weight"), bias, files.settings)


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
    embedding = model.get_input_embeddings()
    tokens = torch.arange(model.config.vocab_size, device=embedding.weight.device)
    table: Tensor = embedding(tokens) * settings.get("embedding_multiplier", 1.0)
    return table


MEASURED_SIZE, NUM_MEASURED = 256, 3


def choose_faster_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return fp32 where this device multiplies matrices faster in it than in a smaller type.

    A processor without instructions for bf16 takes several times as long for it. This is measured,
    so the processes and resumed runs of one training must share the answer. Other devices than a
    CPU have such instructions.
    """
    if device != "cpu" or dtype.itemsize >= torch.float32.itemsize:
        return dtype

    def seconds(kind: torch.dtype) -> float:
        matrix = torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=kind)
        found = []
        for _ in range(NUM_MEASURED):
            started_s = time.perf_counter()
            matrix @ matrix
            found.append(time.perf_counter() - started_s)
        return min(found)

    return dtype if seconds(dtype) < seconds(torch.float32) else torch.float32


def load_target(
    source: str | Path | ModelFiles,
    *,
    dtype: str = "auto",
    device: str = "auto",
    computed: torch.dtype | None = None,
) -> TargetModel:
    """Load a target that only scores text; it needs no KV store.

    Args:
        computed: the type of its products; None: `dtype`.
    """
    files = ModelFiles.open(source)
    _ = files.sizes  # refuses what is not supported before a weight is read
    chosen_dtype, chosen_device = choose_dtype(dtype, files), choose_device(device)
    scored = computed or chosen_dtype
    needed = files.num_parameters * scored.itemsize
    available = available_bytes(chosen_device)
    if needed > available:
        raise NotEnoughMemory(
            f"{files.name} needs {readable(needed)} on {chosen_device}, {readable(available)} are "
            "available; give another --device, or a smaller target"
        )
    return adopt_target(read_weights(files, chosen_dtype).to(chosen_device, scored))


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


BLIND_TO_POSITIONS = frozenset({"opt"})
"""Model types whose decoders do not recognise packed samples by positions that restart at 0."""


def packed_inputs(batch: PackedBatch, model_type: str) -> dict[str, Any]:
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    if model_type in BLIND_TO_POSITIONS:
        inputs["attention_mask"] = seen(batch)
    return inputs


def list_texts(batch: PackedBatch) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of every packed text."""
    for row, owners in enumerate(batch.samples.tolist()):
        starts = (batch.positions[row] == 0).nonzero()[:, 0].tolist()
        for start, end in pairwise((*starts, len(owners))):
            if (length := sum(owner >= 0 for owner in owners[start:end])) > 0:
                yield row, start, start + length
