"""From folder to model: what is chosen, what is refused, and that nothing is made up."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forerun.errors import InvalidModel, InvalidRequest, NotEnoughMemory, RunnerUnavailable
from forerun.models import load, memory
from forerun.models.checkpoint import WEIGHTS
from forerun.models.context import Context, pack
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.load import load_model, load_tokenizer, model_folder


def logits_of(model, ids):
    context = Context(model.store, ids)
    batch = pack([context.span(len(ids))], torch.tensor(ids), range(len(ids)), model.device)
    return model.forward(batch).logits


def test_loaded_model_computes_what_transformers_computes(folder):
    model = load_model(folder, device="cpu", max_batch=2, max_context=100)
    ids = [5, 9, 2, 300]
    expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(model, ids), expected, atol=1e-5, rtol=1e-5)
    assert (model.store.num_free, model.max_context, model.vocab_size) == (1, 100, 320)


def test_context_is_by_default_all_the_model_allows(folder):
    assert load_model(folder, device="cpu").max_context == 128


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bf16", torch.bfloat16), ("float16", torch.float16)],
)
def test_dtype(folder, dtype, expected):
    model = load_model(folder, dtype=dtype, device="cpu", runner="eager")
    assert model.dtype == expected
    assert {parameter.dtype for parameter in model.network.parameters()} == {expected}
    assert logits_of(model, [1, 2]).dtype == expected


def test_auto_dtype_is_that_of_the_stored_weights(folder):
    weights = load_file(folder / WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / WEIGHTS)
    assert load_model(folder, device="cpu").dtype == torch.bfloat16


def test_nothing_is_printed(folder, capfd):
    load_model(folder, device="cpu")
    assert capfd.readouterr() == ("", "")


def test_parameters_are_not_made_up(folder):
    weights = load_file(folder / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"1 missing, the first model\.norm\.weight"):
        load_model(folder, device="cpu")


def test_parameters_are_not_left_out(folder, configure):
    configure(num_hidden_layers=1)
    with pytest.raises(InvalidModel, match=r"9 unexpected, the first model\.layers\.1"):
        load_model(folder, device="cpu")


def test_parameters_of_another_size_are_refused(folder, configure):
    configure(intermediate_size=25)
    with pytest.raises(InvalidModel, match=r"6 mismatched, the first .*mlp"):
        load_model(folder, device="cpu")


def test_unsupported_architecture(folder, configure):
    configure(architectures=["MambaForCausalLM"])
    with pytest.raises(InvalidModel, match="MambaForCausalLM is not supported"):
        load_model(folder)


def test_what_only_the_eager_runner_carries_is_said_once(folder, configure, caplog):
    configure(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
    assert isinstance(load_model(folder, device="cpu"), HuggingFaceModel)
    message = "only the eager runner supports sliding-window attention (sliding_window=64)"
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} runs slower than it could: {message}"
    ]
    with pytest.raises(RunnerUnavailable, match="sliding_window=64"):
        load_model(folder, device="cpu", runner="native")


def test_of_a_supported_class_transformers_own_code_is_used(folder, configure):
    """Phi-3 names the code it came with, which transformers has had for long."""
    expected = logits_of(load_model(folder, device="cpu", runner="eager"), [1, 2, 3])
    code = {"AutoConfig": "own.LlamaConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    configure(auto_map=code)
    model = load_model(folder, device="cpu", runner="eager")
    assert torch.equal(logits_of(model, [1, 2, 3]), expected)


def test_quantised(folder, configure):
    configure(quantization_config={"quant_method": "awq"})
    with pytest.raises(InvalidModel, match="awq"):
        load_model(folder)


def test_configuration_transformers_refuses(folder, configure):
    configure(num_attention_heads="many")
    with pytest.raises(InvalidModel, match=r"configuration in .* is refused"):
        load_model(folder)


def test_too_little_memory_is_said_before_allocating(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000)
    monkeypatch.setattr(load, "run_by", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(NotEnoughMemory, match=r"9\.8 KiB are available"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is unknown; use auto, bf16"),
        ({"device": "abacus"}, "device 'abacus' is unknown"),
        ({"device": "meta"}, "this machine has no device 'meta'"),
        ({"max_context": 0}, "max_context is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_be_honoured(folder, options, message):
    with pytest.raises(InvalidRequest, match=message):
        load_model(folder, **options)


@pytest.mark.parametrize("source", ["/no/such/folder", "./absent", "a/b/c"])
def test_paths_that_do_not_exist_are_not_looked_up(source, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("looked up")
    )
    with pytest.raises(InvalidModel, match="no model folder"):
        model_folder(source)


def test_unknown_name():
    with pytest.raises(InvalidModel, match="'no-such-owner/model' is neither a folder nor"):
        model_folder("no-such-owner/model")


def test_name_is_fetched_without_pickles(tmp_path, monkeypatch):
    asked = {}

    def fetch(name, *, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert model_folder("owner/model-1.5") == tmp_path
    assert asked["name"] == "owner/model-1.5"
    assert not {"*.bin", "*.pt", "*.py"} & set(asked["patterns"])


def test_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("def add")) == "def add"
    assert tokenizer.eos_token_id == 0


def test_missing_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InvalidModel, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(folder)
