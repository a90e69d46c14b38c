from __future__ import annotations

import pytest

from forerun.sampling.kernels import row_chunks


@pytest.mark.parametrize("num_rows", [0, 1, 5, 12])
@pytest.mark.parametrize("width", [0, 1, 3, 100])
def test_chunks_cover_every_row_once_within_the_limit(num_rows: int, width: int) -> None:
    chunks = list(row_chunks(num_rows, width, max_elements=10))
    assert [row for c in chunks for row in range(c.start, c.stop)] == list(range(num_rows))
    assert all((c.stop - c.start) * width <= 10 or c.stop - c.start == 1 for c in chunks)
