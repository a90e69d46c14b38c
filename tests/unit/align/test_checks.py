"""Few held-out prompts are warned of."""

from __future__ import annotations

import pytest

from forerun.align.samples import PromptRecord
from forerun.align.texts import FEW_PROMPTS, PromptSplit, warn_of_few_prompts


def prompts(number: int) -> PromptSplit:
    record = PromptRecord(prompt_ids=(1,), prompt_hash="0" * 16, tag="", where="p:1")
    return PromptSplit(training=(record,), held_out=(record,) * number)


def test_six_held_out_prompts_draw_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_few_prompts(prompts(FEW_PROMPTS))
    assert not caplog.text
    warn_of_few_prompts(prompts(FEW_PROMPTS - 1))
    assert "only 19 prompts are held out" in caplog.text
    warn_of_few_prompts(prompts(6))
    assert "only 6 prompts are held out" in caplog.text
