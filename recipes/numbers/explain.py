"""Three times somebody measured, explained by one set of parameters, and what they then imply.

`python recipes/numbers/explain.py` prints the explanation, `--write` puts it into README.md beside
this file, `--check` says whether it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.control.named import FixedController
from forerun.plan.simulation import Times, serve
from forerun.plan.workload import (
    Constant,
    Phase,
    SimulatedServerConfig,
    Workload,
)
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.speedup import (
    best_k,
    break_even_alpha,
    constant_acceptance_length,
    constant_survival,
    cycle_cost,
)

PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- figures: explain.py -->\n", "<!-- end of figures -->\n"
NUM_TOKENS = 100
PLAIN_S, USELESS_S, DISTILLED_S = 5.0, 6.2, 2.1
"""Seconds per 100 tokens: plain; with a random draft; with a distilled one."""
USELESS_K, DISTILLED_K = 10, 5
BEFORE, AFTER = 0.65, 0.35
"""Acceptance probability before and after it fell."""
SHOWN_K = (1, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What explains the three times.

    Attributes:
        draft_cost: c, plain steps per drafted token.
        overhead: o, plain steps per speculative step.
        alpha: of the distilled draft.
    """

    draft_cost: float
    overhead: float
    alpha: float

    def cycle_cost(self, k: int) -> float:
        """kappa; verifying costs a plain step, what it costs beyond is in c."""
        if k == 0:
            return 1.0
        return cycle_cost(k, draft_cost=self.draft_cost, verify_cost=1.0, overhead=self.overhead)

    def seconds(self, k: int, alpha: float) -> float:
        """Per 100 tokens."""
        return PLAIN_S * self.cycle_cost(k) / constant_acceptance_length(alpha, k)

    def table(self) -> CostTable:
        """The same as a cost table, in seconds."""
        step_s = PLAIN_S / NUM_TOKENS
        return CostTable(
            lines=(
                CostLine(
                    rows=(1, USELESS_K + 1),
                    verify_s=(step_s, step_s),
                    plain_s=step_s,
                    draft_s=self.draft_cost * step_s,
                    overhead_s=(self.overhead * step_s,),
                ),
            )
        )


def explained(fixed_share: float = 0.0) -> Parameters:
    """The parameters, if so much of what the random draft cost was there whatever its K.

    A random draft is never accepted, so its steps yield one token and kappa is their time over a
    plain step's. That gives c; c gives kappa of the distilled run; kappa and its time give tau; and
    tau gives alpha.
    """
    beyond = USELESS_S / PLAIN_S - 1.0
    overhead = fixed_share * beyond
    draft_cost = (beyond - overhead) / USELESS_K
    kappa = cycle_cost(DISTILLED_K, draft_cost=draft_cost, verify_cost=1.0, overhead=overhead)
    alpha = break_even_alpha(DISTILLED_K, kappa * PLAIN_S / DISTILLED_S)
    assert alpha is not None  # the distilled run is no faster than accepting everything
    return Parameters(draft_cost=draft_cost, overhead=overhead, alpha=alpha)


def simulated_s(parameters: Parameters, k: int, alpha: float, num_requests: int = 400) -> float:
    """Seconds of decoding per 100 tokens, token by token, one request after the other."""
    workload = Workload(
        requests=num_requests,
        prompt_tokens=1,
        output_tokens=NUM_TOKENS + 1,  # the first comes with the prompt
        phases=(Phase(share=1.0, acceptance=Constant(alpha=alpha)),),
        server=SimulatedServerConfig(max_batch=1, max_k=USELESS_K),
    )
    times = Times(parameters.table())
    found = serve(workload, times, FixedController(k))
    return found.decode_s / num_requests


def explanation() -> Iterator[str]:
    """Markdown."""
    found = explained()
    yield from three_times(found)
    yield from other_splits()
    yield from what_a_fall_costs(found)


def three_times(found: Parameters) -> Iterator[str]:
    """The three times, by formula and by simulation."""
    yield (
        f"c = {found.draft_cost:.3f} plain steps per drafted token, "
        f"alpha = {found.alpha:.3f} for the distilled draft, 0 for the random one:\n\n"
        "| | K | tau | kappa | seconds per 100 tokens | measured | simulated |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for name, k, alpha, measured_s in (
        ("plain", 0, 0.0, PLAIN_S),
        ("random draft", USELESS_K, 0.0, USELESS_S),
        ("distilled draft", DISTILLED_K, found.alpha, DISTILLED_S),
    ):
        tau = constant_acceptance_length(alpha, k)
        yield (
            f"| {name} | {k} | {tau:.2f} | {found.cycle_cost(k):.3f} | "
            f"{found.seconds(k, alpha):.2f} | {measured_s} | {simulated_s(found, k, alpha):.2f} |\n"
        )


def other_splits() -> Iterator[str]:
    """How much the explanation depends on what cannot be told from three times."""
    yield (
        "\nThree times do not say how much of what the random draft cost was there whatever its K. "
        "It matters little:\n\n"
        "| of it fixed | c | o | alpha | break-even accepted / drafted at K = 5 |\n"
        "|---|---|---|---|---|\n"
    )
    for share in (0.0, 0.5, 1.0):
        found = explained(share)
        even = (found.cycle_cost(DISTILLED_K) - 1.0) / DISTILLED_K
        yield (
            f"| {share:.0%} | {found.draft_cost:.3f} | {found.overhead:.2f} | {found.alpha:.2f} | "
            f"{even:.1%} |\n"
        )


def what_a_fall_costs(found: Parameters) -> Iterator[str]:
    """Time per 100 tokens before and after, at every K and at the best one."""
    yield (
        f"\nWhat it costs if alpha falls from {BEFORE:.0%} to {AFTER:.0%}. "
        "A step costs what it did, so time grows as tau shrinks:\n\n"
        "| K | tau before | after | s / 100 tokens before | after | more time | after / plain |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    best_before, best_after = (best(found, alpha) for alpha in (BEFORE, AFTER))
    for k in SHOWN_K:
        yield fall(str(k), found, k, k)
    yield fall(f"best: {best_before} before, {best_after} after", found, best_before, best_after)


def best(found: Parameters, alpha: float) -> int:
    """The K of highest speedup."""
    survival = constant_survival(alpha, 2 * USELESS_K)
    return best_k(survival, found.cycle_cost).num_speculative_tokens


def fall(name: str, found: Parameters, k_before: int, k_after: int) -> str:
    """One line of the table."""
    before_s, after_s = found.seconds(k_before, BEFORE), found.seconds(k_after, AFTER)
    return (
        f"| {name} | {constant_acceptance_length(BEFORE, k_before):.2f} | "
        f"{constant_acceptance_length(AFTER, k_after):.2f} | {before_s:.2f} | {after_s:.2f} | "
        f"+{after_s / before_s - 1:.0%} | {after_s / PLAIN_S:.2f} |\n"
    )


def main(arguments: list[str]) -> int:
    """Print, write or check."""
    text = "".join(explanation())
    if not arguments:
        print(text, end="")
        return 0
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = f"{head}{BEGIN}\n{text}\n{END}{tail}"
    if arguments == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif arguments != ["--check"]:
        print("usage: explain.py [--write | --check]", file=sys.stderr)
        return 2
    elif page != wanted:
        print("recipes/numbers/README.md is not what explain.py says: run it with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
