"""Folders that must not be loaded are recognised from configuration and headers alone."""

from __future__ import annotations

import json
import resource
from subprocess import run

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import InvalidModel
from forerun.models.checkpoint import INDEX, WEIGHTS, ModelFiles
from forerun.models.stored_tensors import count_elements


def test_good_folder(folder):
    checkpoint = ModelFiles.open(folder)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert [file.name for file in checkpoint.weight_files] == [WEIGHTS]
    assert checkpoint.stored_dtype == "F32"
    assert checkpoint.num_parameters > 320 * 16 * 2


def test_elements_are_counted_by_type(tmp_path):
    path = tmp_path / WEIGHTS
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    assert count_elements(path) == {"F32": 6, "BF16": 5}


def test_sharded_folder(folder):
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    save_file({"x": torch.zeros(7)}, folder / "b.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    checkpoint = ModelFiles.open(folder)
    assert [file.name for file in checkpoint.weight_files] == ["a.safetensors", "b.safetensors"]
    (folder / "b.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"lacks its weights: b\.safetensors"):
        ModelFiles.open(folder)


def test_missing_folder(tmp_path):
    with pytest.raises(InvalidModel, match=r"no model folder .*absent"):
        ModelFiles.open(tmp_path / "absent")


def test_truncated_weights(folder):
    path = folder / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    message = (
        f"model.safetensors has {len(content) - 100} bytes, its header declares {len(content)}"
    )
    with pytest.raises(InvalidModel, match=message):
        ModelFiles.open(folder)


@pytest.mark.parametrize("kept", [0, 5, 300])
def test_weights_cut_inside_the_header(folder, kept):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidModel, match=r"model\.safetensors"):
        ModelFiles.open(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        (2).to_bytes(8, "little") + b"[]",
        (3).to_bytes(8, "little") + b"\xff{}",
        (11).to_bytes(8, "little") + b'{"a": {}}  ',
        (9).to_bytes(8, "little") + b'{"a": [] ',
    ],
)
def test_files_that_are_no_safetensors(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(InvalidModel, match=r"model\.safetensors"):
        ModelFiles.open(folder)


def test_unreadable_weights(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(InvalidModel, match="lacks its weights"):
        ModelFiles.open(folder)


def test_pickled_weights_only(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidModel, match=r"only pickled weights \(pytorch_model\.bin\)"):
        ModelFiles.open(folder)


@pytest.mark.parametrize("name", ["$(touch PWNED).bin", "`touch PWNED`.bin", "';touch PWNED;'.bin"])
def test_advice_on_pickled_weights_runs_nothing_of_their_names(folder, name):
    """A `python` that writes down its arguments stands for the real one."""
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(InvalidModel) as caught:
        ModelFiles.open(folder)
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s' \"$3\" > argument\n")
    python.chmod(0o700)
    command = str(caught.value).rpartition("\n")[2]
    run(["/bin/sh", "-c", command], cwd=folder, env={"PATH": f"{folder}:/usr/bin:/bin"}, check=True)
    assert (folder / "argument").read_text() == name
    assert not (folder / "PWNED").exists()


def test_a_name_of_pickled_weights_adds_no_line(folder):
    (folder / WEIGHTS).rename(folder / "a\nrm -r b.bin")
    with pytest.raises(InvalidModel) as caught:
        ModelFiles.open(folder)
    assert "\nrm" not in str(caught.value)
    assert "in place of NAME write another name" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["EagleQwen3ForCausalLM"]},
        {"draft_vocab_size": 100},
        {"eagle_config": {}},
        {"speculators_model_type": "mlp"},
    ],
)
def test_heads_of_other_architectures_are_refused_by_name(folder, changes):
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({"d2t": torch.zeros(4, dtype=torch.int64)}, folder / WEIGHTS)
    named = f"a head of the architecture {settings['architectures'][0]}"
    with pytest.raises(InvalidModel, match=named):
        ModelFiles.open(folder)


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", b"[" + b"{}," * 4_000_001]
)
def test_headers_of_many_or_nested_values_are_refused(folder, header):
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidModel, match=r"cannot be read: its header|tensor .a. is"):
        ModelFiles.open(folder)


def test_deeply_nested_tokenizer_settings_are_refused(folder):
    (folder / "tokenizer_config.json").write_text('{"chat_template": ' + "[" * 100_000)
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json cannot be read"):
        _ = ModelFiles.find(folder).template_hash


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(InvalidModel, match=r"lacks its weights: model\.safetensors"):
        ModelFiles.open(folder)


def test_weights_of_an_unsupported_type(folder):
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, folder / WEIGHTS)
    with pytest.raises(InvalidModel, match="are I8; supported are BF16, F16, F32, F64"):
        ModelFiles.open(folder)


def test_missing_configuration(folder):
    (folder / "config.json").unlink()
    with pytest.raises(InvalidModel, match=r"config\.json is missing; is .* a model folder"):
        ModelFiles.open(folder)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_damaged_configuration(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(InvalidModel, match=r"config\.json (cannot be read|holds no JSON object)"):
        ModelFiles.open(folder)


@pytest.mark.parametrize(
    ("architecture", "auto_map"),
    [
        ("LlamaForCausalLM", {"AutoModelForCausalLM": "modeling.Mine"}),
        ("Mine", {"AutoModelForCausalLM": "modeling.Mine"}),
        ("LlamaForCausalLM", {"AutoConfig": "configuration.LlamaConfig"}),
        ("LlamaForCausalLM", "modeling.LlamaForCausalLM"),
    ],
)
def test_remote_code(folder, configure, architecture, auto_map):
    configure(architectures=[architecture], auto_map=auto_map)
    with pytest.raises(InvalidModel, match="remote code is never run"):
        ModelFiles.open(folder)


def test_nameless_architecture(folder, configure):
    configure(architectures=None)
    with pytest.raises(InvalidModel, match="names no architecture"):
        ModelFiles.open(folder)


def test_adapter(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidModel, match=r"adapter \(LoRA\); merge it"):
        ModelFiles.open(folder)


def write_header(path, header: object, num_data_bytes: int = 0) -> None:
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(num_data_bytes))


def test_a_huge_header_is_not_read(folder):
    path = folder / WEIGHTS
    with path.open("wb") as file:
        file.write((10 * 10**9).to_bytes(8, "little"))
        file.truncate(11 * 10**9)  # sparse: takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidModel, match="it has 10000000000 bytes; at most"):
        ModelFiles.open(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (GOOD | {"data_offsets": [8, 32]}, "leaves a gap"),
        (GOOD | {"data_offsets": [24, 0]}, "-24 bytes for 6"),
        (GOOD | {"data_offsets": [-8, 16]}, r"`\$\.data_offsets\[0\]`"),
        (GOOD | {"data_offsets": [0]}, r"`\$\.data_offsets`"),
        (GOOD | {"data_offsets": "ab"}, r"`\$\.data_offsets`"),
        (GOOD | {"data_offsets": None}, r"`\$\.data_offsets`"),
        (GOOD | {"data_offsets": [0, 2**70]}, r"`\$\.data_offsets\[1\]`"),
        (GOOD | {"shape": [2, 4]}, "24 bytes for 8 F32"),
        (GOOD | {"shape": [-2, -3]}, r"`\$\.shape\[0\]`"),
        (GOOD | {"shape": [1.5, 4]}, r"`\$\.shape\[0\]`"),
        (GOOD | {"shape": [True, 6]}, r"`\$\.shape\[0\]`"),
        (GOOD | {"shape": [1] * 9}, r"length <= 8 .*`\$\.shape`"),
        (GOOD | {"shape": {"a": 1}}, r"`\$\.shape`"),
        (GOOD | {"dtype": ["F32"]}, r"`\$\.dtype`"),
        ([1, 2], r"tensor 'x' is \[1, 2\] \(Expected `object`"),
        (None, r"tensor 'x' is None \(Expected `object`"),
    ],
)
def test_tensors_that_contradict_themselves(folder, entry, message):
    write_header(folder / WEIGHTS, {"x": entry}, 24)
    with pytest.raises(InvalidModel, match=message):
        ModelFiles.open(folder)
    write_header(folder / WEIGHTS, {"x": GOOD}, 24)
    ModelFiles.open(folder)


def test_tensors_that_overlap(folder):
    write_header(folder / WEIGHTS, {"x": GOOD, "y": GOOD}, 24)
    with pytest.raises(InvalidModel, match="overlaps another"):
        ModelFiles.open(folder)


@pytest.mark.parametrize("weight_map", [None, [], "a", 3, {"x": None}, {"x": ["a"]}, {"x": {}}])
def test_an_index_of_a_wrong_type(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidModel, match=r"weight_map|as a weight file"):
        ModelFiles.open(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_an_index_names_files_of_its_folder_only(folder, name):
    (folder.parent / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(InvalidModel, match="only files of the same folder are read"):
        ModelFiles.open(folder)


def test_deeply_nested_and_huge_configurations(folder):
    path = folder / "config.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(InvalidModel, match="cannot be read"):
        ModelFiles.open(folder)
    with path.open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(InvalidModel, match="larger than 33554432 bytes"):
        ModelFiles.open(folder)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", 3, {"a": 1}])
def test_architectures_of_a_wrong_type(folder, configure, architectures):
    configure(architectures=architectures)
    with pytest.raises(InvalidModel, match="names no architecture"):
        ModelFiles.open(folder)


@pytest.mark.parametrize("architecture", ["Eagle3DeepseekV2ForCausalLM", "EagleLlamaForCausalLM"])
def test_heads_of_another_architecture_are_named(folder, architecture):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    with pytest.raises(InvalidModel, match=f"a head of the architecture {architecture}"):
        ModelFiles.open(folder)


def test_a_file_of_very_many_tensors_is_refused(tmp_path):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"x.{n}": empty for n in range(70_000)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidModel, match="has 70000 tensors; at most 65536"):
        count_elements(path)
