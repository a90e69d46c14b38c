"""Which runner carries a model: the one named or none, the fastest there is under "auto"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.errors import InvalidModel, RunnerUnavailable
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import INDEX, WEIGHTS
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.load import load_model
from forerun.models.runner.graphs.model import TorchModel
from forerun.models.runner.native import NativeModel
from forerun.native import library

RUNNERS = {"native": NativeModel, "graphs": TorchModel, "eager": HuggingFaceModel}
IDS = [5, 9, 2, 7, 30, 1]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Save = Callable[..., Path]
CACHED = type(library._load)


@pytest.fixture
def save(tmp_path) -> Save:
    """Saves a random network, as one file or in parts."""

    def save_network(max_shard_size: str = "1GB", **changes: object) -> Path:
        network = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
        generator = torch.Generator().manual_seed(0)
        for parameter in network.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
        network.save_pretrained(tmp_path / "model", max_shard_size=max_shard_size)
        return tmp_path / "model"

    return save_network


@pytest.fixture
def forgotten() -> Iterator[None]:
    """As a new process: what was compiled is not remembered, and not remembered afterwards."""
    found = [*vars(library).values()]
    remembering = [function for function in found if isinstance(function, CACHED)]
    for function in remembering:
        function.cache_clear()
    yield
    for function in remembering:
        function.cache_clear()


@pytest.fixture
def without_compiler(forgotten, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def load(folder: Path, runner: str = "auto", **options: object) -> LanguageModel:
    return load_model(folder, device="cpu", max_batch=1, runner=runner, num_threads=1, **options)


def logits_of(model: LanguageModel) -> torch.Tensor:
    return tiny.logits_of(model, IDS)


def expected_of(folder: Path) -> torch.Tensor:
    return LlamaForCausalLM.from_pretrained(folder)(torch.tensor([IDS])).logits[0]


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_runner_named_is_the_runner_that_runs(save, runner, caplog):
    folder = save()
    model = load(folder, runner)
    assert type(model) is RUNNERS[runner]
    torch.testing.assert_close(logits_of(model), expected_of(folder), atol=1e-5, rtol=1e-5)
    assert not warnings_of(caplog)


def test_auto_takes_the_kernels_in_silence(save, caplog):
    assert type(load(save())) is NativeModel
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_auto_takes_the_next_and_says_so(save, caplog):
    folder = save()
    model = load(folder)
    assert type(model) is TorchModel
    torch.testing.assert_close(logits_of(model), expected_of(folder), atol=1e-5, rtol=1e-5)
    (message,) = warnings_of(caplog)
    assert message.startswith(f"{folder} runs slower than it could: no C++ compiler")
    assert "install g++ or clang" in message


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_the_kernels_are_refused_by_name(save):
    with pytest.raises(RunnerUnavailable, match=r"no C\+\+ compiler"):
        load(save(), "native")


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("body", ["exit 1", "kill -9 $$", "exit 0"])
def test_a_compiler_that_fails_costs_speed_only(save, monkeypatch, tmp_path, caplog, body):
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    folder = save()
    assert type(load(folder)) is TorchModel
    (message,) = warnings_of(caplog)
    assert str(script) in message
    with pytest.raises(RunnerUnavailable):
        load(folder, "native")


SIZES_OF_NO_KERNEL = {
    "head_dim no multiple of 16": ({"head_dim": 24}, "head_dim 24"),
    "head_dim too large": ({"head_dim": 272}, "head_dim 272"),
    "hidden_size no multiple of 16": (
        {"hidden_size": 40, "num_attention_heads": 2, "head_dim": 16},
        "hidden_size 40",
    ),
}


@pytest.mark.parametrize(
    ("changes", "message"), SIZES_OF_NO_KERNEL.values(), ids=SIZES_OF_NO_KERNEL
)
def test_sizes_without_kernels(save, caplog, changes, message):
    folder = save(**changes)
    with pytest.raises(RunnerUnavailable, match=f"not written for .*{message}"):
        load(folder, "native")
    model = load(folder)
    assert type(model) is TorchModel
    torch.testing.assert_close(logits_of(model), expected_of(folder), atol=1e-5, rtol=1e-5)
    (warning,) = warnings_of(caplog)
    assert message in warning


def test_a_dtype_without_kernels(save, caplog):
    folder = save()
    with pytest.raises(RunnerUnavailable, match=r"compute in bf16 and fp32, not in torch\.float16"):
        load(folder, "native", dtype="fp16")
    assert type(load(folder, dtype="fp16")) is TorchModel
    assert len(warnings_of(caplog)) == 1


DETAILS = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "feed-forward biases": ({"mlp_bias": True}, "mlp_bias"),
    "attention biases": ({"attention_bias": True}, "attention_bias"),
}


@pytest.mark.parametrize(("changes", "message"), DETAILS.values(), ids=DETAILS)
def test_details_only_transformers_knows(save, caplog, changes, message):
    folder = save(**changes)
    for runner in ("native", "graphs"):
        with pytest.raises(RunnerUnavailable, match=f"only the eager runner supports.*{message}"):
            load(folder, runner)
    model = load(folder)
    assert type(model) is HuggingFaceModel
    torch.testing.assert_close(logits_of(model), expected_of(folder), atol=1e-5, rtol=1e-5)
    assert message in warnings_of(caplog)[0]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("vocab_size", [31, 61, 129])
def test_odd_vocabularies(save, runner, vocab_size):
    folder = save(vocab_size=vocab_size)
    logits = logits_of(load(folder, runner))
    assert logits.shape == (len(IDS), vocab_size)
    torch.testing.assert_close(logits, expected_of(folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_in_parts(save, runner, is_tied):
    folder = save(max_shard_size="20KB", tie_word_embeddings=is_tied)
    assert (folder / INDEX).exists()
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load(folder, runner)
    torch.testing.assert_close(logits_of(model), expected_of(folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_part_that_is_missing(save, runner):
    folder = save(max_shard_size="20KB")
    part = sorted(folder.glob("*.safetensors"))[1]
    part.unlink()
    with pytest.raises(InvalidModel, match=part.name):
        load(folder, runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_head_stored_beside_a_tied_embedding(save, runner, is_own):
    """As transformers has it: the same is one, another is used whatever the configuration says."""
    folder = save(tie_word_embeddings=True)
    tied = logits_of(load(folder, runner))
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    head = embedding.flip(0) if is_own else embedding.clone()
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": head}))
    logits = logits_of(load(folder, runner))
    torch.testing.assert_close(logits, expected_of(folder), atol=1e-5, rtol=1e-5)
    assert torch.allclose(logits, tied) is not is_own


@pytest.mark.parametrize("runner", ["native", "graphs"])
def test_stored_constants_are_ignored(save, runner):
    folder = save()
    expected = logits_of(load(folder, runner))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(8)}))
    assert torch.equal(logits_of(load(folder, runner)), expected)


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"),
        r"1 missing, the first model\.layers\.1\.self_attn\.k_proj\.weight",
    ),
    "missing head": (lambda weights: weights.pop("lm_head.weight"), "1 missing, .*lm_head.weight"),
    "unexpected": (
        lambda weights: weights.update({"model.layers.1.self_attn.k_proj.bias": torch.ones(32)}),
        r"1 unexpected, the first model\.layers\.1\.self_attn\.k_proj\.bias",
    ),
    "misshapen": (
        lambda weights: weights.update({"model.norm.weight": torch.ones(63)}),
        r"1 mismatched, the first .*model\.norm\.weight",
    ),
    "transposed": (
        lambda weights: weights.update(
            {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 24)},
        ),
        r"1 mismatched, the first .*model\.layers\.0\.mlp\.up_proj\.weight",
    ),
}


@pytest.mark.parametrize("runner", ["auto", *RUNNERS])
@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_weights_that_do_not_fit_are_refused_by_all(save, runner, damage, message, caplog):
    """Never by falling to the next runner: the files are wrong, not the machine."""
    folder = save()
    change_weights(folder, damage)
    with pytest.raises(InvalidModel, match=message):
        load(folder, runner)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_of_several_dtypes(save, runner):
    folder = save()
    change_weights(
        folder,
        lambda weights: weights.update(
            {name: tensor.bfloat16() for name, tensor in weights.items() if "mlp" in name}
        ),
    )
    model = load(folder, runner, dtype="fp32")
    expected = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(
        logits_of(model), expected(torch.tensor([IDS])).logits[0], atol=1e-5, rtol=1e-5
    )


def test_the_kernels_are_of_the_cpu(save):
    folder = save()
    with pytest.raises(RunnerUnavailable, match="runs on the CPU, not on meta"):
        run_on_meta(folder)


def run_on_meta(folder: Path) -> LanguageModel:
    from forerun.models.checkpoint import ModelFiles
    from forerun.models.load import ModelRun, run_by
    from forerun.models.memory import geometry_of

    files = ModelFiles.open(folder)
    geometry = geometry_of(
        files.sizes, num_slots=1, capacity=8, max_staged_rows=1, dtype=torch.float32
    )
    run = ModelRun(files=files, geometry=geometry, device=torch.device("meta"))
    return run_by("native", run)
