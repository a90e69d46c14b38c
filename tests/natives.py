"""The native runner over a transformers model's own weights, or over random ones of any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from forerun.models.architecture import Architecture, WeightFormat, read_architecture
from forerun.models.decoder import Decoder, parameter_shapes, read_decoder
from forerun.models.family import DecoderVariant
from forerun.models.memory import KVGeometry, geometry_of
from forerun.models.runner.graphs.model import TorchModel, build_torch_model
from forerun.models.runner.native import NativeModel, build_native_model
from forerun.native.library import load_kernels

Parameters = Mapping[str, Tensor]


def native_model(network: PreTrainedModel, **options: object) -> NativeModel:
    """`options` as for `run_natively`."""
    settings = network.config.to_dict()
    decoder = read_decoder(read_architecture(type(network).__name__, settings), settings)
    parameters = network.state_dict()
    if decoder.experts is not None:  # in memory transformers fuses what a checkpoint lists
        parameters = revert_weight_conversion(network, parameters)
    return run_natively(decoder, parameters, **options)


def run_natively(
    decoder: Decoder,
    parameters: Parameters,
    *,
    dtype: torch.dtype = torch.float32,
    num_threads: int = 1,
    num_slots: int = 4,
    max_context: int | None = None,
    weights: WeightFormat = "auto",
) -> NativeModel:
    geometry = geometry_for(decoder, dtype, num_slots, max_context)

    def read(name: str) -> Tensor:
        return parameters[name].to(dtype)

    model = build_native_model(decoder, read, geometry, load_kernels(num_threads), weights)
    # Nothing may be read that has not been written.
    model.store.data.fill_(float("nan"))
    return model


def run_by_torch(
    decoder: Decoder, parameters: Parameters, dtype: torch.dtype = torch.float64
) -> TorchModel:
    """The same decoder in plain torch, by default in twice the precision."""

    def read(name: str) -> Tensor:
        return parameters[name].to(dtype)

    return build_torch_model(
        decoder, read, geometry_for(decoder, dtype, 4, None), torch.device("cpu")
    )


def geometry_for(
    decoder: Decoder, dtype: torch.dtype, num_slots: int, max_context: int | None
) -> KVGeometry:
    return geometry_of(
        decoder.architecture,
        num_slots=num_slots,
        capacity=max_context or decoder.architecture.max_positions,
        max_staged_rows=64,
        dtype=dtype,
    )


def decoder_of(
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    num_layers: int = 2,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
) -> Decoder:
    return Decoder(
        architecture=Architecture(
            name="LlamaForCausalLM",
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_positions=256,
        ),
        intermediate_size=intermediate_size,
        norm_eps=1e-5,
        inv_freq=10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim),
        rope_scale=1.0,
        variant=DecoderVariant(qkv_bias=qkv_bias, qk_norm="heads" if qk_norm else "none"),
        tied=tied,
    )


def random_parameters(decoder: Decoder, seed: int = 0) -> dict[str, Tensor]:
    """Matrices that keep lengths about as they are; norms near 1, biases near 0."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in parameter_shapes(decoder).items():
        noise = torch.empty(shape).normal_(generator=generator)
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.2
        parameters[name] = noise * scale + float("norm" in name)
    parameters["model.embed_tokens.weight"] *= decoder.architecture.hidden_size**0.5
    return parameters
