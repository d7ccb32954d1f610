"""A `Runtime` for the fake: engine directories whose answers can be computed by hand.

It is in no registry. Tests register it with a target that writes such directories, and so verify that a target consists
of two folders and two lines.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult
from llmserve.engine.fake.runner import KERNELS, FakeRunner
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.runtime import Needs, Runtime, Tactics, nothing_to_tune
from llmserve.engine.settings import EngineSettings
from llmserve.progress import Progress


class FakeRuntime:
    def needs(self) -> Needs:
        return {}

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        return []

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        info, block_size = directory.info(), int(directory.manifest.options["tokens_per_block"])
        runner_info = RunnerInfo(
            vocab_size=info.vocab_size,
            block_size=block_size,
            num_blocks=-(-info.max_seq_len // block_size) * info.max_batch_size,
            max_num_tokens=info.max_num_tokens,
            max_batch_size=info.max_batch_size,
            max_seq_len=info.max_seq_len,
        )
        return InflightEngine(
            FakeRunner(runner_info),
            replace(info, kernels=KERNELS),
            settings.scheduler,
            adapter_limits=settings.adapter_limits,
        )

    def kernels(self) -> str:
        return KERNELS

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        return None  # it does not compute logits

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        return None

    def tactics(self, directory: EngineDirectory) -> Tactics:
        return Tactics("there is nothing to choose")

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        raise nothing_to_tune(self.tactics(directory))

    def built_for(self, manifest: Manifest) -> str:
        return ""

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        return ()


RUNTIME: Runtime = FakeRuntime()
