from __future__ import annotations

import pytest

from forerun.align.samples import Sample, cut

WINDOW = 10


def sample(length: int, *spans: tuple[int, int], **changes: object) -> Sample:
    values = {"prompt_hash": "0" * 16, "token_ids": tuple(range(length)), "spans": spans}
    return Sample(**(values | changes))


@pytest.mark.parametrize(
    ("length", "spans", "kept", "kept_spans"),
    [
        # All fits.
        (10, [(4, 10)], (0, 10), [(4, 10)]),
        # Nothing is learned behind the last span.
        (30, [(4, 6)], (0, 6), [(4, 6)]),
        # The prompt is too long: its beginning goes.
        (40, [(35, 40)], (30, 40), [(5, 10)]),
        (40, [(32, 40)], (27, 37), [(5, 10)]),
        # The response is too long: its end goes.
        (40, [(3, 40)], (0, 10), [(3, 10)]),
        # Both are: half of each.
        (40, [(20, 40)], (15, 25), [(5, 10)]),
        # Answers of several turns, positions that were rejected.
        (40, [(2, 4), (7, 12), (20, 40)], (0, 10), [(2, 4), (7, 10)]),
        (40, [(30, 31), (33, 34), (36, 38)], (25, 35), [(5, 6), (8, 9)]),
        (40, [(30, 31), (33, 34)], (24, 34), [(6, 7), (9, 10)]),
    ],
)
def test_what_is_kept(length, spans, kept, kept_spans):
    found = cut(sample(length, *spans), WINDOW)
    assert found.token_ids == tuple(range(*kept))
    assert found.spans == tuple(kept_spans)


def test_a_sample_that_fits_is_left_alone():
    whole = sample(10, (4, 10))
    assert cut(whole, WINDOW) is whole
