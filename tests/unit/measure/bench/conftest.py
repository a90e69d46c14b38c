"""Engines that emit what they are told and take the time they are told, on a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from forerun.engine.results import Completion, RequestOutput
from forerun.measure.bench.compare import BenchArm
from forerun.sampling.config import TokenSource
from forerun.theory.acceptance import AcceptanceCounts


@dataclass
class FakeClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeEngine:
    """Every step drafts `k`, accepts `accepted`, takes `step_s`; the prefill takes `prefill_s`."""

    clock: FakeClock
    k: int = 0
    accepted: int = 0
    step_s: float = 1.0
    prefill_s: float = 2.0
    vocab_size: int = 10**6
    calls: list[str] = field(default_factory=list)

    def generate(self, prompts: Sequence[str], params) -> list[RequestOutput]:
        self.calls += prompts
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        outputs = [self.one(one.max_tokens) for one in each]
        # All prompts of a batch share every pass: it takes as long as one of them.
        self.clock.now_s += max(output.completions[0].total_s for output in outputs)
        return outputs

    def one(self, max_tokens: int) -> RequestOutput:
        counts = AcceptanceCounts()
        counts.add(0, 0)
        num_tokens, decode_s = 1, 0.0
        while num_tokens < max_tokens:
            counts.add(self.k, self.accepted)
            num_tokens += self.accepted + 1
            decode_s += self.step_s
        num_tokens = min(num_tokens, max_tokens)
        total_s = self.prefill_s + decode_s
        completion = Completion(
            index=0,
            text="",
            token_ids=tuple(i % self.vocab_size for i in range(num_tokens)),
            finish_reason="length",
            stop_reason=None,
            sources=(TokenSource.BONUS,) * num_tokens,
            logprobs=None,
            acceptance=counts,
            ttft_s=self.prefill_s,
            prefill_s=self.prefill_s,
            total_s=total_s,
            num_cached_tokens=0,
            num_preemptions=0,
        )
        return RequestOutput(request_id="0", prompt_token_ids=(1,), completions=(completion,))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_arm(clock):
    def make(name: str, k: int = 0, accepted: int = 0, **changes) -> BenchArm:
        engine = FakeEngine(clock, k=k, accepted=accepted, **changes)
        method = "draft_model" if k else "plain"
        return BenchArm(name=name, method=method, num_speculative_tokens=k, engine=engine)

    return make
