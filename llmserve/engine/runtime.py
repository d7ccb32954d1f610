"""The interface between an engine directory and what runs it: the run-time side of `builder.targets.base.Target`."""

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
    """A requirement of a target. `is_met` false: the target does not work; `advice`: what to do, or what to know."""

    need: str
    is_met: bool
    found: str
    advice: str = ""


Needs: TypeAlias = Mapping[str, Callable[[str], Check]]  # name -> asks this machine; may raise, which is unmet


@dataclass(frozen=True, slots=True)
class TacticChoice:
    """The tactic of one layer for up to so many rows, and the reason."""

    rows: int
    tactic: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tactics:
    """Tactics for this machine; `about` is a title, or says why the list is empty."""

    about: str
    layers: Mapping[str, Sequence[TacticChoice]] = field(default_factory=dict)  # by shape


def nothing_to_tune(tactics: Tactics) -> Unsupported:
    """The error for an engine whose tactics are `tactics`."""
    return Unsupported(f"this engine cannot be tuned on this machine: {tactics.about}")


class Runtime(Protocol):
    """The runtime of one target. Its module has `RUNTIME`, which `engine.registry` finds, and imports nothing heavy."""

    def needs(self) -> Needs:
        """Requirements of the target: packages, drivers, devices. For `llmserve doctor`."""
        ...

    def problems_here(self, directory: EngineDirectory) -> list[str]:
        """Returns everything that prevents this engine from running here, including memory, with advice."""
        ...

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> Engine:
        """An engine, ready for requests. An unsupported setting is logged as a warning.

        Raises EngineFileError if the engine is not usable here, ResourceExhausted if the KV pool does not fit.
        """
        ...

    def kernels(self) -> str:
        """The kernels that would compute here, as in `EngineInfo.kernels`; cheap. Unsupported if none."""
        ...

    def selftest(self, directory: EngineDirectory, adapter: SealedAdapter | None = None) -> SelfTestResult | None:
        """Run the self-test in the directory, or in that of an adapter; None for a target without self-tests."""
        ...

    def adapter_selftest(self, directory: EngineDirectory, adapter: SealedAdapter) -> SelfTest | None:
        """Results of the portable kernels with an adapter; None if the target does not support adapters."""
        ...

    def tactics(self, directory: EngineDirectory) -> Tactics: ...

    def tune(self, directory: EngineDirectory, progress: Progress) -> None:
        """Measure the engine's tactics here, and store the results in its directory for `tactics` and `open`.

        They change no bit of any result. Raises Unsupported if the engine has no alternatives.
        """
        ...

    def built_for(self, manifest: Manifest) -> str:
        """The devices that the engine was built for, in one line; empty if unspecified."""
        ...

    def triton_backends(self, manifest: Manifest) -> Collection[str]:
        """Backends of a real Triton server, other than llmserve's, that can run this engine's files."""
        ...
