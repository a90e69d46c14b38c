"""Directions have the expectation they say; alternatives are distributions."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.doctor.audit import alternatives
from forerun.doctor.audit.readings import ExpectedRows, read_sampled

VOCAB = 6


def rows_of(seed: float, num: int) -> np.ndarray:
    weights = np.array(
        [
            [1.05 + np.sin(seed + 3 * row + 7 * column) for column in range(VOCAB)]
            for row in range(num)
        ]
    )
    return weights / weights.sum(-1, keepdims=True)


TARGET, DRAFT = rows_of(0.3, 1), rows_of(1.7, 1)


def reading(token: int, *, reported: bool = False, draft: bool = True):
    if not reported:
        rows = ExpectedRows(probs=TARGET, columns=np.array([token]), draft=DRAFT if draft else None)
        return read_sampled(rows, (1, 2), (token,), (3,))
    order = TARGET[0].argsort()[::-1][:4]
    probs = np.append(TARGET[0, order], 1 - TARGET[0, order].sum())[None]
    place = list(order).index(token) if token in order else 4
    rows = ExpectedRows(probs=probs, columns=np.array([place]), ids=order[None])
    return read_sampled(rows, (1, 2), (token,), (int(order[1]),))


@pytest.mark.parametrize("reported", [False, True])
def test_every_direction_has_the_expectation_it_says(reported):
    each = [reading(token, reported=reported)[0] for token in range(VOCAB)]
    assert len(each[0]) >= 7
    for name in each[0]:
        mean = sum(TARGET[0, t] * each[t][name][0][0] for t in range(VOCAB))
        assert mean == pytest.approx(each[0][name][1][0]), name
        assert all(0 <= found[name][0][0] <= 1 for found in each)


def test_every_likelihood_ratio_has_expectation_one():
    each = [reading(token)[1] for token in range(VOCAB)]
    assert set(each[0]) <= set(alternatives.FAMILIES)
    assert len(each[0]) > 10
    for name in each[0]:
        mean = sum(TARGET[0, t] * each[t][name][0] for t in range(VOCAB))
        assert mean == pytest.approx(1.0), name


def test_a_correct_rule_emits_the_target():
    accepted = alternatives._ratio(TARGET, DRAFT)
    found = alternatives._verified(TARGET, DRAFT, accepted, DRAFT)
    assert found == pytest.approx(TARGET)


def test_noise_reused_equals_brute_force():
    residual = np.maximum(TARGET - DRAFT, 0)[0]
    residual /= residual.sum()
    emitted, num, ends = np.zeros(VOCAB), 20_000, DRAFT[0].cumsum()
    for n in range(num):
        u = (n + 0.5) / num
        token = int(np.searchsorted(ends, u, side="right"))
        if u * DRAFT[0, token] < TARGET[0, token]:
            emitted[token] += 1 / num
        else:
            emitted += residual / num
    found = dict(alternatives.of_draft(TARGET, DRAFT))["noise_reused"]
    assert found[0] == pytest.approx(emitted, abs=1e-3)


def test_a_second_answer_is_compared_until_it_parts():
    rows = ExpectedRows(probs=rows_of(0.3, 4), columns=np.array([1, 2, 3, 4]))
    values, expected = read_sampled(rows, (), (1, 2, 3, 4), (1, 5, 3))[0]["copied"]
    assert values[:2].tolist() == [1.0, 0.0]
    assert expected[1] == pytest.approx(rows.probs[1, 5])
    assert np.isnan(values[2:]).all()


def test_a_token_seen_before_is_a_repeat():
    rows = ExpectedRows(probs=rows_of(0.3, 2), columns=np.array([4, 4]))
    values, expected = read_sampled(rows, (0, 1), (4, 4), ())[0]["repeats"]
    assert values.tolist() == [0.0, 1.0]
    assert expected[1] == pytest.approx(rows.probs[1, [0, 1, 4]].sum())
