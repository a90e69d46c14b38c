"""Features of packed rows are those of the samples alone, computed in the loop or cached."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, caching, expected_logits, texts

from forerun.align.target import (
    EngineTarget,
    TargetModel,
    adopt_target,
    embedding_table,
    load_target,
)
from forerun.align.teachers import ModelTeacher, StateRows, make_teacher
from forerun.errors import CacheTooLarge, UnsupportedFeatures
from forerun.models.load import load_model
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams

KINDS = ("model", "hidden")
SHARING = [family for family in tiny.FAMILIES if family != "opt-projected"]


def check(network, packing, batch, rows) -> None:
    """Hidden states as transformers gives them for every sample alone."""
    compared = 0
    for row, start in ((batch.positions == 0) & (batch.samples >= 0)).nonzero().tolist():
        ids = packing.samples[int(batch.samples[row, start])].token_ids
        with torch.no_grad():
            outputs = network(torch.tensor([ids]), output_hidden_states=True)
        end = start + len(ids) - 1  # the last token predicts nothing
        for layer in range(network.config.num_hidden_layers):  # behind the last one it is normed
            expected = outputs.hidden_states[layer][0, : len(ids) - 1]
            found = rows.features[row, start:end, layer]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)
        if "olmo" not in network.config.model_type:
            torch.testing.assert_close(
                rows.last[row, start:end],
                outputs.hidden_states[-1][0, : len(ids) - 1],
                atol=2e-5,
                rtol=2e-4,
            )
        compared += 1
    assert compared == len(packing.samples)


@pytest.mark.parametrize("family", SHARING)
def test_packed_features_are_what_the_samples_have_alone(family):
    network = tiny.network(family)
    packing, batch = all_rows(texts())
    target = adopt_target(copy.deepcopy(network))
    layers = (0, 1, len(target.layers))
    rows = ModelTeacher(target, SamplingParams(), layers).rows(batch)
    check(network, packing, batch, rows)
    expected = expected_logits(network, packing, batch).softmax(-1)
    found = rows.distribution(slice(None)).target_probs
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)
    ids = torch.tensor([packing.samples[0].token_ids])
    with torch.no_grad():
        hidden = network(ids, output_hidden_states=True).hidden_states[0][0]
    if network.config.model_type not in ("gpt2", "opt"):  # those add learned positions
        torch.testing.assert_close(embedding_table(network)[ids[0]], hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_what_the_target_gives(kind, on_disk):
    packing, batch = all_rows(texts())
    teacher = make_teacher(caching(kind), on_disk.source, 300, (0, 1))
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    assert isinstance(rows, StateRows)
    check(on_disk.network, packing, batch, rows)


def test_a_cache_is_used_again(on_disk, monkeypatch):
    packing, batch = all_rows(texts())
    first = make_teacher(caching("hidden"), on_disk.source, 300, (0, 1))
    first.prepare(packing.samples)

    def refuse(*arguments, **named):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("forerun.align.target.load_target", refuse)
    again = make_teacher(caching("hidden"), on_disk.source, 300, (0, 1))
    again.prepare(packing.samples)
    assert torch.equal(again.rows(batch).features, first.rows(batch).features)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_written(on_disk):
    packing, _ = all_rows(texts())
    small = caching("hidden", max_cache_bytes=1000)
    teacher = make_teacher(small, on_disk.source, 300, (0, 1))
    with pytest.raises(CacheTooLarge, match="features and last hidden states of"):
        teacher.prepare(packing.samples)
    assert not list(on_disk.source.cache_dir.glob("*/rows-*"))
    chosen = make_teacher(caching("auto", max_cache_bytes=1000), on_disk.source, 300, (0, 1))
    assert isinstance(chosen, ModelTeacher)


def test_greedy_deployments_learn_the_whole_distribution(on_disk):
    packing, batch = all_rows(texts())
    greedy = on_disk.with_(sampling=SamplingParams(temperature=0))
    teacher = make_teacher(caching("model"), greedy, 300, (0, 1))
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    found = teacher.rows(batch).distribution(slice(0, packing.num_learned)).target_probs
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_layers_that_do_not_exist_are_refused():
    target = adopt_target(tiny.network())
    _, batch = all_rows(texts())
    with pytest.raises(UnsupportedFeatures, match=r"names \[9\], but the target has 2 layers"):
        ModelTeacher(target, SamplingParams(), (1, 9)).rows(batch)


def test_projected_embeddings_are_refused():
    network = tiny.network("opt-projected")
    with pytest.raises(UnsupportedFeatures, match="embeddings of this opt target are projected"):
        embedding_table(network)
    _, batch = all_rows(texts())
    with pytest.raises(UnsupportedFeatures, match="the head of this opt target reads 16 values"):
        ModelTeacher(adopt_target(network), SamplingParams(), (1,)).rows(batch)


def test_probabilities_of_some_tokens_are_those_of_the_whole_distribution(on_disk):
    packing, batch = all_rows(texts())
    source = on_disk.with_(sampling=SamplingParams(temperature=0.7))
    tokens = torch.tensor([1, 4, 7])
    for sampling, is_kept in ((source.sampling, True), (replace(source.sampling, top_k=5), False)):
        teacher = make_teacher(caching("hidden"), replace(source, sampling=sampling), 300, (0, 1))
        teacher.prepare(packing.samples)
        rows = teacher.rows(batch)
        every = slice(None)
        whole = rows.distribution(every).target_probs
        found = rows.over(tokens)
        assert (found.log_sums is not None) == is_kept  # else every logit is computed
        torch.testing.assert_close(found.distribution(every).target_probs, whole[:, tokens])


def test_the_engines_kernels_give_the_states_of_transformers(on_disk):
    _, batch = all_rows(texts())
    model = load_model(on_disk.source.target, dtype="float32", device="cpu", max_context=64)
    assert isinstance(model, NativeModel)
    target = load_target(on_disk.source.target, dtype="float32", device="cpu")
    runs = EngineTarget(model=model, load_head=lambda: target.head)
    inside = batch.samples >= 0
    for layers in ((), (1, 0), (1, 1)):
        found, expected = runs.states(batch, layers), target.states(batch, layers)
        assert found.shape == expected.shape
        torch.testing.assert_close(found[inside], expected[inside], atol=1e-4, rtol=1e-3)


def test_an_engine_of_this_process_scores_the_texts(on_disk):
    packing, _ = all_rows(texts())
    model = load_model(on_disk.source.target, dtype="float32", device="cpu", max_context=64)
    source = on_disk.with_(runs=model)
    assert isinstance(source.scorer(packing.samples), EngineTarget)
    long = replace(packing.samples[0], token_ids=(1,) * 65)
    assert isinstance(source.scorer([long]), TargetModel)
