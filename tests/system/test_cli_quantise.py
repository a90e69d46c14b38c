"""`forerun quantise`: what is written loads with the weights that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from transformers import PreTrainedModel

from forerun.cli.main import main
from forerun.engine.engine import Engine
from forerun.errors import InvalidModel
from forerun.measure.quantise import write_quantised
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import count_kept_bytes, load_model
from forerun.models.quantised_folder import QuantisedFolder, quantise_matrix, stored_tensors
from forerun.sampling.config import SamplingParams

MODEL = "zoo:code-2m-for-40m"


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-int8"])
def test_a_quantised_folder_loads_and_its_loss_is_measured(weights, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantise", MODEL, "--out", str(out), "--weights", weights, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    if weights != "int8":  # an embedding in bf16 beside its copy in 8 bits is half of this model
        assert made["num_bytes"] < made["num_bytes_before"]
    assert -0.01 < made["loss"] < {"int8": 0.005, "int4": 0.1, "int4-int8": 0.1}[weights]
    plain = Engine.load(out, device="cpu", num_threads=1, num_speculative_tokens=3)
    checkpoint = ModelFiles.open(out)
    expected = count_kept_bytes(checkpoint.weights, 2, is_tied=False)
    assert abs(plain.target.weights.num_bytes - expected) <= 2 << 20  # whole huge pages
    assert plain.target.bytes_read < made["num_bytes_before"]
    params = SamplingParams(max_tokens=16, temperature=0)
    text = plain.generate("def f(", params)[0].text
    assert plain.with_draft("self:int4").generate("def f(", params)[0].text == text
    assert main(["info", str(out), "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["stored_types"]
    assert shares["int8" if weights == "int8" else "int4"] > 0.25
    # Twice the same folder is refused, and a quantised model is not quantised again.
    assert main(["quantise", MODEL, "--out", str(out)]) == 2
    assert main(["quantise", str(out), "--out", str(tmp_path / "again")]) == 2
    assert "quantised already" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_stored_is_what_is_read(bits, tmp_path):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.empty(6, 96).normal_(generator=generator)
    matrix[2] = 0
    made = quantise_matrix(matrix, bits)
    save_file(stored_tensors("x.weight", made, bits), tmp_path / "m.safetensors")
    folder = QuantisedFolder((tmp_path / "m.safetensors",))
    assert folder.shapes == {"x.weight": (6, 96)}
    assert folder.bits("x.weight") == bits
    found = folder.quantised("x.weight")
    assert torch.equal(found.values, made.values)
    assert torch.equal(found.scales, made.scales)
    steps = matrix.reshape(6, 3, 32).abs().amax(-1) / (127 if bits == 8 else 7)
    error = (folder.read("x.weight") - matrix).reshape(6, 3, 32).abs().amax(-1)
    assert (error <= steps * (0.52 if bits == 8 else 2.2)).all()


def test_scales_that_do_not_fit_are_refused(tmp_path):
    out = tmp_path / "out"
    assert main(["quantise", MODEL, "--out", str(out)]) == 0
    path = Path(out) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight_scales"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path)
    with pytest.raises(InvalidModel, match="no scales that fit"):
        load_model(out, device="cpu")
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(InvalidModel, match="no scales that fit"):
        load_model(out, device="cpu")


def test_runners_without_integers_dequantise_or_refuse(tmp_path):
    out = tmp_path / "out"
    assert main(["quantise", MODEL, "--out", str(out)]) == 0
    assert load_model(out, device="cpu", runner="graphs", num_threads=1).num_parameters
    with pytest.raises(Exception, match="quantised weights"):
        load_model(out, device="cpu", runner="eager")


def assert_close_to(network: PreTrainedModel, model: LanguageModel) -> None:
    """Within the noise of 8 bits."""
    ids = torch.arange(1, 30)
    context = Context(model.store, ids.tolist())
    batch = pack([context.span(len(ids))], ids, range(len(ids)), model.device)
    expected = network(ids[None]).logits[0]
    assert 0 < (model.forward(batch).logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("family", ["phi3", "gemma3"])
def test_other_families_are_written_in_fewer_bits(family, tmp_path):
    network = tiny.network(family, scale=0.1)
    network.save_pretrained(tmp_path / "whole")
    write_quantised(tmp_path / "whole", tmp_path / "out", "int8", lambda _: None)
    packed = ModelFiles.open(tmp_path / "out").weights
    assert packed is not None
    assert {packed.bits(name) for name in packed.shapes if "_proj" in name} == {8}
    assert_close_to(network, load_model(tmp_path / "out", device="cpu", max_batch=1))


def test_experts_are_quantised_only_while_they_are_read(tmp_path):
    network = tiny.network("qwen3-moe", scale=0.1)
    network.save_pretrained(tmp_path / "whole")
    with pytest.raises(InvalidModel, match=r"while they are read \(--weights int8\)"):
        write_quantised(tmp_path / "whole", tmp_path / "out", "int8", lambda _: None)
    model = load_model(tmp_path / "whole", device="cpu", max_batch=1, weights="int8")
    assert_close_to(network, model)
