"""A server core for tests of the wire: models whose answers can be computed by hand.

add_two   INPUT0 + INPUT1 -> OUTPUT0, FP32 [-1, n]
echo      every input back under its own name, any type; the request's parameters as response parameters
count     decoupled: N responses 0, 1, ..., N-1 (INT32 [1]), then an empty final one; never ends when N < 0;
          N > 100 is refused before anything runs; fails in-band after FAIL_AFTER responses when that input is given
punctual  decoupled: ends in good order when the client's deadline is over, as an engine does
flood     decoupled: responses of 64 KiB without end; `pulled` counts them
slow      answers after `slow_s`, a day by default
broken    an in-band error, `failure`, always
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.core import Allowance, Tenant
from llmserve.errors import InternalError, InvalidArgument, LlmserveError, NotFound, Unavailable
from llmserve.serving.loading.table import version_number
from llmserve.serving.rollout.rollouts import Asked
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import InferRequest, InferResponse, Tensor


def _tensor(name: str, datatype: str, dim: int = -1) -> str:
    return f"{{ name: '{name}' data_type: TYPE_{datatype} dims: [ {dim} ] }}"


FLOOD_BYTES = 64 * 1024
CONFIGS = {
    "add_two": f"""
        max_batch_size: 4
        input {_tensor("INPUT0", "FP32")} input {_tensor("INPUT1", "FP32")} output {_tensor("OUTPUT0", "FP32")}
        parameters {{ key: "greeting" value {{ string_value: "hello" }} }}
        dynamic_batching {{ max_queue_delay_microseconds: 100 }}
    """,
    "echo": f"input {_tensor('TEXT', 'STRING')} output {_tensor('TEXT', 'STRING')}",
    "text": f"input {_tensor('TEXT', 'STRING', 1)} output {_tensor('TEXT', 'STRING', 1)}",
    "matrix": "input { name: 'X' data_type: TYPE_FP32 dims: [ -1, -1 ] }",
    "floats": f"input {_tensor('X', 'FP32')} output {_tensor('X', 'FP32')}",
    "count": f"""
        max_batch_size: 8
        model_transaction_policy {{ decoupled: true }}
        input {_tensor("N", "INT32", 1)} input {_tensor("FAIL_AFTER", "INT32", 1)} output {_tensor("VALUE", "INT32", 1)}
    """,
    "ensemble": f"""
        max_batch_size: 8
        model_transaction_policy {{ decoupled: true }}
        input {_tensor("text_input", "STRING", 1)} input {_tensor("messages", "STRING", 1)}
        input {_tensor("max_tokens", "INT32", 1)} input {_tensor("stream", "BOOL", 1)}
        input {_tensor("temperature", "FP32", 1)} input {_tensor("seed", "UINT64", 1)}
        input {_tensor("stop_words", "STRING")} output {_tensor("text_output", "STRING")}
        ensemble_scheduling {{ step {{
            model_name: "echo"
            input_map {{ key: "TEXT" value: "text_input" }} output_map {{ key: "TEXT" value: "text_output" }}
        }} }}
    """,
    "punctual": f"model_transaction_policy {{ decoupled: true }} output {_tensor('X', 'INT32')}",
    "flood": f"model_transaction_policy {{ decoupled: true }} output {_tensor('DATA', 'STRING')}",
    "slow": f"input {_tensor('X', 'INT32')} output {_tensor('X', 'INT32')}",
    "broken": f"input {_tensor('X', 'INT32')} output {_tensor('X', 'INT32')}",
}


@dataclass(frozen=True)
class Row:
    name: str
    version: str
    state: str
    reason: str = ""


@dataclass
class StubCore:
    """Counts what is running, so that a test can see a stream being closed."""

    name: str = "stub"
    version: str = "1.2.3"
    extensions: tuple[str, ...] = ("binary_tensor_data", "generate")
    is_ready: bool = True
    running: int = 0
    pulled: int = 0
    slow_s: float = 86400
    failure: LlmserveError = field(default_factory=lambda: InternalError("boom"))
    requests: list[InferRequest] = field(default_factory=list)
    loaded: dict[str, tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    unloaded: list[tuple[str, bool]] = field(default_factory=list)
    rolled_out: dict[str, dict[str, Any]] = field(default_factory=dict)

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: str = "") -> bool:
        return name in CONFIGS and version_number(version) < 2

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if name not in CONFIGS:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version_number(version) > 1:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        config: ModelConfig = text_format.Parse(CONFIGS[name], ModelConfig())
        config.name = name
        return config

    def model_metadata(self, name: str, version: str = "") -> service_pb2.ModelMetadataResponse:
        config = self.model_config(name, version)
        reply = service_pb2.ModelMetadataResponse(name=name, versions=["1"], platform="python")
        for entry in config.input:
            reply.inputs.add(name=entry.name, datatype=datatype_name(entry.data_type), shape=entry.dims)
        return reply

    def statistics(self, name: str = "", version: str = "") -> list[service_pb2.ModelStatistics]:
        if name and name not in CONFIGS:
            raise InvalidArgument(f"requested model '{name}' is not available")
        names = [name] if name else list(CONFIGS)
        return [service_pb2.ModelStatistics(name=each, version="1", inference_count=2**40) for each in names]

    def repository_index(self, *, ready: bool = False) -> list[Row]:
        rows = [Row("add_two", "1", "READY"), Row("wreck", "1", "UNAVAILABLE", "it is broken")]
        return rows[:1] if ready else rows

    def labels(self, name: str, version: str = "") -> dict[str, tuple[str, ...]]:
        return {"OUTPUT0": ("cat", "dog")}

    async def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        if name == "wreck":
            raise InvalidArgument("load failed for model 'wreck'")
        self.loaded[name] = (config, dict(files))

    async def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        self.unloaded.append((name, unload_dependents))

    async def start_rollout(self, name: str, asked: Asked) -> None:
        self.model_config(name)
        self.rolled_out[name] = {"model": name, "asked": asdict(asked)}

    async def promote_rollout(self, name: str) -> None:
        self.rollout(name)["state"] = "promoted"

    def abort_rollout(self, name: str, reason: str) -> None:
        self.rollout(name)["state"] = f"rolled_back {reason}"

    def rollout(self, name: str) -> dict[str, Any]:
        if name not in self.rolled_out:
            raise NotFound(f"model '{name}' has had no rollout since the server was started")
        return self.rolled_out[name]

    def rollouts(self) -> list[dict[str, Any]]:
        return list(self.rolled_out.values())

    def allowance(self, name: str, tenant: Tenant) -> Allowance | None:
        return None

    def adapters(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        return {}

    async def load_adapter(self, name: str, adapter: str, path: str) -> None:
        raise Unavailable("adapters are for engines")

    async def unload_adapter(self, name: str, adapter: str) -> None:
        raise Unavailable("adapters are for engines")

    def facts(self, name: str) -> Mapping[str, Any]:
        return {}

    def metrics_text(self) -> str:
        return "# HELP up is it up\nup 1\n"

    async def infer_stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self.requests.append(request)
        if not self.is_ready:
            raise Unavailable("the server is shutting down")
        self.running += 1
        try:
            async for response in self._answers(request):
                yield response
        finally:
            self.running -= 1

    async def _answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        if request.model_name == "slow":
            await asyncio.sleep(self.slow_s)
            yield self._response(request, outputs=tuple(request.inputs.values()), final=True)
        if request.model_name == "punctual":
            assert request.deadline is not None
            await asyncio.sleep(request.deadline - time.monotonic())
            yield self._response(request, final=True)
        if request.model_name == "broken":
            yield self._response(request, error=self.failure, final=True)
        if request.model_name == "add_two":
            total = request.inputs["INPUT0"].data + request.inputs["INPUT1"].data
            yield self._response(request, outputs=(Tensor("OUTPUT0", "FP32", total),), final=True)
        if request.model_name in ("echo", "floats", "text"):
            outputs = tuple(
                t for t in request.inputs.values() if t.name in (request.requested_outputs or request.inputs)
            )
            yield self._response(request, outputs=outputs, parameters=request.parameters, final=True)
        if request.model_name == "ensemble":
            async for response in self._generate(request):
                yield response
        if request.model_name == "flood":
            async for response in self._flood(request):
                yield response
        if request.model_name == "count":
            async for response in self._count(request):
                yield response

    async def _count(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        limit = int(request.inputs["N"].data.reshape(-1)[0])
        fail_after = int(request.inputs["FAIL_AFTER"].data.reshape(-1)[0]) if "FAIL_AFTER" in request.inputs else -1
        if limit > 100:
            raise InvalidArgument("N must be at most 100")
        value = 0
        while value != limit:
            if value == fail_after:
                yield self._response(request, error=InternalError("broken in the middle"), final=True)
                return
            yield self._response(request, outputs=(Tensor("VALUE", "INT32", np.array([[value]], dtype=np.int32)),))
            value += 1
            await asyncio.sleep(0.001 if limit < 0 else 0)
        yield self._response(request, final=True)

    async def _flood(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        data = Tensor("DATA", "BYTES", np.array([b"x" * FLOOD_BYTES], dtype=object))
        while True:
            self.pulled += 1
            yield self._response(request, outputs=(data,))
            await asyncio.sleep(0)

    async def _generate(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        if "text_input" in request.inputs:
            text = request.inputs["text_input"].data.item().decode()
        else:
            text = json.loads(request.inputs["messages"].data.item())[-1]["content"]
        limit = request.inputs["max_tokens"].data.item()
        words = itertools.repeat(text) if text == "forever" else text.split()[:limit]
        count = 0
        for count, word in enumerate(words, 1):  # noqa: B007
            if word == "fail":
                yield self._response(request, error=InternalError("the model failed"), final=True)
                return
            yield self._response(request, outputs=_text_outputs(f"{word} ", "", 0))
            await asyncio.sleep(0.001)
        yield self._response(
            request, outputs=_text_outputs("", "length" if count == limit else "end_id", count), final=True
        )

    def _response(self, request: InferRequest, **fields: object) -> InferResponse:
        return InferResponse(request.model_name, "1", request.request_id, **fields)  # type: ignore[arg-type]


def _text_outputs(text: str, finish_reason: str, num_tokens: int) -> tuple[Tensor, ...]:
    return (
        Tensor("text_output", "BYTES", np.array([[text.encode()]], dtype=object)),
        Tensor("finish_reason", "BYTES", np.array([[finish_reason.encode()]], dtype=object)),
        Tensor("num_prompt_tokens", "INT32", np.array([[7]], dtype=np.int32)),
        Tensor("num_completion_tokens", "INT32", np.array([[num_tokens]], dtype=np.int32)),
        Tensor("sequence_index", "INT32", np.array([[0]], dtype=np.int32)),
        Tensor("output_log_probs", "FP32", np.array([[[-float(len(text))]]], dtype=np.float32)),
    )
