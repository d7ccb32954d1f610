"""The interface between the server core and the backends that execute models.

A backend loads a model directory as a `LoadedModel`; the core schedules requests onto its instances. Backends are
registered under the name that `config.pbtxt` gives in `backend`. The program that starts the server builds the
registry, so the core imports no backend.
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
    """When an instance began and when it finished a batch, in `time.monotonic_ns()`."""

    began_ns: int
    ended_ns: int


Released: TypeAlias = Callable[[Execution | None], None]  # None: the instance does not know when it began


@runtime_checkable
class ReleasingInstance(ModelInstance, Protocol):
    """An instance that reports when it can take another batch.

    Any other instance can take one when all streams of the last batch have ended. This one may be free earlier (streams
    continue without it) or later (a cancelled batch still runs).
    """

    def when_released(self, callback: Released) -> None:
        """Call `callback` once, on the loop, when the batch that was just started no longer occupies the instance."""
        ...


@runtime_checkable
class QueueingInstance(ReleasingInstance, Protocol):
    """A releasing instance with a queue of its own, so that it need not wait for the loop between two batches."""

    room: int  # number of batches that it wants now, including the one that it executes; at least 1


@runtime_checkable
class InlineInstance(ModelInstance, Protocol):
    """An instance that declares its work as pure and brief: a request may be executed inline, without the scheduler.

    Pure: the answer depends only on the request, which is not modified, and any number of executions may run at the
    same time, on the loop and on the instance's own thread. Brief: microseconds, for requests whose inputs have at most
    `max_inline_bytes` bytes.
    """

    @property
    def max_inline_bytes(self) -> int:
        """The most bytes of inputs that a request may have. 0: no request may be executed inline for now."""
        ...

    def execute_inline(self, request: InferRequest) -> InferResponse:
        """The final response, errors included. Called on the event loop, which it blocks."""
        ...


class ModelControl(Protocol):
    """The core's model control, for models that load other models. Raises `LlmserveError`. For the core's loop."""

    def model_ready(self, name: str, version: str = "") -> bool: ...

    async def load_model(
        self, name: str, config: str = "", files: Mapping[str, bytes] = MappingProxyType({})
    ) -> None: ...

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None: ...


def substitute_directory(value: str, model_dir: Path) -> str:
    """Replace Triton's placeholder for the model's directory at the beginning of a parameter."""
    if value.startswith(MODEL_DIRECTORY):
        return f"{model_dir}{value.removeprefix(MODEL_DIRECTORY)}"
    return value


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The information with which a backend loads one version of a model."""

    config: ModelConfig  # complete: parsed, auto-completed, validated
    model_dir: Path  # <repository>/<model>
    version: str
    version_dir: Path  # <model_dir>/<version>
    infer: Callable[
        [InferRequest], AsyncGenerator[InferResponse, None]
    ]  # requests to other models, for BLS: the core's internal entry point
    control: ModelControl | None = None  # None: outside a server
    loop: asyncio.AbstractEventLoop | None = None  # the core's
    reserved_bytes: int = 0  # of memory that looks free but is promised to versions that are served meanwhile

    def parameter(self, key: str, default: str = "") -> str:
        """A string parameter of the model's config; $$TRITON_MODEL_DIRECTORY at its beginning is `model_dir`."""
        if key not in self.config.parameters:
            return default
        return substitute_directory(self.config.parameters[key].string_value, self.model_dir)


GaugeSample: TypeAlias = tuple[str, Mapping[str, str], float]  # family, labels (without model and version), value


def no_promises() -> int:
    """For a model that has allocated all memory that it will use."""
    return 0


def no_limits(tenant: Tenant) -> Allowance | None:
    """For a model that does not enforce tenants' limits."""
    return None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    instances: Sequence[ModelInstance]
    batches_itself: bool = False  # instances accept any number of requests at once (in-flight batching)
    collates: bool = False  # executes a batch as one set of tensors: honours `batch_input` and `batch_output`
    gauges: Callable[[], Sequence[GaugeSample]] = field(default=lambda: ())  # read at each metrics scrape
    histograms: Mapping[str, Histogram] = field(default_factory=dict)  # by family
    facts: Mapping[str, Any] = field(default_factory=dict)  # facts about the model for clients, as JSON
    missing_outputs: Collection[str] = ()  # outputs in its config that no answer ever has
    allowance: Callable[[Tenant], Allowance | None] = no_limits  # what is left of a tenant's limits; cheap
    reads_answer: ReadsAnswer = every_output  # to compare answers with those of another version
    promised_bytes: Callable[[], int] = no_promises  # of memory that looks free but that it will use
    # digests of the meaning of the ids in its tensors, by name; blocking. Versions that differ are not interchangeable
    id_digests: Callable[[], Mapping[str, str]] = dict
    adapters: Adapters | None = None


class Adapters(Protocol):
    """Variants of a model that requests choose by name, see `InferRequest.chooses_adapter`."""

    def load(self, name: str, path: Path) -> None:
        """Load an adapter under this name; blocking, called in a worker thread."""
        ...

    def unload(self, name: str) -> None:
        """Running requests keep the adapter. Raises `InvalidArgument` if no adapter has the name."""
        ...

    def poll(self, models: Container[str]) -> None:
        """Load and unload adapters that changed in their source, except those with the name of one of `models`;
        blocking, called in a worker thread."""
        ...

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Facts about each adapter for clients, by name."""
        ...

    def load_candidate(self, name: str, path: Path) -> str:
        """Load another adapter for the name, for requests with `wants_candidate`. Returns its digest. Blocking."""
        ...

    def promote_candidate(self, name: str) -> None:
        """Give the name to the candidate. Raises `InvalidArgument` if there is none, or another was loaded since."""
        ...

    def unload_candidate(self, name: str) -> None:
        """Running requests keep the candidate."""
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
        """The metrics of all its models; the same collector for the life of the backend."""
        ...
