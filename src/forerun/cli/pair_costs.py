"""The cost table of a target and its draft, for the predictions of align."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from forerun.align.config import AlignConfig
from forerun.cli.tables import SafeConsole
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.measure.bench.compare import on_best_threads
from forerun.measure.profile import Profile, ProfileConfig, check_setup
from forerun.measure.rigs import draft_of, facts_of, load_pair, measure_pair, setup_of
from forerun.theory.cost import CostTable, DraftCosts

ALIGN_BUDGET_S = 15.0


SCOUT_TEXT = "The quick brown fox"


class PairCosts:
    """Provides the cost tables of a pair, read or measured once for all versions of the draft.

    Args:
        num_threads: that carry the passes; None takes whichever number plain decoding is fastest
            with: against a slower baseline every draft would pay.
        profile: of the target and the draft to begin with, or one of its shape; None measures.
    """

    def __init__(
        self, config: AlignConfig, num_threads: int | None, profile: Profile | None = None
    ) -> None:
        self.config = config
        self.num_threads = num_threads
        self.profile = profile
        self._costs: DraftCosts | None = None

    def __call__(self, draft: Path, temperature: float, target_hash: str) -> CostTable:
        if self._costs is None:
            self._costs = self._get_profile(draft, target_hash).costs
        return self._costs.at(temperature)

    def _get_profile(self, draft: Path, target_hash: str) -> Profile:
        config = self.config
        most = config.evaluation.num_speculative_tokens
        engine, probe = load_pair(
            config.target,
            str(draft),
            dtype=config.dtype,
            device=config.device,
            engine=EngineConfig(num_threads=self._choose_threads()),
            config=ProfileConfig(
                rows=tuple(range(1, most + 2)),
                batches=(1,),
                drafted=(1, most) if most > 1 else (1,),
                budget_s=ALIGN_BUDGET_S,
            ),
        )
        facts = (
            facts_of(config.target, engine.target, known_hash=target_hash),
            facts_of(str(draft), draft_of(engine.drafter)),
        )
        if self.profile is not None:
            # The weights are about to change; what a pass over them takes is not.
            draft_hash = self.profile.setup.draft_hash
            setup = setup_of(engine.target, engine.drafter, engine.config, facts)
            check_setup(self.profile, replace(setup, draft_hash=draft_hash))
            return self.profile
        with SafeConsole(stderr=True).status(
            "measuring what drafting and verifying cost"
        ) as status:

            def notify(num_rounds: int, error: float) -> None:
                status.update(f"measuring costs: round {num_rounds}, within {error:.1%}")

            return measure_pair(engine, facts, probe, clock=time.perf_counter, notify=notify)

    def _choose_threads(self) -> int:
        """Return the given number of threads, or else the fastest for these models."""
        if self.num_threads is not None:
            return self.num_threads
        config, num_torch_threads = self.config, torch.get_num_threads()

        def load(num_threads: int) -> Engine:
            own = EngineConfig(num_threads=num_threads, num_speculative_tokens=0, max_batch=1)
            return Engine.load(config.target, dtype=config.dtype, device=config.device, config=own)

        try:
            best, _ = on_best_threads(load, SCOUT_TEXT, time.perf_counter)
        finally:
            torch.set_num_threads(num_torch_threads)
        return best.config.num_threads or num_torch_threads
