"""Reports of comparisons for JSON: exactness, figures, and the speedups that costs predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from forerun.measure.bench.compare import Block, Generator, Measurement
from forerun.measure.bench.config import BenchConfig, DemoConfig
from forerun.measure.bench.summary import (
    ArmSummary,
    BestOfSeveral,
    best_of_several,
    faster_chain,
    rows_of,
    verdict,
)
from forerun.plan.costs import DraftCosts
from forerun.provenance import Provenance
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """First position at which two outputs differ; a token is None after the end of an output."""

    case: str
    prompt: int
    position: int
    plain: int | None
    speculative: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessReport:
    """Number of outputs that an exactness check compared, and the mismatches.

    Attributes:
        num_accepted: draft tokens accepted on the way; without any, nothing was put to the test.
    """

    num_tokens: dict[str, int]
    num_prompts: int
    num_accepted: int
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        return not self.mismatches

    @property
    def sentence(self) -> str:
        if self.mismatches:
            first = self.mismatches[0]
            return (
                f"{len(self.mismatches)} outputs differ from plain decoding; the first "
                f"({first.case}, prompt {first.prompt}) at token {first.position}: "
                f"plain {first.plain}, speculative {first.speculative}"
            )
        cases = " and ".join(f"{n} tokens {case}" for case, n in self.num_tokens.items())
        return (
            f"identical to plain decoding in fp32: {cases}, over {self.num_prompts} prompts, "
            f"{self.num_accepted} of them drafted and accepted"
        )

    def to_dict(self) -> dict[str, object]:
        return {"passed": self.passed, "sentence": self.sentence, **asdict(self)}


def check_exactness(
    plain: Generator,
    speculative: Generator,
    prompts: Sequence[str],
    cases: Mapping[str, SamplingParams],
) -> ExactnessReport:
    """Compare two engines whose outputs must be identical."""
    num_tokens: dict[str, int] = {}
    mismatches: list[Mismatch] = []
    num_accepted = 0
    for case, params in cases.items():
        num_tokens[case] = 0
        # Plain decoding takes the prompts one by one: batches must not change a text either.
        references = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
        outputs = speculative.generate(prompts, params)
        for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
            num_tokens[case] += len(reference)
            num_accepted += output.completions[0].acceptance.num_accepted
            place = first_difference(reference, output.token_ids)
            if place is not None:
                tokens = {"plain": _token_at(reference, place)}
                tokens["speculative"] = _token_at(output.token_ids, place)
                mismatches.append(Mismatch(case=case, prompt=index, position=place, **tokens))
    return ExactnessReport(
        num_tokens=num_tokens,
        num_prompts=len(prompts),
        num_accepted=num_accepted,
        mismatches=tuple(mismatches),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first difference; None if both sequences are equal."""
    for index in range(max(len(one), len(other))):
        if _token_at(one, index) != _token_at(other, index):
            return index
    return None


def _token_at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrediction:
    """Speedup that the cost table predicts from the measured acceptance.

    Attributes:
        cycle_cost: kappa by the table, at the arm's K, batch and mean context.
        reading_cost: the draft's reading of the prompt, in plain steps per cycle; 0 where it is not
            known. It comes after the first token, so decoding pays for it.
    """

    cycle_cost: Interval
    reading_cost: float
    decode_speedup: Interval


def predict(
    summary: ArmSummary, costs: DraftCosts, *, temperature: float, batch: int
) -> BenchPrediction | None:
    """Predict the speedup of an arm from its acceptance and the cost table."""
    table, context = costs.at(temperature), round(summary.mean_context)
    kappa = table.cycle_cost_interval(summary.arm.num_speculative_tokens, context, batch)
    if kappa.low <= 0:
        return None
    read_s = (
        0.0 if costs.reading is None else costs.reading.draft_more_s(round(summary.mean_prompt))
    )
    # Of a batch all prompts are read, and all its requests wait for that.
    per_cycle = batch * read_s / summary.decode_steps / table.plain_step_s(context, batch)
    tau = summary.acceptance_length
    return BenchPrediction(
        cycle_cost=kappa,
        reading_cost=per_cycle,
        decode_speedup=Interval(
            estimate=tau / (kappa.estimate + per_cycle),
            low=tau / (kappa.high + per_cycle),
            high=tau / (kappa.low + per_cycle),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Results of the demonstration.

    Attributes:
        rows: arms at T=0; the first is plain decoding.
        edit_rows: plain decoding and copying where prompts ask for an edit; empty where no two
            prompts could be measured.
        sampled_rows: plain decoding and the drafts made for the target at T=1; likewise.
        exactness: None where the run was interrupted before.
    """

    rows: tuple[ArmSummary, ...]
    edit_rows: tuple[ArmSummary, ...]
    sampled_rows: tuple[ArmSummary, ...]
    exactness: ExactnessReport | None
    provenance: Provenance
    config: DemoConfig
    num_calibration: int

    def to_dict(self) -> dict[str, object]:
        return {
            "rows": [_as_row(summary) for summary in self.rows],
            "edit_rows": [_as_row(summary) for summary in self.edit_rows],
            "sampled_rows": [_as_row(summary) for summary in self.sampled_rows],
            "exactness": self.exactness.to_dict() if self.exactness else None,
            "provenance": self.provenance.to_dict(),
            "config": asdict(self.config) | {"num_calibrated": self.num_calibration},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """Results at one temperature and batch size.

    Attributes:
        rows: every arm, plain decoding first; empty where too few blocks were measured.
        predictions: by arm, of those whose draft has a cost table that is not too rough.
        best: the best arm, where there was a choice and blocks enough.
    """

    temperature: float
    batch: int
    rows: tuple[ArmSummary, ...]
    predictions: Mapping[str, BenchPrediction]
    best: BestOfSeveral | None
    blocks: Sequence[Block]

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        *,
        temperature: float,
        batch: int,
        costs: Mapping[str, DraftCosts],
    ) -> CellReport:
        """Compute the report from the blocks measured so far."""
        rows = rows_of(blocks)
        return cls(
            temperature=temperature,
            batch=batch,
            rows=rows,
            predictions={
                row.arm.name: prediction
                for row in rows
                if row.arm.draft is not None
                and not row.arm.adaptive  # whose cycles are not all of one cost
                and row.arm.draft in costs
                and (
                    prediction := predict(
                        row, costs[row.arm.draft], temperature=temperature, batch=batch
                    )
                )
            },
            best=best_of_several(blocks) if rows else None,
            blocks=blocks,
        )

    @property
    def title(self) -> str:
        how = "greedy (T=0)" if self.temperature == 0 else f"sampled (T={self.temperature:g})"
        return f"{how}, batch {self.batch}, {len(self.blocks)} blocks"

    def to_dict(self) -> dict[str, object]:
        return {
            "temperature": self.temperature,
            "batch": self.batch,
            "rows": [self.row(summary) for summary in self.rows],
            "best_of_several": self.best.to_dict() if self.best else None,
            "blocks": [[_as_sample(m) for m in block] for block in self.blocks],
        }

    def row(self, summary: ArmSummary) -> dict[str, object]:
        prediction = self.predictions.get(summary.arm.name)
        chain = faster_chain(summary, self.rows)
        return _as_row(summary) | {
            "predicted": asdict(prediction) if prediction else None,
            "faster_chain": None if chain is None else chain.arm.name,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Results of a comparison."""

    cells: tuple[CellReport, ...]
    provenance: Provenance
    config: BenchConfig
    num_prompts: int

    @property
    def has_results(self) -> bool:
        """Whether enough was measured for a table."""
        return any(cell.rows for cell in self.cells)

    def to_dict(self) -> dict[str, object]:
        return {
            "cells": [cell.to_dict() for cell in self.cells],
            "provenance": self.provenance.to_dict(),
            "config": asdict(self.config) | {"num_prompts": self.num_prompts},
        }


def _as_row(summary: ArmSummary) -> dict[str, object]:
    return summary.to_dict() | {"verdict": verdict(summary)}


def _as_sample(measurement: Measurement) -> dict[str, object]:
    return {
        "arm": measurement.arm.name,
        "total_s": measurement.total_s,
        "decode_s": measurement.decode_s,
        "num_tokens": measurement.num_tokens,
        "num_decode_steps": measurement.num_decode_steps,
        "num_drafted": measurement.acceptance.num_drafted,
        "num_accepted": measurement.acceptance.num_accepted,
    }
