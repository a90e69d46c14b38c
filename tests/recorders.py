"""Recorders that need no GPU: they hold recorded passes to what a CUDA graph would hold them to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from forerun.models.architecture import read_architecture
from forerun.models.decoder import read_decoder
from forerun.models.memory import geometry_of
from forerun.models.runner.graphs.model import TorchModel, build_torch_model
from forerun.models.runner.graphs.programs import GraphRecorder


class Again:
    """Records nothing: the function is called again."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        return run


class Traced:
    """Records operations, not Python: values read on the host are frozen, or refused outright.

    The result is one tensor, written over by every play, as the memory of a graph is.
    """

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            traced = make_fx(run)()
        assert not data_dependent(traced)
        result = run().clone()
        return lambda: result.copy_(traced())


def data_dependent(traced: torch.fx.GraphModule) -> list[str]:
    """Operations whose result has a shape, or is a number, that only the device knows."""
    waiting = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return [
        str(node.target)
        for node in traced.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and waiting & set(node.target.tags)
    ]


class Starved:
    """Has memory for so many recordings."""

    def __init__(self, num_recordings: int) -> None:
        self.num_left = num_recordings
        self.num_asked = 0

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_asked += 1
        if not self.num_left:
            raise torch.OutOfMemoryError("planted")
        self.num_left -= 1
        return run


def torch_model(
    network: PreTrainedModel,
    recorder: GraphRecorder | None,
    *,
    num_slots: int = 4,
    max_context: int | None = None,
    device: str = "cpu",
) -> TorchModel:
    """The torch runner over a transformers model's own weights."""
    config = network.config
    architecture = read_architecture(type(network).__name__, config.to_dict())
    geometry = geometry_of(
        architecture,
        num_slots=num_slots,
        capacity=max_context or config.max_position_embeddings,
        max_staged_rows=64,
        dtype=network.dtype,
    )
    place = torch.device(device)
    parameters = network.state_dict()

    def read(name: str) -> Tensor:
        return parameters[name].to(place)

    return build_torch_model(
        read_decoder(architecture, config.to_dict()), read, geometry, place, recorder=recorder
    )
