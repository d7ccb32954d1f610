"""The seam between the server core and whatever executes models.

A backend turns a model directory into a `LoadedModel`; the core schedules requests onto its instances. Backends
register by the name that `config.pbtxt` gives in `backend`; the registry is built by the program that starts the
server, so the core imports none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from prometheus_client.registry import Collector
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.core import Allowance, Tenant
from llmserve.serving.answers import ReadsAnswer, every_output
from llmserve.serving.instruments.latencies import Histogram
from llmserve.serving.types import InferRequest, InferResponse

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


class ModelInstance(Protocol):
    """One executable copy of a model."""

    name: str

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        """Start a batch: one response stream per request, in the same order.

        Each stream ends with a response whose `final` is true. Closing a stream cancels that request and only that one.
        Called on the event loop and must not block it; work may start at once or when a stream is first pulled.
        """
        ...

    def healthy(self) -> bool: ...

    async def close(self) -> None: ...


class Execution(NamedTuple):
    """When an instance began with a batch and when it was through, in `time.monotonic_ns()`."""

    began_ns: int
    ended_ns: int


Released: TypeAlias = Callable[[Execution | None], None]  # None: the instance does not know when it began


@runtime_checkable
class ReleasingInstance(ModelInstance, Protocol):
    """An instance that says itself when it can take another batch.

    Any other instance can when every stream of the last batch has ended. This one may be free earlier (streams go on
    without it) or later (a cancelled batch is still running).
    """

    def when_released(self, callback: Released) -> None:
        """Call `callback` once, on the loop, when the batch that was just started no longer occupies the instance."""
        ...


@runtime_checkable
class QueueingInstance(ReleasingInstance, Protocol):
    """A releasing instance that keeps a line of its own, so that it need not wait for the loop between two batches."""

    room: int  # how many batches it would have now, the one that it executes included; at least 1


@runtime_checkable
class InlineInstance(ModelInstance, Protocol):
    """An instance that declares what it does as pure and brief: a request may be executed where it is made.

    Pure: the answer depends on the request alone, which is not changed, and any number of executions may run at the
    same time, here and on the instance's own thread. Brief: microseconds, for requests whose inputs have at most
    `max_inline_bytes` bytes.
    """

    @property
    def max_inline_bytes(self) -> int:
        """0: none may, for now."""
        ...

    def execute_inline(self, request: InferRequest) -> InferResponse:
        """The final response, errors included. On the event loop, whose other work waits meanwhile."""
        ...


class ModelControl(Protocol):
    """The core's model control, for models that load other models. Raises `LlmserveError`; on the core's loop."""

    def model_ready(self, name: str, version: str = "") -> bool: ...

    async def load_model(
        self, name: str, config: str = "", files: Mapping[str, bytes] = MappingProxyType({})
    ) -> None: ...

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None: ...


def substitute_directory(value: str, model_dir: Path) -> str:
    """Triton's name for the model's directory at the beginning of a parameter."""
    if value.startswith(MODEL_DIRECTORY):
        return f"{model_dir}{value.removeprefix(MODEL_DIRECTORY)}"
    return value


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a backend gets to load one version of a model."""

    config: ModelConfig  # complete: parsed, auto-completed, validated
    model_dir: Path  # <repository>/<model>
    version: str
    version_dir: Path  # <model_dir>/<version>
    infer: Callable[
        [InferRequest], AsyncGenerator[InferResponse, None]
    ]  # of other models: the core's own way in, for BLS
    control: ModelControl | None = None  # None: no server around
    loop: asyncio.AbstractEventLoop | None = None  # the core's
    reserved_bytes: int = 0  # of memory that looks free: promised to versions that are served meanwhile

    def parameter(self, key: str, default: str = "") -> str:
        """A string parameter of the model's config; $$TRITON_MODEL_DIRECTORY at its beginning is `model_dir`."""
        if key not in self.config.parameters:
            return default
        return substitute_directory(self.config.parameters[key].string_value, self.model_dir)


GaugeSample: TypeAlias = tuple[str, Mapping[str, str], float]  # family, labels (without model and version), value


def no_promises() -> int:
    """Of a model whose memory is what it looks like."""
    return 0


def no_limits(tenant: Tenant) -> Allowance | None:
    """Of a model that holds no tenant to its limits."""
    return None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    instances: Sequence[ModelInstance]
    batches_itself: bool = False  # instances accept any number of requests at once (in-flight batching)
    collates: bool = False  # executes a batch as one set of tensors: honours `batch_input` and `batch_output`
    gauges: Callable[[], Sequence[GaugeSample]] = field(default=lambda: ())  # read at each metrics scrape
    histograms: Mapping[str, Histogram] = field(default_factory=dict)  # by family
    facts: Mapping[str, Any] = field(default_factory=dict)  # of what answers, as JSON, for clients
    missing_outputs: Collection[str] = ()  # of its config, those that no answer will ever have
    allowance: Callable[[Tenant], Allowance | None] = no_limits  # what is left to a tenant; cheap
    reads_answer: ReadsAnswer = every_output  # for comparing it with another version's
    promised_bytes: Callable[[], int] = no_promises  # of memory that looks free, and that it will take
    # of what the ids in its tensors stand for, by name; blocking. Versions that differ cannot take each other's place
    id_digests: Callable[[], Mapping[str, str]] = dict
    adapters: Adapters | None = None


class Adapters(Protocol):
    """Variants of a model that requests choose by name, see `InferRequest.chooses_adapter`."""

    def load(self, name: str, path: Path) -> None:
        """Under this name from here on; blocking, called in a worker thread."""
        ...

    def unload(self, name: str) -> None:
        """Requests under way keep it. `InvalidArgument` for a name that none has."""
        ...

    def poll(self, models: Container[str]) -> None:
        """Load and unload what has changed where they come from, but no adapter with the name of one of `models`;
        blocking, called in a worker thread."""
        ...

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Of each, by name, for clients."""
        ...

    def load_candidate(self, name: str, path: Path) -> str:
        """Beside what has the name, for requests with `wants_candidate`; returns its digest. Blocking, as `load`."""
        ...

    def promote_candidate(self, name: str) -> None:
        """It has the name from here on. `InvalidArgument`: another one was loaded since it is there, or none is."""
        ...

    def unload_candidate(self, name: str) -> None:
        """Requests under way keep it."""
        ...


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        """Fill in what the config leaves open (auto-complete). Return it unchanged when there is nothing to add."""
        ...

    def load(self, context: LoadContext) -> LoadedModel:
        """Load one version; blocking, called in a worker thread. Raise `LlmserveError` with the reason on failure."""
        ...


@runtime_checkable
class MetricsSource(Protocol):
    """A backend whose models define metrics of their own."""

    @property
    def custom_metrics(self) -> Collector:
        """Of all its models; the same for the life of the backend."""
        ...
