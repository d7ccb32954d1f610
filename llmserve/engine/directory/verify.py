"""Proof that an engine directory is what its manifest says and computes what its self-test says, on this machine."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import SelfTestResult
from llmserve.engine.registry import runtime_for


def verify_engine(
    directory: EngineDirectory, *, progress: Callable[[int], None] = lambda num_bytes: None
) -> SelfTestResult | None:
    """Hash every file (`EngineFileError` names those that changed), then run the self-test; read its `passed`.

    None for an engine that carries none.
    """
    directory.verify(progress)
    return runtime_for(directory.manifest.target).selftest(directory)
