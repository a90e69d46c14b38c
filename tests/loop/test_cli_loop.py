"""`forerun loop`: its settings, its journal in words, and what it refuses before it serves."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.errors import InvalidRequest
from forerun.loop.config import read_config
from forerun.loop.journal import Journal, Record


def write(path, **values):
    path.write_text(json.dumps(values))
    return path


def test_settings_of_toml_and_json_are_relative_to_their_file(tmp_path):
    path = tmp_path / "loop.toml"
    path.write_text('serve = ["t", "--draft", "d"]\nfolder = "runs"\nold_texts = "old.jsonl"\n')
    found = read_config(path)
    assert found.serve == ("t", "--draft", "d")
    assert (found.folder, found.old_texts) == (tmp_path / "runs", tmp_path / "old.jsonl")
    again = write(tmp_path / "loop.json", serve=["t"], folder=str(tmp_path), train_minutes=5)
    assert read_config(again).train_minutes == 5.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"folder": "x"}, "serve"),
        ({"serve": ["t"], "folder": 3}, "3"),
        ({"serve": ["t"], "folder": "x", "shadow_share": 0.9}, "shadow_share"),
        ({"serve": ["t"], "folder": "x", "minutes": 1}, "minutes"),
        ({"serve": ["t"], "folder": "x", "shadow_requests": 3}, "shadow_requests"),
    ],
)
def test_wrong_settings_are_named(tmp_path, values, message):
    with pytest.raises(InvalidRequest, match=message):
        read_config(write(tmp_path / "loop.json", **values))


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (["t"], "name one draft"),
        (["t", "--draft", "auto"], "name one draft"),
        (["t", "--draft", "a,b"], "name one draft"),
        (["t", "--draft", "d", "--collect", "c"], "collects into its own folder"),
        (["t", "--draft", "d", "--nonsense"], "no option"),
    ],
)
def test_a_server_that_no_loop_can_run_beside_is_refused(tmp_path, serve, message, capsys):
    path = write(tmp_path / "loop.json", serve=serve, folder=str(tmp_path / "out"))
    assert main(["loop", "run", str(path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_second_loop_is_refused(tmp_path, capsys):
    path = write(tmp_path / "loop.json", serve=["t", "--draft", "d"], folder=str(tmp_path))
    with Journal(tmp_path):
        assert main(["loop", "run", str(path)]) == 2
    assert "another run of forerun loop uses" in " ".join(capsys.readouterr().err.split())


def test_status_says_what_was_done_and_what_comes_next(tmp_path, capsys):
    with Journal(tmp_path) as journal:
        fields = {"round": 1, "is_good": True, "version": 0}
        journal.append(Record(stage="watch", why="acceptance fell", **fields))
        journal.append(Record(stage="train", why="aligned", draft="made/draft", **fields))
    assert main(["loop", "status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("round 1  watch      acceptance fell")
    assert lines[-1] == "in service: version 0, that of the configuration; next: shadow of round 1"


def test_status_of_another_folder_has_nothing_done(tmp_path, capsys):
    assert main(["loop", "status", str(tmp_path)]) == 0
    assert "next: watch of round 1" in capsys.readouterr().out


def test_status_of_a_folder_that_is_missing_is_refused(tmp_path, capsys):
    assert main(["loop", "status", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())
