"""Proof that an engine directory is what its manifest says and computes what its self-test says, on this machine."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.engine.artifact import SELFTEST_FILE, EngineDirectory
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.selftest import SelfTest, SelfTestResult, blocks_needed, run_selftest
from llmserve.errors import Unsupported


def verify_engine(
    directory: EngineDirectory, *, progress: Callable[[int], None] = lambda num_bytes: None
) -> SelfTestResult:
    """Hash every file (`EngineFileError` names those that changed), then run the self-test; read its `passed`."""
    directory.verify(progress)
    if directory.manifest.target != "cpu":
        raise Unsupported(
            f"every file is as built; but the self-test runs on cpu engines only, and this one is for "
            f"{directory.manifest.target}"
        )
    selftest = SelfTest.load(directory.path / SELFTEST_FILE)
    block_size = directory.manifest.options["tokens_per_block"]
    runner = CpuRunner.open(directory.engine_file, num_blocks=blocks_needed(selftest, block_size))
    try:
        return run_selftest(runner, selftest)
    finally:
        runner.close()
