"""`forerun diagnose --profile` takes the costs of greedy or of sampled decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.profiles import profile_of

from forerun.cli.diagnose import DiagnoseOptions, costs_of
from forerun.measure.profile import write_profile
from forerun.theory.cost import CostLine, CostTable

LINE = CostLine(rows=(1, 5), verify_s=(0.010, 0.012), plain_s=0.010, draft_s=0.001)
GREEDY = CostTable(lines=(LINE,))
SAMPLED = CostTable(lines=(replace(LINE, draft_s=0.002),))


@pytest.mark.parametrize(
    ("temperature", "table"), [(None, GREEDY), (0.0, GREEDY), (0.7, SAMPLED), (1.0, SAMPLED)]
)
def test_the_temperature_chooses_the_cost_table(tmp_path, temperature, table):
    path = tmp_path / "profile.json"
    write_profile(profile_of(GREEDY, SAMPLED), path)
    assert costs_of(DiagnoseOptions(profile=path, temperature=temperature)) == table


def test_without_a_profile_there_is_no_cost_table():
    assert costs_of(DiagnoseOptions(temperature=0.7)) is None
