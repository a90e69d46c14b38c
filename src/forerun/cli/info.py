"""`forerun info`: a description of a model and a check of its draft."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from forerun.bounded_read import expand_home
from forerun.cli.command import Command
from forerun.cli.flags import LookAhead
from forerun.drafters.config import parse_drafter
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.cli.info_report import ModelDescription
    from forerun.models.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoOptions:
    """Options of `forerun info`."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Folder, hub name or shipped model such as zoo:code-40m."""
    draft: str | None = None
    """Check whether this model can draft for MODEL; the exit code is 1 if it cannot."""
    k: LookAhead = EngineConfig().num_speculative_tokens
    """K: memory is computed for chains of this many tokens, and for trees of the default size."""
    dtype: str = "auto"
    """Memory is computed for this dtype: auto (as stored), bfloat16, float16 or float32."""
    max_batch: Annotated[int, arg(name="batch", aliases=("--max-batch",))] = (
        EngineConfig().max_batch
    )
    """Sequences at once."""
    max_context: int = EngineConfig().max_context
    """Tokens per sequence, cut to what the model holds."""
    hub: bool = False
    """Fetch config.json of this name from the Hugging Face hub, and no weights."""
    profile: Path | None = None
    """Profile of MODEL made here (`forerun profile --out`): shows what its drafts cost."""
    json: bool = False
    """Print one JSON object."""


def run(options: InfoOptions) -> int:
    """Describe the model; returns 1 if the draft does not fit, else 0."""
    from forerun.cli.info_report import compare, print_fit, print_model
    from forerun.drafters.registry import is_head
    from forerun.models.checkpoint import ModelFiles

    if options.draft is not None and parse_drafter(options.draft) is not None:
        raise InvalidRequest(
            f"{options.draft} is a drafter without a model: it has no files to describe"
        )
    if options.hub and options.draft is not None:
        raise InvalidRequest(
            "--hub and --draft exclude each other: whether a draft fits is seen from the files of "
            "both models, and --hub fetches config.json alone"
        )
    if options.draft is None and (folder := _folder_without_weights(options)) is not None:
        return _show_config(options, folder)
    target, tokenizer = _describe_for(options, options.model)
    if options.draft is not None and is_head(ModelFiles.find(options.draft).folder):
        return _show_with_head(target, options)
    content, found = target.to_dict(), None
    if options.draft is not None:
        draft, draft_tokenizer = _describe_for(options, options.draft)
        found = draft, compare(target, draft, tokenizer, draft_tokenizer)
        content |= {"draft": draft.to_dict(), "fit": found[1].to_dict()}
    if options.json:
        print(json.dumps(content))
    else:
        print_model(target)
        if found is not None:
            print_model(found[0])
            print_fit(found[1])
    return 0 if found is None or found[1].fits else 1


def _folder_without_weights(options: InfoOptions) -> Path | None:
    """Return the folder to describe by its config.json alone; None for one with weights."""
    from forerun.models.catalog import fetch_config
    from forerun.models.checkpoint import PICKLES

    if options.hub:
        return fetch_config(options.model)
    folder = expand_home(options.model)
    if not (folder / "config.json").is_file():
        return None
    weights = {".safetensors", *PICKLES}
    return None if any(path.suffix in weights for path in folder.iterdir()) else folder


def _show_config(options: InfoOptions, folder: Path) -> int:
    from forerun.cli.info_report import describe_config, print_config

    described = describe_config(options.model, folder, options.dtype)
    if options.json:
        print(json.dumps(asdict(described)))
    else:
        print_config(described)
    return 0


def _show_with_head(target: ModelDescription, options: InfoOptions) -> int:
    """Describe a model and its attached drafter; returns 1 if the drafter does not fit, else 0."""
    from forerun.cli.info_report import describe_head, print_head, print_model
    from forerun.models.checkpoint import ModelFiles

    assert options.draft is not None
    head = describe_head(ModelFiles.find(options.draft), ModelFiles.open(options.model))
    if options.json:
        print(json.dumps(target.to_dict() | {"draft": head.to_dict()}))
    else:
        print_model(target)
        print_head(head)
    return 0 if head.fits else 1


def _describe_for(options: InfoOptions, name: str) -> tuple[ModelDescription, Tokenizer]:
    from forerun.cli.info_report import describe

    config = EngineConfig(
        num_speculative_tokens=options.k,
        max_batch=options.max_batch,
        max_context=options.max_context,
        max_step_rows=max(EngineConfig().max_step_rows, options.max_batch * (options.k + 1)),
    )
    profile = options.profile if name == options.model else None
    return describe(name, dtype=options.dtype, config=config, profile=profile)


COMMAND = Command(
    options=InfoOptions,
    run=run,
    has_positional=True,
    description="Describe a model, the memory it needs and whether a draft fits it.",
    examples=(
        "forerun info zoo:code-40m --draft zoo:code-2m-for-40m",
        "forerun info path/to/model --batch 32 --max-context 8192",
        "forerun info path/to/model --json",
        "forerun info Qwen/Qwen3.5-4B --hub",
    ),
)
