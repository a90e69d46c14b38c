"""Random traffic against plain decoding, in its short form; `make soak` is the long one."""

from __future__ import annotations

import pytest
from tests.soak import soak_laws, soak_networks

from forerun.models import kv_store

pytestmark = pytest.mark.usefixtures("unchecked")


def test_traffic_over_a_written_law_changes_no_text_and_leaves_nothing():
    report = soak_laws(120, every=30)
    assert report.mismatches == 0
    assert report.law_tokens > 100
    assert abs(report.law_z) < 5
    assert min(report.refused, report.preemptions, report.cached_tokens) > 0
    assert report.drafter_failures > 0
    assert set(report.finished) == {"stop", "length", "deadline", "abort"}
    assert report.objects[-1] <= report.objects[0] + 10


def test_traffic_over_networks_changes_no_text():
    report = soak_networks(16, every=8)
    assert report.mismatches == 0
    assert report.cached_tokens > 0


def test_a_planted_bug_is_found(monkeypatch):
    """One token more is taken for shared than is."""
    count_common = kv_store.count_common
    monkeypatch.setattr(kv_store, "count_common", lambda a, b: count_common(a, b) + 1)
    assert soak_laws(120, every=120).mismatches > 0
