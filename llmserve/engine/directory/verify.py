"""Verifies on this machine that an engine or adapter matches its manifest and passes its self-test."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import SelfTestResult
from llmserve.engine.registry import runtime_for


def verify_engine(
    directory: EngineDirectory, *, progress: Callable[[int], None] = lambda num_bytes: None
) -> SelfTestResult | None:
    """Hash every file (`EngineFileError` names changed ones), then run the self-test; check `passed` of the result.

    None if the engine has no self-test.
    """
    directory.verify(progress)
    return runtime_for(directory.manifest.target).selftest(directory)


def verify_adapter(adapter: SealedAdapter, directory: EngineDirectory) -> SelfTestResult | None:
    """Like `verify_engine`, for an adapter; `EngineFileError` if it is for another engine. None without a self-test."""
    adapter.require_base(directory.manifest.engine_digest)
    adapter.verify()
    has_selftest = bool(adapter.manifest.selftest_sha256)
    return runtime_for(directory.manifest.target).selftest(directory, adapter) if has_selftest else None
