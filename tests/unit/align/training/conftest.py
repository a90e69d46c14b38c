"""Tests of training leave no settings of Accelerate behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import training


@pytest.fixture(autouse=True)
def no_settings_left() -> Iterator[None]:
    yield
    training.forget_accelerators()
