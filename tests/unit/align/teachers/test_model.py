"""The teacher that reruns the target: in packed rows samples are what they are alone."""

from __future__ import annotations

import copy

import pytest
import torch
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, expected_logits, texts

from forerun.align.objectives import DenseDistribution, SparseDistribution
from forerun.align.samples import Sample
from forerun.align.target import (
    adopt_target,
    choose_faster_dtype,
    load_target,
    read_head,
)
from forerun.align.teachers import ModelTeacher
from forerun.errors import InvalidModel, InvalidRequest, NotEnoughMemory
from forerun.models.checkpoint import ModelFiles
from forerun.models.memory import available_bytes
from forerun.sampling.config import SamplingParams


def teacher_of(network, sampling: SamplingParams) -> ModelTeacher:
    return ModelTeacher(adopt_target(copy.deepcopy(network)), sampling)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_rows_are_what_the_samples_are_alone(family):
    network = tiny.network(family)
    packing, batch = all_rows(texts())
    assert (batch.positions == 0).sum() > packing.rows_per_epoch  # several samples share a row
    teacher = teacher_of(network, SamplingParams())
    rows = teacher.rows(batch)
    assert len(rows.hidden) == packing.num_learned
    expected = expected_logits(network, packing, batch).softmax(-1)
    assert expected.amax(-1).mean() < 0.9  # distributions in which something can differ
    distribution = rows.distribution(slice(None))
    torch.testing.assert_close(distribution.target_probs, expected, atol=2e-5, rtol=2e-4)


def test_chunks_are_rows_of_the_whole():
    _, batch = all_rows(texts())
    rows = teacher_of(tiny.network(), SamplingParams(temperature=0.7)).rows(batch)
    whole = rows.distribution(slice(None)).target_probs
    torch.testing.assert_close(rows.distribution(slice(5, 9)).target_probs, whole[5:9])


def test_temperature_and_truncation_are_those_deployed():
    network = tiny.network()
    packing, batch = all_rows(texts())
    logits = expected_logits(network, packing, batch)
    rows = teacher_of(network, SamplingParams(temperature=0.5, top_k=3)).rows(batch)
    distribution = rows.distribution(slice(None))
    assert isinstance(distribution, DenseDistribution)
    best = logits.topk(3)
    expected = torch.zeros_like(logits).scatter_(-1, best.indices, (best.values / 0.5).softmax(-1))
    torch.testing.assert_close(distribution.target_probs, expected, atol=1e-4, rtol=1e-3)


def test_a_greedy_distribution_is_the_most_likely_token():
    network = tiny.network()
    packing, batch = all_rows(texts())
    distribution = (
        teacher_of(network, SamplingParams(temperature=0)).rows(batch).distribution(slice(0, 7))
    )
    assert isinstance(distribution, SparseDistribution)
    expected = expected_logits(network, packing, batch)[:7].argmax(-1)
    assert distribution.ids[:, 0].tolist() == expected.tolist()
    assert distribution.shares.tolist() == [[1.0]] * 7


def test_penalties_and_biases_are_left_to_the_engine():
    _, batch = all_rows(texts())
    shaped = SamplingParams(repetition_penalty=3.0, logit_bias={5: 50.0}, bad_token_ids=(7,))
    probs_of_rows = [
        teacher_of(tiny.network(), params).rows(batch).distribution(slice(0, 4)).target_probs
        for params in (shaped, SamplingParams())
    ]
    assert torch.equal(*probs_of_rows)


def test_distributions_can_be_trained_on():
    """Tensors of inference mode could not be."""
    _, batch = all_rows(texts())
    distribution = (
        teacher_of(tiny.network(), SamplingParams()).rows(batch).distribution(slice(0, 4))
    )
    logits = torch.zeros_like(distribution.target_probs, requires_grad=True)
    (distribution.target_probs * logits.log_softmax(-1)).sum().backward()
    torch.testing.assert_close(
        logits.grad, distribution.target_probs - 1 / tiny.VOCAB_SIZE, atol=1e-6, rtol=1e-5
    )


def test_a_batch_may_have_nothing_learned():
    _, batch = all_rows(texts())
    batch.predicts.zero_()
    rows = teacher_of(tiny.network(), SamplingParams()).rows(batch)
    assert len(rows.hidden) == 0
    assert rows.distribution(slice(0, 0)).target_probs.shape == (0, tiny.VOCAB_SIZE)


def test_a_target_from_a_folder_computes_the_same(on_disk):
    packing, batch = all_rows(texts())
    target = load_target(on_disk.source.target, device="cpu")
    rows = ModelTeacher(target, SamplingParams()).rows(batch)
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    distribution = rows.distribution(slice(None))
    torch.testing.assert_close(distribution.target_probs, expected, atol=2e-5, rtol=2e-4)
    assert not any(parameter.requires_grad for parameter in target.body.parameters())


def test_text_of_another_tokenizer_is_refused():
    teacher = teacher_of(tiny.network(), SamplingParams())
    with pytest.raises(InvalidRequest, match="holds the token 300, the target's vocabulary ends"):
        teacher.prepare([Sample(prompt_hash="0", token_ids=(1, 300, 2), spans=((1, 3),))])


def test_a_text_longer_than_the_targets_context_is_refused():
    teacher = teacher_of(tiny.network(max_context=16), SamplingParams())
    with pytest.raises(InvalidRequest, match="tokens, the target reads 16: lower the window"):
        teacher.prepare(texts())


def test_a_target_that_does_not_fit_is_refused_before_it_is_read(on_disk, monkeypatch):
    monkeypatch.setattr("forerun.align.target.available_bytes", lambda device: 1000)
    assert available_bytes(torch.device("cpu")) > 1000
    with pytest.raises(NotEnoughMemory, match="1000 B are available; give another --device"):
        load_target(on_disk.source.target, device="cpu")


def test_pickled_weights_are_refused(on_disk):
    folder = on_disk.source.target.folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidModel, match="only pickled weights"):
        load_target(folder, device="cpu")


def test_a_type_that_is_slower_than_fp32_is_replaced_by_it_on_a_processor(monkeypatch):
    times = {torch.bfloat16: 2.0, torch.float16: 0.5, torch.float32: 1.0}
    clock = [0.0]

    def product(one, other):
        clock[0] += times[one.dtype]

    monkeypatch.setattr("forerun.align.target.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert choose_faster_dtype(torch.bfloat16, "cpu") == torch.float32
    assert choose_faster_dtype(torch.float16, "cpu") == torch.float16
    assert choose_faster_dtype(torch.float64, "cpu") == torch.float64
    assert choose_faster_dtype(torch.bfloat16, "cuda") == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite", "gpt2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_read_alone_is_that_of_the_whole_target(family, is_tied, tmp_path):
    network = tiny.network(family, num_layers=2)
    if is_tied:
        network.config.tie_word_embeddings = True
        network.tie_weights()
    network.save_pretrained(tmp_path)
    tiny.backend().save_pretrained(tmp_path)
    whole = load_target(tmp_path, dtype="float32", device="cpu").head
    alone = read_head(ModelFiles.open(tmp_path), torch.float32)
    hidden = torch.randn(5, whole.width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(alone.logits(hidden), whole.logits(hidden))


def test_no_other_weights_are_read_for_an_output_layer(on_disk, monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("the whole target was read")

    monkeypatch.setattr("forerun.align.target.read_weights", refuse)
    assert read_head(on_disk.source.target, torch.float32).vocab_size == tiny.VOCAB_SIZE
