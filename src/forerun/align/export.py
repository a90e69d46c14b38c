"""Files that describe how an aligned draft is served, and its upload to the Hugging Face hub.

The draft is an ordinary Hugging Face model with the target's tokenizer, so nothing is converted:
engines differ only in the options that make them draft with it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.align.config import Export, Method
from forerun.align.serving import (
    ASSISTANT_SETTINGS,
    ENGINES,
    EngineSettings,
    Serving,
    assistant_settings,
    engines_of,
    write_forms,
)
from forerun.atomic_write import atomic_write
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import read_checkpoint, read_object
from forerun.models.draft_card import CARD_FILE, CardFigures, read_card
from forerun.models.load import model_folder, read_config
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval

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
    """Return a description of target and draft for other engines, read from their folders."""
    folder = model_folder(target)
    sizes = _architecture_of(folder)
    # A head's context and tokens are the target's.
    draft_sizes = _architecture_of(draft) if method == "draft_model" else sizes
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
    """
    folder = serving.draft / SERVING_FOLDER
    earlier = [engine for engine in ENGINES if (folder / f"{engine}.json").exists()]
    chosen = engines_of((*engines, *earlier), serving)
    written = [write_json(folder / f"{one.engine}.json", dict(one.settings)) for one in chosen]
    if any(one.engine == "hf" for one in chosen):
        written.append(_write_generation_config(serving))
    write_forms([one.engine for one in chosen], serving)
    page = folder / "README.md"
    with atomic_write(page) as scratch:
        scratch.write_text("\n".join(page_of(serving, chosen)) + "\n", encoding="utf-8")
    return (*written, page)


def _write_generation_config(serving: Serving) -> Path:
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


def _architecture_of(folder: Path) -> Architecture:
    return read_config(read_checkpoint(folder))[1]


def write_json(path: Path, content: dict[str, Any]) -> Path:
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


TAGS = ("speculative-decoding", "draft-model", "forerun")


def check_repo(repo: str) -> None:
    """Refuse a repository name that the hub would only reject after a long run (InvalidRequest)."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InvalidRequest(f"--push-to-hub {repo}: {error}") from error


def push_draft(serving: Serving, repo: str, engines: Sequence[Export], api: Any = None) -> str:
    """Write a model card into the draft's folder and upload the folder.

    Files of `serving/` name folders of this machine and are not uploaded; the card has the same
    commands with the name of the repository.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with atomic_write(serving.draft / "README.md") as scratch:
        lines = _model_card(serving, repo, engines)
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
    hub = HfApi() if api is None else api
    try:
        hub.create_repo(repo, exist_ok=True)
        hub.upload_folder(
            repo_id=repo,
            folder_path=str(serving.draft),
            commit_message="Draft model for speculative decoding, aligned by forerun",
            ignore_patterns=[f"{SERVING_FOLDER}/*", "*.tmp", ".*"],
        )
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError, ValueError) as error:
        raise InvalidRequest(
            f"{serving.draft} could not be uploaded to {repo}: {error}; the draft is complete on "
            "disk, and the same command uploads it again"
        ) from error
    return f"https://huggingface.co/{repo}"


def _model_card(serving: Serving, repo: str, engines: Sequence[Export]) -> Iterator[str]:
    """Return the README.md of a hub model card with its metadata."""
    is_local = Path(serving.target).expanduser().is_dir()
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation", "tags:")
    yield from (f"- {tag}" for tag in TAGS)
    if not is_local:
        yield f"base_model: {serving.target}"
    yield from ("---", "", f"# {repo}", "")
    target = Path(serving.target).name if is_local else serving.target
    yield f"A draft for speculative decoding with `{target}`, distilled by forerun. The text"
    yield "is the target's with any draft; a good draft makes decoding faster."
    yield ""
    card = read_card(serving.draft)
    if card is not None:
        yield f"Objective: {card.objective}. Figures on held-out prompts (95% intervals):"
        yield ""
        yield "| | temperature | K | acceptance length | acceptance probability | best speedup |"
        yield "|---|---|---|---|---|---|"
        yield from (row_of("before", figures) for figures in card.before)
        yield from (row_of("after", figures) for figures in card.after)
        yield ""
        yield f"`{CARD_FILE}` has the whole record: hashes, settings and versions."
        yield ""
    if not serving.speculates:
        yield from (DRAFT_PAYS_NOT, "")
    on_hub = replace(serving, target=target, draft=Path(repo))
    for one in engines_of(engines, on_hub):
        yield from (f"## {one.engine}", "", f"```{one.language}", one.command, "```", "")
        yield from (f"- {note}" for note in one.notes)
        yield ""


def row_of(name: str, figures: CardFigures) -> str:
    """Return one row of the table of figures in Markdown."""
    cells = (
        name,
        f"{figures.temperature:g}",
        str(figures.num_speculative_tokens),
        *map(shown, (figures.acceptance_length, figures.acceptance_probability, figures.speedup)),
    )
    return f"| {' | '.join(cells)} |"


def shown(interval: Interval | None) -> str:
    """Return an interval for the table; empty where the figure was not measured."""
    if interval is None:
        return ""
    return f"{interval.estimate:.2f} ({interval.low:.2f} to {interval.high:.2f})"
