"""Statistics with the fields of vLLM 0.32, and a module that looks like its loggers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from forerun.vllm_plugin.observer import VllmObserver

K = 3
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=K),
    model_config=SimpleNamespace(served_model_name="target", max_model_len=512),
    scheduler_config=SimpleNamespace(max_num_seqs=8),
)
Step = tuple[SimpleNamespace, SimpleNamespace]


def drafting(outcomes: Sequence[tuple[int, int]], k: int = K) -> SimpleNamespace:
    """SpecDecodingStats of sequences that drafted and accepted so many tokens."""
    return SimpleNamespace(
        num_spec_tokens=k,
        num_drafts=len(outcomes),
        num_draft_tokens=sum(drafted for drafted, _ in outcomes),
        num_accepted_tokens=sum(accepted for _, accepted in outcomes),
        num_draft_tokens_per_pos=[sum(d > i for d, _ in outcomes) for i in range(k)],
        num_accepted_tokens_per_pos=[sum(a > i for _, a in outcomes) for i in range(k)],
    )


def finished(request_id: str, num_tokens: int = 9) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request_id,
        finish_reason="length",
        e2e_latency=2.0,
        num_prompt_tokens=5,
        num_generation_tokens=num_tokens,
        decode_time=1.0,
    )


def step_of(
    outcomes: Sequence[tuple[int, int]],
    *,
    num_plain: int = 0,
    num_first: int = 0,
    ended: Sequence[SimpleNamespace] = (),
) -> Step:
    """SchedulerStats and IterationStats of one step; a plain sequence emits one token."""
    scheduler = SimpleNamespace(
        num_running_reqs=len(outcomes) + num_plain + num_first,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=SimpleNamespace(queries=10 * num_first, hits=4 * num_first),
        spec_decoding_stats=drafting(outcomes) if outcomes else None,
    )
    num_decoding = len(outcomes) + num_plain
    iteration = SimpleNamespace(
        num_generation_tokens=sum(a + 1 for _, a in outcomes) + num_plain + num_first,
        inter_token_latencies_iter=[0.02] * num_decoding,
        time_to_first_tokens_iter=[0.1] * num_first,
        prompt_token_stats=SimpleNamespace(computed=6 * num_first),
        finished_requests=list(ended),
    )
    return scheduler, iteration


@pytest.fixture
def observer() -> VllmObserver:
    return VllmObserver(CONFIG, "0.32.0", CollectorRegistry(auto_describe=True))


class StatLoggerBase(ABC):
    @abstractmethod
    def record(self): ...

    @abstractmethod
    def log_engine_initialized(self): ...


class AggregateStatLoggerBase(StatLoggerBase):
    def record_admission_rejection(self, reason): ...


@pytest.fixture
def fake_vllm(monkeypatch) -> Iterator[Callable[..., None]]:
    """Installs modules named as vLLM's; by default those that the plug-in is written for."""

    def install(version: str = "0.32.0", **loggers: object) -> None:
        for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["vllm"].__version__ = version
        vars(sys.modules["vllm.v1.metrics.loggers"]).update(loggers)

    yield install
    sys.modules.pop("forerun.vllm_plugin.stat_logger", None)
