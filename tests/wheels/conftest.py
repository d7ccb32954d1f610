"""The wheels that `make wheels` has just made; anywhere else these tests are skipped."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

FOLDER = os.environ.get("LLMSERVE_WHEELS", "")
PROCESSORS = ("x86_64", "aarch64")
LIBRARY = "llmserve/engine/native/libllmserve_cpu.so"


@pytest.fixture(scope="session")
def wheels() -> dict[str, Path]:
    """Processor -> file."""
    if not FOLDER:
        pytest.skip("`make wheels` compiles them, for minutes, and runs this")
    found = {processor: list(Path(FOLDER).glob(f"*_{processor}.whl")) for processor in PROCESSORS}
    assert {processor: len(paths) for processor, paths in found.items()} == dict.fromkeys(PROCESSORS, 1)
    return {processor: path for processor, (path,) in found.items()}


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def library(wheels: dict[str, Path], processor: str, tmp_path: Path) -> Path:
    """The engine's library out of a wheel, in a folder of its own."""
    with zipfile.ZipFile(wheels[processor]) as wheel:
        (tmp_path / "libllmserve_cpu.so").write_bytes(wheel.read(LIBRARY))
    return tmp_path / "libllmserve_cpu.so"
