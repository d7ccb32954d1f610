"""The `Runtime` of the `tensorrt_llm` target. tensorrt_llm itself is only imported to open an engine."""

from __future__ import annotations

from collections.abc import Collection

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult
from llmserve.engine.runtime import Needs, Runtime, Tactics, nothing_to_tune
from llmserve.engine.settings import EngineSettings
from llmserve.engine.tensorrt_llm.fits import fit_problems
from llmserve.engine.tensorrt_llm.library import Mode
from llmserve.engine.tensorrt_llm.needs import NEEDS
from llmserve.progress import Progress


class TensorrtLlmRuntime:
    def needs(self) -> Needs:
        return NEEDS

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        return fit_problems(directory)

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        from llmserve.engine.tensorrt_llm.open import open_tensorrt_llm  # imports every network

        return open_tensorrt_llm(directory, settings)

    def kernels(self) -> str:
        return ""

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        return None  # its arithmetic is not llmserve's

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        return None

    def tactics(self, directory: EngineDirectory) -> Tactics:
        return Tactics(f"those of a {directory.manifest.target} engine were chosen when it was compiled")

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        raise nothing_to_tune(self.tactics(directory))

    def built_for(self, manifest: Manifest) -> str:
        device = manifest.device
        return (
            f"tensorrt-llm {device['tensorrt_llm']}, {device['mode']} mode, for {device['world_size']} x "
            f"{device['gpu']} (compute capability {device['compute_capability']})"
        )

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        """TensorRT-LLM's own C++ backend only runs what its builder has compiled."""
        return ("tensorrtllm",) if Mode(manifest.device["mode"]) is Mode.ENGINE else ()


RUNTIME: Runtime = TensorrtLlmRuntime()
