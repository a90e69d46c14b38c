"""The stop rule inside the kernels, at the very value it compares."""

from __future__ import annotations

import math

import pytest
import torch
from tests import tiny
from tests.natives import native_model
from torch import Tensor

from forerun.models.base import Context, SampledTokens, pack
from forerun.models.runner.native import NativeModel
from forerun.theory.stop_rule import StopRule

K = 4
NEVER = {"entropy": 100.0, "top_probability": 0.0}


@pytest.fixture(scope="module")
def model() -> NativeModel:
    return native_model(tiny.network())


def chain(model: NativeModel, measure: str, threshold: float, temperature: float) -> SampledTokens:
    context = Context(model.store, [5, 9, 2])
    batch = pack([context.span(3)], [5, 9, 2], [2], model.device)
    drawn = model.sampled_chain(
        batch,
        torch.arange(K)[:, None],
        torch.tensor([temperature]),
        model.vocab_size,
        by_race=False,
        stops=[StopRule(measure=measure, threshold=threshold)],
    )
    context.close()
    return drawn


def num_measured(values: Tensor | None) -> int:
    assert values is not None
    return int((values >= 0).sum())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("measure", NEVER)
def test_a_value_equal_to_the_threshold_does_not_stop(model, measure, temperature):
    values = chain(model, measure, NEVER[measure], temperature).stop_values
    assert num_measured(values) == K
    worst = float(values[1:].max() if measure == "entropy" else values[1:].min())
    node = 1 + int((values[1:, 0] == worst).nonzero()[0])
    at_it = chain(model, measure, worst, temperature).stop_values
    assert num_measured(at_it) == K  # the worst node is drafted too
    beyond = math.nextafter(worst, 0.0 if measure == "entropy" else 1.0)
    stopped = chain(model, measure, beyond, temperature).stop_values
    assert num_measured(stopped) == node + 1  # measured, and the chain ends before it


@pytest.mark.parametrize("measure", NEVER)
def test_the_first_token_is_drafted_whatever_the_threshold(model, measure):
    strictest = 0.0 if measure == "entropy" else 1.0
    assert num_measured(chain(model, measure, strictest, 0.8).stop_values) == 2
