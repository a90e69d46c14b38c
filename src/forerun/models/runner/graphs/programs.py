"""Recorded passes by shape, each recorded as a CUDA graph when its shape first occurs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.models.attention import AttentionPass, attend_blocks, plan_pass
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.layers import (
    Pass,
    Rotation,
    Weights,
    allocate_features,
    compute_rotation,
    logits_of,
    split_heads,
)
from forerun.models.runner.graphs.rectangle import (
    Inputs,
    PassShape,
    ShapeLimits,
    attend_rectangle,
    shape_of,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedAttention:
    """An `Attend` over views of the store, cut to each sequence's own keys."""

    decoder: Decoder
    rotation: Rotation
    plan: AttentionPass

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        heads = split_heads(self.decoder, layer, qkv, self.rotation)
        query, key, value = (part.transpose(0, 1)[None] for part in heads)
        scaling = self.decoder.architecture.head_dim**-0.5
        self.plan.write(index, key, value)
        attended = attend_blocks(index, query, self.plan.blocks(None), scaling)
        return attended.reshape(len(qkv), -1)


def run_ragged(weights: Weights, store: ContiguousKVStore, batch: RowBatch) -> ModelOutput:
    """Stage the rows of a pass and run it without a recording."""
    features = allocate_features(weights, len(batch.tokens), batch.feature_layers)
    decoder = weights.decoder
    groups = decoder.architecture.num_heads // decoder.architecture.num_kv_heads
    rows = Pass(
        tokens=batch.tokens,
        wanted=batch.logit_rows,
        attend=RaggedAttention(
            decoder=decoder,
            rotation=compute_rotation(decoder, batch.positions),
            plan=plan_pass(batch.spans, store, groups),
        ),
        feature_layers=batch.feature_layers,
        features=features,
    )
    return ModelOutput(logits=logits_of(weights, rows), features=features)


def run_rectangle(
    weights: Weights, store: ContiguousKVStore, inputs: Inputs
) -> Float[Tensor, "wanted vocab"]:
    """Run a padded pass, which launches the same operations whatever its buffers hold."""
    rows = Pass(
        tokens=inputs.tokens,
        wanted=inputs.wanted,
        attend=attend_rectangle(weights.decoder, store, inputs.rows),
        feature_layers=inputs.bucket.feature_layers,
        features=inputs.features,
    )
    return logits_of(weights, rows)


@runtime_checkable
class GraphRecorder(Protocol):
    """Records the operations of a function over fixed buffers."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record the operations of `run` and return a function that repeats them.

        The result may be overwritten by any later call of anything recorded here.

        Args:
            run: reads and writes the same tensors at every call and never waits for the device.
        """


class CudaRecorder:
    """Records functions as CUDA graphs that share one memory pool.

    Recordings share the pool because they are played one after another on one stream; it is as
    large as the largest of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run once, which compiles kernels and initialises libraries, then capture a CUDA graph.

        What other threads do on the device meanwhile does not matter. May raise
        torch.OutOfMemoryError.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotations here
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


logger = logging.getLogger("forerun.graphs")
preparation = logging.getLogger("forerun.preparation")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A recorded pass and its input buffers."""

    inputs: Inputs
    play: Callable[[], Tensor]

    def run(self, batch: RowBatch) -> Tensor:
        self.inputs.fill(batch)
        return self.play()


@dataclass(slots=True, kw_only=True, eq=False)
class Programs:
    """Recorded passes of one model.

    A shape for which there is no memory is not tried again: its passes run unrecorded. So do those
    of a shape whose first logits are not those of the same pass unrecorded: kernels meet devices
    and versions that no test has seen, and text must not depend on that.
    """

    weights: Weights
    store: ContiguousKVStore
    recorder: GraphRecorder
    limits: ShapeLimits
    _programs: dict[PassShape, Program] = field(default_factory=dict)
    _refused: set[PassShape] = field(default_factory=set)
    _trusted: set[PassShape] = field(default_factory=set)

    def forward(self, batch: RowBatch) -> ModelOutput | None:
        """Run `LanguageModel.forward` by a recorded pass; None if the pass cannot be recorded."""
        num_wanted = len(batch.logit_rows)
        bucket = shape_of(batch.spans, num_wanted, self.limits)
        if bucket is not None:
            bucket = replace(bucket, feature_layers=batch.feature_layers)
        program = None if bucket is None else self._program(bucket, batch)
        if bucket is None or program is None:
            return None
        logits = program.run(batch)[:num_wanted].clone()
        output = ModelOutput(logits=logits, features=program.inputs.pack_features(batch))
        if num_wanted and bucket not in self._trusted:
            expected = run_ragged(self.weights, self.store, batch)
            distance = disagreement(logits, expected.logits)
            if output.features is not None and expected.features is not None:
                pair = (output.features.flatten(0, 1), expected.features.flatten(0, 1))
                distance = max(distance, disagreement(*pair))
            if distance > max(1e-3, 16 * torch.finfo(logits.dtype).eps):
                self._refuse(bucket, f"recorded they differ by {distance:.1g} of their logits")
                return expected
            self._trusted.add(bucket)
        return output

    def _program(self, shape: PassShape, batch: RowBatch) -> Program | None:
        """Return the recorded pass of a shape; a new shape is recorded with `batch` as input."""
        if shape not in self._programs and shape not in self._refused:
            try:
                self._programs[shape] = self._record(shape, batch)
            except torch.OutOfMemoryError:
                self._refuse(shape, "no memory to record them; lower max_batch or max_context")
        return self._programs.get(shape)

    def _record(self, shape: PassShape, batch: RowBatch) -> Program:
        started_s = time.perf_counter()
        num_rows = shape.num_sequences * shape.num_rows
        features = allocate_features(self.weights, num_rows, shape.feature_layers)
        inputs = Inputs(shape, batch.tokens.device, features)
        # Recording runs the pass, so the buffers must hold a valid one; what it writes to the store
        # is written again when the recording is played.
        inputs.fill(batch)
        play = self.recorder.record(partial(run_rectangle, self.weights, self.store, inputs))
        program = Program(inputs=inputs, play=play)
        duration_s = time.perf_counter() - started_s
        if self._programs:
            logger.info("recorded %s in %.2f s", described(shape), duration_s)
        else:
            preparation.info(
                "recorded %s in %.2f s; other shapes follow when they are first met",
                described(shape),
                duration_s,
            )
        return program

    def _refuse(self, shape: PassShape, reason: str) -> None:
        level = logging.INFO if self._refused else logging.WARNING
        logger.log(level, "%s run slower, unrecorded: %s", described(shape), reason)
        self._refused.add(shape)
        self._programs.pop(shape, None)


def disagreement(
    actual: Float[Tensor, "rows vocab"], expected: Float[Tensor, "rows vocab"]
) -> float:
    distances = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    is_finite = expected.isfinite().all(dim=-1)
    return float(distances.nan_to_num(torch.inf).where(is_finite, 0.0).max().item())


def described(shape: PassShape) -> str:
    """Describe a shape for log messages."""
    return (
        f"passes of {shape.num_sequences} x {shape.num_rows} rows over up to {shape.num_keys} keys"
    )
