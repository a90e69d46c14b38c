"""Weights of 8 and 4 bits: what is computed is what the stored integers and scales say."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.natives import decoder_of, native_model, random_parameters, run_natively
from torch import Tensor

from forerun.control.costs import OperatingPoint
from forerun.control.goodput import GoodputController
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.architecture import QUANTISED
from forerun.models.decoder import QuantisedMatrix
from forerun.models.load import load_model, try_out
from forerun.models.memory import weights_bytes
from forerun.models.runner import packed
from forerun.models.runner.native import NativeModel
from forerun.native.library import MatrixFormat, MatrixKind

# Inputs that are no whole groups, several blocks of outputs, one of them partly filled.
SIZES = {
    "hidden_size": 208,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 90,
    "vocab_size": 150,
}
FORMATS = [kind for kind in MatrixFormat if kind is not MatrixFormat.ELEMENT]


def group_of(kind: MatrixFormat) -> int:
    return int(kind.name[-2:])


def quantised_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """int8 activations and the scale of every group, in padded groups."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % group))
    groups = padded.reshape(len(rows), -1, group)
    most = groups.abs().amax(-1)
    inverse = torch.where(most > 0, 127 / most, 0.0)
    return (groups * inverse[..., None]).round(), most / 127


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 11, 23])
def test_products_are_exact_sums_of_integers_times_scales(kind, num_rows, monkeypatch):
    """Extreme values included: sums that 16 bits of a processor's instructions cannot hold."""
    monkeypatch.setattr(packed, "FORMATS", {8: kind, 4: kind})
    decoder = decoder_of(**(SIZES | {"hidden_size": 192}))
    model = run_natively(decoder, random_parameters(decoder), weights="int8")
    group, num_outputs = group_of(kind), SIZES["vocab_size"]
    generator = torch.Generator().manual_seed(num_rows)
    has_minima = "MINIMA" in kind.name
    low, high = (-8, 7) if "INT4" in kind.name else (-128, 127)
    if kind is MatrixFormat.INT4_MINIMA_32:
        low, high = 0, 15
    values = torch.randint(low, high + 1, (num_outputs, 192), generator=generator, dtype=torch.int8)
    values[0], values[1], values[2, ::2], values[2, 1::2] = low, high, low, high
    scales = (torch.rand(num_outputs, 192 // group, generator=generator) - 0.5).half()
    scales[3] = 0
    minima = (torch.rand(scales.shape, generator=generator) - 0.5).half() if has_minima else None
    model.weights.put_quantised(MatrixKind.HEAD, 0, QuantisedMatrix(values, scales, minima))
    rows = torch.randn(num_rows, 192, generator=generator)
    rows[0], rows[num_rows // 2] = 1, -1  # the largest integers
    rows[-1, :group] = 0
    ints, row_scales = quantised_rows(rows, group)
    weights = values.reshape(num_outputs, -1, group).double()
    sums = torch.einsum("rgi,ogi->rog", ints.double(), weights)
    assert sums.abs().max() == group * 127 * max(-low, high)
    products = sums * scales.double()
    if minima is not None:
        products += ints.double().sum(-1)[:, None] * minima.double()
    expected = (products * row_scales.double()[:, None]).sum(-1)
    found = model.head(rows).double()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.cat([model.head(row[None]) for row in rows]), model.head(rows))


@pytest.mark.parametrize(("bits", "kind"), [(8, "INT8_GROUPS_64"), (4, "INT4_GROUPS_32")])
def test_weights_are_off_by_at_most_a_step(bits, kind, monkeypatch):
    decoder = decoder_of(**SIZES)
    parameters = random_parameters(decoder)
    parameters["lm_head.weight"][7] = 0
    parameters["lm_head.weight"][8] *= 1e-4
    # Scales of every size, among them the smallest that fp16 has with all its bits.
    parameters["lm_head.weight"][9:25] *= 2.0 ** -torch.arange(16)[:, None]
    monkeypatch.setattr(packed, "FORMATS", dict.fromkeys((8, 4), MatrixFormat[kind]))
    model = run_natively(decoder, parameters, weights="int8")
    # Columns of the head: rows with a single one are exact in int8.
    columns = model.head(torch.eye(SIZES["hidden_size"])).t()
    head = parameters["lm_head.weight"]
    steps = torch.stack(
        [part.abs().amax(1) for part in head.split(group_of(MatrixFormat[kind]), 1)], 1
    ) / (127 if bits == 8 else 7)
    allowed = steps.repeat_interleave(group_of(MatrixFormat[kind]), 1)[:, : SIZES["hidden_size"]]
    error = (columns - head).abs()
    # In 4 bits the largest weights of a group may be clipped, where that errs less in all.
    assert (error <= allowed * (0.52 if bits == 8 else 2.2) + 2**-24).all()  # the smallest scale
    assert error.square().mean().sqrt() < 0.35 * steps.mean()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_group_whose_largest_weight_is_positive_has_a_negative_scale(sign, monkeypatch):
    """The integers -8 to 7 times a scale of about -1 hold 8, and times a positive one only 7."""
    decoder = decoder_of(**SIZES)
    parameters = random_parameters(decoder)
    head = torch.randint(-7, 8, parameters["lm_head.weight"].shape, generator=torch.manual_seed(0))
    head[:, ::32] = 8
    parameters["lm_head.weight"] = sign * head.float()
    monkeypatch.setattr(packed, "FORMATS", dict.fromkeys((8, 4), MatrixFormat.INT4_GROUPS_32))
    model = run_natively(decoder, parameters, weights="int8")
    columns = model.head(torch.eye(SIZES["hidden_size"])).t()
    assert (columns - parameters["lm_head.weight"]).square().mean() < 0.02


@pytest.mark.parametrize("weights", list(QUANTISED))
@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_in_fewer_bits_computes_what_a_model_loaded_in_them_does(weights, tied):
    decoder = decoder_of(**SIZES, tied=tied, qkv_bias=True, qk_norm=True)
    parameters = random_parameters(decoder)
    whole = run_natively(decoder, parameters)
    loaded = run_natively(decoder, parameters, weights=weights)
    copy = whole.in_fewer_bits(weights)
    assert copy.store is whole.store
    assert torch.equal(logits_of(copy), logits_of(loaded))
    assert not torch.equal(logits_of(copy), logits_of(whole))
    assert copy.bytes_read == loaded.bytes_read < whole.bytes_read / 2.5
    assert copy.num_parameters == loaded.num_parameters == whole.num_parameters


@pytest.mark.parametrize("family", ["gemma3", "phi3", "olmo2", "granite", "qwen3-moe-mixed"])
def test_a_copy_has_the_norms_and_scales_of_its_family(family):
    network = tiny.network(family, scale=0.1)
    whole = native_model(network)
    copy = logits_of(whole.in_fewer_bits("int8"))
    assert torch.equal(copy, logits_of(native_model(network, weights="int8")))
    expected = network(torch.arange(1, 30)[None]).logits[0]
    assert (copy - expected).norm() < 0.05 * expected.norm()


def logits_of(model: NativeModel) -> Tensor:
    return tiny.logits_of(model, list(range(1, 30)))


@pytest.mark.parametrize("weights", list(QUANTISED))
@pytest.mark.parametrize("tied", [True, False])
def test_memory_is_estimated_before_loading(weights, tied):
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
    decoder = decoder_of(**sizes, tied=tied)
    model = run_natively(decoder, random_parameters(decoder), weights=weights)
    expected = weights_bytes(
        model.num_parameters, decoder.architecture, model.dtype, weights, is_tied=tied
    )
    assert abs(model.weights.num_bytes - expected) <= 2 << 20  # whole huge pages


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad):
    decoder = decoder_of(**SIZES)
    parameters = random_parameters(decoder)
    parameters["model.layers.1.mlp.down_proj.weight"][3, 5] = bad
    model = run_natively(decoder, parameters, weights="int4")
    with pytest.raises(InvalidModel, match="NaN or infinite"):
        try_out(model, "it")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_no_numbers_stay_so(bad):
    decoder = decoder_of(**SIZES)
    model = run_natively(decoder, random_parameters(decoder), weights="int8")
    rows = torch.randn(3, SIZES["hidden_size"])
    rows[1, 100] = bad
    logits = model.head(rows)
    assert logits[1].isnan().all()
    assert logits[[0, 2]].isfinite().all()


def test_values_of_other_groups_are_not_taken():
    decoder = decoder_of(**SIZES)
    model = run_natively(decoder, random_parameters(decoder), weights="int4")
    put = model.weights.kernels.library.forerun_decoder_put_quantised
    nothing = (None, None, None)
    assert not put(model.weights.handle, MatrixKind.HEAD, 0, -1, *nothing)  # 208 inputs
    plain = run_natively(decoder, random_parameters(decoder))
    assert not put(plain.weights.handle, MatrixKind.OUTPUT, 0, -1, *nothing)
    ones = torch.ones(208, 32)
    with_minima = QuantisedMatrix(ones.to(torch.int8), ones[:, :1].half(), ones[:, :1].half())
    with pytest.raises(ValueError, match="OUTPUT of layer 0"):
        model.weights.put_quantised(MatrixKind.OUTPUT, 0, with_minima)


def test_a_copy_of_matrices_with_minima_has_their_weights(monkeypatch):
    monkeypatch.setattr(packed, "FORMATS", dict.fromkeys((8, 4), MatrixFormat.INT4_MINIMA_32))
    decoder = decoder_of(**(SIZES | {"hidden_size": 192}))
    model = run_natively(decoder, random_parameters(decoder), weights="int8")
    generator = torch.Generator().manual_seed(0)
    # Whole numbers that 8 bits hold, the largest 127 in every group.
    values = torch.randint(0, 16, (150, 6, 32), generator=generator, dtype=torch.int8)
    values[:, :, 0] = 15
    matrix = QuantisedMatrix(
        values.flatten(1), torch.full((150, 6), 8.0).half(), torch.full((150, 6), 7.0).half()
    )
    model.weights.put_quantised(MatrixKind.HEAD, 0, matrix)
    monkeypatch.undo()
    copy = model.in_fewer_bits("int8")
    columns = torch.eye(192)
    assert torch.equal(copy.head(columns).t(), (values * 8.0 + 7.0).flatten(1))
    assert torch.equal(copy.head(columns), model.head(columns))


def test_other_runners_have_no_fewer_bits():
    with pytest.raises(InvalidRequest, match=r"int5.*use auto, bf16, int8"):
        EngineConfig(weights="int5")
    with pytest.raises(InvalidRequest, match="need the native runner, not eager"):
        load_model("zoo:code-2m", runner="eager", weights="int8", device="cpu")


def test_a_self_draft_is_expected_to_cost_what_it_reads():
    """Before anything is measured; other drafts are assumed to cost a tenth of a plain step."""
    engine = Engine.load("zoo:code-2m", "self:int4", device="cpu", num_threads=1)
    assert isinstance(engine.controller, GoodputController)
    assert engine.capabilities().methods == ("self:int4",)
    costs = engine.controller.costs
    point = OperatingPoint(batch=1, context_bits=7, greedy=True)
    times = costs.times(point)["self:int4"]
    share = engine.drafter.model.bytes_read / engine.target.bytes_read
    assert 0.25 < share < 0.35
    assert times.draft_s[0] == pytest.approx(share * times.plain_s)
