"""`forerun plan --workload` from written workloads and profiles."""

from __future__ import annotations

import json

import pytest
from tests.profiles import profile_of

from forerun.cli.main import main
from forerun.measure.profile import write_profile
from forerun.theory.cost import CostLine, CostTable

TABLE = CostTable(
    lines=(
        CostLine(
            rows=(1, 2, 8),
            verify_s=(0.010, 0.0102, 0.012),
            plain_s=0.010,
            draft_s=0.0005,
            overhead_s=(0.0002,),
        ),
    )
)
PROFILE = profile_of(greedy=TABLE, sampled=TABLE)
WORKLOAD = """
requests = 12
arrivals = {kind = "poisson", rate_per_s = 2}
prompt_tokens = 16
output_tokens = 30
phases = [
  {name = "good", share = 0.5, acceptance = {kind = "constant", alpha = 0.9}},
  {name = "bad", share = 0.5, acceptance = {kind = "constant", alpha = 0.0}},
]
server = {max_batch = 2, max_k = 4}
slo = {tpot_s = 0.008}
"""


@pytest.fixture
def files(tmp_path):
    profile, workload = tmp_path / "profile.json", tmp_path / "workload.toml"
    write_profile(PROFILE, profile)
    workload.write_text(WORKLOAD)
    return ("--workload", str(workload), "--profile", str(profile))


def simulated(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_for_people(files, tmp_path, capsys):
    arguments = ("--controllers", "plain", "fixed:4", "auto")
    assert main(["plan", *files, *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("12 requests, 360 tokens", "TTFT", "in SLO", "good", "bad"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_server_that_is_never_idle_is_named(files, tmp_path, capsys):
    path = tmp_path / "w.toml"
    path.write_text(WORKLOAD.replace("rate_per_s = 2", "rate_per_s = 500"))
    arguments = ("--controllers", "plain", "fixed:1")
    assert main(["plan", *files, "--workload", str(path), *arguments]) == 0
    assert "no idle time with plain, fixed:1: requests" in capsys.readouterr().out


def test_json(files, capsys):
    found = simulated(capsys, *files, "--controllers", "plain", "fixed:4")
    plain, fixed = found["results"]
    assert fixed["phases"][0]["decode_s"] < plain["phases"][0]["decode_s"]
    assert plain["phases"][1]["decode_s"] < fixed["phases"][1]["decode_s"]
    assert plain["num_tokens"] == fixed["num_tokens"] == 360
    assert fixed["tpot_s"]["p50"] < fixed["tpot_s"]["p99"]
    assert 0 < fixed["num_in_slo"] < 12
    assert plain["num_in_slo"] == 0


def test_figures_are_a_function_of_the_seed(files, capsys):
    one, same, other = (
        simulated(capsys, *files, "--controllers", "auto", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert one == same
    assert one["results"] != other["results"]


@pytest.mark.parametrize("name", ["plain", "fixed:2", "fixed", "auto", "tree:4"])
def test_every_controller_serves_every_request(name, files, capsys):
    (result,) = simulated(capsys, *files, "--controllers", name)["results"]
    assert (result["controller"], result["num_requests"]) == (name, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--controllers", "best"), "controller 'best' is unknown; use plain, fixed:K, tree:NODES"),
        (("--controllers", "fixed:5"), "only fixed takes a K, from 0 to max_k, which is 4"),
        (("--controllers", "auto:3"), "only fixed takes a K"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, message, files, capsys):
    assert main(["plan", *files, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("more", [("--acceptance", "0.5"), ("--batch", "2")])
def test_flags_of_a_plan_that_a_workload_states_itself_are_refused(more, files, capsys):
    assert main(["plan", *files, *more]) == 2
    assert "are fields of its file" in " ".join(capsys.readouterr().err.split())


def test_flags_of_a_workload_need_one(files, capsys):
    assert main(["plan", *files[2:], "--seed", "3"]) == 2
    assert "--workload: name one" in " ".join(capsys.readouterr().err.split())


def test_the_former_name_is_said_to_be_part_of_plan(files, capsys):
    assert main(["simulate", *files, "--controllers", "plain", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"]
    assert captured.err == "forerun simulate is forerun plan now\n"


def test_a_workload_without_an_end_is_refused(files, tmp_path, capsys):
    path = tmp_path / "w.toml"
    path.write_text(WORKLOAD.replace("output_tokens = 30", "output_tokens = 100000"))
    assert main(["plan", *files, "--workload", str(path)]) == 2
    assert "it would never finish" in " ".join(capsys.readouterr().err.split())
