"""Folders of GPTQ, AWQ and compressed-tensors: their weights are those of the published formulas.

Written and dequantised here value by value, apart from the code that reads them.
"""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny

from forerun.engine.engine import Engine
from forerun.errors import InvalidModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import count_kept_bytes, load_model
from forerun.sampling.config import SamplingParams

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of a run of eight that is in nibble 0, 1, ... of an AWQ word."""
KEPT = {
    "gptq": {"group": 32},
    "gptq-64": {"group": 64},
    "gptq-whole": {"group": 64, "group_size": -1},
    "gptq-8": {"group": 32, "bits": 8},
    "gptq-v2": {"group": 32},
    "gptq-misnamed": {"group": 32},
    "awq-symmetric": {"group": 32},
    "pack": {"group": 32},
    "pack-channel": {"group": 64, "group_size": None},
    "pack-8": {"group": 32, "bits": 8},
    "int": {"group": 64, "bits": 8, "group_size": None},
}
DEQUANTISED = {
    "awq": {"group": 32},
    "gptq-zeros": {"group": 32},
    "gptq-v2-zeros": {"group": 32},
    "gptq-order": {"group": 32},
    "gptq-8-zeros": {"group": 32, "bits": 8},
    "gptq-16": {"group": 16},
    "pack-order": {"group": 32},
    "pack-bf16-tiny": {"group": 32},
}
FORMS = KEPT | DEQUANTISED


def packed_row(values, bits, order=None):
    """int32 words of a row of unsigned integers; `order`: of the values of a word."""
    per_word = 32 // bits
    order = order or range(per_word)
    words = []
    for start in range(0, len(values), per_word):
        run = [*values[start : start + per_word], *[0] * per_word][:per_word]
        words.append(sum(int(run[at]) << bits * place for place, at in enumerate(order)))
    return np.array(words, dtype=np.uint32).view(np.int32)


def packed(values, bits, order=None):
    return np.stack([packed_row(row, bits, order) for row in values])


def quantised_module(  # noqa: C901, PLR0912, PLR0915 (one formula per format)
    form, rng, outputs, inputs
):
    """The tensors of a random module, and its weights by the published formula, fp64."""
    bits, group = FORMS[form].get("bits", 4), FORMS[form]["group"]
    group = inputs if FORMS[form].get("group_size", group) in (-1, None) else group
    num_groups, top, middle = inputs // group, (1 << bits) - 1, 1 << bits - 1
    values = rng.integers(0, top + 1, (outputs, inputs))
    has_zeros = "zeros" in form or form == "awq"
    zeros = np.full((outputs, num_groups), middle)
    if has_zeros:
        zeros = rng.integers(0, top + 1, zeros.shape)
    scales = (rng.uniform(0.002, 0.02, zeros.shape) / (16 if bits == 8 else 1)).astype(np.float16)
    if form == "pack-bf16-tiny":
        scales = np.full(zeros.shape, 2.0**-30)
    index = np.arange(inputs) // group
    if "order" in form:
        index = rng.permutation(index)
    weights = np.empty((outputs, inputs))
    for o in range(outputs):
        for i in range(inputs):
            g = index[i]
            weights[o, i] = (values[o, i] - zeros[o, g]) * float(scales[o, g])
    tensors = {}
    if form.startswith("gptq"):
        stored = zeros if "v2" in form or "misnamed" in form else (zeros - 1) & top
        tensors["qweight"] = packed(values, bits).T
        tensors["qzeros"] = packed(stored.T, bits)
        tensors["scales"] = scales.T
        tensors["g_idx"] = index.astype(np.int32)
        tensors["bias"] = np.zeros(outputs, dtype=np.float16)
    elif form.startswith("awq"):
        tensors["qweight"] = packed(values.T, 4, AWQ_COLUMNS)
        tensors["qzeros"] = packed(zeros.T, 4, AWQ_COLUMNS)
        tensors["scales"] = scales.T
    elif form == "int":
        tensors["weight"] = (values - middle).astype(np.int8)
        tensors["weight_scale"] = scales
    else:
        tensors["weight_packed"] = packed(values, bits)
        tensors["weight_scale"] = scales
        tensors["weight_shape"] = np.array([outputs, inputs])
        if "order" in form:
            tensors["weight_g_idx"] = index.astype(np.int32)
    made = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}
    if form == "pack-bf16-tiny":
        made["weight_scale"] = made["weight_scale"].bfloat16()
    return made, torch.from_numpy(weights)


def settings_of(form):
    bits, group = FORMS[form].get("bits", 4), FORMS[form]["group"]
    group = FORMS[form].get("group_size", group)
    if form.startswith("gptq"):
        given = {"quant_method": "gptq", "bits": bits, "group_size": group}
        given["sym"] = "zeros" not in form
        named = {"gptq-v2": "gptq_v2", "gptq-misnamed": "gptq"}
        format_ = next((named[name] for name in named if form.startswith(name)), None)
        return given | ({"checkpoint_format": format_} if format_ else {})
    if form.startswith("awq"):
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "group_size": group}
    weights["strategy"] = "channel" if group is None else "group"
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if form == "int" else "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


@pytest.fixture
def write(tmp_path):
    """Writes a Llama with every matrix of its layers quantised; returns two folders.

    The second holds the weights dequantised, in fp32.
    """

    def written(form):
        network = tiny.network("llama", hidden_size=64, scale=0.1)
        plain, folder = tmp_path / "plain", tmp_path / form
        network.save_pretrained(plain)
        tiny.backend().save_pretrained(plain)
        rng = np.random.default_rng(list(FORMS).index(form))
        tensors, whole = {}, load_file(plain / "model.safetensors")
        for name, value in list(whole.items()):
            if name.startswith("model.layers") and value.dim() == 2:
                made, weights = quantised_module(form, rng, *value.shape)
                module = name.removesuffix("weight")
                tensors |= {f"{module}{part}": tensor for part, tensor in made.items()}
                whole[name] = weights.float()
            else:
                tensors[name] = value.clone()
        save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
        folder.mkdir()
        for path in plain.iterdir():
            if path.name != "model.safetensors":
                (folder / path.name).write_bytes(path.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        configure(folder, settings_of(form))
        return folder, plain

    return written


def configure(folder, quantisation):
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation})
    )


def logits_of(model):
    return tiny.logits_of(model, list(range(1, 30)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_published_formula(form, write, caplog):
    folder, plain = write(form)
    found, expected = ModelFiles.open(folder), load_file(plain / "model.safetensors")
    assert found.weights.is_packed
    assert found.num_parameters - ModelFiles.open(plain).num_parameters == sum(
        found.weights.shapes[name][0] for name in found.weights.zero_biases
    )
    for name, weights in expected.items():
        assert torch.equal(found.weights.read(name).float(), weights)
        if name.startswith("model.layers") and weights.dim() == 2:
            assert (found.weights.bits(name) is not None) == (form in KEPT)
        if found.weights.bits(name) is not None:
            values, scales, _ = found.weights.quantised(name)
            groups = values.reshape(*scales.shape, 32).float()
            assert torch.equal((groups * scales.float()[..., None]).flatten(1), weights)
    caplog.set_level(logging.INFO)
    model = load_model(folder, device="cpu", dtype="float32", max_batch=1)
    whole = load_model(plain, device="cpu", dtype="float32", max_batch=1)
    assert torch.equal(logits_of(model), logits_of(whole))
    assert "dequantised" not in caplog.text  # it was asked for
    model = load_model(folder, device="cpu", max_batch=1)
    assert caplog.text.count("dequantised while they are read") == (form in DEQUANTISED)
    needed = count_kept_bytes(found.weights, model.dtype.itemsize, is_tied=False)
    assert abs(model.weights.num_bytes - needed) <= 2 << 20  # whole huge pages
    whole_types = ", ".join(found.stored_types)
    assert ("kept packed" if form in KEPT else "dequantised while read") in whole_types
    if form in DEQUANTISED:
        whole = load_model(plain, device="cpu", dtype=str(model.dtype)[6:], max_batch=1)
        assert torch.equal(logits_of(model), logits_of(whole))
    else:
        error = (logits_of(model) - logits_of(whole)).norm() / logits_of(whole).norm()
        assert 0 < error < 0.05  # activations have 8 bits


@pytest.mark.parametrize("form", ["gptq", "awq", "pack"])
def test_they_are_targets_and_drafts(form, write):
    folder, plain = write(form)
    params = SamplingParams(max_tokens=12, temperature=0)
    alone = Engine.load(folder, device="cpu", num_threads=1)
    text = alone.generate(tiny.PROMPTS[0], params)[0].token_ids
    for draft in ("self:int4", str(plain), str(folder)):
        engine = Engine.load(folder, draft, device="cpu", num_threads=1, num_speculative_tokens=3)
        assert engine.generate(tiny.PROMPTS[0], params)[0].token_ids == text


def test_a_folder_that_has_not_changed_is_checked_once(write):
    folder, _ = write("pack")
    found = ModelFiles.open(folder)
    assert ModelFiles.open(folder).weights is found.weights
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{UP}.weight_scale"][0] = 0.0
    save_file(tensors, path)
    with pytest.raises(InvalidModel, match=r"holds 0\.0"):
        ModelFiles.open(folder)


UP = "model.layers.1.mlp.up_proj"


def changed(part, change):
    def apply(tensors):
        found = tensors.pop(f"{UP}.{part}")
        if (made := change(found.clone())) is not None:
            tensors[f"{UP}.{part}"] = made.contiguous()

    return apply


def filled(value):
    return lambda tensor: tensor.index_fill(0, torch.tensor([1]), value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("form", "part", "change", "message"),
    [
        ("gptq", "scales", lambda _: None, "scales is missing"),
        ("gptq", "scales", lambda t: t[:-1], r"scales is F16 of shape \[1, 128\]; \[2, 128\]"),
        ("gptq", "scales", filled(float("nan")), "scales holds nan"),
        ("gptq", "scales", filled(0.0), "scales holds 0.0"),
        ("gptq", "qzeros", lambda _: None, "qzeros is missing"),
        ("gptq", "qzeros", lambda t: t.float(), "qzeros is F32"),
        ("gptq", "qzeros", lambda t: t + 1, r"qzeros holds zeros other than 8 \(sym: true\)"),
        ("pack", "weight_shape", lambda t: t[0].clone(), r"weight_shape is \[128\]"),
        ("gptq", "g_idx", filled(2), "g_idx names group 2 of 2"),
        ("gptq", "g_idx", filled(-1), "g_idx names group -1 of 2"),
        ("gptq", "g_idx", lambda t: t[1:], r"g_idx is torch.int32 of shape \[63\]"),
        ("gptq", "bias", lambda t: t + 1, "unexpected, the first model.layers.1.mlp.up_proj.bias"),
        ("gptq", "qweight", lambda t: t[None], r"qweight is I32 of shape \[1, 8, 128\]"),
        ("gptq", "qweight", lambda t: t[1:], r"g_idx is torch.int32 of shape \[64\], not \[56\]"),
        ("gptq", "qweight", lambda _: None, "unexpected|I32"),
        ("awq", "qzeros", lambda t: t[:, 1:], "qzeros is I32 of shape"),
        ("awq", "scales", filled(float("inf")), "scales holds inf"),
        ("pack", "weight_shape", lambda t: t * 2, r"weight_shape is \[256, 128\]"),
        ("pack", "weight_shape", lambda _: None, "weight_shape is missing"),
        ("pack", "weight_scale", lambda _: None, "weight_scale is missing"),
        ("int", "weight_scale", lambda t: t[1:], "weight_scale is F16 of shape"),
    ],
)
def test_damaged_tensors_are_named(form, part, change, message, write):
    folder, _ = write(form)
    tensors = load_file(folder / "model.safetensors")
    changed(part, change)(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidModel, match=message):
        load_model(folder, device="cpu")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "gptq bits 3; supported: 4, 8"),
        ("gptq", {"bits": "4"}, "gptq bits '4'"),
        ("gptq", {"group_size": 0}, "group_size 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq packing 'marlin'"),
        ("gptq", {"dynamic": {"+:.*up": {"bits": 8}}}, "settings per module"),
        ("gptq", {"bits": 8}, "model.layers"),
        ("awq", {"bits": 8}, "awq bits 8; supported: 4"),
        ("awq", {"version": "gemv"}, "awq packing 'gemv'; supported: gemm"),
        ("pack", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("pack", {"config_groups": {}}, "one form of weights"),
        ("gptq", {"dynamic": [1]}, "settings per module"),
        ("pack", {"sparsity_config": 7}, "sparse weights"),
        ("pack", {"config_groups": {"a": 3}}, "one form of weights"),
        ("pack", {"config_groups": 3}, "one form of weights"),
        ("pack", {"kv_cache_scheme": {"num_bits": 8}}, "keys and values in fewer bits"),
    ],
)
def test_unknown_settings_are_refused(form, changes, message, write):
    folder, _ = write(form)
    configure(folder, settings_of(form) | changes)
    with pytest.raises(InvalidModel, match=message):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symmetric": False}, "zero points"),
        ({"type": "float"}, "type 'float'"),
        ({"num_bits": 2}, "bits 2"),
        ({"strategy": "block"}, "strategy 'block'"),
    ],
)
def test_other_weights_of_compressed_tensors_are_refused(changes, message, write):
    folder, _ = write("pack")
    settings = settings_of("pack")
    settings["config_groups"]["group_0"]["weights"] |= changes
    configure(folder, settings)
    with pytest.raises(InvalidModel, match=message):
        load_model(folder, device="cpu")
