"""Coarse simulation of millions of requests, whose events are arrivals and ends, not steps.

Between two such events the batch is the same, so every cycle takes the same time and every request
advances by one step per cycle. How many steps a request needs is drawn at once, from the mean and
variance of a renewal process whose renewals are steps. The fine mode is more exact in three ways:
here prompts are read in one go as a request joins, while all others wait; contexts are means over a
request's life; and controllers that decide at every step cannot be simulated, so K is fixed.

Source: the number of renewals until a level, and the overshoot (Feller 1971, volume 2, chapter XI).
"""

from __future__ import annotations

import math
from collections import Counter
from heapq import heappop, heappush

import numpy as np

from forerun.plan.simulation.config import Workload
from forerun.plan.simulation.result import Result, SimulationTally, result_of
from forerun.plan.simulation.times import CycleTimes, Times
from forerun.plan.simulation.traffic import NDFloats, SimulatedDraw, Traffic, key_of, normals


def simulate_coarsely(
    workload: Workload, traffic: Traffic, times: Times, num_speculative_tokens: int, name: str
) -> Result:
    """Simulate a workload at fixed K, event by event."""
    tally = SimulationTally(num_phases=len(workload.phases))
    steps = num_steps_of(traffic, num_speculative_tokens)
    Flow(workload, traffic, times, num_speculative_tokens, tally).serve(steps)
    return result_of(name, tally, workload.slo)


class Flow:
    """Simulates the batch from event to event.

    Args:
        workload: what is simulated.
        traffic: its requests.
        times: what cycles take.
        num_speculative_tokens: K.
        tally: counts what happens.
    """

    def __init__(
        self,
        workload: Workload,
        traffic: Traffic,
        times: Times,
        num_speculative_tokens: int,
        tally: SimulationTally,
    ) -> None:
        self.server = workload.server
        self.traffic = traffic
        self.times = times
        self.k = num_speculative_tokens
        self.tally = tally
        self.now_s = 0.0
        self.num_steps = 0.0
        """Steps the batch has made, with the part of one since the last event."""
        self.num_decoding = 0.0
        """Requests in those steps."""
        self.num_tokens = 0
        """Of all running requests, at the middle of their lives."""
        self.ends: list[tuple[float, int, float, float]] = []
        """Step of the end, request, time of its first token, its steps; a heap."""

    def serve(self, steps: NDFloats) -> None:
        """Simulate all requests, from the first arrival to the end of the last one."""
        arrival_s, count = self.traffic.arrival_s, len(steps)
        need: list[float] = steps.tolist()
        joining, max_batch = 0, self.server.max_batch
        while joining < count or self.ends:
            free = joining < count and len(self.ends) < max_batch
            if free and arrival_s[joining] <= self.now_s:
                self.join(joining, need[joining])
                joining += 1
                continue
            cycle_s = self.cycle_s()
            end_s = math.inf
            if self.ends:
                end_s = self.now_s + (self.ends[0][0] - self.num_steps) * cycle_s
            if free and arrival_s[joining] <= end_s:
                self.advance(arrival_s[joining], cycle_s)
            else:
                self.advance(end_s, cycle_s)
                self.finish()
        self.tally.num_cycles = max(1, round(self.num_steps))
        self.tally.num_decoding = round(self.num_decoding)

    def advance(self, until_s: float, cycle_s: float) -> None:
        """Advance the time to the next event, with the same requests running."""
        if self.ends:
            passed = (until_s - self.now_s) / cycle_s
            self.num_steps += passed
            self.tally.busy_s += until_s - self.now_s
            self.num_decoding += passed * len(self.ends)
        self.now_s = until_s

    def join(self, index: int, num_steps: float) -> None:
        """Add a request to the batch and let the others wait while its prompt is read."""
        num_running, num_prompt = len(self.ends), self.traffic.num_prompt[index]
        num_output = self.traffic.num_output[index]
        times = self.place(max(1, num_running))
        read_s = self.read_s(times, num_prompt, num_running)
        self.now_s += read_s
        self.tally.busy_s += read_s
        first_s, before = self.now_s, 0.0
        if num_running:  # the end of the prompt shares a cycle with the others' next step
            first_s, before = first_s + self.cycle_s(), 1.0
        end = self.num_steps + before + num_steps
        heappush(self.ends, (end, index, first_s, num_steps))
        self.num_tokens += num_prompt + num_output // 2

    def read_s(self, times: CycleTimes, num_prompt: int, num_running: int) -> float:
        """Return by how many seconds reading a prompt prolongs the cycles in which it is read."""
        chunk = self.server.prefill_chunk
        full, rest = divmod(num_prompt, chunk)
        parts = [(chunk, full), (rest, 1 if rest else 0)]
        reading, beside_s = self.times.reading, 0.0
        pass_s = reading.target_more_s
        if not num_running:
            pass_s, beside_s = reading.target_pass_s, max(0.0, times.plain_s - times.pass_s(1))
        read_s = sum([count * (pass_s(rows) + beside_s) for rows, count in parts if count])
        return read_s + (reading.draft_more_s(num_prompt) if self.k else 0.0)

    def finish(self) -> None:
        """End the running request that emits its last token first."""
        _, index, first_s, num_steps = heappop(self.ends)
        num_prompt, num_output = self.traffic.num_prompt[index], self.traffic.num_output[index]
        self.num_tokens -= num_prompt + num_output // 2
        first_s = min(first_s, self.now_s)
        tally, phase = self.tally, self.traffic.phases[index]
        tally.arrival_s.append(self.traffic.arrival_s[index])
        tally.first_s.append(first_s)
        tally.finished_s.append(self.now_s)
        tally.num_output.append(num_output)
        tally.tokens[phase] += num_output - 1
        tally.decode_s[phase] += self.now_s - first_s
        tally.depths[phase] += Counter({self.k: round(num_steps)})
        tally.accepted[phase] += max(0, num_output - 1 - round(num_steps))

    def place(self, num_running: int) -> CycleTimes:
        """Return the cycle times for a number of running requests and their present context."""
        return self.times.at(num_running, self.num_tokens)

    def cycle_s(self) -> float:
        """Return the seconds of a cycle of the running requests."""
        num_running = len(self.ends)
        if not num_running:
            return 0.0
        times = self.place(num_running)
        if not self.k:
            return times.plain_s
        draft_s = self.k * times.draft_s[num_running]
        return draft_s + times.pass_s(num_running * (self.k + 1)) + times.overhead_s(self.k)


def num_steps_of(traffic: Traffic, num_speculative_tokens: int) -> NDFloats:
    """Draw the decode steps of every request from the normal limit of a renewal process.

    A step renews after X tokens: P(X > i) is survival through i. L tokens take
    (L + (E[X^2] / E[X] - 1) / 2) / E[X] steps, the second term for the last step's overshoot, with
    variance L Var[X] / E[X]^3.
    """
    k = num_speculative_tokens
    left = np.array(traffic.num_output, dtype=np.float64) - 1.0
    if k == 0:
        return left
    kinds = {alphas: number for number, alphas in enumerate(dict.fromkeys(traffic.alphas))}
    chosen = np.array([kinds[alphas] for alphas in traffic.alphas])
    survival = np.cumprod(np.array([alphas[:k] for alphas in kinds]), axis=1)
    odd = 2.0 * np.arange(1, k + 1) + 1.0  # (i + 1)^2 - i^2
    mean = (1.0 + survival.sum(axis=1))[chosen]
    square = (1.0 + survival @ odd)[chosen]
    overshoot = (square / mean - 1.0) / 2.0
    expected = (left + overshoot) / mean
    spread = np.sqrt(left * (square - mean**2) / mean**3)
    noise = normals(key_of(traffic.seed, SimulatedDraw.TEXT), len(left))
    least = np.ceil(left / (k + 1.0))
    return np.where(left > 0, np.clip(expected + spread * noise, least, left), 0.0)
