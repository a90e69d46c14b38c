"""Everything that `diagnose` reads."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

from tests.fuzz.harness import fuzz_test
from tests.records import FULL, HEADER, REQUEST, STEP, line_of, steps

from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.readers.prometheus import PrometheusText
from forerun.doctor.readers.sources import read_source, read_text
from forerun.doctor.words import headline, page_of, sections
from forerun.terminal_text import printable

RECORDS = [HEADER, *steps(40), FULL, STEP, REQUEST]
TRACE = b"".join(map(line_of, RECORDS))
LOG = b"""(EngineCore pid=7) INFO SpecDecoding metrics: Mean acceptance length: 3.56, Accepted: \
479 tokens, Drafted: 748 tokens, Per-position acceptance rate: 0.818, 0.668, 0.570, 0.503
(EngineCore pid=7) INFO Avg generation throughput: 61.0 tokens/s, Running: 1 reqs
Decode batch, #running-req: 4, accept len: 2.31, accept rate: 0.46, gen throughput (token/s): 90.1
draft acceptance = 0.57576 (   171 accepted /   297 generated), mean acceptance length = 2.5
eval time =   10 ms / 20 tokens
speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=4)
Position 0: 80.1
"""
PAGE = b"""# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 100
vllm:spec_decode_num_draft_tokens_total{engine="0"} 400
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 200
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 80
sglang:spec_accept_length 2.5
"""
FACTS = b'{"forerun_facts": 1, "source": "notes", "facts": {"k": 4, "acceptance_length": 2.5}}'
JSON_FACTS = json.dumps(
    {
        "forerun_facts": 1,
        "facts": {
            "speedup": {"value": 0.9, "interval": [0.8, 1.0]},
            "changed": ["target"],
            "acceptance_rate_per_position": [0.8, 0.5, 0.1],
            "output_differs": True,
        },
    }
).encode()


def report(evidence: Evidence) -> None:
    """Everything that is made of evidence; nothing in it may control a terminal."""
    diagnosis = diagnose(evidence)
    json.dumps(diagnosis.to_dict(), allow_nan=False)
    page_of(diagnosis)
    for line in (headline(diagnosis), *(line for s in sections(diagnosis) for line in s.lines)):
        assert printable(line) == line


def text(data: bytes) -> None:
    """A log, a metrics page, facts or a document."""
    report(read_text(io.BytesIO(data), "source"))


def trace(data: bytes) -> None:
    """A trace of JSON lines, as a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(data)
        report(read_source(str(path), interval_s=1.0))


def metrics(data: bytes) -> None:
    """A metrics page alone."""
    page = PrometheusText()
    for line in data.decode("utf-8", errors="replace").splitlines():
        page.read(line)
    page.close()


STEP_LINE = line_of(STEP).decode()
HOSTILE_STEPS = [
    line_of(HEADER) + STEP_LINE.replace(old, new).encode()
    for old, new in (
        (f'"num_drafted":{STEP.num_drafted}', '"num_drafted":1000000000'),
        (f'"cycle_id":{STEP.cycle_id}', '"cycle_id":9223372036854775808'),
        (f'"k_budget":{STEP.k_budget}', '"k_budget":4611686018427387904'),
        (f'"context_tokens":{STEP.context_tokens}', '"context_tokens":-1'),
        (f'"verify_s":{STEP.verify_s}', '"verify_s":1e308'),
    )
]
BLANK = [b"\n" * 50_000, b"# \n" * 5000, b"---\n" * 2000, b" \t\n" * 5000]
NESTED = [b"forerun_facts: 1\nfacts: " + b"[" * 100_000, b"[" * 200_000, b'{"a":' * 50_000]
NUMBERS = [b"forerun_facts: 1\nfacts: {k: " + b"9" * 400 + b"}", b'{"timings": 1e999}']

test_logs = fuzz_test(text, [LOG, *BLANK])
test_facts = fuzz_test(text, [FACTS, JSON_FACTS, *NESTED, *NUMBERS])
test_metrics_in_a_source = fuzz_test(text, [PAGE])
test_metrics_pages = fuzz_test(metrics, [PAGE])
test_traces = fuzz_test(trace, [TRACE, *HOSTILE_STEPS])
