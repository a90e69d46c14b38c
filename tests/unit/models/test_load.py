"""From folder to model: what is chosen, what is refused, and that nothing is made up."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.contract.test_more_families import network
from transformers import AutoModelForCausalLM

from forerun.drafters.config import METHODS
from forerun.errors import (
    ForerunError,
    InvalidModel,
    InvalidRequest,
    NotEnoughMemory,
    RunnerUnavailable,
)
from forerun.models import checkpoint, load, memory
from forerun.models.base import Context, pack
from forerun.models.catalog import KNOWN_NAMES, model_folder
from forerun.models.checkpoint import WEIGHTS, ModelFiles
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.load import load_model


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
    configure(architectures=["RwkvForCausalLM"])
    with pytest.raises(InvalidModel, match="RwkvForCausalLM is not supported"):
        load_model(folder)


def test_what_only_the_eager_runner_carries_is_said_once(folder, configure, caplog):
    configure(hidden_act="gelu")
    assert isinstance(load_model(folder, device="cpu"), HuggingFaceModel)
    message = "only the eager runner supports hidden_act 'gelu'"
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} runs slower than it could: {message}"
    ]
    with pytest.raises(RunnerUnavailable, match="hidden_act 'gelu'"):
        load_model(folder, device="cpu", runner="native")


def test_of_a_supported_class_transformers_own_code_is_used(folder, configure):
    """Phi-3 names the code it came with, which transformers has had for long."""
    expected = logits_of(load_model(folder, device="cpu", runner="eager"), [1, 2, 3])
    code = {"AutoConfig": "own.LlamaConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    configure(auto_map=code)
    model = load_model(folder, device="cpu", runner="eager")
    assert torch.equal(logits_of(model, [1, 2, 3]), expected)


def test_quantised(folder, configure):
    configure(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(InvalidModel, match=r"'bitsandbytes'.*read are awq"):
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


def test_every_drafter_is_a_name_that_may_be_meant():
    assert {row.name for row in METHODS if row.build} <= set(KNOWN_NAMES)


def test_unknown_name():
    with pytest.raises(InvalidModel, match="'no-such-owner/model' is neither a folder nor"):
        model_folder("no-such-owner/model")


def test_a_mistyped_name_gets_the_nearest_known_one(monkeypatch):
    def fetch(*_, **__):
        raise OSError("no network\nand a page of advice")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(InvalidModel, match=r"Did you mean zoo:code-11m.*says: no network$"):
        model_folder("code-11m")


@pytest.mark.parametrize("name", ["sufix", "Suffix", "recylcing", "selv:int4", "sufix:3", "mpt"])
def test_names_near_those_of_drafters_are_not_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises(InvalidModel, match=r"no draft .*did you mean .*self:int4") as caught:
        model_folder(name)
    assert "\n" not in str(caught.value)


def test_name_is_fetched_without_pickles(tmp_path, monkeypatch):
    asked = {}

    def fetch(name, *, allow_patterns, ignore_patterns):
        asked.update(name=name, patterns=allow_patterns, ignored=ignore_patterns)
        return str(tmp_path)

    (tmp_path / "model.safetensors").touch()

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert model_folder("owner/model-1.5") == tmp_path
    assert asked["name"] == "owner/model-1.5"
    assert not {"*.bin", "*.pt", "*.py"} & set(asked["patterns"])
    names = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt"]
    names += ["additional_chat_templates/tool.jinja"]
    copies = ["consolidated.safetensors", "consolidated.00.safetensors", "fp16/model.safetensors"]
    copies += ["onnx/config.json", "original/tokenizer.model", "original/params.json"]
    kept = filter_repo_objects(
        [*names, *copies], allow_patterns=asked["patterns"], ignore_patterns=asked["ignored"]
    )
    assert [*kept] == names


def test_repository_of_pickles_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(InvalidModel, match=r"no safetensors weights .* pickled weights"):
        model_folder("owner/pickles")


@pytest.mark.parametrize("name", ["ngram", "prompt-lookup", "[ngram]"])
def test_names_of_other_systems_for_suffix_drafting(name):
    with pytest.raises(InvalidModel, match='did you mean the drafter "suffix"'):
        model_folder(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.gguf", "there is no file x.gguf"), ("none", "give no draft")],
)
def test_names_that_are_not_asked_of_the_hub(name, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises(InvalidModel, match=message):
        model_folder(name)


@pytest.mark.parametrize("name", ["model.bin", "config.json"])
def test_files_are_no_model_folders(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidModel, match="is a file, not a model folder"):
        model_folder(tmp_path / name)


VALUES = (None, -1, 0, 3, 10**9, 30_000_000, 2**63, 1e400, float("nan"), "x", [], {}, [None], True)


@pytest.mark.parametrize(
    ("share", "least"), [(3, 20), pytest.param(1, 60, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_mutated_configurations_end_in_errors_of_ours(folder, share, least):
    """Every setting meets a third of the values, and the next setting the next third."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    num_refused = 0
    more = ("layer_types", "sliding_window", "rope_scaling", "quantization_config")
    for number, key in enumerate([*content, *more]):
        for value in VALUES[number % share :: share]:
            path.write_text(json.dumps(content | {key: value}))
            try:
                load_model(folder, device="cpu", max_context=64, max_batch=1)
            except ForerunError:
                num_refused += 1
    assert num_refused > least


def test_too_many_layers_are_refused_before_transformers_is_asked(folder, configure, monkeypatch):
    configure(num_hidden_layers=30_000_000)
    monkeypatch.setattr(checkpoint, "understood", lambda _: pytest.fail("transformers was asked"))
    with pytest.raises(InvalidModel, match="num_hidden_layers=30000000; it must be from 1 to 4096"):
        load_model(folder)


def test_layers_named_as_unrotated_must_be_those_of_the_model(tmp_path):
    network("SmolLM3").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    settings = json.loads(config.read_text())
    settings["no_rope_layers"] = [1, 0] * settings["num_hidden_layers"]
    config.write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match="no_rope_layers names 8 of 4 layers"):
        load_model(tmp_path, device="cpu", max_context=64, runner="native")


@pytest.mark.parametrize("runner", ["native", "eager"])
def test_nan_weights_are_refused(folder, runner):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match="logits of the first token are NaN"):
        load_model(folder, device="cpu", runner=runner)


@pytest.mark.parametrize("runner", ["native", "eager"])
def test_weights_of_the_decoder_alone_are_taken(folder, configure, runner):
    """Saved without the head, whose names then lack "model."; the head is the embedding."""
    configure(tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(load_model(folder, device="cpu", runner=runner), [1, 2, 3])
    short = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(folder, device="cpu", runner=runner)
    assert torch.equal(logits_of(model, [1, 2, 3]), expected)


def test_unused_key_value_heads_are_ignored(tmp_path):
    network = tiny.network("gpt-neox")
    network.config.num_key_value_heads = 1
    network.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", max_batch=1)
    expected = network(torch.tensor([[1, 2, 3]])).logits[0]
    torch.testing.assert_close(logits_of(model, [1, 2, 3]), expected, atol=1e-4, rtol=1e-4)


def test_a_window_longer_than_the_context_hides_nothing(tmp_path):
    network = tiny.network("mistral-sliding")
    network.config.sliding_window = 90
    network.save_pretrained(tmp_path)
    options = {"device": "cpu", "max_batch": 1, "runner": "graphs"}
    with pytest.raises(RunnerUnavailable, match=r"sliding-window attention \(sliding_window=90\)"):
        load_model(tmp_path, **options)
    short = load_model(tmp_path, **options, max_context=80, max_staged_rows=10)
    long = load_model(tmp_path, device="cpu", max_batch=1)
    assert (type(long).__name__, type(short).__name__) == ("NativeModel", "TorchModel")
    ids = list(range(1, 80))
    torch.testing.assert_close(logits_of(short, ids), logits_of(long, ids), atol=1e-3, rtol=1e-3)


def test_tokenizer(folder):
    tokenizer = ModelFiles.find(folder).tokenizer
    assert tokenizer.decode(tokenizer.encode("def add")) == "def add"
    assert tokenizer.eos_token_id == 0


def test_missing_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InvalidModel, match=r"tokenizer in .* cannot be loaded"):
        _ = ModelFiles.find(folder).tokenizer


@pytest.mark.parametrize("name", ["", " ", "~no-such-user/model"])
def test_a_name_that_leads_nowhere_is_refused(name):
    with pytest.raises(InvalidModel, match=r"is empty|there is no|no-such-user"):
        model_folder(name)
