"""Random traffic over an engine with too few places, every text compared with plain decoding.

    python -m tests.soak --requests 10000 --out benchmarks/soak/10000.json

Requests come in bursts, with random parameters, priorities, deadlines and tenants; many begin
alike or go on where another ended. Some are called off, the queue overflows, the KV is too small
for the batch, every step has another K, and the drafter fails now and then. All of it follows from
one seed: time is a counter of steps, so that deadlines fall where they fell before.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch
from tests import tiny
from tests.faulty import Faulty
from tests.naive import naive_tokens
from tests.tabular import TabularModel

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.engine.sequence import Sequence as Sample
from forerun.errors import QueueFull
from forerun.sampling.config import SamplingParams
from forerun.sampling.processors import _without_history
from forerun.theory.record import StepRecord

VOCAB_SIZE = 12
MOST_K = 4
MOST_NEW = 16
LAW_PROMPT = [(3 * n) % VOCAB_SIZE for n in range(24)]
LAW_PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, verification="block")
LAW_SHARE = 0.15

Oracle = Callable[[list[int], SamplingParams, int], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request as it was sent."""

    prompt: list[int]
    params: SamplingParams
    terms: RequestTerms

    @property
    def of_law(self) -> bool:
        """Whether it counts for the law instead of having one right text."""
        return self.params.verification == "block"


@dataclass(kw_only=True)
class Report:
    """What happened."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    mismatches: int = 0
    refused: int = 0
    preemptions: int = 0
    drafter_failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    law_tokens: int = 0
    law_z: float = 0.0
    objects: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    wall_s: float = 0.0


class RandomController(Controller):
    """Another K for every request at every step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        most = min(MOST_K, capacity.max_rows // max(1, len(states)) - 1)
        ks = [self.rng.randint(0, most) for _ in states]
        return Decision([Plan.chain("draft_model" if k else "plain", k) for k in ks])

    def observe(self, records: Sequence[StepRecord]) -> None:
        pass


class FailsNowAndThen(Faulty):
    """A drafter that raises at random, before or after it has done its work."""

    def __init__(self, inner: DraftModel, rng: random.Random) -> None:
        super().__init__(inner)
        self.rng = rng
        self.num_failures = 0

    def _maybe_fail(self) -> None:
        if self.rng.random() < 0.004:
            self.num_failures += 1
            raise RuntimeError("failed by design")

    def propose(self, requests, plans):
        self._maybe_fail()
        proposals = super().propose(requests, plans)
        self._maybe_fail()
        return proposals

    def observe(self, outcomes):
        super().observe(outcomes)
        self._maybe_fail()


class Prompts:
    """Prompts that begin alike, go on where another ended, or are new."""

    def __init__(self, rng: random.Random, vocab_size: int, longest: int) -> None:
        self.rng = rng
        self.vocab_size = vocab_size
        self.longest = longest
        self.beginnings = [self.some(rng.randint(16, 40)) for _ in range(8)]
        self.ended: list[list[int]] = []

    def some(self, length: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(length)]

    def draw(self) -> list[int]:
        kind = self.rng.random()
        if kind < 0.3:
            prompt = self.some(self.rng.randint(1, 30))
        elif kind < 0.7 or not self.ended:
            prompt = [*self.rng.choice(self.beginnings), *self.some(self.rng.randint(0, 9))]
        else:
            prompt = [*self.rng.choice(self.ended), *self.some(self.rng.randint(1, 6))]
        return prompt[: self.longest]

    def ends(self, output: RequestOutput) -> None:
        self.ended.append([*output.prompt_token_ids, *output.token_ids])
        del self.ended[:-16]


def some_params(rng: random.Random) -> SamplingParams:
    """Whatever has one right text: greedy, or a seed and the walk."""
    max_tokens = rng.randint(1, MOST_NEW)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
        seed=rng.randrange(1000),
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, min(3, max_tokens)]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (), (4,)]),
        top_k=rng.choice([0, 0, 3]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([None, None, {2: 1.5, 5: -1.0}]),
        bad_token_ids=rng.choice([(), (), (7,)]),
    )


def some_terms(rng: random.Random) -> RequestTerms:
    return RequestTerms(
        priority=rng.choice([0, 0, 0, 1, 2]),
        deadline_s=rng.choice([None, None, None, None, rng.uniform(1, 40)]),
        tenant=rng.choice([None, None, "a", "b"]),
    )


class Soak:
    """Sends requests into an engine, steps it, and judges what comes out.

    Args:
        engine: to be soaked.
        oracle: the right text of a sample.
        rng: every choice is drawn from it.
        prompts: where prompts come from.
        with_law: whether some requests are judged by their law.
    """

    def __init__(
        self, engine: Engine, oracle: Oracle, rng: random.Random, prompts: Prompts, with_law: bool
    ) -> None:
        self.engine = engine
        self.oracle = oracle
        self.rng = rng
        self.prompts = prompts
        self.with_law = with_law
        self.report = Report()
        self.live: dict[str, Wanted] = {}
        self.streamed: dict[tuple[str, int], tuple[int, ...]] = {}
        self.law_texts: list[tuple[int, ...]] = []
        self.now_s = 0.0

    def run(self, num_requests: int, every: int) -> Report:
        """Send so many requests; after every so many let all end, and count what is left."""
        started_s = time.perf_counter()
        with mock.patch("time.monotonic", lambda: self.now_s):
            while self.report.requests < num_requests:
                until = min(num_requests, self.report.requests + every)
                while self.report.requests < until:
                    self._burst(until)
                    self._maybe_abort()
                    self._step()
                while self.engine.has_unfinished:
                    self._step()
                self._check_nothing_is_left()
        self.report.wall_s = time.perf_counter() - started_s
        return self.report

    def _burst(self, until: int) -> None:
        if self.rng.random() < 0.55:
            return
        for _ in range(min(self.rng.randint(1, 7), until - self.report.requests)):
            wanted = self._some_request()
            try:
                name = self.engine.add_request(wanted.prompt, wanted.params, terms=wanted.terms)
            except QueueFull:
                self.report.refused += 1
                return
            self.live[name] = wanted
            self.report.requests += 1
            self.report.samples += wanted.params.n

    def _some_request(self) -> Wanted:
        terms = some_terms(self.rng)
        if self.with_law and self.rng.random() < LAW_SHARE:
            # What ends it must not depend on what was drawn: no deadline, never called off.
            params = replace(LAW_PARAMS, seed=self.rng.getrandbits(60))
            terms = replace(terms, deadline_s=None)
            return Wanted(prompt=LAW_PROMPT, params=params, terms=terms)
        return Wanted(prompt=self.prompts.draw(), params=some_params(self.rng), terms=terms)

    def _maybe_abort(self) -> None:
        if self.rng.random() > 0.05:
            return
        names = [name for name, wanted in self.live.items() if not wanted.of_law]
        if not names:
            return
        name = self.rng.choice(names)
        self.report.aborted[self._state_of(name)] += 1
        output = self.engine.abort(name)
        assert output is not None
        self._judge(output)

    def _state_of(self, name: str) -> str:
        first = self.engine._requests[name][0]
        if first in self.engine.scheduler.waiting:
            return "preempted" if first.num_preemptions else "queued"
        if first.context is None:
            return "ended, siblings going on"
        return "decoding" if first.num_output else "reading"

    def _step(self) -> None:
        self.now_s += 1.0
        self.report.steps += 1
        ended = set()
        for chunk in self.engine.step():
            sample = (chunk.request_id, chunk.index)
            self.streamed[sample] = self.streamed.get(sample, ()) + chunk.token_ids
            if chunk.finish_reason is not None:
                ended.add(chunk.request_id)
        for name in sorted(ended):
            if all(sample.stop is not None for sample in self.engine._requests[name]):
                output = self.engine.take_output(name)
                self._judge(output)
                self.prompts.ends(output)
        self._check_places()

    def _check_places(self) -> None:
        """Exactly the running sequences hold a slot, within the bounds."""
        engine, config = self.engine, self.engine.config
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        assert engine.target.store.num_free == config.max_batch - len(running)
        assert len(running) + len(waiting) <= config.max_batch + config.max_waiting
        assert all(sample.context is None for sample in waiting)
        held = sum(s.context.num_cached for s in running if s.context is not None)
        assert held <= (config.max_kv_tokens or math.inf)

    def _judge(self, output: RequestOutput) -> None:
        wanted = self.live.pop(output.request_id)
        assert list(output.prompt_token_ids) == wanted.prompt
        for completion in output.completions:
            streamed = self.streamed.pop((output.request_id, completion.index), ())
            reason, tokens = completion.finish_reason, completion.token_ids
            self.report.finished[reason] += 1
            self.report.tokens += len(tokens)
            self.report.preemptions += completion.num_preemptions
            self.report.prompt_tokens += len(wanted.prompt)
            self.report.cached_tokens += completion.num_cached_tokens
            is_right = streamed == tokens
            if wanted.of_law:
                self.law_texts.append(tokens)
                is_right &= reason == "length"
            else:
                expected = self.oracle(wanted.prompt, wanted.params, completion.index)
                cut = reason in ("abort", "deadline")
                is_right &= tokens == (expected[: len(tokens)] if cut else expected)
            self.report.mismatches += not is_right

    def _check_nothing_is_left(self) -> None:
        engine = self.engine
        assert not self.live
        assert not self.streamed
        assert not engine._requests
        assert not engine._keys
        assert engine.target.store.num_free == engine.config.max_batch
        drafter = engine.drafter
        assert drafter is not None
        assert isinstance(drafter, FailsNowAndThen)
        draft = drafter.inner
        assert isinstance(draft, DraftModel)
        assert not draft._sequences
        assert draft.model.store.num_free == engine.config.max_batch
        self.report.drafter_failures = drafter.num_failures
        _without_history.cache_clear()  # bounded, but it grows with the parameters of requests
        gc.collect()
        self.report.objects.append(num_living())
        self.report.resident_bytes.append(resident_bytes())


def num_living() -> int:
    """Sequences and tensors that something still refers to."""
    return sum(issubclass(type(thing), Sample | torch.Tensor) for thing in gc.get_objects())


def resident_bytes() -> int:
    """Memory the process has resident; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0


@contextmanager
def no_warnings_of_failing_drafters() -> Iterator[None]:
    logger = logging.getLogger("forerun.drafting")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


LOAD = {
    "max_batch": 4,
    "max_waiting": 24,
    "max_context": tiny.MAX_CONTEXT,
    "max_kv_tokens": 180,
    "prefill_chunk": 12,
    "max_step_rows": 36,
}


def engine_for(target: object, draft: object, rng: random.Random, vocab_size: int) -> Engine:
    drafter = FailsNowAndThen(DraftModel(draft, vocab_size), rng)
    return Engine(
        target=target,
        tokenizer=tiny.tokenizer(),
        drafter=drafter,
        controller=RandomController(rng),
        config=tiny.settings(MOST_K, **LOAD),
        eos_token_ids=frozenset({tiny.EOS}),
    )


class Remembering(TabularModel):
    """A law that depends on every token before: one wrong row in the KV changes the text."""

    @classmethod
    def like(cls, model: TabularModel) -> Remembering:
        return cls(log_probs=model.log_probs, order=model.order, store=model.store)

    def state_of(self, ids: Sequence[int]) -> int:
        return hash(tuple(ids)) % len(self.log_probs)


def soak_laws(num_requests: int, *, seed: int = 0, every: int = 500) -> Report:
    """Over a target whose law is written down."""
    rng = random.Random(seed)
    law = tiny.tabular(0, vocab_size=VOCAB_SIZE, order=3)
    target, draft = Remembering.like(law), Remembering.like(tiny.cousin(law, 5))
    engine = engine_for(target, draft, rng, VOCAB_SIZE)
    longest = tiny.MAX_CONTEXT - MOST_NEW
    soak = Soak(
        engine,
        lambda prompt, params, index: naive_tokens(target, prompt, params, index),
        rng,
        Prompts(rng, VOCAB_SIZE, longest),
        with_law=True,
    )
    with no_warnings_of_failing_drafters():
        report = soak.run(num_requests, every)
    report.law_tokens = sum(map(len, soak.law_texts))
    report.law_z = deviation(target, soak.law_texts)
    return report


def soak_networks(num_requests: int, *, seed: int = 0, every: int = 500) -> Report:
    """Over a small random Llama in fp32, its plain decoding of one prompt at a time as oracle."""
    rng = random.Random(seed)
    network = tiny.network()
    plain = tiny.engine_over(tiny.adapted(network), sharing="none")

    def oracle(prompt: list[int], params: SamplingParams, index: int) -> tuple[int, ...]:
        return plain.generate([prompt], params)[0].completions[index].token_ids

    draft = tiny.adapted(tiny.network(jitter=0.03))
    engine = engine_for(tiny.adapted(network), draft, rng, tiny.VOCAB_SIZE)
    longest = tiny.MAX_CONTEXT - MOST_NEW
    soak = Soak(engine, oracle, rng, Prompts(rng, tiny.VOCAB_SIZE, longest), with_law=False)
    with no_warnings_of_failing_drafters():
        return soak.run(num_requests, every)


def deviation(target: TabularModel, texts: Sequence[tuple[int, ...]]) -> float:
    """How often the most likely token was drawn, the next, and so on, against how often it should.

    Whatever the texts were: at each token its history is given, so expected counts add up. Their
    chi-square in its standard deviations; it varies less than independent counts would.
    """
    found = torch.zeros(target.vocab_size, dtype=torch.float64)
    expected = torch.zeros_like(found)
    for text in texts:
        for length, token in enumerate(text):
            law, order = target.probs([*LAW_PROMPT, *text[:length]]).sort(descending=True)
            found += order == token
            expected += law
    freedom = target.vocab_size - 1
    statistic = float(((found - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def main() -> None:
    from forerun.provenance import collect

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--networks", type=int, default=500, help="requests over a small Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reports = {
        "laws": soak_laws(options.requests, seed=options.seed),
        "networks": soak_networks(options.networks, seed=options.seed, every=100),
    }
    content = {"arguments": sys.argv[1:], "provenance": collect({}).to_dict()}
    content |= {name: vars(report) for name, report in reports.items()}
    text = json.dumps(content, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(any(report.mismatches for report in reports.values()))


if __name__ == "__main__":
    main()
