from __future__ import annotations

import pytest
from tests import tiny
from tests.tabular import TabularModel


@pytest.fixture
def target() -> TabularModel:
    return tiny.tabular(0)


@pytest.fixture
def draft(target: TabularModel) -> TabularModel:
    return tiny.cousin(target, 5)
