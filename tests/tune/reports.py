"""Made-up reports of tune."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.theory.intervals import Interval
from forerun.tune.arms import Arm, Load, Speculation
from forerun.tune.check import ExactnessCheck
from forerun.tune.drafting import DraftingCounts
from forerun.tune.report import ArmResult, LoadResult, TuneReport

ONE, MANY = Load(clients=1), Load(clients=16)
NAMES = ("none", "ngram K=4", "eagle3 head K=3", "suffix")


def make_interval(estimate: float, share: float = 0.05) -> Interval:
    """Return an interval that reaches so far to both sides."""
    return Interval(estimate=estimate, low=estimate * (1.0 - share), high=estimate * (1.0 + share))


def make_arm(name: str) -> Arm:
    """Return an arm of vLLM, with a command of its own host and port."""
    speculation = Speculation() if name == "none" else Speculation(method="ngram", k=4)
    if name.startswith("eagle3"):
        speculation = Speculation(method="eagle3", draft="head", k=3)
    flag = () if name == "none" else ("--speculative-config", f"{{{name}}}")
    return Arm(
        name=name,
        url="http://127.0.0.1:41000/v1",
        command=("vllm", "serve", "m", *flag, "--port", "41000"),
        speculation=speculation,
        typed=f"vllm serve m --port 8000 # {name}",
    )


def make_result(name: str, speedup: float, rate: float = 40.0, **others: Any) -> ArmResult:
    """Return what was measured of an arm."""
    times = {"ttft_median_s": 0.12, "ttft_p95_s": 0.31, "tpot_median_s": 0.02, "tpot_p95_s": 0.03}
    figures = {key: make_interval(value) for key, value in times.items()}
    return ArmResult(
        arm=name,
        speedup=make_interval(speedup),
        num_blocks=5,
        figures={"tokens_per_s": make_interval(speedup * rate), **figures},
        **others,
    )


def make_report() -> TuneReport:
    """Return a report in which n-grams win at one client, and nothing at sixteen."""
    counts = DraftingCounts(
        num_drafts=100, num_drafted=400, num_accepted=150, accepted_per_position=(70, 50, 20, 10)
    )
    rows = (
        make_result("ngram K=4", 1.31, drafting=counts, equal_texts=1.0),
        make_result("none", 1.0),
        make_result(
            "eagle3 head K=3",
            0.8,
            drafting=DraftingCounts(num_drafts=100, num_drafted=300, num_accepted=100),
            equal_texts=0.97,
            reason="0.61 (0.58–0.64) of the tokens/s of ngram K=4, 3 blocks",
        ),
        ArmResult(arm="suffix", speedup=None, num_blocks=0, reason="out of memory"),
    )
    check = ExactnessCheck(
        status="no_deviation", sentence="No deviation.", num_tokens=4012, bound=0.031
    )
    return TuneReport(
        source="vllm serve m --port 8000",
        baseline="none",
        arms=tuple(map(make_arm, NAMES)),
        loads=(
            LoadResult(
                load=ONE,
                arms=rows,
                recommended="ngram K=4",
                confirmed=make_interval(1.29),
                check=check,
            ),
            LoadResult(
                load=MANY,
                arms=(rows[1], replace(rows[0], speedup=make_interval(0.9)), *rows[2:]),
                recommended="none",
            ),
        ),
        memory_bytes={"none": 3 << 30, "ngram K=4": 3 << 30},
        start_s={"none": 41.5},
        minutes=12.5,
        is_complete=True,
        provenance={"cpu": "a processor", "date": "2026-11-29"},
        versions={"forerun": "0.1.0", "server": "0.26.0"},
    )
