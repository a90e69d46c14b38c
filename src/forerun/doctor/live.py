"""What the live page shows of a diagnosis."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from forerun.doctor.asking import next_question, read_answer, with_answers
from forerun.doctor.diagnosis import Diagnosis, diagnose
from forerun.doctor.evidence import Evidence, Reading
from forerun.doctor.readers.prometheus import Metrics, metrics_of, read_page
from forerun.doctor.words import change_line, changes_of, headline

MIN_DIAGNOSED = 50
"""Steps of requests below which there is no diagnosis."""
MAX_DIAGNOSED = 40
"""Samples of the metrics; a diagnosis rests on what was counted since the oldest."""
MAX_CAUSES = 3
MAX_CHANGES = 3


class PageDiagnosis:
    """Diagnoses a server of forerun or vLLM when it is called with the text of its metrics."""

    def __init__(self, engine: str = "forerun") -> None:
        self.engine = engine
        self._samples = deque([Metrics()], maxlen=MAX_DIAGNOSED)

    def __call__(self, page: str) -> dict[str, object] | None:
        """Return a diagnosis of what was counted lately; None without enough or new steps."""
        metrics = read_page(page).metrics
        growth = metrics.since(self._samples[0])
        num_steps, num_new = map(_count_steps, (growth, metrics.since(self._samples[-1])))
        if not num_new or num_steps < MIN_DIAGNOSED:
            return None
        self._samples.append(metrics)
        return diagnose_metrics(growth, self.engine, num_steps)

    def ask(self, page: str, given: Mapping[str, object]) -> dict[str, object]:
        """Return the next question for a person, and the diagnosis with the answers so far.

        It rests on everything that was counted since the start.

        Raises:
            InvalidRequest: an answer is none.
        """
        answers = {name: read_answer(name, word) for name, word in given.items()}
        evidence = collect_evidence(read_page(page).metrics, self.engine)
        number, question = next_question(evidence, answers)
        return {
            "num_asked": number,
            "question": [item.to_dict() for item in question],
            "diagnosis": _describe(diagnose(with_answers(evidence, answers))),
        }


def _count_steps(metrics: Metrics) -> int:
    return int(metrics.totals.get("forerun:sequence_steps", 0.0))


def diagnose_metrics(growth: Metrics, engine: str, num_steps: int) -> dict[str, object]:
    """Return the part of the diagnosis of counts that the live page shows.

    The speedup is left out: the page states it once, and a diagnosis rests on other steps.
    """
    return _describe(diagnose(collect_evidence(growth, engine))) | {"num_request_steps": num_steps}


def _describe(found: Diagnosis) -> dict[str, object]:
    return {
        "verdict": found.verdict,
        "headline": headline(found, states_speedup=False),
        "causes": [
            {"label": cause.label, "score": item.scored.score, "what": cause.what}
            for item in found.causes[:MAX_CAUSES]
            for cause in [item.scored.cause]
        ],
        "changes": [
            change_line(change, states_speedup=False) for change in changes_of(found)[:MAX_CHANGES]
        ],
    }


def collect_evidence(metrics: Metrics, engine: str) -> Evidence:
    """Return the evidence that a file of the same metrics gives."""
    source = f"metrics of {engine}"
    evidence = Evidence(readings=[Reading(source=source)])
    evidence.add("engine", engine, source)
    metrics_of(metrics).add_to(evidence, source)
    return evidence
