"""Proof that an engine directory is what its manifest says and computes what its self-test says, on this machine."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.engine.artifact import SELFTEST_FILE, EngineDirectory
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.open import CPU_TARGET
from llmserve.engine.selftest import SelfTest, SelfTestResult, blocks_needed, run_selftest


def verify_engine(
    directory: EngineDirectory, *, progress: Callable[[int], None] = lambda num_bytes: None
) -> SelfTestResult | None:
    """Hash every file (`EngineFileError` names those that changed), then run the self-test; read its `passed`.

    None for an engine that carries none: only those for the cpu target do.
    """
    directory.verify(progress)
    if directory.manifest.target != CPU_TARGET:
        return None
    selftest = SelfTest.load(directory.path / SELFTEST_FILE)
    block_size = directory.manifest.options["tokens_per_block"]
    runner = CpuRunner.open(directory.engine_file, num_blocks=blocks_needed(selftest, block_size))
    try:
        return run_selftest(runner, selftest)
    finally:
        runner.close()
