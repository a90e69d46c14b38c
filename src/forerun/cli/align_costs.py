"""What a draft costs beside its target, for the predictions of `forerun align`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from forerun.align.config import AlignConfig
from forerun.bench.threads import on_best_threads
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.plan.costs import DraftCosts
from forerun.probe.config import ProbeConfig
from forerun.probe.measurement import measure_pair
from forerun.probe.pair import facts_of, load_pair, setup_of
from forerun.probe.profile import Profile
from forerun.probe.profile_file import check_setup
from forerun.theory.cost import CostTable

__all__ = ["PairCosts"]

BUDGET_S = 15.0
SCOUT_TEXT = "The quick brown fox"


class PairCosts:
    """Costs read or measured once: training changes what a draft says, not what it costs.

    Args:
        config: of the alignment.
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
        """The table at a temperature.

        Raises:
            InvalidProfile: the profile is of another machine or target.
        """
        if self._costs is None:
            self._costs = self._profile(draft, target_hash).costs
        return self._costs.at(temperature)

    def _profile(self, draft: Path, target_hash: str) -> Profile:
        """A profile of the target and a draft of this shape, here."""
        config = self.config
        most = config.evaluation.num_speculative_tokens
        pair, probe = load_pair(
            config.target,
            str(draft),
            dtype=config.dtype,
            device=config.device,
            engine=EngineConfig(num_threads=self._threads()),
            config=ProbeConfig(
                rows=tuple(range(1, most + 2)),
                batches=(1,),
                drafted=(1, most) if most > 1 else (1,),
                budget_s=BUDGET_S,
            ),
        )
        facts = (
            facts_of(config.target, pair.target, config.dtype, known_hash=target_hash),
            facts_of(str(draft), pair.draft, config.dtype),
        )
        if self.profile is not None:
            # The weights are about to change; what a pass over them takes is not.
            draft_hash = self.profile.setup.draft_hash
            check_setup(self.profile, replace(setup_of(pair, *facts), draft_hash=draft_hash))
            return self.profile
        with Console(stderr=True).status("measuring what drafting and verifying cost") as status:

            def tell(num_rounds: int, error: float) -> None:
                status.update(f"measuring costs: round {num_rounds}, within {error:.1%}")

            return measure_pair(pair, facts, probe, clock=time.perf_counter, tell=tell)

    def _threads(self) -> int:
        """The number asked for, or the best; training keeps its own."""
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
