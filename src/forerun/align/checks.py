"""Checks the settings of an alignment, and that its folder belongs to the same alignment.

The identity of an alignment has all inputs that decide its result, so that no two share a folder.
It leaves out settings that decide only where and how fast things happen, and the names of files
whose content is hashed. A setting that is newer than a folder had its default when the run began.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.align.config import AlignConfig, DataConfig
from forerun.align.data.packing import shares_of
from forerun.align.data.sample import data_hash
from forerun.align.export import check_repo
from forerun.align.objectives import Objective
from forerun.align.teachers.choose import PARTIAL, check_feature_teacher, check_objective
from forerun.align.texts import PromptSplit
from forerun.align.training.checkpoint import differences
from forerun.align.training.trainer import FREE_SETTINGS
from forerun.align.workspace import Workspace, settings_of, write_json
from forerun.cache import hash_of
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.provenance import content_hash

Identity = Mapping[str, str]

FREE = {
    "sampling": ("n", "logprobs"),  # responses are single samples
    "data": ("prompts", "held_out", "held_out_share", "max_prompt_tokens"),  # see the two hashes
    "teacher": ("teacher_device", "cache_dir", "max_cache_bytes"),
    "objective": (),
    "attached": (),
    "training": FREE_SETTINGS,
    "evaluation": (),
}
"""By stage, settings that do not change the result, or whose effect a hash covers."""
OF_THE_TEACHER = "teacher."


def identity_of(config: AlignConfig, prompts: PromptSplit, target_hash: str) -> dict[str, str]:
    """Return all inputs that decide the result of an alignment, as text by name."""
    learned = [[prompt.prompt_hash, data_hash(prompt.brought)] for prompt in prompts.training]
    judged = [[prompt.prompt_hash, prompt.tag] for prompt in prompts.held_out]
    return {
        "target": target_hash,
        "draft": _start_hash(config),
        "training prompts": hash_of(json.dumps(learned).encode()),
        "held-out prompts": hash_of(json.dumps(judged).encode()),
        **_settings_of_result(config),
    }


def _start_hash(config: AlignConfig) -> str:
    """Return the hash of the draft that training starts from, or of its config.json."""
    if config.draft is not None:
        return content_hash(config.draft)
    if config.init is None:
        return "none"  # a fresh head, whose shape is in the settings
    try:
        return hashlib.sha256(config.init.read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidRequest(f"{config.init} cannot be read: {error.strerror}") from error


def _settings_of_result(config: AlignConfig) -> dict[str, str]:
    """Return the settings that influence the trained draft, as text by stage and name."""
    settings = settings_of(config)
    return {"dtype": config.dtype, "method": config.method} | {
        f"{stage}.{name}": _as_text(value)
        for stage, free in FREE.items()
        for name, value in settings[stage].items()
        if name not in free
    }


def _as_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(None if value in ([], {}) else value)


DEFAULTS = _settings_of_result(AlignConfig(target="", data=DataConfig(prompts=Path())))
"""Values of settings that a run of an earlier version did not store."""


def _of_folder(identity: Identity) -> dict[str, str]:
    """Return the part of the identity that an output folder must match, without the teacher.

    Not the teacher: where its cache turned out too large, responses are there, and another may go
    on with them until the first checkpoint.
    """
    return {name: text for name, text in identity.items() if not name.startswith(OF_THE_TEACHER)}


def of_training(identity: Identity) -> dict[str, str]:
    """Return the part of the identity that a checkpoint must match."""
    return {name: text for name, text in identity.items() if not name.startswith("training.")}


def check_folder(workspace: Workspace, identity: Identity) -> None:
    """Refuse a folder that holds an alignment with other settings (InvalidRequest)."""
    if not workspace.identity.exists():
        return
    found = differences(read_object(workspace.identity), _of_folder(identity), DEFAULTS)
    if found:
        raise InvalidRequest(
            f"{workspace.root} holds an alignment with other settings ({'; '.join(found)}); "
            "give another --out, or those settings to go on"
        )


def claim_folder(config: AlignConfig, workspace: Workspace, identity: Identity) -> None:
    """Write the identity and the settings of the run into its folder."""
    try:
        write_json(workspace.identity, _of_folder(identity))
        write_json(workspace.settings, settings_of(config))
    except OSError as error:
        raise InvalidRequest(f"{workspace.root} cannot be written: {error}") from error


logger = logging.getLogger("forerun.align")

FEW_PROMPTS = 20
"""Held-out prompts below which a difference of a tenth in tau is hardly ever shown."""


def check_settings(config: AlignConfig, objective: Objective, workspace: Workspace) -> None:
    """Refuse settings that contradict each other (InvalidRequest)."""
    data = config.data
    shares_of(on_policy_share=data.on_policy_share, fixed_share=data.fixed_share)
    _check_place(config, workspace)
    if config.push_to_hub is not None:
        check_repo(config.push_to_hub)
    _check_weights(config, objective)
    if config.is_attached:
        _check_attached(config, objective)
        return
    if objective.needs_teacher:
        check_objective(config.teacher.teacher, objective, config.sampling)
        _check_server(config)


def _check_attached(config: AlignConfig, objective: Objective) -> None:
    """Refuse settings that apply to draft models and not to attached heads (InvalidRequest)."""
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


def _check_place(config: AlignConfig, workspace: Workspace) -> None:
    """Refuse an output folder in which the trained draft would replace the draft it starts from.

    A run that is interrupted begins with it again, and adapters are merged into it at every save.
    """
    if config.draft is None:
        return
    if Path(config.draft).resolve() == workspace.draft.resolve():
        raise InvalidRequest(
            f"the draft {config.draft} is to be replaced by what is learned; give another --out"
        )


def _check_weights(config: AlignConfig, objective: Objective) -> None:
    """Refuse `length_aware` where the acceptance probability of a row cannot be computed."""
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


def _check_server(config: AlignConfig) -> None:
    """Refuse the teacher "top-k" unless the server that gives log-probabilities wrote all texts."""
    data = config.data
    if config.teacher.teacher != "top-k":
        return
    if data.responses_from is None or data.on_policy_share or data.fixed_share or data.replay:
        raise InvalidRequest(
            'teacher "top-k" has the log-probabilities of a server for its own responses: give '
            "--responses-from URL, and neither --on-policy-share nor --fixed-share nor --replay"
        )


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
