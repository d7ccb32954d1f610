"""The server core: loads the models of its repositories, and is their single entry point for all protocols.

It runs on one asyncio loop. `infer_stream` looks up the model, admits the request, and enforces the client's deadline;
the model checks, schedules and counts. Closing the stream is the only way to cancel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve import __version__
from llmserve.core import Allowance, Tenant
from llmserve.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    LlmserveError,
    Unavailable,
    Unsupported,
)
from llmserve.serving.backend import Adapters, Backend, MetricsSource
from llmserve.serving.config.labels import Labels
from llmserve.serving.lifecycle import ModelLifecycle
from llmserve.serving.loading.deployment import Deployment
from llmserve.serving.loading.loader import ServerContext
from llmserve.serving.loading.table import READY, ModelStatus, ModelTable
from llmserve.serving.observe.exposition import ServerCollector, metrics_text
from llmserve.serving.observe.tenant_requests import counted_request
from llmserve.serving.rollout.report import rollout_report, rollout_samples
from llmserve.serving.rollout.rollouts import Asked, Rollouts
from llmserve.serving.rollout.routing import Answering
from llmserve.serving.schedulers.rate_limiter import make_rate_limiter
from llmserve.serving.schedulers.response_cache import ResponseCache
from llmserve.serving.schedulers.shared import SharedResources
from llmserve.serving.settings import ControlMode, ServerSettings
from llmserve.serving.signature import request_label
from llmserve.serving.types import InferRequest, InferResponse
from llmserve.tenant_counters import TenantCounters

__all__ = ["InferenceCore", "ModelStatus", "ServerSettings"]

EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip
logger = logging.getLogger(__name__)


class InferenceCore:
    def __init__(
        self,
        settings: ServerSettings,
        backends: Mapping[str, Backend],
        tenants: Callable[[], Mapping[str, TenantCounters]] = dict,
    ) -> None:
        """`tenants`: returns the counters of the current tenants by name, for `/metrics`."""
        self.name = settings.server_name
        self.version = __version__
        self.extensions = EXTENSIONS
        self._settings = settings
        self._table = ModelTable()
        cache = ResponseCache(settings.cache_bytes) if settings.cache_bytes else None
        limiter = make_rate_limiter(settings.rate_limit, settings.rate_limit_resources)
        self._shared = SharedResources(cache, limiter, settings.metrics, settings.inline_execution)
        server = ServerContext(self._infer_nested, self, self._shared)
        deployment = Deployment(self._table, settings, backends, server)
        self._rollouts = Rollouts(self._table, deployment, self._shared)
        self._splits = self._rollouts.splits
        self._lifecycle = ModelLifecycle(settings, self._table, deployment, self._rollouts)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(
            ServerCollector(
                lambda: (*self._table, *self._rollouts.candidates()),
                settings.metrics,
                cache,
                more=lambda: rollout_samples(self._rollouts),
                tenants=tenants,
            )
        )
        for backend in backends.values():
            if isinstance(backend, MetricsSource):
                self._registry.register(backend.custom_metrics)
        self._started = False
        self._leaving = False
        self._stopping = False
        self._num_in_flight = 0
        self._drained = asyncio.Event()

    async def start(self) -> None:
        """Load the models that the control mode selects. A model that fails is listed in `repository_index`; only an
        unusable repository raises."""
        await self._lifecycle.start()
        self._started = True

    def leave(self) -> None:
        """Report not ready, but keep serving: load balancers that check health then send requests elsewhere."""
        self._leaving = True

    async def stop(self, timeout_s: float = 30.0) -> None:
        """Drain: report not ready, refuse new requests, wait up to `timeout_s` for running ones; then unload."""
        self._leaving = self._stopping = True
        if self._num_in_flight:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            except TimeoutError:
                logger.warning("stopping with %d requests still running", self._num_in_flight)
        await self._lifecycle.close()

    async def load_model(self, name: str, config: str = "", files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Load a model, or reload it if its files have changed; an ensemble with its steps. Returns when it is loaded.

        `config` (JSON) replaces config.pbtxt for this load; `files` (path in the model directory -> content), which
        need a `config`, replace the whole directory. The current version is served until the new one is ready, and
        for good if that fails. Raises `Unavailable` in control modes other than explicit, `InternalError` if the model
        or the override cannot be read, `InvalidArgument` if it cannot be loaded.
        """
        self._check_serving()
        await self._lifecycle.load_model(name, config, files)

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model. Its running requests finish normally after this returns. Unknown names are no error.

        `unload_dependents`: also unload an ensemble's steps that were not loaded by name. Raises `Unavailable` in
        control modes other than explicit.
        """
        self._check_serving()
        await self._lifecycle.unload_model(name, unload_dependents=unload_dependents)

    async def start_rollout(self, name: str, asked: Asked) -> None:
        """Load a candidate version of a model, or a candidate for the name of one of its adapters, next to the served
        one, and split requests by its rules.

        Returns when the candidate is ready. Raises `Unavailable` if the control mode does not allow rollouts,
        `NotFound` for an unknown model or version, `InvalidArgument` for invalid rules or candidates, and the errors of
        loading the candidate.
        """
        self._check_serving()
        await self._lifecycle.start_rollout(name, asked)

    async def promote_rollout(self, name: str) -> None:
        """Let the candidate answer all requests, regardless of the rules."""
        await self._rollouts.promote(name)

    def abort_rollout(self, name: str, reason: str) -> None:
        """Withdraw the candidate. No request fails: the stable version answers those that wait for the candidate."""
        self._rollouts.abort(name, reason)

    def rollout(self, name: str) -> dict[str, Any]:
        """The current rollout of a model, or its last one, as JSON."""
        return rollout_report(self._rollouts.find(name))

    def rollouts(self) -> list[dict[str, Any]]:
        return [rollout_report(rollout) for rollout in self._rollouts]

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        if not self._started or self._leaving:
            return False
        if not self._settings.strict_readiness:
            return True
        return self._table.all_loaded() and all(model.healthy() for model in self._table)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether `infer_stream` would take a request; False for a model that does not exist.

        Raises `InvalidArgument` for an invalid version.
        """
        try:
            model = self._table.find(name, version)
        except InvalidArgument:
            raise
        except LlmserveError:
            return False
        return self._started and not self._leaving and model.healthy()

    async def infer_stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The responses of one request; the last one is `final`.

        Raises `LlmserveError` when the request is refused (before the first response) and `DeadlineExceeded` at any
        time; a model's own errors are responses with `error` set.
        """
        self._check_serving(request)
        model: Answering = self._table.find(request.model_name, request.model_version)
        if self._splits and not request.model_version:
            model = self._splits.get(request.model_name, model)
        self._num_in_flight += 1
        counted = counted_request(request.tenant, request.model_name)
        try:
            async with aclosing(model.infer(request)) as stream:
                responses = stream if request.deadline is None else _BeforeDeadline(request.deadline, stream, request)
                async for response in responses:
                    if counted is not None and (response.final or response.error is not None):
                        counted.see(response)
                    yield response
        except LlmserveError as error:
            if counted is not None:
                counted.refused(error)
            raise
        finally:
            if counted is not None:
                counted.end()
            self._num_in_flight -= 1
            if self._stopping and not self._num_in_flight:
                self._drained.set()

    def model_metadata(self, name: str, version: str = "") -> service_pb2.ModelMetadataResponse:
        model = self._table.find(name, version)
        batch = [-1] if model.config.max_batch_size > 0 else []
        message = service_pb2.ModelMetadataResponse(
            name=name,
            versions=[version] if version else self._table.versions(name),
            platform=model.config.platform or model.config.backend,
        )
        for spec in model.signature.inputs.values():
            message.inputs.add(name=spec.name, datatype=spec.datatype, shape=[*batch, *spec.dims])
        for spec in model.signature.outputs.values():
            message.outputs.add(name=spec.name, datatype=spec.datatype, shape=[*batch, *spec.dims])
        return message

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The complete config, with defaults. It is shared: do not modify it.

        Raises `Unavailable` while the server starts or stops: a model may then exist that is not loaded yet.
        """
        self._check_serving()
        return self._table.find(name, version).config

    def statistics(self, name: str = "", version: str = "") -> list[service_pb2.ModelStatistics]:
        """Statistics of all models, of all versions of one model, or of one version."""
        if not name:
            return [model.statistics.message() for model in self._table]
        if not self._table.versions(name):
            raise InvalidArgument(f"requested model '{name}' is not available")
        versions = [version] if version else self._table.versions(name)
        return [self._table.find(name, number).statistics.message() for number in versions]

    def repository_index(self, *, ready: bool = False) -> list[ModelStatus]:
        """`ready`: only versions that are ready."""
        return [row for row in self._lifecycle.index() if row.state == READY or not ready]

    def labels(self, name: str, version: str = "") -> Labels:
        """The names of the classes that a model's outputs score, if its config gives them."""
        of_candidate = self._rollouts.labels(name, version) if version else None
        return self._table.find(name, version).labels if of_candidate is None else of_candidate

    def allowance(self, name: str, tenant: Tenant) -> Allowance | None:
        """What is left of a tenant's limits in a model, for now; None: there are no limits."""
        return self._table.find(name, "").allowance(tenant)

    def facts(self, name: str) -> Mapping[str, Any]:
        """The backend's facts about a model, as JSON; empty for most models."""
        return self._table.find(name, "").facts

    def adapters(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """The adapters that requests for a model may name, with the facts about each."""
        adapters = self._table.find(name, "").adapters
        return {} if adapters is None else adapters.facts()

    async def load_adapter(self, name: str, adapter: str, path: str) -> None:
        """Load an adapter of a model from a directory of this machine; it replaces an adapter of the same name.

        Raises `Unsupported` in control modes other than explicit, `AlreadyExists` for the name of a model, and the
        errors of loading.
        """
        adapters = self._changeable_adapters(name)
        if any(row.name == adapter for row in self.repository_index()):
            raise AlreadyExists(f"a model is already named '{adapter}'; give the adapter another name")
        await asyncio.shield(self._load_adapter(adapters, adapter, Path(path)))

    async def _load_adapter(self, adapters: Adapters, name: str, path: Path) -> None:
        await asyncio.to_thread(adapters.load, name, path)
        self._rollouts.adapter_changed(adapters, name)

    async def unload_adapter(self, name: str, adapter: str) -> None:
        """Unload an adapter. Its running requests finish normally."""
        adapters = self._changeable_adapters(name)
        adapters.unload(adapter)
        self._rollouts.adapter_changed(adapters, adapter)

    def _changeable_adapters(self, name: str) -> Adapters:
        self._check_serving()
        if self._settings.control_mode != ControlMode.EXPLICIT:
            raise Unsupported("adapters can be loaded at run time only with --model-control-mode explicit")
        if (adapters := self._table.find(name, "").adapters) is None:
            raise Unsupported(f"model '{name}' does not support adapters")
        return adapters

    def metrics_text(self) -> str:
        return metrics_text(self._registry)

    def _check_serving(self, request: InferRequest | None = None) -> None:
        if not self._started or self._stopping:
            label = "" if request is None else request_label(request)
            state = "stopping" if self._stopping else "starting"
            raise Unavailable(f"{label}Server is {state}, not ready for requests")

    async def _infer_nested(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The entry point for models that call models. Their request was admitted, so it works while draining."""
        async with aclosing(self._table.find(request.model_name, request.model_version).infer(request)) as stream:
            async for response in stream:
                yield response


class _BeforeDeadline:
    """The responses of a stream until `deadline`, in seconds of time.monotonic(), which is the loop's clock."""

    def __init__(self, deadline: float, stream: AsyncGenerator[InferResponse, None], request: InferRequest) -> None:
        self._deadline = deadline
        self._stream = stream
        self._request = request

    def __aiter__(self) -> _BeforeDeadline:
        return self

    async def __anext__(self) -> InferResponse:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(self._stream)
        except TimeoutError:
            problem = f"Deadline exceeded for model '{self._request.model_name}'"
            raise DeadlineExceeded(request_label(self._request) + problem) from None
