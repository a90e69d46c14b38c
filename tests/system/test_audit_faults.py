"""An audit finds and names faults planted into the engine's verification."""

from __future__ import annotations

import pytest
from tests.lab.audited import FAULTS, EngineEndpoint, Fault, faulty_engine, pair, reference_of

from forerun.doctor.audit.config import AuditConfig
from forerun.doctor.audit.records import StateFile
from forerun.doctor.audit.run import Audit
from forerun.doctor.audit.verdict import AuditVerdict, judge

pytestmark = pytest.mark.usefixtures("unchecked")
PROMPTS = [(n % 17, (n * 5 + 3) % 17, (7 * n + 1) % 17) for n in range(60)]
QUICK = (
    "lenient acceptance",
    "residual not clipped",
    "draft noise reused",
    "grammar mask on the draft alone",
    "stale KV after a rejection",
    "seeds shared by requests",
    "argmax in the recovered and bonus slot",
    "two best tokens pass at T=0",
)


def audited(fault: Fault | None, *, tokens: int = 12_000) -> AuditVerdict:
    target, draft = pair(1)
    audit = Audit(
        AuditConfig(max_tokens=tokens),
        EngineEndpoint(
            faulty_engine(target, draft, fault),
            101,
            shares_seeds=bool(fault and fault.shares_seeds),
        ),
        reference_of(target, draft),
        PROMPTS,
        StateFile(None, {}),
    )
    audit.run(lambda what, done: None)
    return judge(audit)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in QUICK], ids=lambda f: f.name)
def test_a_planted_fault_is_named(fault):
    verdict = audited(fault)
    assert verdict.status == "deviates", verdict
    assert verdict.family == fault.family, verdict


def test_a_healthy_engine_raises_no_alarm():
    assert audited(None, tokens=6000).status == "no_deviation"
