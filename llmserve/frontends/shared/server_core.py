"""What a front end asks of the server core, and the two ways of asking.

A unary call is a stream of one: `single_response` is the only place that knows it. Closing the stream is the only way
to cancel, so every stream that a front end opens sits in `aclosing`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.core import Allowance, Tenant
from llmserve.errors import InternalError, InvalidArgument
from llmserve.serving.rollout.rollouts import Asked
from llmserve.serving.types import InferRequest, InferResponse


class ModelStatus(Protocol):
    """One row of the repository index."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


class Core(Protocol):
    """The server core, as front ends see it; all on one event loop.

    Versions are as clients write them, "" being the highest. Whatever is wrong, it raises `LlmserveError`s only.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def extensions(self) -> Sequence[str]: ...

    def live(self) -> bool: ...
    def ready(self) -> bool: ...
    def model_ready(self, name: str, version: str = "") -> bool: ...
    def model_metadata(self, name: str, version: str = "") -> service_pb2.ModelMetadataResponse: ...
    def model_config(self, name: str, version: str = "") -> ModelConfig: ...
    def statistics(self, name: str = "", version: str = "") -> Sequence[service_pb2.ModelStatistics]: ...
    def repository_index(self, *, ready: bool = False) -> Sequence[ModelStatus]: ...
    def labels(self, name: str, version: str = "") -> Mapping[str, Sequence[str]]: ...
    def allowance(self, name: str, tenant: Tenant) -> Allowance | None: ...
    def facts(self, name: str) -> Mapping[str, Any]: ...
    def metrics_text(self) -> str: ...
    async def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None: ...
    async def unload_model(self, name: str, *, unload_dependents: bool) -> None: ...
    async def start_rollout(self, name: str, asked: Asked) -> None: ...
    async def promote_rollout(self, name: str) -> None: ...
    def abort_rollout(self, name: str, reason: str) -> None: ...
    def rollout(self, name: str) -> Mapping[str, Any]: ...
    def rollouts(self) -> Sequence[Mapping[str, Any]]: ...
    def infer_stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]: ...


def is_decoupled(config: ModelConfig) -> bool:
    return bool(config.model_transaction_policy.decoupled)


def check_known_model(core: Core, name: str) -> None:
    """Settings of a model need a model, loaded or not; "" stands for all of them."""
    if name and all(row.name != name for row in core.repository_index()):
        raise InvalidArgument(f"Request for unknown model : {name}")


async def single_response(core: Core, request: InferRequest) -> InferResponse:
    """The one response of a model that is not decoupled, or its error; raises why the request is refused."""
    answer: InferResponse | None = None
    async with aclosing(core.infer_stream(request)) as stream:
        async for response in stream:
            if response.error is not None:
                return response
            if answer is None:
                answer = response
    if answer is None:
        raise InternalError(f"model '{request.model_name}' ended its response stream without a response")
    return answer
