"""The questions of the Diagnosis tab: asked and answered over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.server.conftest import serving, tiny_engine

from forerun.doctor.asking import MAX_QUESTIONS
from forerun.doctor.live import PageDiagnosis


@pytest.fixture(scope="module")
def page() -> Iterator[httpx.Client]:
    with serving(tiny_engine(), diagnose=PageDiagnosis()) as client:
        yield client


def test_questions_lead_to_a_diagnosis(page: httpx.Client):
    answers: dict[str, object] = {}
    for number in range(MAX_QUESTIONS + 1):
        found = page.post("/live/answers", json={"answers": answers}).json()
        assert found["num_asked"] == number
        if not found["question"]:
            break
        for item in found["question"]:
            assert item["text"] and "unknown" in item["answers"]
            answers[item["fact"]] = {"output_corrupt": "yes"}.get(item["fact"], "unknown")
    assert answers["output_corrupt"] == "yes"
    assert found["diagnosis"]["headline"] and found["diagnosis"]["verdict"] != "healthy"


@pytest.mark.parametrize(
    "answers", [{"output_corrupt": "perhaps"}, {"nothing": "yes"}, {"k": -1}, {"k": [1]}, 3]
)
def test_what_is_no_answer_is_refused(page: httpx.Client, answers: object):
    assert page.post("/live/answers", json={"answers": answers}).status_code in (400, 422)
