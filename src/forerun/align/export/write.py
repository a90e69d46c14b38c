"""Write how an aligned draft is served, into the draft's own folder.

The draft is an ordinary Hugging Face model with the target's tokenizer, so nothing is converted:
what differs between engines is how they are told to draft with it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.align.config import Export
from forerun.align.export.engines import ENGINES, EngineSettings, Serving, assistant_settings
from forerun.errors import IncompatibleDraft
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import read_checkpoint, read_object
from forerun.models.load import model_folder, read_config
from forerun.sampling.config import SamplingParams

__all__ = ["SERVING_FOLDER", "describe_pair", "export_draft"]

SERVING_FOLDER = "serving"


def describe_pair(
    target: str, draft: Path, num_speculative_tokens: int, sampling: SamplingParams
) -> Serving:
    """What engines have to be told, read from the two folders.

    Args:
        target: folder, hub name or shipped model.
        draft: folder of the aligned draft.
        num_speculative_tokens: K of the deployment.
        sampling: parameters of its requests.

    Raises:
        InvalidModel: a folder cannot be read.
        IncompatibleDraft: the logits are not equally wide, which vLLM and SGLang refuse.
        InvalidRequest: K is not at least 1.
    """
    sizes, own_sizes = architecture_of(model_folder(target)), architecture_of(draft)
    if sizes.vocab_size != own_sizes.vocab_size:
        raise IncompatibleDraft(
            f"the draft's logits are {own_sizes.vocab_size} wide, the target's {sizes.vocab_size}: "
            "other engines refuse such a pair; align the draft again, which makes them equal"
        )
    folder = model_folder(target)
    local = Path(target).expanduser().is_dir() or target.startswith("zoo:")
    return Serving(
        target=str(folder.resolve()) if local else target,
        draft=draft.resolve(),
        num_speculative_tokens=num_speculative_tokens,
        sampling=sampling,
        draft_context=own_sizes.max_positions,
        target_context=sizes.max_positions,
    )


def export_draft(engines: Sequence[Export], serving: Serving) -> tuple[Path, ...]:
    """Write the settings of some engines and a page that explains them.

    Returns:
        The files written: `serving/ENGINE.json` each, `serving/README.md`, and the draft's
        generation_config.json where transformers is among the engines.
    """
    folder = serving.draft / SERVING_FOLDER
    folder.mkdir(exist_ok=True)
    chosen = [ENGINES[engine](serving) for engine in dict.fromkeys(engines)]
    written = [write_json(folder / f"{one.engine}.json", dict(one.settings)) for one in chosen]
    if "hf" in engines:
        path = serving.draft / "generation_config.json"
        earlier = read_object(path) if path.exists() else {}
        written.append(write_json(path, earlier | assistant_settings(serving)))
    page = folder / "README.md"
    page.write_text("\n".join(page_of(serving, chosen)) + "\n", encoding="utf-8")
    return (*written, page)


def page_of(serving: Serving, chosen: Sequence[EngineSettings]) -> Iterator[str]:
    """The lines of the page."""
    yield f"# Serving {serving.draft.name}"
    yield ""
    yield (
        f"A draft model for `{serving.target}`, to draft {serving.num_speculative_tokens} tokens "
        f"per step at temperature {serving.sampling.temperature:g}. The text is the target's "
        "whatever the draft; the settings decide how much of it comes for free."
    )
    yield ""
    command = (
        f"forerun generate PROMPT --target {shlex.quote(serving.target)} "
        f"--draft {shlex.quote(str(serving.draft))} --k {serving.num_speculative_tokens} "
        f"--temperature {serving.sampling.temperature:g}"
    )
    yield from section("forerun", "bash", command, (), "`forerun info` for what the draft is worth")
    for one in chosen:
        yield from section(one.engine, one.language, one.command, one.notes, one.source)


def section(
    title: str, language: str, command: str, notes: Sequence[str], source: str
) -> Iterator[str]:
    """One engine on the page."""
    yield from ("", f"## {title}", "", f"```{language}", command, "```", "")
    for note in notes:
        yield f"- {note}"
    yield f"- See {source}."


def architecture_of(folder: Path) -> Architecture:
    """Sizes of the model in a folder."""
    return read_config(read_checkpoint(folder))[1]


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """An object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
