"""Metrics that Prometheus and our own diagnosis read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.records import STEP
from tests.server.conftest import serving, tiny_engine
from tests.server.test_completions import PROMPT, SEEDED

from forerun.doctor.readers.prometheus import PrometheusText
from forerun.sampling.config import SamplingParams
from forerun.server.metrics import ServerMetrics, StepTotals


@pytest.fixture(scope="module")
def scraped():
    with serving(tiny_engine()) as client:
        body = {"prompt": PROMPT, **SEEDED, "speculation": {"num_speculative_tokens": 2}}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        plain = client.post("/v1/completions", json=body | {"speculation": "off"}).json()["usage"]
        assert client.post("/v1/completions", json={}).status_code == 400
        text = client.get("/metrics").text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            samples[sample.name, *labels.values()] = sample.value
    return text, samples, usage, plain


def test_counters_are_those_of_the_usage(scraped):
    _, samples, usage, plain = scraped
    figures = usage["speculative_decoding"]
    assert samples["vllm:spec_decode_num_drafts_total",] == figures["num_steps"]
    assert samples["vllm:spec_decode_num_draft_tokens_total",] == figures["num_drafted"]
    assert samples["vllm:spec_decode_num_accepted_tokens_total",] == figures["num_accepted"]
    per_position = [
        samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(at)] for at in range(2)
    ]
    assert sum(per_position) == figures["num_accepted"]
    both = usage["completion_tokens"] + plain["completion_tokens"]
    assert samples["vllm:generation_tokens_total",] == both
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:time_to_first_token_seconds_count",] == 2
    assert samples["vllm:request_decode_time_seconds_count",] == 2
    assert samples["vllm:request_max_num_generation_tokens_sum",] == both
    num_steps = figures["num_steps"] + figures["num_plain_steps"]
    num_steps += plain["speculative_decoding"]["num_plain_steps"]
    gap = "vllm:inter_token_latency_seconds"
    assert samples[f"{gap}_count",] == samples[f"{gap}_bucket", "+Inf"] == num_steps - 2
    assert 0.0 < samples[f"{gap}_sum",] < samples["vllm:request_decode_time_seconds_sum",] * 1.1
    assert samples["vllm:num_requests_running",] == 0
    assert samples["forerun:http_responses_total", "400"] == 1
    assert samples["forerun:http_responses_total", "200"] == 2
    steps = {key[1:]: n for key, n in samples.items() if key[0] == "forerun:sequence_steps_total"}
    assert steps["draft_model", "2"] == figures["num_steps"]


def test_times_of_a_request_are_parts_of_its_latency():
    """Waiting, reading the prompt and decoding follow each other."""
    engine = tiny_engine()
    metrics = ServerMetrics(engine, "tiny")
    output = engine.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))[0]
    times = {"ttft_s": 3.0, "prefill_s": 1.0, "total_s": 7.0}
    metrics.finished(replace(output, completions=(replace(output.completions[0], **times),)))
    sums = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    assert sums["vllm:request_queue_time_seconds_sum"] == 2.0
    assert sums["vllm:request_prefill_time_seconds_sum"] == 1.0
    assert sums["vllm:time_to_first_token_seconds_sum"] == 3.0
    assert sums["vllm:request_time_per_output_token_seconds_sum"] == 1.0
    assert sums["vllm:e2e_request_latency_seconds_sum"] == 7.0


DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ["grafana/forerun.json", "prometheus/forerun.rules.yml", "../docs/operating.md"]


@pytest.mark.parametrize("name", FILES)
def test_files_name_metrics_that_exist(scraped, name):
    text, *_ = scraped
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    named = set(re.findall(r"(?:vllm|forerun):[a-z_0-9]+", (DEPLOY / name).read_text()))
    assert named
    assert {re.sub("_(bucket|count|sum)$", "", metric) for metric in named} <= known


EXPRESSION = re.compile(r"((?:vllm|forerun):[a-z_0-9]+)\{([^}]*)\}")


@pytest.mark.parametrize("name", FILES[:2])
def test_files_name_labels_that_exist(scraped, name):
    text, *_ = scraped
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    found = EXPRESSION.findall((DEPLOY / name).read_text().replace('\\"', '"'))
    assert found
    for metric, matchers in found:
        named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        # A counter without an event, such as one of changes, has no sample to compare with.
        assert named <= labels.get(metric, named) | {"instance", "job"}, metric


def test_our_own_reader_understands_them(scraped):
    text, _, usage, _ = scraped
    reader = PrometheusText()
    assert any([reader.read(line) for line in text.splitlines()])
    steps = reader.metrics.totals["vllm:spec_decode_num_drafts"]
    assert steps == usage["speculative_decoding"]["num_steps"]


def test_a_fall_of_acceptance_is_a_change_point_of_the_server_itself(unchecked):
    totals, generator = StepTotals(), torch.Generator().manual_seed(0)
    entry = SimpleNamespace(sequence=SimpleNamespace(stop="length"))
    for rate, num in ((0.74, 40_000), (0.47, 5_000)):
        assert not totals.changes
        for uniform in torch.rand(num, generator=generator).tolist():
            accepted = int(uniform < rate)
            record = msgspec.structs.replace(
                STEP, num_drafted=1, depth_drafted=1, num_accepted=accepted, num_emitted=1
            )
            totals.observe(SimpleNamespace(records=[record], emitting=[entry], prefilling=[]))
    assert totals.changes[0].words.startswith("acceptance at position 1 fell from 0.7")
    assert totals.num_changes == {"acceptance at position 1": 1}
