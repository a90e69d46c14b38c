"""Cost tables of a target and its drafts, for the predictions of bench and align."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from forerun.align.config import AlignConfig
from forerun.cli.session import pair_of
from forerun.cli.tables import SafeConsole
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.measure.bench.compare import BenchArm, on_best_threads
from forerun.measure.bench.comparison import BenchComparison
from forerun.measure.profile import Profile, ProfileConfig, check_setup, profiles_of_drafts
from forerun.measure.rigs import LoadedPair, ModelFacts, facts_of, load_pair, measure_pair, setup_of
from forerun.plan.costs import DraftCosts
from forerun.theory.cost import CostTable

BENCH_BUDGET_S = 6.0
"""Per draft: a prediction needs less than a profile that is kept."""
ALIGN_BUDGET_S = 15.0


def measured_costs(
    comparison: BenchComparison, notify: Callable[[str], None]
) -> Mapping[str, DraftCosts]:
    found = {}
    for draft, arm in _by_draft(comparison).items():
        pair, facts = _pair_of(comparison, arm)
        if not isinstance(pair.drafter, DraftModel):
            continue  # it drafts as many tokens as it finds, so K says little of a step

        def say(num_rounds: int, error: float, draft: str = draft) -> None:
            notify(f"measuring costs with {draft}: round {num_rounds}, within {error:.1%}")

        profile = measure_pair(
            pair, facts, _probe_for(comparison), clock=time.perf_counter, notify=say
        )
        found[draft] = profile.costs
    return found


def read_costs(paths: Sequence[Path], comparison: BenchComparison) -> Mapping[str, DraftCosts]:
    """Read costs from profiles, and assign each to the draft that it was measured with."""
    pairs = {draft: _pair_of(comparison, arm) for draft, arm in _by_draft(comparison).items()}
    setups = {draft: setup_of(pair, *facts) for draft, (pair, facts) in pairs.items()}
    found = profiles_of_drafts(paths, setups)
    return {draft: profile.costs for draft, profile in found.items()}


def _by_draft(comparison: BenchComparison) -> dict[str, BenchArm]:
    """Return the first arm of every draft whose arms have a fixed K."""
    arms: dict[str, BenchArm] = {}
    for arm in comparison.arms:
        if arm.draft is not None and not arm.adaptive:
            arms.setdefault(arm.draft, arm)
    return arms


def _pair_of(
    comparison: BenchComparison, arm: BenchArm
) -> tuple[LoadedPair, tuple[ModelFacts, ModelFacts]]:
    assert isinstance(arm.engine, Engine) and arm.draft is not None
    assert arm.engine.drafter is not None
    return pair_of(arm.engine, arm.engine.drafter, comparison.config.target, arm.draft)


def _probe_for(comparison: BenchComparison) -> ProfileConfig:
    """Return settings of a profile whose batch sizes and K are those of the comparison."""
    config, room = comparison.config, comparison.arms[0].engine
    assert isinstance(room, Engine)
    longest = room.max_context - config.max_k - 1
    defaults = ProfileConfig()
    contexts = tuple(c for c in defaults.contexts if c <= longest) or (max(1, longest // 2),)
    return replace(
        defaults,
        rows=tuple(range(1, config.max_k + 2)),
        batches=tuple(sorted(config.batches)),
        contexts=contexts,
        read=tuple(size for size in defaults.read if contexts[0] + size <= longest),
        drafted=(1, config.max_k) if config.max_k > 1 else (1,),
        max_pass_rows=max(defaults.max_pass_rows, max(config.batches) * (config.max_k + 1)),
        budget_s=BENCH_BUDGET_S,
    )


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
            self._costs = self._profile(draft, target_hash).costs
        return self._costs.at(temperature)

    def _profile(self, draft: Path, target_hash: str) -> Profile:
        config = self.config
        most = config.evaluation.num_speculative_tokens
        pair, probe = load_pair(
            config.target,
            str(draft),
            dtype=config.dtype,
            device=config.device,
            engine=EngineConfig(num_threads=self._threads()),
            config=ProfileConfig(
                rows=tuple(range(1, most + 2)),
                batches=(1,),
                drafted=(1, most) if most > 1 else (1,),
                budget_s=ALIGN_BUDGET_S,
            ),
        )
        facts = (
            facts_of(config.target, pair.target, known_hash=target_hash),
            facts_of(str(draft), pair.draft),
        )
        if self.profile is not None:
            # The weights are about to change; what a pass over them takes is not.
            draft_hash = self.profile.setup.draft_hash
            check_setup(self.profile, replace(setup_of(pair, *facts), draft_hash=draft_hash))
            return self.profile
        with SafeConsole(stderr=True).status(
            "measuring what drafting and verifying cost"
        ) as status:

            def notify(num_rounds: int, error: float) -> None:
                status.update(f"measuring costs: round {num_rounds}, within {error:.1%}")

            return measure_pair(pair, facts, probe, clock=time.perf_counter, notify=notify)

    def _threads(self) -> int:
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
