"""An engine for what pods run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import CHECKPOINT, llmserve


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "chat"
    done = llmserve("build", str(CHECKPOINT), "--dtype", "float16", "--output-dir", str(output))
    assert done.returncode == 0, done.stderr
    return output
