"""What commands say of drafters that are no models."""

from __future__ import annotations

import pytest

from forerun.cli.info import InfoOptions
from forerun.cli.info import run as run_info
from forerun.errors import InvalidRequest
from forerun.provenance import trace_header


@pytest.mark.parametrize("draft", ["suffix", "self:2"])
def test_what_is_about_models_refuses_them_by_name(draft):
    with pytest.raises(InvalidRequest, match=draft):
        run_info(InfoOptions(model="zoo:code-11m", draft=draft))


def test_a_trace_names_them_without_a_hash():
    header = trace_header("zoo:code-11m", "suffix", "cpu")
    assert (header.draft, header.draft_hash) == ("suffix", None)
