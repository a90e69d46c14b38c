"""`forerun profile` on a tiny random pair, as few measurements as it takes."""

from __future__ import annotations

import json

import pytest
from tests.profiles import exact_times, rising_costs

from forerun.cli.main import main
from forerun.errors import InvalidProfile
from forerun.measure.profile import load_profile, load_profiles

FEW = ["--rows", "1,2,5", "--batches", "1,2", "--contexts", "8", "--budget-s", "0.001"]

WORKLOAD = """requests = 3
prompt_tokens = 9
output_tokens = 9
acceptance = {kind = "constant", alpha = 0.5}
"""


@pytest.fixture
def models(tiny_pair):
    return ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]


def test_json_and_file(models, tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert main(["profile", *models, *FEW, "--json", "--out", str(out)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(out.read_text())
    found = load_profile(out)
    assert found.greedy.batches == (1, 2)
    assert all(line.rows == (1, 2, 5) for line in found.greedy.lines)
    assert found.setup.dtype == "float32"
    assert found.setup.target_hash != found.setup.draft_hash
    # Two layers, one key-value head of 16, keys and values of 4 bytes.
    assert found.limit.kv_token_bytes == 2 * 2 * 16 * 4
    assert found.limit.bytes_per_s > 0


def test_weights_of_a_tied_model_are_read_once(models, tiny_pair, capsys):
    assert main(["profile", *models, *FEW, "--json"]) == 0
    limit = json.loads(capsys.readouterr().out)["limit"]
    file_bytes = (tiny_pair.target / "model.safetensors").stat().st_size
    assert 0.9 * file_bytes < limit["target_bytes"] < file_bytes


def test_tables_for_people(models, capsys):
    assert main(["profile", *models, *FEW]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("plain step", "read limit", "n = 5", "T=1, K = 4", "draft chain of 4", "GB/s"):
        assert words in text


def test_a_draft_that_shares_tokens_can_be_profiled(tiny_pair, capsys):
    pair = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.stranger)]
    assert main(["profile", *pair, *FEW]) == 0
    assert "draft chain of 4" in capsys.readouterr().out


@pytest.mark.parametrize("draft", ["suffix", "recycling", "self:1", "self:int4"])
def test_every_kind_of_draft_is_profiled_and_planned(tiny_pair, draft, tmp_path, capsys):
    out, target = tmp_path / "profile.json", str(tiny_pair.target)
    few = ["--batch", "1", "--rows", "1,2,5", "--context", "8", "--budget-s", "0.001"]
    assert main(["profile", "--target", target, "--draft", draft, *few, "--out", str(out)]) == 0
    [profile] = load_profiles(out)
    assert (profile.draft, profile.setup.draft_hash) == (draft, draft)
    assert profile.reading.draft_s == (0.0,) * len(profile.reading.tokens)
    [line] = profile.greedy.lines
    assert line.overhead_ks == (1, 4)
    assert line.draft_s + max(line.overhead_s) > 0
    capsys.readouterr()
    exact_times(out)
    assert main(["plan", "--profile", str(out), "--draft", draft, "--acceptance", "0.5"]) == 0
    used = ["--target", target, "--draft", draft, "--profile", str(out), "--max-tokens", "6"]
    assert main(["generate", "x =", *used]) == 0


def test_a_draft_with_another_tokenizer_drafts_in_every_step(tmp_path):
    """Its steps are measured on text: arbitrary ids are no text that it could read."""
    out = tmp_path / "profile.json"
    pair = ["--target", "zoo:code-2m", "--draft", "zoo:books-1m", "--batch", "1"]
    few = ["--context", "16", "--rows", "1,2,5", "--budget-s", "0.01"]
    assert main(["profile", *pair, *few, "--out", str(out)]) == 0
    assert load_profile(out).greedy.lines[0].overhead_ks == (1, 4)


def test_plain_decoding_is_profiled_planned_and_simulated(tiny_pair, tmp_path, capsys):
    out, workload = tmp_path / "profile.json", tmp_path / "w.toml"
    few = ["--batch", "1", "--rows", "1,2,5", "--context", "8", "--budget-s", "0.001"]
    target = ["--target", str(tiny_pair.target), "--draft", "none"]
    assert main(["profile", *target, *few, "--out", str(out)]) == 0
    assert load_profile(out).draft == "none"
    exact_times(out)
    rising_costs(out)
    capsys.readouterr()
    assert main(["plan", "--profile", str(out)]) == 0
    assert "decode plainly" in capsys.readouterr().out
    workload.write_text(WORKLOAD)
    simulated = ["plan", "--workload", str(workload), "--profile", str(out)]
    assert main([*simulated, "--json"]) == 0
    assert [r["controller"] for r in json.loads(capsys.readouterr().out)["results"]] == ["plain"]
    assert main([*simulated, "--controller", "auto"]) == 2
    assert "a profile of plain decoding" in capsys.readouterr().err


def test_several_drafts_are_in_one_file(tiny_pair, tmp_path, capsys):
    """What "auto" stands for, too, of which there is only one for a tiny target."""
    out, workload = tmp_path / "profile.json", tmp_path / "w.toml"
    few = ["--batch", "1", "--rows", "1,2,5", "--context", "8", "--budget-s", "0.001"]
    drafts = ["--draft", "auto", str(tiny_pair.draft)]
    command = ["profile", "--target", str(tiny_pair.target), *drafts, *few]
    assert main([*command, "--out", str(out)]) == 0
    names = [profile.draft for profile in load_profiles(out)]
    assert names == ["suffix", str(tiny_pair.draft)]
    exact_times(out)
    with pytest.raises(InvalidProfile, match="has profiles of suffix"):
        load_profile(out)
    given = [f"{name}=0.5" for name in names]
    for chosen in ([], ["--draft", "auto"]):
        capsys.readouterr()
        assert main(["plan", "--profile", str(out), "--json", *chosen, "--acceptance", *given]) == 0
        assert list(json.loads(capsys.readouterr().out)["curves"]) == names
    workload.write_text(WORKLOAD)
    simulated = ["plan", "--workload", str(workload), "--profile", str(out)]
    assert main([*simulated, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["drafts"]) == names
    assert main([*simulated, "--json", "--draft", "suffix"]) == 0
    assert "results" in json.loads(capsys.readouterr().out)
    assert main([*simulated, "--draft", "recycling"]) == 2
    assert "--draft recycling has no profile" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, capsys):
    path = str(tmp_path / "missing" / "p.json")
    assert main(["profile", "--target", "no/model", "--draft", "no/draft", "--out", path]) == 2
    assert f"--out {path} cannot be written" in capsys.readouterr().err


def test_a_file_that_is_there_survives_a_failed_run(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text("before")
    assert main(["profile", "--target", str(tmp_path), "--draft", "x", "--out", str(path)]) == 2
    assert path.read_text() == "before"
    assert main(["profile", "--target", str(tmp_path), "--draft", "x", "--out", f"{path}.new"]) == 2
    assert not (tmp_path / "profile.json.new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "2,3"], "must begin at 1"),
        (["--batches", "4,2"], "must ascend"),
        (["--contexts", "100000"], "no context of [100000]"),
        (["--budget-s", "0"], "budget_s is 0"),
        (["--batches", "1,64"], "max_pass_rows is 128, below 64 sequences"),
        (["--threads", "0"], "--threads is 0"),
        (["--draft", "none"], "leave the other drafts out"),
        (["--draft", "suffix", "--draft", "suffix"], "--draft suffix is given twice"),
    ],
)
def test_requests_that_cannot_be_honoured(models, arguments, message, capsys):
    assert main(["profile", *models, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
