"""The contract of test_runner.py, over the runners whose kernels are interpreted."""

from __future__ import annotations

import pytest

from tests.contracts.test_runner import *  # noqa: F403
from tests.contracts.test_runner import INTERPRETED


@pytest.fixture(scope="module", params=INTERPRETED)  # type: ignore[no-redef]
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
