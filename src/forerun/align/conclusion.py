"""The end of an alignment: the kept draft judged on everything, and handed over."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.align.card import card_of
from forerun.align.config import AlignConfig
from forerun.align.data.packing import Packing
from forerun.align.data.sample import data_hash
from forerun.align.evaluation.judge import Judge
from forerun.align.evaluation.ledger import ledger_of
from forerun.align.evaluation.plot import plot_survival
from forerun.align.export.write import describe_pair, export_draft
from forerun.align.identity import DEFAULTS
from forerun.align.keeping import Keeper
from forerun.align.objectives.named import make_objective
from forerun.align.report import AlignReport, DataFacts, Judged
from forerun.align.training.checkpoint import differences
from forerun.align.training.metrics import read_metrics
from forerun.align.training.plot import plot_training
from forerun.align.workspace import Workspace
from forerun.models.draft_card import write_card
from forerun.provenance import collect, content_hash
from forerun.theory.cost import CostTable

__all__ = ["export", "finished", "hand_over", "judged_at", "report_of"]


def judged_at(
    judge: Judge, workspace: Workspace, others: Mapping[float, CostTable | None]
) -> tuple[Judged, ...]:
    """First and kept draft on all held-out prompts, as deployed and at other temperatures.

    Args:
        judge: of the deployment.
        workspace: of the alignment.
        others: costs at the other temperatures.
    """
    judges = [judge, *(judge.at(temperature, costs) for temperature, costs in others.items())]
    return tuple(
        Judged(
            before=one.judge(workspace.snapshot(0), name="before"),
            after=one.judge(workspace.draft, name="after"),
        )
        for one in judges
    )


def report_of(
    config: AlignConfig,
    *,
    identity: Mapping[str, str],
    judged: tuple[Judged, ...],
    keeper: Keeper,
    data: DataFacts,
    seconds: Mapping[str, float],
) -> AlignReport:
    """What the alignment was, found and made.

    Args:
        config: of the alignment.
        identity: of the alignment.
        judged: as deployed first; one of them at temperature 1.
        keeper: of the judgements on the way.
        data: what was learned and judged on.
        seconds: of every phase.
    """
    sampled = next(pair.after for pair in judged if pair.after.temperature == 1)
    hashes = {
        "target": identity["target"],
        "draft": content_hash(str(keeper.workspace.draft)),
    }
    return AlignReport(
        draft=keeper.workspace.draft,
        objective=make_objective(config.objective, config.draft_temperature).name,
        data=data,
        judged=judged,
        ledger=ledger_of(judged[0].after, sampled, config.evaluation.in_domain),
        judgements=tuple(keeper.judgements[step] for step in sorted(keeper.judgements)),
        best_step=keeper.best.step,
        seconds=dict(seconds),
        provenance=collect(hashes),
        identity=identity,
    )


def hand_over(
    config: AlignConfig, workspace: Workspace, report: AlignReport, packing: Packing
) -> None:
    """Put beside the draft what its users and its next alignment need; the report comes last."""
    card = card_of(
        config,
        target_hash=report.identity["target"],
        objective=report.objective,
        data=data_hash(packing.samples),
        before=[pair.before for pair in report.judged],
        after=[pair.after for pair in report.judged],
    )
    write_card(card, workspace.draft)
    export(config, workspace, report)
    draw(config, workspace, report)
    report.write(workspace.report)


def export(config: AlignConfig, workspace: Workspace, report: AlignReport) -> None:
    """Write how the draft is served."""
    k = report.best_k or config.evaluation.num_speculative_tokens
    serving = describe_pair(config.target, workspace.draft, k, config.sampling)
    export_draft(config.export, serving)


def draw(config: AlignConfig, workspace: Workspace, report: AlignReport) -> None:
    """Pictures of what was accepted, and of how it went."""
    deployed = report.judged[0]
    plot_survival(
        {"before": deployed.before, "after": deployed.after},
        f"Acceptance at T={config.sampling.temperature:g}",
        [workspace.picture("acceptance")],
    )
    judged = {judgement.step: judgement for judgement in report.judgements}
    alphas = {step: j.acceptance_probability for step, j in judged.items()}
    speedups = {step: j.predicted_speedup for step, j in judged.items()}
    plot_training(
        read_metrics(workspace.metrics),
        {step: alpha for step, alpha in alphas.items() if alpha is not None},
        {step: speedup for step, speedup in speedups.items() if speedup is not None},
        [workspace.picture("training")],
    )


def finished(
    workspace: Workspace, identity: Mapping[str, str], *, predicted: bool
) -> AlignReport | None:
    """The report of an alignment that has nothing left to do.

    Args:
        workspace: of the alignment.
        identity: of what is asked for now.
        predicted: whether speedups are to be predicted.
    """
    report = AlignReport.read(workspace.report)
    if report is None or not workspace.draft.is_dir():
        return None
    lacks_speedup = predicted and report.judged[0].after.overall.speedup is None
    if lacks_speedup or differences(report.identity, identity, DEFAULTS):
        return None
    return report
