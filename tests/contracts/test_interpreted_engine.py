"""The contract of test_engine.py, over the engines whose kernels are interpreted: they take a minute."""

from __future__ import annotations

import pytest

from tests.contracts.engines import ENGINES, INTERPRETED
from tests.contracts.test_engine import *  # noqa: F403


@pytest.fixture(scope="module", params=sorted(ENGINES.keys() & set(INTERPRETED)))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
