"""Lines of every documented format."""

from __future__ import annotations

import io
import json

import pytest

from forerun.doctor.diagnosis import derive, diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.readers import sources as text
from forerun.doctor.readers.engine_logs import num_draft_tokens_of
from forerun.doctor.readers.sources import MAX_BYTES, read_text
from forerun.errors import InvalidRequest

VLLM = (
    "(APIServer pid=1) INFO 05-30 07:49:21 [metrics.py:101] SpecDecoding metrics: Mean "
    "acceptance length: 3.00, Accepted throughput: 1.05 tokens/s, Drafted throughput: 1.51 "
    "tokens/s, Accepted: 200 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.900, "
    "0.700, 0.400, Avg Draft acceptance rate: 66.7%"
)
VLLM_SPEED = (
    "INFO 11-20 16:02:01 [loggers.py:335] Engine 000: Avg prompt throughput: 103.5 tokens/s, Avg "
    "generation throughput: 60.7 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: "
    "0.2%, Prefix cache hit rate: 25.4%"
)
VLLM_OLD = (
    "INFO metrics.py:477] Speculative metrics: Draft acceptance rate: 0.500, System efficiency: "
    "0.400, Number of speculative tokens: 4, Number of accepted tokens: 200, Number of draft "
    "tokens: 400, Number of emitted tokens: 280."
)
LMDEPLOY = (
    "Avg thr (in/out): 1000.0 / 250.0 tokens/s, SpecDecoding metrics: Draft acceptance rate: "
    "61.33%, Mean acceptance length: 2.84, Accepted: 184 tokens, Drafted: 300 tokens, Per-position "
    "acceptance rate: 0.800, 0.600, 0.440"
)
SGLANG = (
    "[2026-08-19 00:02:25] Decode batch, #running-req: 4, #token: 8123, token usage: 0.02, accept "
    "len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): "
    "40.29, #queue-req: 0, "
)


def read(*lines: str) -> Evidence:
    evidence = read_text(io.BytesIO("\n".join(lines).encode()), "log")
    return derive(evidence)


def test_vllm_log_lines_add_up():
    found = read(VLLM, VLLM_SPEED, VLLM, "something else")
    assert found.number("num_drafts") == pytest.approx(200)
    assert found.number("num_accepted") == 400 and found.number("num_drafted") == 600
    assert found.number("acceptance_length") == pytest.approx(3.0)
    assert found.numbers("acceptance_rate_per_position") == pytest.approx((0.9, 0.7, 0.4))
    assert found.number("k") == 3
    assert found.number("tokens_per_s") == 60.7 and found.number("batch") == 2
    assert found.number("prefix_hit_rate") == pytest.approx(0.254)
    assert found.words("engine") == ("vLLM",)
    assert (found.readings[0].num_lines, found.readings[0].num_unknown) == (4, 1)


def test_a_vllm_line_without_acceptance_has_its_drafts_from_the_positions():
    line = (
        "SpecDecoding metrics: Mean acceptance length: 1.00, Accepted throughput: 0.00 tokens/s, "
        "Drafted throughput: 69.20 tokens/s, Accepted: 0 tokens, Drafted: 692 tokens, Per-position "
        "acceptance rate: 0.000, 0.000, Avg Draft acceptance rate: 0.0%"
    )
    found = read(line)
    assert found.number("num_drafts") == 346 and found.flag("acceptance_zero") is True


def test_a_vllm_interval_without_drafts_counts_nothing():
    line = (
        "SpecDecoding metrics: Mean acceptance length: nan, Accepted throughput: 0.00 tokens/s, "
        "Drafted throughput: 0.00 tokens/s, Accepted: 0 tokens, Drafted: 0 tokens, Per-position "
        "acceptance rate: , Avg Draft acceptance rate: nan%"
    )
    found = read(line)
    assert found.number("num_accepted") == 0 and "acceptance_length" not in found


def test_lines_of_vllm_before_v1_are_cumulative():
    found = read(VLLM_OLD.replace("200,", "100,"), VLLM_OLD)
    assert found.number("num_drafted") == 400 and found.number("num_accepted") == 200
    assert found.number("k") == 4 and found.number("acceptance_length") == pytest.approx(3.0)


def test_lmdeploy_orders_the_same_fields_differently():
    found = read(LMDEPLOY)
    assert found.words("engine") == ("LMDeploy",)
    assert found.number("draft_acceptance_rate") == pytest.approx(184 / 300)
    assert found.number("tokens_per_s") == 250.0
    assert found.numbers("acceptance_rate_per_position") == pytest.approx((0.8, 0.6, 0.44))


def test_vllm_configuration_line():
    line = (
        "Initializing a V1 LLM engine with config: model='m', "
        "speculative_config=SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=5), x"
    )
    found = read(line)
    assert found.words("method") == ("eagle",) and found.number("k") == 5


@pytest.mark.parametrize(("old", "k"), [(True, 7), (False, 7)])
def test_both_meanings_of_the_sglang_accept_rate(old: bool, k: int):
    lengths = (2.36, 3.1, 1.75)
    pairs = [(x, x / (k + 1) if old else (x - 1) / k) for x in lengths]
    found = read(*(SGLANG.format(length=x, rate=rate) for x, rate in pairs))
    assert found.number("k") == k
    tau = sum(lengths) / 3
    assert found.number("acceptance_length") == pytest.approx(tau)
    assert found.number("draft_acceptance_rate") == pytest.approx((tau - 1) / k)
    assert found.number("graph_hit_share") == 1.0 and found.number("batch") == 4


def test_an_accept_rate_that_fits_both_meanings_says_nothing():
    assert num_draft_tokens_of([(2.0, 0.5)]) is None  # 2/4, and (2-1)/(3-1)
    assert num_draft_tokens_of([(1.52, 0.51), (2.2, 0.73)]) == 3
    assert num_draft_tokens_of([(2.0, 0.99)]) is None
    assert num_draft_tokens_of([]) is None


def test_sglang_lines_of_other_shapes():
    found = read(
        "[2026-08-19] Decode batch [17], #running-req: 2, #full token: 5, full token usage: 0.1, "
        "mamba num: 3, accept len: 2.00, accept rate: 0.33, npu graph: False, gen throughput "
        "(token/s): 10.0, #queue-req: 0, new field: 3",
        "server_args=ServerArgs(speculative_algorithm='EAGLE3', speculative_num_steps=3, x)",
    )
    assert found.number("k") == 3 and found.words("method") == ("eagle",)
    assert found.flag("graphs_off") is True


def test_sglang_adaptive_lines_that_turn_and_turn():
    lines = [
        f"Adaptive spec params updated: steps {a} -> {b} (ema_accept_len=0.62)"
        for a, b in [(3, 1), (1, 3)] * 5
    ]
    found = read(*lines)
    assert found.flag("adaptive_k") is True and found.flag("adaptive_stuck") is True


def test_tensorrt_llm_gate_and_statistics():
    gate = (
        "[SpeculationGate] Speculative decoding disabled: rolling acceptance avg 0.412 < threshold "
        "0.5 over last 10 requests"
    )
    stats = {"iter": 1, "specDecodingStats": {"numDraftTokens": 30, "numAcceptedTokens": 12}}
    stats["specDecodingStats"] |= {"numRequestsWithDraftTokens": 10, "acceptanceLength": 2.2}
    stats["specDecodingStats"] |= {"iterLatencyMS": 20.0, "draftOverhead": 0.25}
    found = read(gate, json.dumps(stats), json.dumps(stats))
    assert found.flag("speculation_off") is True and found.flag("adaptive_stuck") is True
    assert found.number("num_drafts") == 20 and found.number("k") == 3
    assert found.number("acceptance_length") == pytest.approx(2.2)
    assert found.number("cycle_s") == pytest.approx(0.02)
    assert found.number("draft_s") == pytest.approx(0.005)


def test_llamacpp_lines_of_all_generations():
    oldest = "draft acceptance rate = 0.57576 (  171 accepted /   297 generated)"
    newer = "draft acceptance = 0.5 (  150 accepted /   300 generated), mean len = 2.50"
    positions = "     acc per pos = (0.800, 0.500, 0.200)"
    found = read(oldest)
    assert found.number("draft_acceptance_rate") == pytest.approx(171 / 297)
    found = read(newer, positions)
    assert found.number("num_drafts") == pytest.approx(100)
    assert found.numbers("acceptance_rate_per_position") == pytest.approx((0.8, 0.5, 0.2))
    assert found.number("acceptance_length") == pytest.approx(2.5)


def test_llamacpp_statistics_are_cumulative():
    line = (
        "statistics ngram_map_k: #calls(b,g,a) = 6 1690 26, #gen drafts = {0}, #acc drafts = 26, "
        "#gen tokens = {1}, #acc tokens = {2}, #mean acc len = 37.2, #acc rate/pos = (0.9, 0.8), "
        "dur(b,g,a) = 2.234, 1.427, 0.016 ms"
    )
    found = read(line.format(10, 400, 300), line.format(26, 1248, 968))
    assert found.number("num_drafted") == 1248 and found.number("num_drafts") == 26
    assert found.words("method") == ("ngram",)


def test_llamacpp_times():
    found = read(
        "prompt eval time =     200.00 ms /   251 tokens (    0.72 ms per token,  1394.91 t/s)",
        "       eval time =     400.00 ms /   120 tokens (    2.82 ms per token,   354.07 t/s)",
    )
    assert found.number("tokens_per_s") == pytest.approx(300.0)
    assert found.number("prefill_share") == pytest.approx(1 / 3)


def test_llamacpp_example_program():
    found = read(
        "0.00.615.261 I decoded  132 tokens in    0.400 seconds, speed:  330.0 t/s",
        *("n_draft   = 4", "n_predict = 132", "n_drafted = 133", "n_accept  = 98"),
        "accept    = 73.684%",
    )
    assert found.number("num_drafts") == 34 and found.number("k") == 4
    assert found.number("acceptance_length") == pytest.approx(132 / 34)
    assert found.number("tokens_per_s") == pytest.approx(330.0)
    assert found.readings[0].num_unknown == 0


def test_llamacpp_response():
    timings = {"predicted_n": 128, "predicted_ms": 400.0, "prompt_ms": 100.0}
    found = read(json.dumps({"timings": timings | {"draft_n": 129, "draft_n_accepted": 93}}))
    assert found.number("num_drafts") == 34 and found.number("tokens_per_s") == 320.0
    assert found.number("prefill_share") == pytest.approx(0.2)
    assert read(json.dumps({"timings": timings})).flag("drafts_absent") is True


@pytest.mark.parametrize(
    "names",
    [
        ("spec_accept_token_num", "spec_draft_token_num"),
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
    ],
)
def test_sglang_meta_info_in_both_spellings(names: tuple[str, str]):
    accepted, drafted = names
    meta = {"spec_verify_ct": 50, accepted: 60, drafted: 150, "spec_accept_length": 2.2}
    found = read(json.dumps([{"meta_info": meta}, {"meta_info": meta}]))
    assert found.number("num_drafts") == 100 and found.number("num_accepted") == 120
    assert found.number("acceptance_length") == pytest.approx(2.2) and found.number("k") == 3


def test_vllm_request_metrics_and_sglang_server_info():
    metrics = {"num_spec_steps": 10, "num_draft_tokens": 30, "num_accepted_draft_tokens": 15}
    found = read(
        json.dumps({"metrics": {"speculative_decoding": metrics | {"num_spec_tokens": 3}}})
    )
    assert found.number("acceptance_length") == 2.5 and found.number("k") == 3
    info = {"internal_states": [{"avg_spec_accept_length": 2.75}]}
    assert read(json.dumps(info)).number("acceptance_length") == 2.75


def test_benchmark_block():
    found = read(
        "============ Serving Benchmark Result ============",
        "Output token throughput (tok/s):         123.40    ",
        "Mean TTFT (ms):                          250.00    ",
        "---------------Speculative Decoding---------------",
        "Acceptance rate (%):                     50.00     ",
        "Acceptance length:                       2.00      ",
        "Drafts:                                  100       ",
        "Draft tokens:                            200       ",
        "Accepted tokens:                         100       ",
        "Per-position acceptance (%):",
        "  Position 0:                            60.00     ",
        "  Position 1:                            40.00     ",
        "==================================================",
    )
    assert found.number("acceptance_length") == 2.0 and found.number("num_drafts") == 100
    assert found.numbers("acceptance_rate_per_position") == (0.6, 0.4)
    assert found.number("tokens_per_s") == 123.4 and found.number("ttft_s") == 0.25
    assert found.readings[0].num_unknown == 0


def test_benchmark_summary_line():
    found = read("#questions: 80, Throughput: 276.30 token/s, Acceptance length: 5.36")
    assert found.number("tokens_per_s") == 276.3 and found.number("acceptance_length") == 5.36


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (
            "error: draft model vocab must match target model to use speculation",
            "vocabularies_differ",
        ),
        (
            "srv load_model: speculative decoding not supported by this context",
            "speculation_refused",
        ),
        ("the target context does not support partial sequence removal", "target_recurrent"),
        (
            "Some weights of the draft were not initialized from the checkpoint",
            "weights_incomplete",
        ),
        ("WARNING: CUDA graphs are disabled for the draft", "graphs_off"),
        ("draft logits contain NaN", "draft_nan"),
        ("Sequence group 3 is preempted by PreemptionMode.RECOMPUTE", "memory_pressure"),
    ],
)
def test_what_engines_say_in_words(line: str, fact: str):
    assert read(line).flag(fact) is True


def test_ordinary_lines_say_nothing():
    found = read(
        "loading draft model '/m/trunc-bf16.gguf'",
        "model loaded in 3.2 s, 12 threads, speculative decoding is enabled",
        "listening on http://127.0.0.1:8091",
    )
    assert not found.facts and found.readings[0].num_unknown == 3


def test_lines_of_several_engines_are_read_and_told():
    found = read(VLLM, SGLANG.format(length=2.0, rate=0.33))
    assert found.number("num_accepted") == 200
    assert any("several engines" in note for note in found.readings[0].notes)
    assert any(fact.name == "acceptance_length" for fact in found.disagreements) or (
        found.number("acceptance_length") is not None
    )


def test_colours_and_carriage_returns_do_not_hide_a_line():
    found = read("\x1b[32m" + VLLM + "\x1b[0m\r")
    assert found.number("num_accepted") == 200


def test_binary_is_refused():
    with pytest.raises(InvalidRequest, match="binary"):
        read_text(io.BytesIO(b"GGUF\x00\x01\x02" * 100), "model.gguf")


def test_bytes_that_are_no_text_are_lines_nobody_knows():
    found = read_text(io.BytesIO(b"\xff\xfe\xfa\n" * 10), "log")
    assert not found.facts and found.readings[0].num_unknown == 10


class Endless:
    """More bytes than anybody has, without a line end."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, size: int, /) -> bytes:
        self.num_bytes += size
        return b"x" * size


def test_an_endless_line_ends():
    source = Endless()
    found = read_text(source, "log")
    assert source.num_bytes <= MAX_BYTES + (1 << 25)
    assert any("longer than" in note for note in found.readings[0].notes)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"timings": {"predicted_n": 1e400, "predicted_ms": -1}}',
        '{"specDecodingStats": []}',
        '{"spec_verify_ct": "<script>"}',
        "SpecDecoding metrics: Accepted: tokens, Drafted: tokens",
        "Decode batch, accept len: 1" + "9" * 5000,
        "draft acceptance = 0.5 ( 5 accepted / ",
        "vllm:spec_decode_num_drafts_total{" + "a" * 100_000,
    ],
)
def test_hostile_lines_cost_nothing_but_themselves(line: str):
    found = read(line, VLLM)
    assert found.number("num_accepted") == 200


def test_a_source_that_takes_too_long_is_left_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "MAX_SECONDS", 0.0)
    found = read(VLLM, *["draft"] * 5000)
    assert found.number("num_accepted") == 200
    assert found.readings[0].num_lines == text.CHECKED_LINES
    assert any("the rest was not read" in note for note in found.readings[0].notes)


def test_a_truncated_log_is_read_up_to_there():
    assert read(VLLM, VLLM[:90]).number("num_accepted") == 200


SUMMARY = (
    "Total output tokens: 10,400",
    "Number of draft proposals: 4,000",
    "Number of draft tokens generated: 12,000",
    "Number of accepted tokens: 6,400",
    "Mean acceptance length: 2.60",
    "Acceptance rate at token 0: 0.80",
    "Acceptance rate at token 1: 0.50",
    "Acceptance rate at token 2: 0.30",
)
OLDER_SUMMARY = (
    "-" * 50,
    "total_num_output_tokens: 10400",
    "num_drafts: 4000",
    "num_draft_tokens: 12000",
    "num_accepted_tokens: 6400",
    "mean acceptance length: 2.60",
    "-" * 50,
    "acceptance at token 0: 0.80",
    "acceptance at token 1: 0.50",
    "acceptance at token 2: 0.30",
)


@pytest.mark.parametrize("lines", [SUMMARY, OLDER_SUMMARY])
def test_the_summary_of_vllms_offline_example_is_read(lines):
    found = read(*lines)
    assert found.number("num_drafts") == 4000 and found.number("num_drafted") == 12000
    assert found.number("num_accepted") == 6400 and found.number("k") == 3
    assert found.number("acceptance_length") == pytest.approx(2.6)
    assert found.numbers("acceptance_rate_per_position") == pytest.approx((0.8, 0.5, 0.3))
    assert found.readings[0].num_unknown == 0


@pytest.mark.parametrize("is_camel", [False, True])
def test_the_stats_of_lm_studio_are_read(is_camel):
    stats: dict[str, object] = {
        "tokens_per_second": 40.5,
        "time_to_first_token": 0.2,
        "draft_model": "small",
        "total_draft_tokens_count": 90,
        "accepted_draft_tokens_count": 60,
        "rejected_draft_tokens_count": 25,
        "ignored_draft_tokens_count": 5,
    }
    answer: dict[str, object] = {"usage": {"completion_tokens": 100}}
    if is_camel:
        words = {name: name.split("_") for name in stats}
        stats = {w[0] + "".join(map(str.title, w[1:])): stats[n] for n, w in words.items()}
        stats["predictedTokensCount"], answer = 100, {}
    found = read(json.dumps({"object": "chat.completion", **answer, "stats": stats}))
    assert found.number("num_drafted") == 90 and found.number("num_accepted") == 60
    assert found.number("num_drafts") == 39  # each step emits one more than it accepts
    assert found.number("tokens_per_s") == 40.5
    assert found.words("method") == ("draft_model",)
    assert not read(json.dumps({"stats": {"tokens_per_second": 3}})).facts


@pytest.mark.parametrize("content", ["", "  \n\n"])
def test_an_empty_source_is_refused(content):
    with pytest.raises(InvalidRequest, match="log is empty"):
        read(content)


@pytest.mark.parametrize(
    ("line", "recurrent"),
    [
        ("Reset SSM cache type to float32 for accelerated GDN mamba backend 'none'.", None),
        ("Setting attention block size to 1072 for a hybrid model", True),
        ("llama_memory_recurrent: size = 75.00 MiB", True),
    ],
)
def test_a_setting_of_recurrent_layers_is_no_recurrent_target(line: str, recurrent: bool | None):
    found = read_text(
        io.BytesIO((line + "\nno CUDA graphs: cuda graph disabled\n").encode()), "log"
    )
    assert found.flag("target_recurrent") is recurrent and found.flag("graphs_off") is True


def metrics_line(process: int, accepted: int, drafted: int) -> str:
    """A line of one process at K = 4."""
    length = 1.0 + 4.0 * accepted / drafted
    rates = ", ".join([f"{accepted / drafted:.3f}"] * 4)
    return (
        f"(EngineCore pid={process}) INFO SpecDecoding metrics: Mean acceptance length: "
        f"{length:.2f}, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position "
        f"acceptance rate: {rates}, Avg Draft acceptance rate: 1.0%\n"
    )


def test_unrelated_processes_are_taken_apart():
    text = metrics_line(1, 990, 1000) + metrics_line(2, 0, 4000) + metrics_line(3, 5, 8)
    evidence = read_text(io.BytesIO(text.encode()), "log")
    assert evidence.number("num_drafted") == 4000 and evidence.number("num_accepted") == 0
    (note,) = evidence.readings[0].notes
    assert "process 2, which accepts 0%" in note and "process 1 99%" in note
    diagnosis = diagnose(evidence)
    assert diagnosis.evidence.flag("acceptance_zero")
    assert diagnosis.causes[0].scored.cause.label == "draft_weights_misloaded"


@pytest.mark.parametrize(
    ("others", "num_drafted"), [((650, 1000), 2000), ((660, 1000), 1000), ((0, 99), 1099)]
)
def test_processes_that_accept_alike_are_averaged(others, num_drafted):
    text = metrics_line(1, 510, 1000) + metrics_line(2, *others)
    evidence = read_text(io.BytesIO(text.encode()), "log")
    assert evidence.number("num_drafted") == num_drafted
