"""Checks settings before any model is loaded, because an alignment takes hours."""

from __future__ import annotations

import logging
from pathlib import Path

from forerun.align.config import AlignConfig
from forerun.align.data.selection import shares_of
from forerun.align.export.hub import check_repo
from forerun.align.objectives.named import Objective
from forerun.align.teachers.choose import PARTIAL, check_feature_teacher, check_objective
from forerun.align.texts import PromptSplit
from forerun.align.workspace import Workspace
from forerun.errors import InvalidRequest

__all__ = ["check_domain", "check_settings", "warn_of_few_prompts"]

logger = logging.getLogger("forerun.align")

FEW_PROMPTS = 20
"""Held-out prompts below which a difference of a tenth in tau is hardly ever shown."""


def check_settings(config: AlignConfig, objective: Objective, workspace: Workspace) -> None:
    """Refuse settings that contradict each other.

    Raises:
        InvalidRequest: they do.
    """
    data = config.data
    shares_of(on_policy_share=data.on_policy_share, fixed_share=data.fixed_share)
    check_place(config, workspace)
    if config.push_to_hub is not None:
        check_repo(config.push_to_hub)
    check_weights(config, objective)
    if config.is_attached:
        check_attached(config, objective)
        return
    if objective.needs_teacher:
        check_objective(config.teacher.teacher, objective, config.sampling)
        check_server(config)


def check_attached(config: AlignConfig, objective: Objective) -> None:
    """Refuse settings that apply to draft models and not to attached heads.

    Raises:
        InvalidRequest: naming the first.
    """
    check_feature_teacher(config.teacher.teacher)
    method = config.method
    if method == "medusa" and config.draft is not None:
        raise InvalidRequest("--draft does not go with --method medusa: its heads are made fresh")
    reasons = {
        "--on-policy-share": (config.data.on_policy_share, "a head writes no text of its own"),
        "--lora-rank": (config.training.lora_rank, "a head has no adapters: it is trained whole"),
        "--init": (config.init, "a head's shape is set by flags such as --intermediate-size"),
        "--length-aware": (config.objective.length_aware, "use --pass-decay"),
    }
    for flag, (value, reason) in reasons.items():
        if value:
            raise InvalidRequest(f"{flag} does not go with --method {method}: {reason}")
    if not objective.needs_teacher:
        raise InvalidRequest(
            f"--objective {objective.name} reads text alone, but --method {method} learns the "
            "target's distributions; take another objective, such as fkl"
        )


def check_place(config: AlignConfig, workspace: Workspace) -> None:
    """Refuse an output folder in which the trained draft would replace the draft it starts from.

    A run that is interrupted begins with it again, and adapters are merged into it at every save.

    Raises:
        InvalidRequest: the draft is the one in `out`.
    """
    if config.draft is None:
        return
    if Path(config.draft).resolve() == workspace.draft.resolve():
        raise InvalidRequest(
            f"the draft {config.draft} is to be replaced by what is learned; give another --out"
        )


def check_weights(config: AlignConfig, objective: Objective) -> None:
    """Refuse `length_aware` where the acceptance probability of a row cannot be computed.

    Raises:
        InvalidRequest: it cannot be computed.
    """
    if not config.objective.length_aware:
        return
    if not objective.needs_teacher:
        raise InvalidRequest(
            f"--length-aware weighs positions by acceptance, which objective {objective.name} does "
            "not ask the target for; take another objective, such as fkl"
        )
    if config.teacher.teacher in PARTIAL and not config.sampling.greedy:
        raise InvalidRequest(
            "--length-aware weighs positions by acceptance, which the teacher "
            f'"{config.teacher.teacher}" has only in part; use teacher "hidden" or "model"'
        )


def check_server(config: AlignConfig) -> None:
    """Refuse the teacher "top-k" unless the server that gives log-probabilities wrote all texts.

    Raises:
        InvalidRequest: there is no server, or some texts come from elsewhere.
    """
    data = config.data
    if config.teacher.teacher != "top-k":
        return
    if data.responses_from is None or data.on_policy_share or data.fixed_share or data.replay:
        raise InvalidRequest(
            'teacher "top-k" has the log-probabilities of a server for its own responses: give '
            "--responses-from URL, and neither --on-policy-share nor --fixed-share nor --replay"
        )


def check_domain(in_domain: str | None, prompts: PromptSplit) -> None:
    """Refuse a domain tag that none of the held-out prompts has.

    Raises:
        InvalidRequest: no held-out prompt has the tag.
    """
    tags = sorted({prompt.tag for prompt in prompts.held_out})
    if in_domain is not None and in_domain not in tags:
        raise InvalidRequest(f"no held-out prompt has the tag {in_domain!r}; there are {tags}")


def warn_of_few_prompts(prompts: PromptSplit) -> None:
    """Warn if there are too few held-out prompts for informative intervals."""
    num_prompts = len(prompts.held_out)
    if num_prompts < FEW_PROMPTS:
        logger.warning(
            "only %d prompts are held out for judging: intervals will be wide, and the choice of "
            "the draft uncertain. Give at least %d, by more prompts, a larger --held-out-share, or "
            "--held-out FILE",
            num_prompts,
            FEW_PROMPTS,
        )
