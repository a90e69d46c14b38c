"""The check at load against transformers' own passes: silent for every class, and faults show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from tests import tiny
from tests.contract.test_more_families import MORE, network

from forerun.errors import InvalidModel
from forerun.models import attention, base, huggingface, recurrent
from forerun.models.families import FAMILIES
from forerun.models.huggingface import check_passes
from forerun.models.load import load_model

pytestmark = pytest.mark.usefixtures("unchecked")

# What a released configuration says and the class's own defaults leave out.
RELEASED: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [9, 18, 27]},
    "DeepseekV2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "Dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "Gemma4": {"num_kv_shared_layers": 10},
    "HunYuanDenseV1": {"head_dim": 128},
    "HunYuanMoEV1": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "Lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "Lfm2Moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "GraniteMoeHybrid": {"layer_types": [*["mamba"] * 7, "attention"] * 4},
    "Ministral": {"head_dim": 128, "num_key_value_heads": 8},
    "Nemotron": {"num_key_value_heads": 8},
}


@pytest.fixture(autouse=True)
def compared(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "was not compared" not in caplog.text


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_at_its_released_size_passes(name):
    model_class = getattr(transformers, name)
    settings = RELEASED.get(name.removesuffix("ForCausalLM"), {})
    check_passes(model_class, model_class.config_class(**settings))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", MORE)
def test_a_class_at_the_size_of_the_tests_passes(family):
    made = network(family)
    check_passes(type(made), made.config)


def state_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent.RecurrentStore, "state_before", lambda *_: {})


def mask_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Biases, "of", lambda *_: None)


def window_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(self: attention.AttentionPass, window: int | None) -> Any:
        return right(self, None)

    right = attention.AttentionPass.blocks
    monkeypatch.setattr(attention.AttentionPass, "blocks", blocks)


def position_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a later pass are one position too far."""

    def positions_of(span: base.Span) -> list[int]:
        return [position + bool(span.start) for position in right(span)]

    right = base.positions_of
    monkeypatch.setattr(base, "positions_of", positions_of)


def sinks_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any) -> Any:
        return right(*args[:6], None)

    right = attention.attend
    monkeypatch.setattr(attention, "attend", attend)


RECURRENT = ("FalconH1", "Jamba", "KimiLinear", "Lfm2", "Mamba2", "NemotronH", "Qwen3_5")
ROTATED = ("DeepseekV3", "Gemma2", "GPT2", "Llama", "MiniMaxM2", "OPT", "Phi", "Qwen3_5")
WINDOWED = ("Cohere2", "Cwm", "Gemma2", "Gemma3", "Gemma4", "GptOss", "Ministral", "VaultGemma")
FAULTS = {
    state_ignored: RECURRENT,
    mask_ignored: (*ROTATED, "Gemma4", "Jamba", "Llama4"),
    window_ignored: WINDOWED,
    position_off_by_one: ROTATED,
    sinks_ignored: ("GptOss", "GraniteSWA"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("plant", "family"), [(plant, f) for plant, families in FAULTS.items() for f in families]
)
def test_a_fault_shows(monkeypatch, plant, family):
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model_class = getattr(transformers, name)
    config = model_class.config_class(**RELEASED.get(family, {}))
    plant(monkeypatch)
    version = re.escape(transformers.__version__)
    with pytest.raises(InvalidModel, match=f"{name} of transformers {version} .*its logits differ"):
        check_passes(model_class, config)


def test_a_pass_that_fails_is_a_refusal(monkeypatch):
    monkeypatch.setattr(recurrent, "CACHE_NAMES", ("states",))
    made = network("Lfm2")
    with pytest.raises(InvalidModel, match="takes its states by none of the names states"):
        check_passes(type(made), made.config)


def test_models_are_checked_when_they_are_loaded(monkeypatch, tmp_path):
    network("Gemma2").save_pretrained(tmp_path)
    checked: list[Any] = []
    monkeypatch.setattr(huggingface, "check_passes", lambda *given: checked.append(given))
    load_model(tmp_path, max_context=10, runner="eager")
    assert [model_class.__name__ for model_class, _ in checked] == ["Gemma2ForCausalLM"]
    assert checked[0][1].vocab_size == tiny.VOCAB_SIZE


def test_weights_of_a_class_that_is_refused_are_not_read(monkeypatch, tmp_path):
    network("Gemma2").save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface, "read_weights", None)
    monkeypatch.setattr(huggingface, "_measure_difference", lambda *_: 0.5)
    with pytest.raises(InvalidModel, match=r"its logits differ by 50\.0% from its own pass"):
        load_model(tmp_path, max_context=10, runner="eager")


def _failing(*_: object) -> None:
    raise RuntimeError("no room")


@pytest.mark.parametrize("part", ["_trim_settings", "_measure_difference"])
def test_a_check_that_fails_by_itself_is_no_refusal(monkeypatch, caplog, part):
    made = network("Llama")
    monkeypatch.setattr(huggingface, part, _failing)
    check_passes(type(made), made.config)
    assert "LlamaForCausalLM of transformers" in caplog.text
    caplog.clear()
