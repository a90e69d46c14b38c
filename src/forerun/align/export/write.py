"""Files that describe how an aligned draft is served.

The draft is an ordinary Hugging Face model with the target's tokenizer, so nothing is converted:
engines differ only in the options that make them draft with it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.align.config import Export, Method
from forerun.align.export.engines import (
    ASSISTANT_SETTINGS,
    ENGINES,
    EngineSettings,
    Serving,
    assistant_settings,
)
from forerun.align.export.heads import engines_of, write_forms
from forerun.atomic_write import atomic_write
from forerun.errors import IncompatibleDraft
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import read_checkpoint, read_object
from forerun.models.load import model_folder, read_config
from forerun.sampling.config import SamplingParams

__all__ = ["DRAFT_PAYS_NOT", "SERVING_FOLDER", "describe_pair", "export_draft"]

SERVING_FOLDER = "serving"
DRAFT_PAYS_NOT = (
    "**Serve the target without this draft.** On the machine of the alignment no number of "
    "speculative tokens was predicted to be faster than decoding without a draft, so the settings "
    "below use none. On other hardware `forerun profile` measures what speculation costs, and "
    "`forerun plan` says whether it pays there."
)


def describe_pair(
    target: str,
    draft: Path,
    num_speculative_tokens: int,
    sampling: SamplingParams,
    method: Method = "draft_model",
) -> Serving:
    """Return a description of target and draft for other engines, read from their folders.

    Args:
        target: folder, hub name or shipped model.
        draft: folder of the aligned draft.
        num_speculative_tokens: K of the deployment; 0 where speculation was not found to pay.
        sampling: parameters of its requests.
        method: what the draft is.

    Raises:
        InvalidModel: a folder cannot be read.
        IncompatibleDraft: the logits are not equally wide, which vLLM and SGLang refuse.
        InvalidRequest: K is negative.
    """
    folder = model_folder(target)
    sizes = architecture_of(folder)
    # A head's context and tokens are the target's.
    draft_sizes = architecture_of(draft) if method == "draft_model" else sizes
    if sizes.vocab_size != draft_sizes.vocab_size:
        raise IncompatibleDraft(
            f"the draft's logits are {draft_sizes.vocab_size} wide, the target's "
            f"{sizes.vocab_size}: other engines refuse such a pair; align the draft again, which "
            "makes them equal"
        )
    is_local = Path(target).expanduser().is_dir() or target.startswith("zoo:")
    return Serving(
        target=str(folder.resolve()) if is_local else target,
        draft=draft.resolve(),
        num_speculative_tokens=num_speculative_tokens,
        sampling=sampling,
        draft_context=draft_sizes.max_positions,
        target_context=sizes.max_positions,
        method=method,
    )


def export_draft(engines: Sequence[Export], serving: Serving) -> tuple[Path, ...]:
    """Write the settings of some engines and a page that explains them.

    Engines of an earlier export to the same folder are written again, so that the page has all.

    Returns:
        The files written: `serving/ENGINE.json` each, `serving/README.md`, and the draft's
        generation_config.json where transformers is among the engines.
    """
    folder = serving.draft / SERVING_FOLDER
    earlier = [engine for engine in ENGINES if (folder / f"{engine}.json").exists()]
    chosen = engines_of((*engines, *earlier), serving)
    written = [write_json(folder / f"{one.engine}.json", dict(one.settings)) for one in chosen]
    if any(one.engine == "hf" for one in chosen):
        written.append(write_generation_config(serving))
    write_forms([one.engine for one in chosen], serving)
    page = folder / "README.md"
    with atomic_write(page) as scratch:
        scratch.write_text("\n".join(page_of(serving, chosen)) + "\n", encoding="utf-8")
    return (*written, page)


def write_generation_config(serving: Serving) -> Path:
    """Write K for transformers to generation_config.json, or remove it if the draft is not used."""
    path = serving.draft / "generation_config.json"
    settings = dict(read_object(path)) if path.exists() else {}
    for name in ("num_assistant_tokens", *ASSISTANT_SETTINGS):
        settings.pop(name, None)
    return write_json(path, settings | (assistant_settings(serving) if serving.speculates else {}))


def page_of(serving: Serving, chosen: Sequence[EngineSettings]) -> Iterator[str]:
    """Return the lines of the page that explains how the draft is served."""
    yield f"# Serving {serving.draft.name}"
    yield ""
    at = f"at temperature {serving.sampling.temperature:g}"
    command = f"forerun generate PROMPT --target {shlex.quote(serving.target)}"
    if serving.speculates:
        yield (
            f"A draft for `{serving.target}`, to draft {serving.num_speculative_tokens} "
            f"tokens per step {at}. The text is the target's with any draft; the settings decide "
            "how many tokens are accepted."
        )
        command += (
            f" --draft {shlex.quote(str(serving.draft))} --k {serving.num_speculative_tokens}"
        )
    else:
        yield f"A draft for `{serving.target}`, judged {at}."
        yield ""
        yield DRAFT_PAYS_NOT
    yield ""
    command += f" --temperature {serving.sampling.temperature:g}"
    yield from section("forerun", "bash", command, (), "`forerun info` for the draft's figures")
    for one in chosen:
        yield from section(one.engine, one.language, one.command, one.notes, one.source)


def section(
    title: str, language: str, command: str, notes: Sequence[str], source: str
) -> Iterator[str]:
    """Return the lines of the page about one engine."""
    yield from ("", f"## {title}", "", f"```{language}", command, "```", "")
    for note in notes:
        yield f"- {note}"
    yield f"- See {source}."


def architecture_of(folder: Path) -> Architecture:
    """Return the sizes of the model in a folder."""
    return read_config(read_checkpoint(folder))[1]


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write an object as indented JSON, and return the path."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
