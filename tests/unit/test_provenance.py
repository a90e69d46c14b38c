from __future__ import annotations

import json
import subprocess
from datetime import datetime

import forerun
from forerun.provenance import collect, commit_of, read_cpu_model


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_provenance_is_json_and_names_what_decides_speed():
    provenance = collect({"target": "abc"}).to_dict()
    assert json.loads(json.dumps(provenance)) == provenance
    assert provenance["version"] == forerun.__version__
    assert provenance["models"] == {"target": "abc"}
    assert set(provenance["packages"]) == {"torch", "transformers"}
    assert datetime.fromisoformat(provenance["date"]).tzinfo is not None
    assert provenance["num_cores"] >= 1


def test_commit_of_a_tracked_file_says_whether_it_was_changed(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "one")
    commit = commit_of(source)
    assert commit is not None
    assert len(commit) == 40
    source.write_text("2")
    assert commit_of(source) == f"{commit}+changes"


def test_a_file_inside_somebody_elses_checkout_has_no_commit(tmp_path):
    git(tmp_path, "init")
    source = tmp_path / "a.py"
    source.write_text("1")
    assert commit_of(source) is None


def test_cpu_model_is_read_from_cpuinfo(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Imaginary 9000\n")
    assert read_cpu_model(cpuinfo) == "Imaginary 9000"


def test_cpu_model_has_a_name_without_cpuinfo(tmp_path):
    assert read_cpu_model(tmp_path / "missing")
