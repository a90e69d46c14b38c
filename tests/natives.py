"""The native runner over a transformers model's own weights."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.models.architecture import read_architecture
from forerun.models.decoder import read_decoder
from forerun.models.kv_store import geometry_of
from forerun.models.runner.library import load_kernels
from forerun.models.runner.native import NativeModel, build_native_model


def native_model(
    network: PreTrainedModel,
    *,
    dtype: torch.dtype = torch.float32,
    num_threads: int = 1,
    num_slots: int = 4,
    max_context: int | None = None,
) -> NativeModel:
    config = network.config
    architecture = read_architecture(type(network).__name__, config.to_dict())
    geometry = geometry_of(
        architecture,
        num_slots=num_slots,
        capacity=max_context or config.max_position_embeddings,
        max_staged_rows=64,
        dtype=dtype,
    )
    parameters = network.state_dict()

    def read(name: str) -> Tensor:
        return parameters[name].to(dtype)

    return build_native_model(
        read_decoder(architecture, config), read, geometry, load_kernels(num_threads)
    )
