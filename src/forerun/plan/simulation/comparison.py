"""Runs of several controllers on the same requests and texts."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.coarse import simulate_coarsely
from forerun.plan.simulation.config import Workload
from forerun.plan.simulation.controllers import controller_maker
from forerun.plan.simulation.regret import Oracle, oracle_of
from forerun.plan.simulation.result import Result
from forerun.plan.simulation.schedules import SCHEDULES
from forerun.plan.simulation.simulate import simulate
from forerun.plan.simulation.times import Times
from forerun.plan.simulation.traffic import traffic_of

__all__ = ["ControllerComparison"]


class ControllerComparison:
    """Runs one workload, drawn once, under several controllers, each of them once.

    Args:
        workload: the workload to simulate.
        costs: costs of cycles, which the controllers receive, too.
        seed: seed of everything random.
        overlap: name of the schedule.
        coarse: average steps instead of every step.
    """

    def __init__(
        self,
        workload: Workload,
        costs: DraftCosts,
        *,
        seed: int,
        overlap: str = "none",
        coarse: bool = False,
    ) -> None:
        self.workload = workload
        self.costs = costs
        self.overlap = overlap
        self.coarse = coarse
        self.traffic = traffic_of(workload, seed)
        self.times = Times(costs.at(workload.temperature), costs.reading)
        self._results: dict[str, Result] = {}

    def check(self, names: Iterable[str]) -> None:
        """Refuse controllers that cannot be run, before any run begins.

        Raises:
            InvalidRequest: a controller is unknown, or the coarse mode does not support it.
        """
        for name in names:
            controller_maker(name, self.costs, self.workload.server.max_k)
            if self.coarse and fixed_k(name) is None:
                raise InvalidRequest(
                    f"the coarse mode has no steps that {name} could learn from; take plain or "
                    "fixed:K, or leave --coarse out"
                )
        if self.coarse and self.overlap != "none":
            raise InvalidRequest("the coarse mode does not support overlap; leave --coarse out")

    def run(self, name: str) -> Result:
        """Return the result of one controller."""
        name = "plain" if name == "fixed:0" else name
        found = self._results.get(name)
        if found is None:
            found = self._results[name] = self._run(name)
        return found

    def _run(self, name: str) -> Result:
        k = fixed_k(name)
        if self.coarse:
            assert k is not None
            return simulate_coarsely(self.workload, self.traffic, self.times, k, name)
        make = controller_maker(name, self.costs, self.workload.server.max_k)
        schedule = SCHEDULES[self.overlap]()
        return simulate(self.workload, self.traffic, self.times, make(), name, schedule)

    def oracle(self, ks: Iterable[int]) -> Oracle:
        """Return the best of several fixed K, phase by phase."""
        return oracle_of({k: self.run(f"fixed:{k}") for k in ks})


def fixed_k(name: str) -> int | None:
    """Return K of a fixed controller, 0 for plain decoding, or None for one that learns."""
    if name == "plain":
        return 0
    base, _, argument = name.partition(":")
    return int(argument) if base == "fixed" and argument.isdecimal() else None
