"""Features: the residual stream entering layers, for every row of a pass, on every runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.contract.conftest import Case
from tests.contract.test_language_model import (
    BRANCHED,
    BRANCHED_TOKENS,
    mixed_pass,
    text,
)
from tests.tabular import TabularModel
from torch import Tensor

from forerun.errors import UnsupportedFeatures
from forerun.models.base import Context, ModelOutput, Span, pack


def run(
    case: Case, parts: Sequence[tuple[Span, Sequence[int]]], layers: tuple[int, ...]
) -> ModelOutput:
    """A pass whose last row alone has its logits computed."""
    tokens = torch.tensor([token for _, part in parts for token in part])
    batch = pack([span for span, _ in parts], tokens, [len(tokens) - 1], case.model.device)
    return case.model.forward(replace(batch, feature_layers=layers))


def assert_close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def all_layers(case: Case) -> tuple[int, ...]:
    return tuple(range(case.model.num_layers + 1))


@pytest.mark.one_in(3)
def test_features_differ_between_layers_and_rows(case):
    """Features that are alike would let every test below pass."""
    features = case.features(text(20))
    assert features.shape == (20, case.model.num_layers + 1, case.model.hidden_size)
    assert all((features[:, layer] != features[:, layer - 1]).any() for layer in all_layers(case))
    assert features[:, -1].std(dim=0).max() > 0.1


@pytest.mark.covering
@pytest.mark.parametrize("num_rows", [1, 7, 100])
def test_features_of_a_chain(case, num_rows):
    ids = text(num_rows)
    output = run(case, [(Context(case.model.store, ids).span(num_rows), ids)], all_layers(case))
    assert_close(output.features, case.features(ids))
    assert_close(output.logits, case.expected(ids)[-1:])


@pytest.mark.one_in(3)
def test_features_come_for_the_layers_asked_in_that_order(case):
    ids, last = text(9), case.model.num_layers
    contexts = [Context(case.model.store, ids) for _ in range(3)]
    for context, layers in zip(contexts, [(last, 0), (1,), (0, 1, 0)], strict=True):
        output = run(case, [(context.span(9), ids)], layers)
        assert_close(output.features, case.features(ids)[:, list(layers)])
    other = Context(case.model.store, ids)
    assert run(case, [(other.span(9), ids)], ()).features is None


@pytest.mark.one_in(3)
def test_features_of_a_pass_of_chunks_trees_and_single_rows(case):
    (prefilling, verifying, decoding), parts = mixed_pass(case.model)
    expected = [case.features(verifying.ids)[-1:]]
    for node in range(len(BRANCHED_TOKENS)):
        path = [BRANCHED_TOKENS[above] for above in BRANCHED.path(node)]
        expected.append(case.features([*verifying.ids, *path])[-1:])
    expected += [case.features(prefilling.ids)[5:75], case.features(decoding.ids)[-1:]]
    assert_close(run(case, parts, all_layers(case)).features, torch.cat(expected))


def test_a_layer_that_does_not_exist_is_refused(case):
    span = Context(case.model.store, [1]).span(1)
    for layer in (-1, case.model.num_layers + 1):
        with pytest.raises(UnsupportedFeatures, match=f"layer {layer} "):
            run(case, [(span, [1])], (layer,))


@pytest.mark.one_in(3)
def test_embedding_norm_and_head_are_those_of_the_pass(case):
    ids = text(12)
    if isinstance(case.model, TabularModel):
        with pytest.raises(UnsupportedFeatures):
            case.model.embed(torch.tensor(ids))
        for call in (case.model.final_norm, case.model.head):
            with pytest.raises(UnsupportedFeatures):
                call(torch.zeros(2, 4))
        return
    features = case.features(ids)
    normed = case.model.final_norm(features[:, -1])
    assert_close(case.model.head(normed), case.expected(ids))
    embedded = case.model.embed(torch.tensor(ids))
    if not case.model.architecture.learned_positions:
        assert_close(embedded, features[:, 0])
    else:
        positions = features[:, 0] - embedded
        moved = [*ids[6:], *ids[:6]]
        other = case.features(moved)[:, 0] - case.model.embed(torch.tensor(moved))
        assert_close(positions, other)


@pytest.mark.one_in(3)
def test_shorter_models_have_the_features_of_their_layers(case):
    if isinstance(case.model, TabularModel):
        pytest.skip("a table has no layers to leave out")
    ids = text(9)
    shorter = replace(case, model=case.model.first_layers(1))
    output = run(shorter, [(Context(case.model.store, ids).span(9), ids)], (1, 0))
    assert_close(output.features, case.features(ids)[:, [1, 0]])
