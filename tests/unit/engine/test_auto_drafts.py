"""What `draft="auto"` finds for a target, without loading or fetching anything."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from forerun import Engine
from forerun.engine import auto_drafts as found_drafts
from forerun.engine.auto_drafts import (
    COPIER,
    IN_FEWER_BITS,
    auto_drafts,
    fitting_models,
    with_auto,
)
from forerun.engine.config import EngineConfig
from forerun.errors import ForerunError, InvalidModel, InvalidRequest
from forerun.measure.quantise import write_quantised
from forerun.models.catalog import zoo_path
from forerun.models.checkpoint import ModelFiles

TARGET = str(zoo_path("zoo:code-40m"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    scan = partial(huggingface_hub.scan_cache_dir, cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    return tmp_path


def add(cache: Path, name: str, model: str) -> Path:
    """Put a shipped model into the cache under a name of the hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(zoo_path(model), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_shipped_target_has_its_shipped_draft():
    assert auto_drafts("zoo:code-40m") == ("zoo:code-2m-for-40m", IN_FEWER_BITS, COPIER)
    assert auto_drafts("zoo:books-1m") == (COPIER,)


def test_without_a_cache_the_target_drafts_for_itself():
    assert auto_drafts(TARGET) == (IN_FEWER_BITS, COPIER)


@pytest.mark.parametrize(
    "settings",
    [{"runner": "graphs"}, {"dtype": "float16"}, {"weights": "int4"}, {"weights": "int8"}],
)
def test_no_copy_in_4_bits_is_made_where_another_runner_or_fewer_bits_are_asked(settings):
    assert auto_drafts(TARGET, **settings) == (COPIER,)
    assert auto_drafts(TARGET, dtype="float32", weights="bf16") == (IN_FEWER_BITS, COPIER)


def test_a_small_target_does_not_draft_for_itself():
    assert auto_drafts(str(zoo_path("zoo:code-11m"))) == (COPIER,)


def test_a_target_in_few_bits_does_not_draft_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(found_drafts, "LEAST_READ_BYTES", 0)
    small = zoo_path("zoo:code-2m-for-40m")
    write_quantised(small, tmp_path / "int4", "int4", lambda share: None)
    assert auto_drafts(str(small)) == (IN_FEWER_BITS, COPIER)
    assert auto_drafts(str(tmp_path / "int4")) == (COPIER,)


def test_a_copy_in_4_bits_is_counted_before_anything_is_loaded(monkeypatch, caplog):
    needed = found_drafts._describe_run(ModelFiles.open(Path(TARGET)), "cpu").memory.total_bytes
    caplog.set_level("INFO", "forerun.loading")
    monkeypatch.setattr(found_drafts, "available_bytes", lambda device: needed + (30 << 20))
    assert auto_drafts(TARGET) == (IN_FEWER_BITS, COPIER)
    monkeypatch.setattr(found_drafts, "available_bytes", lambda device: needed + (29 << 20))
    assert auto_drafts(TARGET) == (COPIER,)
    assert "in 4 bits needs" in caplog.text


def test_the_smaller_model_with_the_same_tokenizer_is_found(cache):
    good = add(cache, "org/small", "code-2m-for-40m")
    add(cache, "org/as-large", "code-40m")
    add(cache, "org/head", "eagle3-for-40m")
    broken = add(cache, "org/broken", "code-2m-for-40m")
    (broken / "model.safetensors").unlink()
    assert auto_drafts(TARGET) == (str(good), IN_FEWER_BITS, COPIER)


def test_a_model_whose_tokenizer_panics_or_whose_settings_are_odd_is_left_out(cache, caplog):
    """The first one makes the Rust code of the tokenizers library panic, which is no Exception."""
    caplog.set_level("INFO", "forerun.loading")
    junk = add(cache, "org/junk", "code-2m-for-40m")
    content = json.loads((junk / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (junk / "tokenizer.json").write_text(json.dumps(content))
    for number, names in enumerate([5, {}, [["x"]], "LlamaForCausalLM"]):
        odd = add(cache, f"org/odd-{number}", "code-2m-for-40m")
        settings = json.loads((odd / "config.json").read_text())
        (odd / "config.json").write_text(json.dumps({**settings, "architectures": names}))
    good = add(cache, "org/small", "code-2m-for-40m")
    assert auto_drafts(TARGET) == (str(good), IN_FEWER_BITS, COPIER)
    (line,) = [r.getMessage() for r in caplog.records if "cannot draft" in r.getMessage()]
    assert line.startswith("org/junk of the local Hugging Face cache cannot draft: the tokenizer")


def test_a_model_with_another_tokenizer_comes_after_one_with_the_same(cache):
    """The same model, whose tokenizer has one token under another spelling."""
    other = add(cache, "org/a-foreign", "code-2m-for-40m")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert [(m.name, m.is_foreign) for m in fitting_models(TARGET)] == [("org/a-foreign", True)]
    add(cache, "org/same", "code-2m-for-40m")
    assert [m.name for m in fitting_models(TARGET)] == ["org/same", "org/a-foreign"]


def test_a_draft_has_at_most_a_share_of_the_targets_parameters(cache, monkeypatch):
    add(cache, "org/small", "code-2m-for-40m")
    (model,) = fitting_models(TARGET)
    share = model.num_parameters / ModelFiles.open(Path(TARGET)).num_parameters
    monkeypatch.setattr(found_drafts, "MOST_SHARE", share * (1 + 1e-9))
    assert [*fitting_models(TARGET)] == [model]
    monkeypatch.setattr(found_drafts, "MOST_SHARE", share * (1 - 1e-6))
    assert [*fitting_models(TARGET)] == []


def test_a_model_as_large_as_the_target_is_no_draft(cache):
    add(cache, "org/as-large", "code-40m")
    assert [*fitting_models(TARGET)] == []


def test_the_draft_leaves_less_room_for_a_copy_of_the_target(cache, monkeypatch):
    good = add(cache, "org/small", "code-2m-for-40m")
    (model,) = fitting_models(TARGET)
    needed = found_drafts._describe_run(ModelFiles.open(Path(TARGET)), "cpu").memory.total_bytes
    room = needed + model.needed_bytes
    for more, copies in ((30 << 20, (IN_FEWER_BITS,)), (29 << 20, ())):
        monkeypatch.setattr(found_drafts, "available_bytes", lambda _, more=more: room + more)
        assert auto_drafts(TARGET) == (str(good), *copies, COPIER)


def test_a_draft_that_does_not_fit_into_the_memory_is_left_out(cache, monkeypatch, caplog):
    add(cache, "org/small", "code-2m-for-40m")
    caplog.set_level("INFO", "forerun.loading")
    (model,) = fitting_models(TARGET)
    monkeypatch.setattr(found_drafts, "available_bytes", lambda device: model.needed_bytes)
    assert list(fitting_models(TARGET)) == []
    assert "org/small needs" in caplog.text


def test_auto_stands_beside_named_drafts_and_names_none_twice():
    config = EngineConfig()
    target = ModelFiles.open("zoo:code-40m")
    drafts, found = with_auto(["suffix", "auto", "recycling"], target, "cpu", "auto", config)
    assert drafts == ["suffix", "zoo:code-2m-for-40m", IN_FEWER_BITS, "recycling"]
    assert found == ["zoo:code-2m-for-40m", IN_FEWER_BITS]
    drafts, _ = with_auto(["auto", IN_FEWER_BITS], target, "cpu", "auto", config)
    assert drafts == ["zoo:code-2m-for-40m", COPIER, IN_FEWER_BITS]


def test_a_draft_that_was_found_and_cannot_be_loaded_is_left_out(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken"
    shutil.copytree(zoo_path("code-2m-for-40m"), broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    monkeypatch.setattr(found_drafts, "auto_drafts", lambda *_: (str(broken), COPIER))
    engine = Engine.load("zoo:books-1m", draft="auto")
    assert [choice.method for choice in engine.choices()] == ["plain", COPIER]
    (line,) = [r.getMessage() for r in caplog.records if "goes on without" in r.getMessage()]
    assert str(broken) in line
    with pytest.raises(ForerunError):
        Engine.load("zoo:books-1m", draft=[str(broken), COPIER])


@pytest.mark.parametrize("draft", ["mtp", ["mtp", "suffix"], ["suffix", "mtp", "auto"]])
def test_a_module_that_is_asked_for_and_missing_is_refused(draft):
    with pytest.raises(InvalidModel, match="brings no multi-token-prediction"):
        Engine.load("zoo:books-1m", draft=draft)


@pytest.mark.parametrize("draft", ["self:99", "self:4", "self:0", "self:x", ["suffix", "self:99"]])
def test_a_self_draft_of_too_many_layers_is_refused_before_weights_are_read(draft, monkeypatch):
    monkeypatch.delattr("forerun.engine.loading.load_model")
    with pytest.raises(InvalidRequest, match="self:"):
        Engine.load("zoo:books-1m", draft=draft)


def test_several_drafts_are_refused_with_a_controller_that_takes_the_first():
    with pytest.raises(InvalidRequest, match=r"several drafts \(suffix, recycling\).*fixed"):
        Engine.load(
            "zoo:books-1m", draft=["suffix", "recycling"], config=EngineConfig(controller="fixed")
        )
    engine = Engine.load("zoo:books-1m", draft=["suffix", "recycling"])
    with pytest.raises(InvalidRequest, match="several drafts"):
        replaced = Engine.load("zoo:books-1m", config=EngineConfig(controller="fixed"))
        replaced.with_draft(["suffix", "recycling"])
    assert len(engine.capabilities().methods) == 2
