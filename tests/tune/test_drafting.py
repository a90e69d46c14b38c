"""What an engine drafted is the growth of its counters between two readings."""

from __future__ import annotations

import pytest

from forerun.tune.drafting import DraftingCounts, compare_pages


def page(prefix: str, drafts: int, drafted: int, accepted: tuple[int, ...]) -> str:
    lines = [
        f'{prefix}_num_drafts_total{{engine="0"}} {drafts}',
        f'{prefix}_num_draft_tokens_total{{engine="0"}} {drafted}',
        f'{prefix}_num_accepted_tokens_total{{engine="0"}} {sum(accepted)}',
    ]
    for place, count in enumerate(accepted):
        lines.append(f'{prefix}_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}')
    return "\n".join(lines)


@pytest.mark.parametrize("prefix", ["vllm:spec_decode", "llamacpp:spec_decode"])
def test_counters_of_two_pages_are_subtracted(prefix: str) -> None:
    found = compare_pages(page(prefix, 10, 30, (8, 5, 1)), page(prefix, 30, 90, (24, 15, 7)))
    assert found == DraftingCounts(
        num_drafts=20, num_drafted=60, num_accepted=32, accepted_per_position=(16, 10, 6)
    )
    assert found.acceptance_length == pytest.approx(1 + 32 / 20)


def test_a_page_of_plain_decoding_has_no_drafting() -> None:
    assert compare_pages("", "vllm:generation_tokens_total 9") is None


def test_no_draft_has_no_acceptance_length() -> None:
    found = compare_pages("", page("vllm:spec_decode", 0, 0, ()))
    assert found is not None
    assert found.acceptance_length is None


def test_sglang_counts_tokens_and_steps() -> None:
    before = "sglang:spec_verify_calls_total 5\nsglang:generation_tokens_total 9"
    after = (
        "sglang:spec_verify_calls_total 25\nsglang:generation_tokens_total 59\n"
        "sglang:spec_num_draft_tokens 4"
    )
    assert compare_pages(before, after) == DraftingCounts(
        num_drafts=20, num_drafted=60, num_accepted=30
    )
