"""`forerun info`: a description of a model and a check of its draft."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from forerun.cli.command import Command
from forerun.cli.flags import LookAhead
from forerun.drafters.config import parse_drafter
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest


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
    json: bool = False
    """Print one JSON object."""


def run(options: InfoOptions) -> int:
    """Describe the model; returns 1 if the draft does not fit, else 0."""
    from forerun.cli.info_report import (
        compare,
        describe,
        examine_head,
        print_fit,
        print_head,
        print_model,
    )
    from forerun.drafters.registry import is_head
    from forerun.models.checkpoint import ModelFiles

    if options.draft is not None and parse_drafter(options.draft) is not None:
        raise InvalidRequest(
            f"{options.draft} is a drafter without a model: it has no files to describe"
        )
    config = EngineConfig(
        num_speculative_tokens=options.k,
        max_batch=options.max_batch,
        max_context=options.max_context,
        max_step_rows=max(EngineConfig().max_step_rows, options.max_batch * (options.k + 1)),
    )
    files = ModelFiles.open(options.model)
    target = describe(files, options.dtype, config)
    content, fit = {**target}, None
    if options.draft is not None:
        draft_files = ModelFiles.find(options.draft)
        if is_head(draft_files.folder):
            fit = content["draft"] = examine_head(draft_files, files)
        else:
            draft_files.check()
            draft = content["draft"] = describe(draft_files, options.dtype, config)
            fit = content["fit"] = compare(target, draft, (files, draft_files))
    if options.json:
        print(json.dumps(content, default=asdict))
    else:
        print_model(target)
        if "fit" in content:
            print_model(draft)
            share = draft["num_parameters"] / target["num_parameters"]
            print_fit(
                "draft",
                content["fit"],
                f"{content['fit']['reason']}, {share:.1%} of the target's parameters",
            )
        elif fit is not None:
            print_head(fit)
    return 0 if fit is None or fit["fits"] else 1


COMMAND = Command(
    options=InfoOptions,
    run=run,
    has_positional=True,
    description="Describe a model, the memory it needs and whether a draft fits it.",
    examples=(
        "forerun info zoo:code-40m --draft zoo:code-2m-for-40m",
        "forerun info path/to/model --batch 32 --max-context 8192",
        "forerun info path/to/model --json",
    ),
)
