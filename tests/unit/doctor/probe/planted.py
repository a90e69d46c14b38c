"""A machine whose clock only planted costs move: passes, chains and commits of known times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.tabular import TabularModel, TokenStore
from tests.tiny import MAX_CONTEXT, tokenizer

from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.measure.profile import ProfileConfig
from forerun.measure.rigs import ModelFacts

SMALL = ProfileConfig(
    rows=(1, 2, 4, 8),
    batches=(1, 3),
    contexts=(9, 40),
    drafted=(1, 3),
    read=(1, 4, 16),
    max_pass_rows=24,
    target_error=0.01,
    min_rounds=1,
    budget_s=1e9,
)
NUM_SLOTS = 3
VOCAB_SIZE = 8
COMMIT_S = 2e-5


class Clock:
    """Seconds that pass when somebody says so; reading it takes next to nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-12
        return self.now_s


class TimedStore(TokenStore):
    """Every commit takes a planted time, wherever it is called from."""

    clock: Clock

    def commit(self, slot, rows):
        super().commit(slot, rows)
        self.clock.now_s += COMMIT_S


@dataclass(kw_only=True)
class Costs:
    """Seconds of a model: passes by rows and context, chains by tokens.

    `noise` multiplies every pass, by how many there were before it.
    """

    pass_s: float
    row_s: float
    cached_s: float = 0.0
    chain_s: float = 0.0
    chain_token_s: float = 0.0
    noise: Callable[[int], float] = lambda count: 1.0
    fits: Callable[[int], bool] = lambda rows: True
    count: int = 0

    def of_pass(self, batch) -> float:
        rows = len(batch.tokens)
        if not self.fits(rows):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        cached = sum(span.start for span in batch.spans)
        return self.noisy(self.pass_s + self.row_s * rows + self.cached_s * cached)

    def of_chain(self, batch, num_tokens) -> float:
        return self.noisy(self.chain_s + self.chain_token_s * num_tokens * len(batch.spans))

    def noisy(self, seconds) -> float:
        self.count += 1
        return seconds * self.noise(self.count)


class PlantedModel(TabularModel):
    """A tabular law that moves the clock."""

    clock: Clock
    costs: Costs

    def forward(self, batch):
        self.clock.now_s += self.costs.of_pass(batch)
        return super().forward(batch)

    def greedy_chain(self, batch, num_tokens, vocab_size):
        seconds = self.costs.of_chain(batch, num_tokens)
        before_s = self.clock.now_s
        tokens = super().greedy_chain(batch, num_tokens, vocab_size)
        self.clock.now_s = before_s + seconds
        return tokens


def planted_model(clock: Clock, costs: Costs, seed: int) -> PlantedModel:
    law = TabularModel.from_seed(seed, vocab_size=VOCAB_SIZE)
    store = TimedStore(NUM_SLOTS, MAX_CONTEXT, max_staged_rows=64)
    store.clock = clock
    model = PlantedModel(log_probs=law.log_probs, order=law.order, store=store)
    model.clock, model.costs = clock, costs
    return model


def planted_pair(clock: Clock, target: Costs, draft: Costs) -> Engine:
    return Engine(
        target=planted_model(clock, target, seed=0),
        drafter=DraftModel(planted_model(clock, draft, seed=1), VOCAB_SIZE),
        tokenizer=tokenizer(),
        config=EngineConfig(max_batch=NUM_SLOTS, max_context=MAX_CONTEXT),
    )


def facts(name: str, pass_bytes: int = 8000) -> ModelFacts:
    return ModelFacts(
        name=name,
        content_hash=f"hash of {name}",
        dtype="float32",
        pass_bytes=pass_bytes,
        kv_token_bytes=16,
    )
