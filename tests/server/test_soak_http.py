"""A few hundred requests of the soak test; `soak-server` runs 10,000."""

from __future__ import annotations

import pytest
from tests.server.soak import run


@pytest.mark.usefixtures("unchecked")
def test_random_traffic_is_answered_right():
    counts, before_mb, after_mb = run(200, seed=5)
    assert counts["whole 200"] + counts["stream 200"] > 10
    assert {kind.split()[0] for kind in counts} >= {"leave", "cancel", "oversized", "key"}
    assert after_mb < 1.2 * before_mb + 50
