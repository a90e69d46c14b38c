from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.errors import InvalidRequest
from forerun.plan.costs import (
    PRESETS,
    Machine,
    ModelSize,
    cost_table,
    preset,
    with_batches,
    with_draft_cost,
)
from forerun.theory.cost import CostLine, CostTable

# 1 TB/s and 100 TFLOP/s: 2-byte weights are read as long as 100 rows compute.
MACHINE = Machine(name="m", flops_per_s=1e14, bytes_per_s=1e12, launch_s=1e-4, step_s=2e-4)
TARGET = ModelSize(num_parameters=1e9, weight_bytes=2e9, kv_token_bytes=1e5)
DRAFT = ModelSize(num_parameters=1e8, weight_bytes=2e8)


def test_few_rows_cost_the_reading_and_many_the_arithmetic():
    table = cost_table(MACHINE, TARGET, DRAFT, batches=(1, 200), contexts=(0, 1000))
    assert table.verify_step_s(1) == pytest.approx(2e-3 + 1e-4)
    assert table.verify_step_s(64) == pytest.approx(2e-3 + 1e-4)
    assert table.verify_step_s(1, 1000, 1) == pytest.approx(2e-3 + 1e-4 + 1e-4)
    assert table.verify_step_s(4, 0, 200) == pytest.approx(2e9 * 800 / 1e14 + 1e-4)
    assert table.plain_step_s() == pytest.approx(2e-3 + 1e-4 + 2e-4)
    assert table.draft_token_s() == pytest.approx(2e-4 + 1e-4)
    assert table.cycle_s(3) == pytest.approx(3 * 3e-4 + 2.1e-3 + 2e-4)


def test_without_a_draft_model_drafting_is_free():
    assert cost_table(MACHINE, TARGET, None, batches=(1,), contexts=(0,)).draft_token_s() == 0.0


def test_presets_are_positive_and_named():
    assert all(name == machine.name for name, machine in PRESETS.items())
    assert all("data sheet" in machine.source for machine in PRESETS.values())
    # Where 2-byte weights stop being free: about 295 rows on an H100, 153 on an A100.
    for name, num_rows in (("h100-sxm", 295), ("a100-80gb", 153)):
        machine = preset(name)
        assert machine.flops_per_s / machine.bytes_per_s == pytest.approx(num_rows, abs=1)


def test_an_unknown_machine_is_refused_with_those_there_are():
    with pytest.raises(
        InvalidRequest, match=r"'h1000' is unknown; there are a100-80gb, .* --flops"
    ):
        preset("h1000")


@pytest.mark.parametrize("field", ["flops_per_s", "bytes_per_s"])
def test_a_machine_without_speed_is_refused(field):
    rates = {"flops_per_s": 1.0, "bytes_per_s": 1.0}
    with pytest.raises(InvalidRequest, match=f"{field} is 0"):
        Machine(name="m", **(rates | {field: 0.0}))


def test_a_model_without_weights_is_refused():
    with pytest.raises(InvalidRequest, match="num_parameters is -1"):
        ModelSize(num_parameters=-1.0, weight_bytes=1.0)


LINE = CostLine(
    batch=2, rows=(1, 2, 4), verify_s=(0.010, 0.012, 0.020), plain_s=0.011, draft_s=0.001
)


def test_larger_batches_cost_what_as_many_rows_do():
    table = with_batches(CostTable(lines=(LINE,)), [1, 2, 4])
    assert table.batches == (2, 4)
    assert table.verify_step_s(1, batch=4) == pytest.approx(0.012)
    assert table.verify_step_s(2, batch=4) == pytest.approx(0.020)
    assert table.verify_step_s(4, batch=4) == pytest.approx(0.040)
    assert table.plain_step_s(batch=4) == pytest.approx(0.013)
    assert table.draft_token_s(batch=4) == pytest.approx(0.0012)


def test_another_drafter_changes_drafting_only():
    table = CostTable(lines=(LINE,))
    other = with_draft_cost(table, draft_s=0.003)
    assert other.draft_token_s(batch=2) == 0.003
    assert other.overhead_s(1, batch=2) == table.overhead_s(1, batch=2)
    assert with_draft_cost(table, draft_s=0.003, overhead_s=0.004).overhead_s(5, batch=2) == 0.004
    assert other.verify_step_s(4, batch=2) == table.verify_step_s(4, batch=2)


def test_models_that_do_not_fit_are_refused():
    large = ModelSize(num_parameters=70e9, weight_bytes=140e9)
    with pytest.raises(InvalidRequest, match=r"140 GB of weights.*it has 80 GB"):
        cost_table(preset("h100-sxm"), large, None, batches=[1], contexts=[1024])
    cost_table(preset("mi300x"), large, None, batches=[1], contexts=[1024])


def test_keys_and_values_count_for_the_memory():
    model = ModelSize(num_parameters=35e9, weight_bytes=70e9, kv_token_bytes=1e6)
    cost_table(preset("h100-sxm"), model, None, batches=[1], contexts=[1024])
    with pytest.raises(InvalidRequest, match="at batch 16"):
        cost_table(preset("h100-sxm"), model, None, batches=[16, 32], contexts=[1024])


@pytest.mark.parametrize("changes", [{"flops_per_s": 1e-300}, {"bytes_per_s": 1e-300}])
def test_figures_that_give_no_times_are_refused(changes):
    machine = replace(MACHINE, **changes)
    with pytest.raises(InvalidRequest, match="give no times of passes"):
        cost_table(machine, replace(TARGET, num_parameters=1e20), None, batches=(1,), contexts=(0,))
