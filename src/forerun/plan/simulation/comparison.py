"""Runs of several controllers on the same requests and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.control.base import Controller, Tree
from forerun.control.config import CONTROLLER_NAMES
from forerun.control.named import ControllerInputs, FixedController, build_controller
from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.config import Workload
from forerun.plan.simulation.request import SimulatedRequest, Traffic, traffic_of
from forerun.plan.simulation.result import Result, SimulationTally, result_of
from forerun.plan.simulation.server import Server, Times

METHOD = "draft_model"
"""Name of the simulated drafter."""


def _controller_maker(
    name: str, costs: DraftCosts, max_k: int, *, has_trees: bool = False, max_tree_nodes: int = 0
) -> Callable[[], Controller]:
    """Return a function that builds a fresh controller for each run."""
    base, colon, argument = name.partition(":")
    if base == "tree":
        tree = Tree.parse(argument)
        return lambda: FixedController(tree, METHOD)
    base, argument = ("fixed", "0") if name == "plain" else (base, argument)
    kind = next((known for known in CONTROLLER_NAMES if known == base), None)
    if kind is None:
        raise InvalidRequest(
            f"controller {name!r} is unknown; use plain, fixed:K, tree:NODES, "
            f"{', '.join(CONTROLLER_NAMES)}"
        )
    k = max_k
    if argument or colon:
        if kind != "fixed" or not argument.isdecimal() or int(argument) > max_k:
            raise InvalidRequest(
                f"controller {name!r}: only fixed takes a K, from 0 to max_k, which is {max_k}"
            )
        k = int(argument)
    inputs = ControllerInputs(
        methods=(METHOD,),
        num_speculative_tokens=k,
        costs={METHOD: costs},
        tree_methods=(METHOD,) if has_trees else (),
        max_tree_nodes=max_tree_nodes,
    )
    return lambda: build_controller(kind, inputs)


def simulate(
    workload: Workload, traffic: Traffic, times: Times, controller: Controller, name: str
) -> Result:
    """Serve the requests of a workload, cycle by cycle."""
    tally = SimulationTally(num_phases=len(workload.phases))
    server = Server(workload.server, times, controller, tally)
    server.serve([SimulatedRequest(traffic, i) for i in range(workload.requests)])
    return result_of(name, tally, workload.slo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The best fixed K of every phase, found by simulating several fixed K.

    All requests of a phase meet the same texts under every controller, so request-seconds of their
    decode steps can be compared between runs.
    """

    ks: tuple[int, ...]
    decode_s: tuple[float, ...]

    def regret(self, result: Result) -> float:
        """Return how far a result's request-seconds exceed the oracle's, relative to the latter."""
        return result.decode_s / sum(self.decode_s) - 1.0

    def phase_regrets(self, result: Result) -> tuple[float, ...]:
        """Return by phase how far request-seconds exceed the oracle's, relative to the latter."""
        return tuple(
            phase.decode_s / best - 1.0 if best else 0.0
            for phase, best in zip(result.phases, self.decode_s, strict=True)
        )


def _oracle_of(fixed: Mapping[int, Result]) -> Oracle:
    num_phases = len(next(iter(fixed.values())).phases)
    best = [_phase_best(fixed, phase) for phase in range(num_phases)]
    return Oracle(ks=tuple(k for k, _ in best), decode_s=tuple(seconds for _, seconds in best))


def _phase_best(fixed: Mapping[int, Result], phase: int) -> tuple[int, float]:
    """Return the fixed K with the fewest request-seconds in a phase, and their number."""
    costs: Sequence[tuple[float, int]] = sorted(
        (result.phases[phase].decode_s, k) for k, result in fixed.items()
    )
    seconds, k = costs[0]
    return k, seconds


class ControllerComparison:
    """Runs the same workload once under each of several controllers."""

    def __init__(self, workload: Workload, costs: DraftCosts, *, seed: int) -> None:
        self.workload = workload
        self.costs = costs
        self.traffic = traffic_of(workload, seed)
        self.times = Times(costs.at(workload.temperature), costs.reading)
        self._results: dict[str, Result] = {}

    def check(self, names: Iterable[str]) -> None:
        """Refuse unknown controllers before any run begins; raises InvalidRequest."""
        for name in names:
            _controller_maker(name, self.costs, self.workload.server.max_k)

    def run(self, name: str) -> Result:
        name = "plain" if name == "fixed:0" else name
        found = self._results.get(name)
        if found is None:
            server = self.workload.server
            make = _controller_maker(
                name,
                self.costs,
                server.max_k,
                has_trees=self.workload.sibling_acceptance > 0.0,
                max_tree_nodes=server.max_tree_nodes,
            )
            found = simulate(self.workload, self.traffic, self.times, make(), name)
            self._results[name] = found
        return found

    def oracle(self, ks: Iterable[int]) -> Oracle:
        """Return the oracle over several fixed K, which chooses one K per phase."""
        return _oracle_of({k: self.run(f"fixed:{k}") for k in ks})
