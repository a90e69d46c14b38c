"""Upload of an aligned draft to the Hugging Face hub, with a model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from forerun.align.config import Export
from forerun.align.export.engines import Serving
from forerun.align.export.heads import engines_of
from forerun.align.export.write import DRAFT_PAYS_NOT, SERVING_FOLDER
from forerun.atomic_write import atomic_write
from forerun.errors import InvalidRequest
from forerun.models.draft_card import CARD_FILE, CardFigures, read_card
from forerun.theory.intervals import Interval

__all__ = ["HubApi", "check_repo", "push_draft"]

TAGS = ("speculative-decoding", "draft-model", "forerun")


@runtime_checkable
class HubApi(Protocol):
    """The part of `huggingface_hub.HfApi` that an upload needs."""

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> object:
        """Create a model repository if it does not exist."""

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]
    ) -> object:
        """Upload the files of a folder as one commit."""


def check_repo(repo: str) -> None:
    """Refuse a repository name that the hub would only reject after a long run.

    Raises:
        InvalidRequest: it is no name of a repository.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InvalidRequest(f"--push-to-hub {repo}: {error}") from error


def push_draft(
    serving: Serving, repo: str, engines: Sequence[Export], api: HubApi | None = None
) -> str:
    """Write a model card into the draft's folder and upload the folder.

    Files of `serving/` name folders of this machine and are not uploaded; the card has the same
    commands with the name of the repository.

    Args:
        serving: the pair, its draft in a folder.
        repo: name of the repository, such as "me/my-draft"; made where it does not exist.
        engines: whose commands the card shows.
        api: of the hub; by default `huggingface_hub.HfApi()`, which reads the user's token.

    Returns:
        The address of the repository.

    Raises:
        InvalidRequest: the hub refuses the name or the upload, or cannot be reached.
        InvalidModel: the draft's own card, forerun.json, cannot be read.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with atomic_write(serving.draft / "README.md") as scratch:
        lines = model_card(serving, repo, engines)
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
    hub: HubApi = HfApi() if api is None else api
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


def model_card(serving: Serving, repo: str, engines: Sequence[Export]) -> Iterator[str]:
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
