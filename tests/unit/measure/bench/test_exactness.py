from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.measure.bench.report import check_exactness, first_difference
from forerun.sampling.config import SamplingParams

CASES = {"greedy": SamplingParams(temperature=0, max_tokens=9)}


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
    ],
)
def test_first_difference(one, other, place):
    assert first_difference(one, other) == place


def test_identical_outputs_pass_and_say_how_much_was_compared(make_arm):
    plain, draft = make_arm("plain").engine, make_arm("draft", k=2, accepted=1).engine
    report = check_exactness(plain, draft, ["a", "b"], CASES)
    assert report.passed
    assert report.num_tokens == {"greedy": 18}
    assert report.num_accepted == 8
    assert "18 tokens greedy" in report.sentence
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


class OneTokenOff:
    """An engine that changes token 3 of the second prompt."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, prompts, params):
        outputs = self.engine.generate(prompts, params)
        (completion,) = outputs[1].completions
        ids = list(completion.token_ids)
        ids[3] = 99
        outputs[1] = replace(outputs[1], completions=(replace(completion, token_ids=tuple(ids)),))
        return outputs


def test_a_single_different_token_fails_and_is_named(make_arm):
    plain, draft = make_arm("plain").engine, OneTokenOff(make_arm("draft").engine)
    report = check_exactness(plain, draft, ["a", "b"], CASES)
    assert not report.passed
    (mismatch,) = report.mismatches
    assert (mismatch.prompt, mismatch.position) == (1, 3)
    assert (mismatch.plain, mismatch.speculative) == (3, 99)
    assert "prompt 1) at token 3: plain 3, speculative 99" in report.sentence
