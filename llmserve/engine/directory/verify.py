"""Proof that an engine or adapter is what its manifest says and computes what its self-test says, on this machine."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.engine.adapters.sealed import SealedAdapter
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


def verify_adapter(adapter: SealedAdapter, directory: EngineDirectory) -> SelfTestResult | None:
    """The same of an adapter of this engine; `EngineFileError` for one of another. None for one without self-test."""
    adapter.require_base(directory.manifest.engine_digest)
    adapter.verify()
    has_selftest = bool(adapter.manifest.selftest_sha256)
    return runtime_for(directory.manifest.target).selftest(directory, adapter) if has_selftest else None
