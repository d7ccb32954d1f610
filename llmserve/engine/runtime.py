"""The seam between an engine directory and what runs it here: the run-time twin of `builder.targets.base.Target`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult
from llmserve.engine.settings import EngineSettings
from llmserve.errors import Unsupported
from llmserve.progress import Progress


@dataclass(frozen=True, slots=True)
class Check:
    """One need of a target. `is_met` false: the target does not work; `advice`: what to do, or what to know."""

    need: str
    is_met: bool
    found: str
    advice: str = ""


Needs: TypeAlias = Mapping[str, Callable[[str], Check]]  # name -> asks this machine; may raise, which is unmet


@dataclass(frozen=True, slots=True)
class TacticChoice:
    """The tactic of one layer for up to so many rows, and why."""

    rows: int
    tactic: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tactics:
    """What this machine would use; `about` is a title, or says why there is nothing to list."""

    about: str
    layers: Mapping[str, Sequence[TacticChoice]] = field(default_factory=dict)  # by shape


def nothing_to_tune(tactics: Tactics) -> Unsupported:
    """Of an engine whose tactics are `tactics`."""
    return Unsupported(f"this engine cannot be tuned on this machine: {tactics.about}")


class Runtime(Protocol):
    """Of one target. Its module has `RUNTIME`, which `engine.registry` finds; nothing heavy is imported with it."""

    def needs(self) -> Needs:
        """What the target needs of a machine: packages, drivers, devices. For `llmserve doctor`."""
        ...

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        """Everything that keeps this engine from running here, memory included; each says what to do. Opens none."""
        ...

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        """An engine, ready for requests. A setting that it cannot honour is logged as a warning.

        Raises EngineFileError for one that is not usable here, ResourceExhausted when the KV pool does not fit.
        """
        ...

    def kernels(self) -> str:
        """What would compute here, as `EngineInfo.kernels` has it; cheap. Raises Unsupported when nothing would."""
        ...

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        """Run the self-test that lies in the directory, or in that of an adapter; None for a target without any."""
        ...

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        """What the engine computes with an adapter, by the plainest kernels; None for a target that takes none."""
        ...

    def tactics(self, directory: EngineDirectory) -> Tactics: ...

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        """Measure the engine's tactics here, and leave in its directory what `tactics` and `open` then go by.

        No bit of any result depends on it. Raises Unsupported for an engine that has no choice.
        """
        ...

    def built_for(self, manifest: Manifest) -> str:
        """In a line, the devices that the engine was built for; empty where that says nothing."""
        ...

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        """Backends of a real Triton, not ours, that run this engine's files by themselves."""
        ...
