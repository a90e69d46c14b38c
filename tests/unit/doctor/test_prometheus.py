"""Expositions of every engine, and what happened between two of them."""

from __future__ import annotations

import io

import pytest

from forerun.doctor.diagnosis import derive
from forerun.doctor.evidence import Evidence
from forerun.doctor.readers.prometheus import PrometheusText, metrics_of
from forerun.doctor.readers.sources import read_text

COUNTERS = """\
# HELP {p}num_drafts_total Number of drafts.
# TYPE {p}num_drafts_total counter
{p}num_drafts_total{{engine="0",model_name="a"}} 60.0
{p}num_drafts_total{{engine="1",model_name="a"}} 40.0
{p}num_drafts_created{{engine="0"}} 1.7951905109411573e+09
{p}num_draft_tokens_total{{engine="0"}} 300
{p}num_accepted_tokens_total{{engine="0"}} 120
{p}num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 80
{p}num_accepted_tokens_per_pos_total{{engine="0",position="1"}} 40
python_info{{implementation="CPython"}} 1.0
"""


def read(text: str) -> Evidence:
    evidence = read_text(io.BytesIO(text.encode()), "metrics")
    return derive(evidence)


@pytest.mark.parametrize("engine", ["vllm", "lmdeploy", "llamacpp"])
def test_counters_are_summed_over_labels(engine: str):
    found = read(COUNTERS.format(p=f"{engine}:spec_decode_"))
    assert found.number("num_drafts") == 100 and found.number("num_drafted") == 300
    assert found.numbers("acceptance_rate_per_position") == (0.8, 0.4)
    assert found.number("acceptance_length") == pytest.approx(2.2)
    assert found.readings[0].num_unknown == 0


def test_tensorrt_llm_has_denominators_per_position():
    found = read(
        "trtllm_spec_decode_num_draft_tokens_total 250\n"
        "trtllm_spec_decode_num_accepted_tokens_total 120\n"
        'trtllm_spec_decode_drafted_tokens_total{token_position="0"} 100\n'
        'trtllm_spec_decode_drafted_tokens_total{token_position="1"} 50\n'
        'trtllm_spec_decode_accepted_tokens_total{token_position="0"} 80\n'
        'trtllm_spec_decode_accepted_tokens_total{token_position="1"} 40\n'
    )
    assert found.numbers("acceptance_rate_per_position") == (0.8, 0.8)


def test_sglang_window_length_is_tokens_over_verify_calls():
    found = read(
        "sglang:spec_accept_length 1.9\n"
        "sglang:spec_verify_calls_total 100\n"
        "sglang:generation_tokens_total 250\n"
        "sglang:spec_num_draft_tokens 4\n"
    )
    assert found.number("acceptance_length") == 2.5 and found.number("k") == 3


def test_ratios_of_vllm():
    found = read(
        'vllm:time_to_first_token_seconds_sum{engine="0"} 5\n'
        'vllm:time_to_first_token_seconds_count{engine="0"} 10\n'
        "vllm:prefix_cache_hits_total 30\nvllm:prefix_cache_queries_total 120\n"
        "vllm:num_preemptions_total 2\n"
    )
    assert found.number("ttft_s") == 0.5 and found.number("prefix_hit_rate") == 0.25
    assert found.flag("memory_pressure") is True


def sampled(text: str) -> PrometheusText:
    page = PrometheusText()
    for line in text.splitlines():
        assert page.read(line)
    return page


def test_between_two_samples_counters_grow_and_gauges_stand():
    first = sampled("vllm:spec_decode_num_drafts_total 100\nsglang:spec_num_steps 3\n")
    second = sampled("vllm:spec_decode_num_drafts_total 150\nsglang:spec_num_steps 5\n")
    tally = metrics_of(second.metrics.since(first.metrics))
    assert tally.counts["num_drafts"] == 50 and tally.facts["k"] == 5


def test_a_counter_that_was_reset_counts_from_zero():
    first = sampled("vllm:spec_decode_num_drafts_total 100\n")
    second = sampled("vllm:spec_decode_num_drafts_total 30\n")
    assert metrics_of(second.metrics.since(first.metrics)).counts["num_drafts"] == 30


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "abc", ""])
def test_values_that_are_none_count_nothing(value: str):
    found = read(f"vllm:spec_decode_num_drafts_total {value}\nvllm:num_preemptions_total 0\n")
    assert "num_drafts" not in found


@pytest.mark.parametrize("prefix", ["vllm", "sglang"])
@pytest.mark.parametrize(("num_tokens", "is_absent"), [(0, False), (5000, True)])
def test_an_idle_server_is_not_one_that_drafts_nothing(prefix, num_tokens, is_absent):
    found = read(
        f"{prefix}:generation_tokens_total {num_tokens}\n"
        "vllm:spec_decode_num_drafts_total 0\nvllm:spec_decode_num_draft_tokens_total 0\n"
    )
    assert ("drafts_absent" in found) == is_absent


def test_own_metrics_are_read_with_the_times_of_steps():
    found = read(
        "vllm:spec_decode_num_drafts_total 100\nvllm:spec_decode_num_draft_tokens_total 400\n"
        "vllm:spec_decode_num_accepted_tokens_total 200\n"
        'forerun:drafted_per_position_total{position="0"} 100\n'
        'forerun:cycle_seconds_total{model="m",phase="draft"} 1.0\n'
        'forerun:cycle_seconds_total{model="m",phase="verify"} 3.0\n'
        'forerun:cycle_seconds_total{model="m",phase="other"} 1.0\n'
        "forerun:cycles_total 100\nforerun:sequence_steps_total 200\n"
    )
    assert found.words("engine") == ("forerun",) and found.number("num_drafts") == 100
    assert found.number("cycle_s") == 0.05 and found.number("verify_s") == 0.03
    assert found.number("batch") == 2.0
    assert "forerun metrics" in found.readings[0].kinds


def test_vllm_with_our_plug_in_is_still_vllm():
    found = read(
        "forerun:cycles_total 90\nforerun:sequence_steps_total 120\n"
        'forerun:drafted_per_position_total{position="0"} 100\n'
        "vllm:spec_decode_num_drafts_total 100\nvllm:spec_decode_num_draft_tokens_total 100\n"
        "vllm:spec_decode_num_accepted_tokens_total 20\n"
    )
    assert found.words("engine") == ("vLLM",)
    assert found.number("num_drafts") == 100


def test_counters_of_an_impossible_size_are_left_out():
    found = read(
        "vllm:spec_decode_num_drafts_total 1e308\nvllm:spec_decode_num_draft_tokens_total 1e308\n"
        "vllm:spec_decode_num_accepted_tokens_total 1e308\nvllm:num_preemptions_total 0\n"
    )
    assert "num_drafts" not in found and "num_accepted" not in found
