"""`forerun profile` on a tiny random pair, as few measurements as it takes."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.measure.profile import load_profile

FEW = ["--rows", "1,2,5", "--batches", "1,2", "--contexts", "8", "--budget-s", "0.001"]


@pytest.fixture
def models(tiny_pair):
    return ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]


def test_json_file_and_picture(models, tmp_path, capsys):
    out, picture = tmp_path / "profile.json", tmp_path / "v.svg"
    files = ["--out", str(out), "--plot", str(picture)]
    assert main(["profile", *models, *FEW, "--json", *files]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(out.read_text())
    assert "<svg" in picture.read_text()
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


@pytest.mark.parametrize("flag", ["--out", "--plot"])
def test_what_cannot_be_written_is_refused_before_anything_is_loaded(flag, tmp_path, capsys):
    path = str(tmp_path / "missing" / "p.svg")
    assert main(["profile", "--target", "no/model", "--draft", "no/draft", flag, path]) == 2
    assert f"{flag} {path} cannot be written" in capsys.readouterr().err


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
        (["--draft", "none"], "name a --draft"),
        (["--plot", "v.txt"], "must end in"),
    ],
)
def test_requests_that_cannot_be_honoured(models, arguments, message, capsys):
    assert main(["profile", *models, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
