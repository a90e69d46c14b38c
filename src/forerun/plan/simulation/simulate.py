"""Simulation of one controller on a workload, from the first arrival to the last token."""

from __future__ import annotations

from forerun.control.base import Controller
from forerun.plan.simulation.config import Workload
from forerun.plan.simulation.request import SimulatedRequest
from forerun.plan.simulation.result import Result, result_of
from forerun.plan.simulation.schedules import Schedule, Sequential
from forerun.plan.simulation.server import Server
from forerun.plan.simulation.tally import SimulationTally
from forerun.plan.simulation.times import Times
from forerun.plan.simulation.traffic import Traffic

__all__ = ["simulate"]


def simulate(
    workload: Workload,
    traffic: Traffic,
    times: Times,
    controller: Controller,
    name: str,
    schedule: Schedule | None = None,
) -> Result:
    """Serve the requests of a workload, cycle by cycle.

    Args:
        workload: the workload to simulate.
        traffic: its requests.
        times: times of cycles, at the workload's temperature.
        controller: chooses K, called as by the engine.
        name: name of the controller, for the result.
        schedule: overlap of drafting and verification; None: no overlap.
    """
    tally = SimulationTally(num_phases=len(workload.phases))
    server = Server(workload.server, times, controller, schedule or Sequential(), tally)
    server.serve([SimulatedRequest(traffic, i) for i in range(workload.requests)])
    return result_of(name, tally, workload.slo)
