"""The runtime of engines that this version does not support: the target is unknown here, or was removed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult
from llmserve.engine.runtime import Needs, Tactics, nothing_to_tune
from llmserve.engine.settings import EngineSettings
from llmserve.errors import Unsupported
from llmserve.progress import Progress


@dataclass(frozen=True, slots=True)
class UnknownRuntime:
    target: str
    known: Sequence[str]  # targets

    def needs(self) -> Needs:
        return {}

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        executed = " and ".join(map(repr, self.known))
        return [
            f"{directory.path} was built for target {self.target!r}; this version executes {executed} engines; "
            f"run: llmserve build ... --target {self.known[0]}"
        ]

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        raise Unsupported(self.problems_here(directory)[0])

    def kernels(self) -> str:
        return ""

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        return None

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        return None

    def tactics(self, directory: EngineDirectory) -> Tactics:
        return Tactics(f"not known for {self.target} engines")

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        raise nothing_to_tune(self.tactics(directory))

    def built_for(self, manifest: Manifest) -> str:
        return ""

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        return ()
