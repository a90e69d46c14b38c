"""Upload to the hub: what is sent, under which card, and what a refusal says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from tests.unit.align.export.conftest import Pair

from forerun.align.serving import check_repo, describe_pair, export_draft, push_draft
from forerun.errors import InvalidRequest
from forerun.models.draft_card import CardFigures, DraftCard, identify, write_card
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval


class FakeHub:
    """Keeps what was uploaded, or raises an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.repos: list[str] = []
        self.files: dict[str, bytes] = {}

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> object:
        assert exist_ok
        self.repos.append(repo_id)
        return None

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]
    ) -> object:
        from huggingface_hub.utils import filter_repo_objects

        if self.error is not None:
            raise self.error
        root = Path(folder_path)
        names = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            self.files[name] = (root / name).read_bytes()
        return None


@pytest.fixture
def own(pair: Pair, tmp_path: Path) -> Pair:
    """The pair with a draft that may be written to, exported and with its card."""
    own = Pair(pair.target, Path(shutil.copytree(pair.draft, tmp_path / "draft")))
    tau = Interval(estimate=2.5, low=2.25, high=2.75)
    card = DraftCard(
        target="t",
        target_hash="t0",
        made_for=identify(own.target),
        data_hash="d0",
        objective="nla",
        temperature=1.0,
        after=(CardFigures(temperature=1.0, num_speculative_tokens=4, acceptance_length=tau),),
    )
    write_card(card, own.draft)
    export_draft(["vllm"], describe_pair(str(own.target), own.draft, 4, SamplingParams()))
    (own.draft / "model.safetensors.0123456789abcdef.tmp").write_text("unfinished")
    return own


def test_the_draft_goes_up_with_a_card_that_the_hub_reads(own: Pair) -> None:
    serving = describe_pair(str(own.target), own.draft, 4, SamplingParams())
    hub = FakeHub()
    assert push_draft(serving, "me/draft", ["vllm"], hub) == "https://huggingface.co/me/draft"
    assert hub.repos == ["me/draft"]
    assert {"README.md", "config.json", "forerun.json", "model.safetensors"} <= hub.files.keys()
    assert not [name for name in hub.files if name.startswith("serving") or name.endswith(".tmp")]
    text = hub.files["README.md"].decode()
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "speculative-decoding" in (card.data.tags or [])
    assert card.data.base_model is None  # a folder of this machine is no model of the hub
    assert "| after | 1 | 4 | 2.50 (2.25 to 2.75) |" in text
    assert '"model": "me/draft"' in text and str(own.draft) not in text
    assert str(own.target) not in text


def test_a_target_of_the_hub_is_the_base_model(own: Pair) -> None:
    from dataclasses import replace

    serving = describe_pair(str(own.target), own.draft, 0, SamplingParams())
    hub = FakeHub()
    push_draft(replace(serving, target="them/target"), "me/draft", ["vllm"], hub)
    text = hub.files["README.md"].decode()
    assert ModelCard(text).data.base_model == "them/target"
    assert "Serve the target without this draft" in text and "speculative-config" not in text


def test_a_refusal_says_that_the_draft_is_safe(own: Pair) -> None:
    serving = describe_pair(str(own.target), own.draft, 4, SamplingParams())
    with pytest.raises(InvalidRequest, match="no token; the draft is complete on disk"):
        push_draft(serving, "me/draft", [], FakeHub(ValueError("no token")))


@pytest.mark.parametrize("repo", ["a/b/c", "me/what is this", "-me/draft"])
def test_a_name_that_the_hub_would_refuse_is_refused_at_once(repo: str) -> None:
    with pytest.raises(InvalidRequest, match="push-to-hub"):
        check_repo(repo)
    check_repo("me/draft")
