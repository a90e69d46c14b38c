"""Folders of EAGLE-3 and Medusa heads, whatever their files hold."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fuzz.harness import fuzz_test

from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head
from forerun.drafters.eagle3.load import (
    read_eagle3_head,
    write_eagle3_head,
)
from forerun.drafters.medusa import MedusaConfig, MedusaHeads, read_medusa, write_medusa
from forerun.errors import InvalidModel

SIZES = Eagle3Config(
    target_hidden_size=16,
    target_vocab_size=30,
    feature_layers=(1, 2, 3),
    draft_vocab_size=10,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
SCRATCH = Path(tempfile.mkdtemp(prefix="forerun-heads-"))
# A worker may leave this module and come back to it, so that no fixture may remove the folder.
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
EAGLE, MEDUSA = SCRATCH / "eagle3", SCRATCH / "medusa"
write_eagle3_head(Eagle3Head(SIZES), EAGLE, target="t")
write_medusa(
    MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=30, num_heads=2)), MEDUSA, target="t"
)
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"


def replaced(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a function that reads a copy of a folder in which one file holds given bytes."""

    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(shutil.copytree(folder, Path(scratch) / "head"))
            (copy / name).write_bytes(data)
            return read(copy)

    return run


def read_heads(folder: Path) -> object:
    return read_medusa(folder, vocab_size=30)


CONFIG = (EAGLE / "config.json").read_bytes()
HUGE = [
    json.dumps(json.loads(CONFIG) | {name: 10**9}).encode()
    for name in ("draft_vocab_size", "target_hidden_size")
]
LAYER = json.loads(CONFIG)["transformer_layer_config"]
NESTED = [
    json.dumps(json.loads(CONFIG) | {"transformer_layer_config": LAYER | change}).encode()
    for change in (
        *({name: 10**9} for name in ("hidden_size", "vocab_size", "intermediate_size", "head_dim")),
        *({"rope_parameters": {"rope_type": kind}} for kind in ("llama3", "linear", "yarn")),
        {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
    )
]
WEIGHTS = (EAGLE / "model.safetensors").read_bytes()

test_configurations = fuzz_test(
    replaced(EAGLE, "config.json", read_eagle3_head), [CONFIG, *HUGE, *NESTED]
)
test_weights = fuzz_test(
    replaced(EAGLE, "model.safetensors", read_eagle3_head), [WEIGHTS, b"", b"\xff" * 64]
)
test_medusa_configurations = fuzz_test(
    replaced(MEDUSA, "config.json", read_heads), [(MEDUSA / "config.json").read_bytes()]
)
test_medusa_weights = fuzz_test(
    replaced(MEDUSA, MEDUSA_WEIGHTS, read_heads), [(MEDUSA / MEDUSA_WEIGHTS).read_bytes(), WEIGHTS]
)


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EAGLE, tmp_path / "eagle3"))


@pytest.fixture
def medusa(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MEDUSA, tmp_path / "medusa"))


def changed(path: Path, **tensors: torch.Tensor | None) -> None:
    """Write a file again with some tensors added, replaced or left out."""
    stored = load_file(path) | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path)


@pytest.mark.parametrize("data", HUGE + NESTED)
def test_sizes_that_the_weights_do_not_have_are_refused(eagle: Path, data: bytes):
    (eagle / "config.json").write_bytes(data)
    with pytest.raises(InvalidModel, match=r"must|supported|wide"):
        read_eagle3_head(eagle)


def test_devices_and_pipes_are_no_configuration(eagle: Path, medusa: Path):
    for folder, read in ((eagle, read_eagle3_head), (medusa, read_heads)):
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
        with pytest.raises(InvalidModel, match="not a regular file"):
            read(folder)
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to("/dev/zero")
        with pytest.raises(InvalidModel, match="not a regular file"):
            read(folder)


def test_many_tensors_are_refused_by_the_header(eagle: Path):
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % index for index in range(100_000)) + b"}"
    (eagle / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidModel, match="at most"):
        read_eagle3_head(eagle)


@pytest.mark.parametrize("name", ["d2t", "fc.weight", "lm_head.weight"])
def test_tensors_without_dimensions_are_refused(eagle: Path, name: str):
    kind = torch.int64 if name == "d2t" else torch.float32
    changed(eagle / "model.safetensors", **{name: torch.tensor(1, dtype=kind)})
    with pytest.raises(InvalidModel, match=name):
        read_eagle3_head(eagle)


def test_target_ids_below_zero_are_refused(eagle: Path):
    offsets = load_file(eagle / "model.safetensors")["d2t"]
    offsets[3] = -4  # draft token 3 would be target token -1
    changed(eagle / "model.safetensors", d2t=offsets)
    with pytest.raises(InvalidModel, match="maps draft token 3 to -1"):
        read_eagle3_head(eagle)


def test_numbers_of_medusa_heads_take_no_memory(medusa: Path):
    changed(medusa / MEDUSA_WEIGHTS, **{"100000000.0.linear.weight": torch.zeros(8, 8)})
    with pytest.raises(InvalidModel, match="only 5 are there"):
        read_heads(medusa)
    stored = load_file(medusa / MEDUSA_WEIGHTS)
    flat = {name: torch.tensor(1.0) for name in stored if not name.startswith("1000")}
    save_file(flat, medusa / MEDUSA_WEIGHTS)
    with pytest.raises(InvalidModel, match="no matrices"):
        read_heads(medusa)


def test_a_head_in_several_files_is_read(eagle: Path):
    stored = load_file(eagle / "model.safetensors")
    (eagle / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for part, held in parts.items():
        save_file({name: stored[name] for name in held}, eagle / part)
    places = {name: part for part, held in parts.items() for name in held}
    index = {"metadata": {}, "weight_map": places}
    (eagle / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(read_eagle3_head(eagle).fc.weight, stored["fc.weight"])


def test_the_targets_own_matrices_are_left_out(eagle: Path):
    copies = {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": torch.ones(30, 16)}
    changed(eagle / "model.safetensors", **copies)
    assert read_eagle3_head(eagle).config == SIZES


def test_pickled_heads_are_refused_with_the_command_that_converts(eagle: Path):
    (eagle / "model.safetensors").rename(eagle / "pytorch_model.bin")
    with pytest.raises(
        InvalidModel,
        match=r"torch\.load\(sys\.argv\[1\], weights_only=True\).* pytorch_model\.bin$",
    ):
        read_eagle3_head(eagle)


def test_what_is_not_supported_is_named(eagle: Path):
    settings = json.loads(CONFIG)
    listed = "eagle_aux_hidden_state_layer_ids"
    inner = {"eagle_config": {"use_aux_hidden_state": False}}
    (eagle / "config.json").write_text(json.dumps(settings | inner))
    with pytest.raises(InvalidModel, match="use_aux_hidden_state"):
        read_eagle3_head(eagle)
    (eagle / "config.json").write_text(json.dumps(settings | {listed: []}))
    assert read_eagle3_head(eagle, num_target_layers=8).config.feature_layers == (2, 4, 5)
    (eagle / "config.json").write_bytes(CONFIG)
    changed(eagle / "model.safetensors", **{"fc.bias": torch.zeros(16)})
    with pytest.raises(InvalidModel, match=r"fc\.bias"):
        read_eagle3_head(eagle)
